"""Every kernel lowers for every card, and compiles within what the smallest card has.

What of a kernel can be known without a GPU: that JAX makes Triton's IR of it, what shared memory
the machine code takes, and which instructions multiply.
"""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from compiled import (
    compile_for,
    kernels,
    lower,
    lower_gradient,
    needs_lowering,
    require_triton,
)
from implementations import INTERPRET, reasons
from test_attention import CASES

import pallas_flash
from pallas_flash import autodiff
from pallas_flash.backends import Device
from pallas_flash.backends.triton import TritonBackend
from pallas_flash.spec import AttentionSpec, Operands
from pallas_flash.testing import make_inputs

pytestmark = needs_lowering

KINDS = {
    "8.0": "NVIDIA A100",
    "8.9": "NVIDIA L4",
    "9.0": "NVIDIA H200",
    "10.0": "NVIDIA B200",
}
CARDS = [*KINDS.values(), "NVIDIA GeForce RTX 4090"]

# KiB that a program may have, on the smallest card of each.
SHARED_MEMORY = {"8.0": 163, "8.9": 99, "9.0": 227, "10.0": 227}

NAMES = {
    "flash_attention_forward",
    "flash_attention_key_gradient",
    "flash_attention_query_gradient",
}

RUNNABLE = [case for case in CASES if not reasons(INTERPRET, make_inputs(case, seed=0))]


def operands_of(shape: tuple[int, ...], dtype: str, key_heads: int | None = None) -> Operands:
    """Of a query of that shape, and as many keys."""
    query = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    batch, length, heads, head_dim = shape
    key = jax.ShapeDtypeStruct((batch, length, key_heads or heads, head_dim), query.dtype)
    return Operands(query, key, key)


@pytest.mark.parametrize("case", RUNNABLE, ids=lambda case: case.id)
def test_every_option_lowers(case):
    found = kernels(lower_gradient(*make_inputs(case, seed=0).spec_and_operands(), "NVIDIA H200"))
    assert set(found) == NAMES


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_width_lowers_for_every_card(card, dtype):
    for head_dim in (8, 64, 80, 96, 128, 192, 256):
        operands = operands_of((2, 1000, 4, head_dim), dtype, key_heads=2)
        found = kernels(lower_gradient(AttentionSpec(is_causal=True), operands, card))
        assert set(found) - {"flash_attention_value_gradient"} == NAMES


def most_spilled(name: str, head_dim: int, dtype: str, precision: jax.lax.Precision) -> int:
    """More bytes than this are a tile that does not fit the registers."""
    if "gradient" not in name:
        return 2048
    if dtype != "float32":
        # Two programs, of which the one for large logits keeps a statistic more.
        return 5120
    # Exact products are unrolled, and what they reuse is put aside: dk and dv of rows of 128 took
    # 12.3 ms so, and 19.9 in tiles of 32x32 by 8 warps, which spill nothing (H200).
    is_unrolled = precision == jax.lax.Precision.HIGHEST and "key" in name
    return 8192 if is_unrolled and 64 < head_dim <= 128 else 2048


@pytest.mark.parametrize("capability", SHARED_MEMORY)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_shared_memory_fits_the_smallest_card(head_dim, dtype, capability):
    require_triton()
    precisions = {"float32": ["highest", "default"]}.get(dtype, ["default"])
    for precision in map(jax.lax.Precision, precisions):
        # An odd length has every branch.
        spec = AttentionSpec(is_causal=True, precision=precision)
        operands = operands_of((2, 8191, 16, head_dim), dtype)
        for kernel in kernels(lower_gradient(spec, operands, KINDS[capability])).values():
            compiled = compile_for(kernel, capability)
            # A tenth is left for what another version of the compiler may add.
            assert compiled.shared_bytes <= 0.9 * 1024 * SHARED_MEMORY[capability], kernel.name
            most = most_spilled(kernel.name, head_dim, dtype, precision)
            assert compiled.spilled_bytes <= most, kernel.name
            if capability == "9.0" and dtype == "bfloat16" and head_dim <= 128:
                assert "wgmma.mma_async" in compiled.ptx, kernel.name


def test_what_is_picked_for_a_soft_cap_fits_too():
    require_triton()
    spec = AttentionSpec(is_causal=True, logits_soft_cap=50.0)
    operands = operands_of((2, 8191, 16, 128), "bfloat16")
    for kernel in kernels(lower_gradient(spec, operands, KINDS["9.0"])).values():
        compiled = compile_for(kernel, "9.0")
        assert compiled.shared_bytes <= 0.9 * 1024 * SHARED_MEMORY["9.0"], kernel.name


@pytest.mark.parametrize("capability", SHARED_MEMORY)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_head_dims_up_to_512_fit(dtype, capability):
    require_triton()
    operands = operands_of((1, 2048, 2, 512), dtype)
    device = Device("gpu", KINDS[capability], capability)
    spec = AttentionSpec(is_causal=True)
    refusals = TritonBackend().unsupported_reasons(spec, operands, device)
    is_refused = any("head dims of" in reason for reason in refusals)
    assert is_refused == (dtype == "float32" and capability in ("8.0", "8.9"))
    if not is_refused:
        for kernel in kernels(lower_gradient(spec, operands, KINDS[capability])).values():
            compiled = compile_for(kernel, capability)
            assert compiled.shared_bytes <= 0.9 * 1024 * SHARED_MEMORY[capability], kernel.name


def attention(query, key, value):
    operands = Operands(query, key, value)
    return autodiff.attention(TritonBackend(), AttentionSpec(is_causal=True), False, operands).out


def test_vmap_three_deep_lowers():
    over = jax.vmap(
        jax.vmap(jax.vmap(attention, (None, None, 0)), (None, 0, None)), (0, None, None)
    )
    x = jax.ShapeDtypeStruct((3, 2, 64, 4, 32), jnp.bfloat16)
    (kernel,) = kernels(lower(over, x, x, x, kind="NVIDIA H200")).values()
    programs = kernel.grid[0] * kernel.grid[1] * kernel.grid[2]
    assert programs == 3**3 * 2 * 4


def test_inside_shard_map_it_lowers():
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    kinds = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((2,), ("data",), kinds, abstract_device=device)
    batch = jax.sharding.PartitionSpec("data")
    each = jax.shard_map(attention, mesh=mesh, in_specs=batch, out_specs=batch)
    x = jax.ShapeDtypeStruct((4, 64, 4, 32), jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(each).trace(x, x, x).lower(lowering_platforms=("cuda",))
    (kernel,) = kernels(lowered).values()
    assert kernel.grid == (2 * 4, 1, 1)


@pytest.mark.parametrize(("batch", "heads"), [(65536, 8), (1, 70000), (300, 300)])
def test_many_rows_and_heads_go_along_the_long_axis_of_the_grid(batch, heads):
    operands = operands_of((batch, 20, heads, 16), "float16")
    for kernel in kernels(lower_gradient(AttentionSpec(), operands, "NVIDIA H200")).values():
        assert kernel.grid == (batch * heads, 1, 1)


@pytest.mark.parametrize(("length", "is_wide"), [(2**18, False), (2**20, True)])
def test_offsets_beyond_2_to_the_31_are_wide(length, is_wide):
    operands = operands_of((1, length, 16, 256), "bfloat16")
    for kernel in kernels(lower_gradient(AttentionSpec(), operands, "NVIDIA H200")).values():
        assert ("xi64>" in kernel.text) == is_wide


def test_the_head_dims_pieces_are_multiplied_and_no_more():
    operands = operands_of((1, 256, 1, 96), "bfloat16")
    found = kernels(lower_gradient(AttentionSpec(), operands, "NVIDIA H200"))
    text = found["flash_attention_forward"].text
    assert "x64xbf16>" in text
    assert "x32xbf16>" in text
    assert "x128xbf16>" not in text


def test_an_abstract_gpu_is_the_device_of_what_is_traced():
    seen = []

    # Not its multiprocessors: one of the kind that is here has as many as that.
    def call(x):
        device = Device.of(x)
        seen.append((device.platform, device.kind, device.compute_capability))
        return x

    for kind in CARDS:
        lower(call, jax.ShapeDtypeStruct((1,), jnp.float32), kind=kind)
    capabilities = [*KINDS, "8.9"]
    assert seen == [("gpu", *pair) for pair in zip(CARDS, capabilities, strict=True)]


def test_export_needs_our_list_of_checks_and_no_other():
    x = jax.ShapeDtypeStruct((1, 128, 4, 64), jnp.bfloat16)
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)

    def export(checks):
        with jax.sharding.use_abstract_mesh(mesh):
            exporter = jax.export.export(
                jax.jit(attention), platforms=["cuda"], disabled_checks=checks
            )
            return exporter(x, x, x).serialize(vjp_order=1)

    with pytest.raises(ValueError, match=r"xla\.gpu\.triton"):
        export([])
    again = jax.export.deserialize(export(pallas_flash.DISABLED_EXPORT_CHECKS))
    assert again.platforms == ("cuda",)
    assert again.has_vjp()


def test_no_warning_comes_of_lowering():
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "from test_lowering import *\n"
        "operands = operands_of((1, 64, 1, 32), 'float32')\n"
        "print(*kernels(lower_gradient(AttentionSpec(), operands, 'NVIDIA H200')))"
    )
    command = [sys.executable, "-W", "error", "-c", code, *sys.path]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert set(result.stdout.split()) == NAMES
