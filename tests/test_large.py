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


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("splits", [1, 8])
@ON_A_LARGE_GPU
def test_a_cache_of_more_than_2_to_the_31_elements(splits, page_size, seed):
    shape = (9, 131072, 16, 128)
    assert np.prod(shape) > 2**31
    keys = jax.random.split(jax.random.key(seed), 3)
    key, value = (jax.random.normal(k, shape, jnp.bfloat16) for k in keys[:2])
    query = jax.random.normal(keys[2], (9, 16, 128), jnp.bfloat16)
    lengths = jnp.full(9, shape[1], jnp.int32)
    # In the same parts however many rows there are, so that a row alone gives the same bits.
    backend = TritonBackend(decode_config=DecodeConfig(Config(16, 64, 2, 3), splits))
    decode = functools.partial(flash_decode_with_lse, implementation=backend)
    whole = decode(query, key, value, lengths)
    alone = decode(query[8:], key[8:], value[8:], lengths[8:])
    pool = [x.reshape(-1, page_size, *shape[2:]) for x in (key, value)]
    table = np.arange(len(pool[0]), dtype=np.int32).reshape(9, -1)
    paged = decode(query, *pool, lengths, page_table=table)
    for x, y, z in zip(whole, alone, paged, strict=True):
        np.testing.assert_array_equal(x[8:], y)
        np.testing.assert_array_equal(x, z)
        assert np.isfinite(np.asarray(y, np.float32)).all()
