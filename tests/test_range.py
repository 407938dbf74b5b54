"""Numbers near the ends of a float type's range."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from implementations import SMALL_BLOCKS, draw, each_implementation, extend, judge, runnable

from pallas_flash.testing import Inputs


def small_values(size: float, seed: int) -> Inputs:
    inputs = draw(seed, "float16", T=40, S=70, N=2, H=16, is_causal=True)
    value = inputs.arrays["value"].astype(np.float32) * size
    return extend(inputs, value=value.astype(np.float16))


@each_implementation("xla", SMALL_BLOCKS)
@pytest.mark.parametrize("size", [1e-2, 3e-4, 1e-5])
def test_float16_below_its_normal_numbers(implementation, size, seed):
    got, wrong = judge(implementation, small_values, size, seed)
    assert wrong == []
    assert np.count_nonzero(got["out"]) > 0.9 * got["out"].size


@each_implementation("xla", SMALL_BLOCKS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_traced_scale_beyond_float32_of_the_cap(implementation, dtype, seed):
    """Their ratio is inf as a float32, and 0 * inf is NaN."""
    inputs = draw(seed, dtype, T=20, S=40, N=2, H=16)
    attention = runnable(implementation, inputs)
    _, key, value = (jnp.asarray(inputs.arrays[name]) for name in ("query", "key", "value"))
    query = jnp.zeros_like(key[:, :20])

    @jax.jit
    def run(scale):
        return attention(query, key, value, scale=scale, logits_soft_cap=1e-9).out

    got = np.asarray(run(jnp.float32(1e30)), np.float32)
    mean = np.asarray(value, np.float32).mean(axis=1, keepdims=True)
    np.testing.assert_allclose(got, np.broadcast_to(mean, got.shape), rtol=0, atol=1e-2)
