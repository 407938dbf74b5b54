"""Long sequences, and arrays with more elements than 32 bits count."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from implementations import judge

from pallas_flash import flash_attention, flash_decode_with_lse
from pallas_flash.backends.triton import TritonBackend
from pallas_flash.backends.triton.config import Config
from pallas_flash.backends.triton.decode_config import DecodeConfig
from pallas_flash.testing import Case, make_inputs


@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("T", "S", "spread"), [(1024, 1024, 2.0), (64, 32768, 1.0), (64, 32768, 2.0)], ids=str
)
def test_long_sequences(implementation, dtype, T, S, spread, seed):
    sizes = {"B": 1, "T": T, "S": S, "N": 2, "K": 1, "H": 128}
    case = Case(**sizes, dtype=dtype, is_causal=True, query_offset=(S - T,), spread=spread)
    _, wrong = judge(implementation, make_inputs, case, seed)
    assert wrong == []


# Operands, results and gradients.
_NEEDED_BYTES = 12 * 2**32


def _free_bytes() -> int:
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)


ON_A_LARGE_GPU = pytest.mark.skipif(
    jax.default_backend() != "gpu" or _free_bytes() < _NEEDED_BYTES,
    reason="needs a GPU with 52 GB free",
)


@ON_A_LARGE_GPU
def test_more_than_2_to_the_31_elements(seed):
    shape = (2, 4100, 2048, 128)
    assert np.prod(shape) > 2**31
    keys = jax.random.split(jax.random.key(seed), 4)
    query, key, value, dout = (jax.random.normal(k, shape, jnp.bfloat16) for k in keys)

    def attend(query, key, value):
        return flash_attention(
            query, key, value, local_window_size=(63, 0), implementation="triton"
        )

    @jax.jit
    def run(query, key, value, dout):
        out, vjp = jax.vjp(attend, query, key, value)
        return out, *vjp(dout)

    results = run(query, key, value, dout)
    for batch, heads in ((0, slice(0, 2)), (1, slice(2046, 2048))):
        part = [x[batch : batch + 1, :, heads] for x in (query, key, value, dout)]
        for whole, alone in zip(results, run(*part), strict=True):
            np.testing.assert_array_equal(whole[batch : batch + 1, :, heads], alone)


@ON_A_LARGE_GPU
def test_a_cache_of_more_than_2_to_the_31_elements(seed):
    B, S, K, H = shape = (9, 131072, 16, 128)
    assert np.prod(shape) > 2**31
    keys = jax.random.split(jax.random.key(seed), 3)
    key, value = (jax.random.normal(k, shape, jnp.bfloat16) for k in keys[:2])
    query = jax.random.normal(keys[2], (B, K, H), jnp.bfloat16)
    lengths = jnp.full(B, S, jnp.int32)

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def decode(splits, page_size, query, key, value, lengths):
        # In the same parts however many rows there are, so that a row alone gives the same bits.
        cut = DecodeConfig(Config(16, 64, 2, 3), splits)
        page_table = None
        if page_size is not None:
            key, value = (x.reshape(-1, page_size, K, H) for x in (key, value))
            page_table = np.arange(len(key), dtype=np.int32).reshape(len(query), -1)
        return flash_decode_with_lse(
            query,
            key,
            value,
            lengths,
            page_table=page_table,
            implementation=TritonBackend(decode_config=cut),
        )

    arguments = (query, key, value, lengths)
    last = [x[-1:] for x in arguments]
    for splits in (1, 8):
        alone = decode(splits, None, *last)
        assert np.isfinite(np.asarray(alone.out, np.float32)).all()
        # Blocks that lie in a page, and blocks of several.
        for page_size in (None, 64, 16):
            whole = decode(splits, page_size, *arguments)
            for x, y in zip(whole, alone, strict=True):
                np.testing.assert_array_equal(x[-1:], y)
