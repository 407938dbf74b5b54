"""Kernels lowered and compiled for an NVIDIA GPU on a machine that has none.

`lower` and `kernels` need JAX 0.11; `compile_for` needs the `triton` package too. The stages are
those that XLA runs, of another revision.
"""

import functools
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_flash import autodiff
from pallas_flash.backends.triton import TritonBackend
from pallas_flash.spec import AttentionOutput, AttentionSpec, Operands

needs_lowering = pytest.mark.skipif(
    jax.version.__version_info__ < (0, 11), reason="JAX 0.10 lowers for a GPU only beside one"
)

_TARGET = "__gpu$xla.gpu.triton"

# Whose compiler reads what a JAX writes.
_TRITON_OF_JAX = {(0, 11): "3.8", (0, 12): "3.9"}


def require_triton() -> None:
    """Skip where the package is missing, or of another time than this JAX."""
    found = pytest.importorskip("triton").__version__
    needed = _TRITON_OF_JAX.get(jax.version.__version_info__[:2])
    if needed is None or not found.startswith(f"{needed}."):
        pytest.skip(f"JAX {jax.__version__} wants triton {needed}, and {found} is installed")


@dataclass(frozen=True)
class Kernel:
    """As JAX hands it to XLA; `ir` is the bytecode of a module of Triton's IR."""

    name: str
    ir: bytes
    num_warps: int
    num_stages: int
    grid: tuple[int, int, int]

    @property
    def text(self) -> str:
        from jax._src.lib.mlir import ir
        from jax._src.pallas.triton.lowering import _new_ir_context

        with _new_ir_context():
            return ir.Module.parse(self.ir).operation.get_asm()


@dataclass(frozen=True)
class Compiled:
    """What a program takes: shared memory in bytes, and bytes that each thread spills."""

    shared_bytes: int
    spilled_bytes: int
    ptx: str


def gradient(
    spec: AttentionSpec, operands: Operands, dout: jax.Array, dlse: jax.Array
) -> tuple[AttentionOutput, tuple[Operands]]:
    """Outputs and gradients by the kernels."""
    # Of the operands, floats alone are differentiated.
    floats = {name: x for name, x in operands._asdict().items() if is_float(x)}

    def attention(floats: dict[str, jax.Array]) -> AttentionOutput:
        operands_now = operands._replace(**floats)
        return AttentionOutput(*autodiff.attention(TritonBackend(), spec, True, operands_now))

    result, vjp = jax.vjp(attention, floats)
    return result, vjp(AttentionOutput(dout, dlse))


def is_float(x: jax.Array | None) -> bool:
    return x is not None and jnp.issubdtype(x.dtype, jnp.floating)


def lower(function: Callable, *args: Any, kind: str) -> jax.stages.Lowered:
    """For a GPU of that name; the arguments may be `jax.ShapeDtypeStruct`."""
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",))


def lower_gradient(spec: AttentionSpec, operands: Operands, kind: str) -> jax.stages.Lowered:
    """`lower` of `gradient`."""
    query, value = operands.query, operands.value
    dout = jax.ShapeDtypeStruct((*query.shape[:3], value.shape[3]), query.dtype)
    dlse = jax.ShapeDtypeStruct(query.shape[:3], jnp.float32)
    return lower(functools.partial(gradient, spec), operands, dout, dlse, kind=kind)


def kernels(lowered: jax.stages.Lowered) -> dict[str, Kernel]:
    """All that the lowered function calls, by name."""
    from jax._src.lib.mlir import ir

    found = {}

    def visit(operation):
        is_call = operation.name == "stablehlo.custom_call"
        if is_call and operation.attributes["call_target_name"].value == _TARGET:
            config = operation.attributes["mhlo.backend_config"]
            name = config["name"].value
            found[name] = Kernel(
                name=name,
                ir=config["ir"].value_bytes,
                num_warps=config["num_warps"].value,
                num_stages=config["num_stages"].value,
                grid=tuple(config[f"grid_{axis}"].value for axis in "xyz"),
            )
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir("stablehlo").operation.walk(visit)
    return found


def compile_for(kernel: Kernel, capability: str) -> Compiled:
    """Down to machine code for that compute capability."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget, Language
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
    from triton.compiler.compiler import make_backend

    number = int(capability.replace(".", ""))
    backend = make_backend(GPUTarget("cuda", number, 32))
    options = backend.parse_options(
        {
            "num_warps": kernel.num_warps,
            "num_stages": kernel.num_stages,
            # As XLA does.
            "enable_fp_fusion": True,
        }
    )
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    # `triton.compile` of a file leaves out the first of these stages, which XLA does run.
    stages: dict[str, Callable] = {}
    backend.add_stages(stages, options, Language.TRITON)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ttir"
        path.write_bytes(kernel.ir)
        module = ir.parse_mlir_module(str(path), context)
        module.context = context
        metadata: dict[str, Any] = {}
        for stage in ("ttir", "ttgir", "llir", "ptx"):
            module = stages[stage](module, metadata)
        source = Path(folder) / "kernel.ptx"
        source.write_text(module)
        architecture = f"--gpu-name={sm_arch_from_capability(number)}"
        command = [get_ptxas(number).path, "-v", architecture, str(source), "-o", "/dev/null"]
        log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    return Compiled(metadata["shared"], sum(map(int, spills)), module)
