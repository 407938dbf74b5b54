"""The import law: imports run one way, and importing the package loads no kernel and no extra."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import pallas_flash

PACKAGE = Path(pallas_flash.__file__).parent

# What each room may import of the others. A new room is not allowed anything until it stands here.
ALLOWED = {
    "__init__": {"api", "autodiff", "backends", "cache", "spec"},
    "__main__": {"doctor", "terminal"},
    "api": {
        "autodiff",
        "backends",
        "sharding",
        "spec",
        "validate.attention",
        "validate.decode",
        "validate.options",
    },
    "autodiff": {"sharding", "spec"},
    "backends": {"spec"},
    "backends.triton": {
        "backends",
        "backends.triton.config",
        "backends.triton.decode_config",
        "spec",
    },
    "backends.triton.backward": {
        "backends.triton.config",
        "backends.triton.lowering",
        "backends.triton.memory",
        "backends.triton.schedule",
        "backends.triton.tile",
        "sharding",
        "spec",
    },
    "backends.triton.config": {"spec"},
    "backends.triton.decode": {
        "backends.triton.config",
        "backends.triton.decode_config",
        "backends.triton.lowering",
        "backends.triton.memory",
        "backends.triton.softmax",
        "backends.triton.tile",
        "masks",
        "sharding",
        "softmax",
        "spec",
    },
    "backends.triton.decode_config": {"backends.triton.config", "spec"},
    "backends.triton.forward": {
        "backends.triton.config",
        "backends.triton.lowering",
        "backends.triton.memory",
        "backends.triton.schedule",
        "backends.triton.softmax",
        "backends.triton.tile",
        "sharding",
        "spec",
    },
    "backends.triton.lowering": set(),
    "backends.triton.memory": {"backends.triton.config", "backends.triton.lowering"},
    "backends.triton.schedule": {"backends.triton.lowering", "backends.triton.tile", "spec"},
    "backends.triton.softmax": set(),
    "backends.triton.tile": {
        "backends.triton.config",
        "backends.triton.lowering",
        "backends.triton.softmax",
        "masks",
        "spec",
    },
    "backends.xla": {
        "backends",
        "backends.xla.backward",
        "backends.xla.decode",
        "backends.xla.forward",
        "spec",
    },
    "backends.xla.backward": {"backends.xla.tile", "sharding", "spec"},
    "backends.xla.decode": {"backends.xla.forward", "spec"},
    "backends.xla.forward": {"backends.xla.tile", "sharding", "softmax", "spec"},
    "backends.xla.tile": {"masks", "spec"},
    "cache": {"sharding", "validate.arguments", "validate.cache"},
    "doctor": {"api", "backends", "spec", "testing"},
    "flax": {"flax.adapter", "flax.config", "flax.rotary"},
    "flax.adapter": {
        "api",
        "backends",
        "spec",
        "validate.arguments",
        "validate.attention",
        "validate.options",
    },
    "flax.config": {"backends", "flax.rotary", "validate.arguments", "validate.options"},
    "flax.layer": {"cache", "flax.config", "validate.arguments", "validate.decode"},
    "flax.linen": {"api", "flax.config", "flax.layer"},
    "flax.nnx": {"api", "flax.config", "flax.layer"},
    "flax.rotary": {"validate.arguments"},
    "masks": {"spec"},
    "models": {"testing"},
    "reference": {"spec"},
    "sharding": {"spec"},
    "softmax": set(),
    "spec": set(),
    "terminal": set(),
    "testing": {"reference", "spec"},
    "validate": set(),
    "validate.arguments": {"spec"},
    "validate.attention": {"spec", "validate.arguments"},
    "validate.cache": {"spec", "validate.arguments"},
    "validate.decode": {"spec", "validate.arguments"},
    "validate.options": {"spec", "validate.arguments"},
}

# What may be imported from outside: the standard library aside, the run-time needs alone, and in
# one room what it is for.
OUTSIDE = {"jax", "numpy"}
OUTSIDE_OF = {"flax": {"flax"}}


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if parts[-1] == "__init__" and len(parts) > 1:
        parts = parts[:-1]
    return ".".join(parts)


ROOMS = {room_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imported_modules(path: Path) -> set[str]:
    """Full names of what a file imports, at any depth of its code."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            # `from package import room` imports the room, `from room import name` the name in it.
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                is_room = inner.removeprefix("pallas_flash.") in ROOMS
                names.add(inner if is_room else str(node.module))
    return names


@pytest.mark.parametrize("room", ROOMS)
def test_imports_run_one_way(room):
    names = imported_modules(ROOMS[room])
    ours = {n.removeprefix("pallas_flash.") for n in names if n.split(".")[0] == "pallas_flash"}
    assert ours <= ALLOWED[room]


def test_no_room_is_listed_that_does_not_exist():
    assert set(ALLOWED) == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_only_the_run_time_needs_are_imported(room):
    roots = {name.split(".")[0] for name in imported_modules(ROOMS[room])}
    allowed = OUTSIDE | OUTSIDE_OF.get(room.split(".")[0], set())
    assert roots - set(sys.stdlib_module_names) - {"pallas_flash"} <= allowed


def test_a_fresh_import_loads_no_kernel_and_no_extra():
    code = "import pallas_flash, sys; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "pallas_flash.api" in loaded
    unwanted = ("flax", "triton", "jax.experimental.pallas", "jax._src.pallas")
    assert [name for name in loaded if name.startswith(unwanted)] == []
    ours = (
        "pallas_flash.backends.",
        "pallas_flash.doctor",
        "pallas_flash.flax",
        "pallas_flash.testing",
    )
    assert [name for name in loaded if name.startswith(ours)] == []
