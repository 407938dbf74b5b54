"""What the README says is true: its example runs, its map is the tree, its commands exist."""

import re
from pathlib import Path

import jax

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return [text for name, text in fenced if name == language]


def test_the_examples_run(capsys):
    """One after the other, but for the one of a model that the reader has."""
    examples = [block for block in blocks("python") if "checkpoint_policies" not in block]
    assert len(examples) == 5
    names = {}
    results = []
    # What users have, not the suite's strict settings.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for example in examples:
            exec(compile(example, "README.md", "exec"), names)
            if "cache" in names:
                results.append((names["cache"].lengths.tolist(), names["out"].shape))
    assert "(1, 4096, 8, 64)" in capsys.readouterr().out
    decoding, _, layer = results
    assert decoding == ([4001], (1, 8, 64))
    assert layer == ([133, 133], (2, 1, 512))


def mapped_paths() -> set[str]:
    """The paths of the map's lines, an indent of two spaces for each folder."""
    (text,) = (block for block in blocks("") if block.startswith("pallas_flash/"))
    folders: list[str] = []
    paths = set()
    for line in text.splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        folders[depth:] = [name.rstrip("/")] if name.endswith("/") else []
        paths.add("/".join([*folders[:depth], name.rstrip("/")]))
    return paths


def test_the_map_is_the_tree():
    paths = mapped_paths()
    assert [path for path in paths if not (ROOT / path).exists()] == []
    package = ROOT / "pallas_flash"
    rooms = {path for path in package.iterdir() if path.suffix == ".py"}
    rooms |= {path for path in (package / "backends").iterdir() if (path / "__init__.py").exists()}
    rooms |= set((ROOT / "bench").glob("*.py")) | set((ROOT / "examples").glob("*.py"))
    rooms |= set((package / "flax").glob("[!_]*.py"))
    assert {str(path.relative_to(ROOT)) for path in rooms} <= paths


def test_the_commands_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^make (\w+)", README, re.MULTILINE)
    assert {"demo", "test", "check"} <= set(targets)
    assert [name for name in targets if not re.search(rf"^{name}:", makefile, re.MULTILINE)] == []
