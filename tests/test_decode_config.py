"""Into how many parts decoding splits the keys, and that what is picked fits every card."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from compiled import compile_for, kernels, lower, needs_lowering, require_triton
from test_lowering import KINDS, SHARED_MEMORY

from pallas_flash import autodiff
from pallas_flash.backends.triton import TritonBackend
from pallas_flash.backends.triton.config import Config
from pallas_flash.backends.triton.decode_config import DecodeConfig, pick_decode
from pallas_flash.spec import AttentionSpec, DecodeOperands, Dims

TILE = Config(16, 64, 2, 3)
SPEC = AttentionSpec(is_causal=True)


def dims(B: int = 1, S: int = 8192, T: int = 1, N: int = 32, K: int = 8, H: int = 128) -> Dims:
    return Dims(B, T, S, N, K, H, H)


@pytest.mark.parametrize(
    ("sizes", "splits"),
    [
        # As many programs as an H200 begins at once.
        ({"B": 1, "S": 32768}, 32),
        ({"B": 16, "S": 8192}, 2),
        ({"B": 32, "S": 1024}, 1),
        # More, so that it does not matter how few the last are.
        ({"B": 64, "S": 4096}, 4),
        ({"B": 64, "S": 8192}, 4),
        # Two blocks at least.
        ({"B": 1, "S": 1024}, 8),
        ({"B": 1, "S": 64}, 1),
        ({"B": 1, "S": 1}, 1),
        ({"B": 4096, "S": 4096}, 1),
    ],
)
def test_parts_fill_the_card(sizes, splits):
    cut = pick_decode(SPEC, dims(**sizes), jnp.dtype("bfloat16"), 132)
    assert (cut.tile, cut.splits) == (TILE, splits)


@pytest.mark.parametrize("multiprocessors", [None, 1, 58, 108, 132])
@pytest.mark.parametrize("left", [None, 0, 100, 5000, 10**6])
@pytest.mark.parametrize("S", [1, 100, 8191, 131072])
def test_no_part_is_empty_where_a_row_is_full(S, left, multiprocessors):
    spec = dataclasses.replace(SPEC, local_window_size=(left, 0))
    for T in (1, 16):
        cut = pick_decode(spec, dims(S=S, T=T), jnp.dtype("bfloat16"), multiprocessors)
        reached = S if left is None else min(S, left + T)
        assert 1 <= cut.splits <= max(1, -(-reached // cut.tile.block_k) + 1)


def test_a_card_of_any_size_has_a_pick():
    cut = pick_decode(SPEC, dims(S=2**20, K=1, H=64), jnp.dtype("bfloat16"), 1000)
    assert cut.splits == 1024


@pytest.mark.parametrize(
    ("splits", "H", "merged"),
    [
        (2, 64, (2, 1)),
        (32, 128, (32, 1)),
        (33, 128, (64, 2)),
        (128, 96, (128, 4)),
        (256, 128, (256, 8)),
        (256, 256, (128, 8)),
        (1024, 64, (512, 8)),
        (2, 512, (2, 1)),
    ],
)
def test_as_many_parts_are_merged_at_a_time_as_registers_hold(splits, H, merged):
    assert DecodeConfig(TILE, splits).merge_tile(dims(H=H)) == merged


@pytest.mark.parametrize("splits", [0, -1, 1025, 2.0, True, None, "2"], ids=repr)
def test_configs_validate_themselves(splits):
    with pytest.raises(ValueError, match=r"^splits: expected an int, 1 to 1024, got "):
        DecodeConfig(TILE, splits)
    with pytest.raises(ValueError, match=r"^tile: expected a Config, got None"):
        DecodeConfig(None, 2)


def decode(operands: DecodeOperands, precision: str) -> tuple[jax.Array, jax.Array | None]:
    spec = AttentionSpec(is_causal=True, precision=jax.lax.Precision(precision))
    return autodiff.decode(TritonBackend(), spec, True, operands)


def lowered(sizes: Dims, dtype: str, precision: str, kind: str, page_size: int | None = None):
    """The kernels of a call, by name."""
    struct = jax.ShapeDtypeStruct
    query = struct((sizes.batch, sizes.query_length, sizes.query_heads, sizes.head_dim), dtype)
    pages = sizes.key_length // (page_size or sizes.key_length)
    cache = (sizes.batch * pages, page_size or sizes.key_length, sizes.key_heads, sizes.head_dim)
    table = None if page_size is None else struct((sizes.batch, pages), jnp.int32)
    key = struct(cache, dtype)
    lengths = struct((sizes.batch,), jnp.int32)
    operands = DecodeOperands(query, key, key, lengths, table)
    return kernels(lower(functools.partial(decode, precision=precision), operands, kind=kind))


@needs_lowering
@pytest.mark.parametrize("capability", ["8.0", "8.9", "9.0"])
@pytest.mark.parametrize(
    ("dtype", "precision"),
    [("bfloat16", "default"), ("float32", "default"), ("float32", "highest")],
)
def test_shared_memory_fits_the_smallest_card(dtype, precision, capability):
    require_triton()
    for H, T, N in ((64, 16, 32), (128, 1, 8), (128, 16, 32), (256, 2, 64)):
        sizes = dims(B=4, T=T, N=N, K=2, H=H)
        found = lowered(sizes, dtype, precision, KINDS[capability])
        assert set(found) == {"flash_decode", "flash_decode_merge"}
        for kernel in found.values():
            compiled = compile_for(kernel, capability)
            # A tenth is left for what another version of the compiler may add.
            assert compiled.shared_bytes <= 0.9 * 1024 * SHARED_MEMORY[capability], sizes
            assert compiled.spilled_bytes <= 2048, sizes


@needs_lowering
@pytest.mark.parametrize("page_size", [None, 16, 64, 48])
def test_keys_and_values_come_by_asynchronous_copies(page_size):
    """16 bytes each, which is what reads at the speed of memory."""
    require_triton()
    sizes = dims(S=64 * 48)
    compiled = compile_for(
        lowered(sizes, "bfloat16", "default", KINDS["9.0"], page_size)["flash_decode"], "9.0"
    )
    assert "cp.async.cg.shared.global" in compiled.ptx
    assert "cp.async.ca" not in compiled.ptx
    assert "mma.sync" in compiled.ptx


@needs_lowering
def test_one_part_is_written_whole_and_nothing_is_merged():
    found = lowered(dims(B=32, S=1024), "bfloat16", "default", KINDS["9.0"])
    assert set(found) == {"flash_decode"}
    assert found["flash_decode"].grid == (32 * 8, 1, 1)
