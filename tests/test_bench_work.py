"""The bench's count of operations and bytes, against the definition."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import problems
import pytest
import work

from pallas_flash.testing import Case

SMALL = Case(B=2, T=64, S=64, N=4, K=2, H=16, dtype="bfloat16")
OPTIONS = {
    "none": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (9, 3)},
    "causal window": {"local_window_size": (9, 3), "is_causal": True},
    "cap": {"logits_soft_cap": 50.0},
    "lengths": {"key_value_seq_lengths": (3, 41)},
    "an empty row": {"key_value_seq_lengths": (0, 41), "local_window_size": (9, 3)},
    "value head dim": {"Hv": 24, "dtype": "float32"},
}
SIZES = [{}, {"T": 23}, {"S": 23}]


def visible(case: Case) -> np.ndarray:
    """Bools [B, T, S], by the definition."""
    left, right = case.local_window_size or (10**6, 10**6)
    lengths = np.array(case.key_value_seq_lengths or (case.S,) * case.B)[:, None, None]
    i, j = np.arange(case.T)[:, None], np.arange(case.S)
    return (j < lengths) & (i - left <= j) & (j <= i + right) & ((j <= i) | (not case.is_causal))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("options", OPTIONS)
def test_operations_are_those_of_the_pairs_that_are_seen(options, sizes):
    case = dataclasses.replace(SMALL, **sizes, **OPTIONS[options])
    pairs, value_head_dim = int(visible(case).sum()), case.Hv or case.H
    assert work.visible_pairs(case) == pairs
    assert work.share_of_pairs(case) == pairs / (case.B * case.T * case.S)
    # q.k and p.v; then q.k again, dp, dv, dk and dq.
    forward = 2 * pairs * case.N * (case.H + value_head_dim)
    backward = 2 * pairs * case.N * (3 * case.H + 2 * value_head_dim)
    assert work.flops(case, with_gradients=False) == forward
    assert work.flops(case, with_gradients=True) == forward + backward


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("options", OPTIONS)
def test_bytes_are_those_of_the_rows_that_matter(options, sizes):
    case = dataclasses.replace(SMALL, **sizes, **OPTIONS[options])
    seen = visible(case)
    queries, keys = int(seen.any(axis=2).sum()), int(seen.any(axis=1).sum())
    size, value_head_dim = jnp.dtype(case.dtype).itemsize, case.Hv or case.H
    out = case.B * case.T * case.N * value_head_dim
    read = queries * case.N * case.H + keys * case.K * (case.H + value_head_dim)
    assert work.least_bytes(case, with_gradients=False) == size * (read + out)
    gradients = case.B * (case.T * case.N * case.H + case.S * case.K * (case.H + value_head_dim))
    read += queries * case.N * value_head_dim
    assert work.least_bytes(case, with_gradients=True) == size * (read + out + gradients)


def test_causal_counts_half():
    cases = problems.SUITES["headline"].cases
    full, causal = (work.flops(cases[name], with_gradients=False) for name in ("full", "causal"))
    assert full == 4 * 2 * 8192**2 * 16 * 128
    assert causal == pytest.approx(full / 2, rel=2e-4)


def test_what_is_not_reckoned_is_refused():
    with pytest.raises(ValueError, match="query_offset"):
        work.flops(dataclasses.replace(SMALL, query_offset=(3, 4)), with_gradients=False)
