"""Where the logit of a row's first key says nothing of its largest, nor of the size of its sums."""

import jax.numpy as jnp
import numpy as np
import pytest
from implementations import draw, each_implementation, extend, judge, runnable

from pallas_flash.testing import Inputs

SIZES = {"T": 72, "S": 136, "N": 4, "K": 2, "H": 32}


def _first_key_far_below(dtype: str, seed: int, is_causal: bool) -> Inputs:
    """By some 250, to the base e: more than bfloat16's range, and than float16's."""
    inputs = draw(seed, dtype, **SIZES, is_causal=is_causal)
    query = np.abs(inputs.arrays["query"]) + 4
    key = inputs.arrays["key"].copy()
    key[:, 0] = -8
    return extend(inputs, query=query.astype(key.dtype), key=key)


def _far_below_for_some_rows(dtype: str, seed: int, is_causal: bool) -> Inputs:
    inputs = _first_key_far_below(dtype, seed, is_causal)
    query = inputs.arrays["query"].copy()
    query[:, ::5] = draw(seed, dtype, **SIZES).arrays["query"][:, ::5]
    return extend(inputs, query=query)


def _first_key_far_above(dtype: str, seed: int, is_causal: bool) -> Inputs:
    """Logits of a thousand for it: beyond what one float32 keeps of a logit and a sum together."""
    inputs = draw(seed, dtype, **SIZES, is_causal=is_causal)
    query = np.abs(inputs.arrays["query"]) + 4
    key = inputs.arrays["key"].copy()
    key[:, 0] = 48
    return extend(inputs, query=query.astype(key.dtype), key=key)


def _all_keys_far_below(dtype: str, seed: int, is_causal: bool) -> Inputs:
    """One offset of -300 for all logits, which changes nothing."""
    inputs = draw(seed, dtype, **SIZES, is_causal=is_causal)
    query, key = inputs.arrays["query"].copy(), inputs.arrays["key"].copy()
    query[..., -1], key[..., -1] = 32, -53
    return extend(inputs, query=query, key=key)


def _one_key_at_the_end_of_the_range(dtype: str, seed: int, is_causal: bool) -> Inputs:
    """Sums of 2^126.2, and values so small that nothing overflows."""
    inputs = draw(seed, dtype, **SIZES, is_causal=is_causal, scale=1.0)
    query, key = np.zeros_like(inputs.arrays["query"]), np.zeros_like(inputs.arrays["key"])
    query[..., 0], key[:, 1, :, 0] = 1, 87.5
    return extend(inputs, query=query, key=key, value=inputs.arrays["value"] / 128)


def _large_values(dtype: str, seed: int, is_causal: bool) -> Inputs:
    """Sums that overflow only by their values, beside weights that are all but harmless."""
    inputs = draw(seed, dtype, **SIZES, spread=3.0, is_causal=is_causal)
    value = inputs.arrays["value"]
    scale = 2.0**110 if dtype == "bfloat16" else 2.0**8
    return extend(inputs, value=(value.astype(np.float64) * scale).astype(value.dtype))


@each_implementation("xla")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "build",
    [
        _first_key_far_below,
        _far_below_for_some_rows,
        _first_key_far_above,
        _all_keys_far_below,
        _one_key_at_the_end_of_the_range,
        _large_values,
    ],
)
def test_values_and_gradients(implementation, build, dtype, is_causal, seed):
    _, wrong = judge(implementation, build, dtype, seed, is_causal)
    assert wrong == []


@each_implementation("xla")
def test_a_logit_that_is_noise(implementation):
    """Terms of 2^32 cancel, and how depends on the order: yet equal keys have equal weights."""
    rng = np.random.default_rng(0)
    query, key = (
        (rng.standard_normal((1, rows, 1, 16)) * 2**16).astype(jnp.bfloat16) for rows in (16, 1)
    )
    order = rng.permutation(8)
    query[..., 8:], key[..., 8:] = query[..., :8][..., order], -key[..., :8][..., order]
    value = np.ones((1, 64, 1, 16), jnp.bfloat16)
    inputs = Inputs(
        {"query": query, "key": np.repeat(key, 64, 1), "value": value}, {}, value, value
    )
    got = runnable(implementation, inputs)(**inputs.arrays)
    assert np.all(got.out == 1)
    assert np.all(np.isfinite(got.lse))
