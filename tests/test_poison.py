"""What does not exist must not matter, not even NaN: past lengths, and in rows that see nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from implementations import SMALL_BLOCKS, each_implementation, runnable

from pallas_flash.testing import Case, Inputs, evaluate, make_inputs

LENGTHS = {"query_seq_lengths": (40, 21, 0), "key_value_seq_lengths": (17, 50, 33)}


def poisoned(x: np.ndarray, lengths: tuple[int, ...]) -> np.ndarray:
    """NaN, and infinities of both signs, in every row past its length."""
    x = x.copy()
    for row, length in zip(x, lengths, strict=True):
        row[length:] = np.nan
        row[length + 1 :: 3] = np.inf
        row[length + 2 :: 3] = -np.inf
    return x


@each_implementation("xla", SMALL_BLOCKS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cap", [None, 3.0], ids=["plain", "cap"])
def test_past_the_lengths(implementation, dtype, cap, seed):
    case = Case(
        B=3, T=40, S=50, N=4, K=2, H=8, dtype=dtype, bias="BNTS", logits_soft_cap=cap, **LENGTHS
    )
    clean = make_inputs(case, seed)
    attention = runnable(implementation, clean)
    q_lengths, k_lengths = LENGTHS.values()
    arrays = dict(clean.arrays)
    arrays["query"] = poisoned(arrays["query"], q_lengths)
    for name in ("key", "value"):
        arrays[name] = poisoned(arrays[name], k_lengths)
    by_row = poisoned(arrays["bias"].transpose(0, 2, 3, 1), q_lengths)
    by_column = poisoned(by_row.transpose(0, 2, 1, 3), k_lengths)
    arrays["bias"] = by_column.transpose(0, 3, 2, 1)
    bad = Inputs(
        arrays, clean.options, poisoned(clean.dout, q_lengths), poisoned(clean.dlse, q_lengths)
    )
    got, expected = evaluate(attention, bad), evaluate(attention, clean)
    for name, x in expected.items():
        np.testing.assert_array_equal(got[name], x, name)


@each_implementation("xla", SMALL_BLOCKS)
def test_cotangents_of_rows_that_see_nothing(implementation, seed):
    """The gradient at -inf, as that of a merge of parts, is often NaN."""
    clean = make_inputs(Case(T=40, S=40, is_causal=True, query_offset=(-7, -50)), seed)
    attention = runnable(implementation, clean)
    dout, dlse = clean.dout.copy(), clean.dlse.copy()
    for x in (dout, dlse):
        for row, count in zip(x, (7, 40), strict=True):
            row[:count] = np.nan
    got = evaluate(attention, Inputs(clean.arrays, clean.options, dout, dlse))
    expected = evaluate(attention, clean)
    assert np.isneginf(expected["lse"][0, :7]).all()
    for name, x in expected.items():
        np.testing.assert_array_equal(got[name], x, name)


@each_implementation("xla", SMALL_BLOCKS)
@pytest.mark.parametrize("cap", [None, 3.0], ids=["plain", "cap"])
def test_a_value_that_exists_does_not_reach_gradients_of_rows_that_do_not(
    implementation, cap, seed
):
    inputs = make_inputs(Case(B=1, T=40, S=40, query_seq_lengths=(21,), logits_soft_cap=cap), seed)
    attention = runnable(implementation, inputs)
    inputs.arrays["value"][0, 3, 0, 0] = np.nan
    dq = evaluate(attention, inputs)["dquery"]
    assert np.isnan(dq[0, :21]).any()
    np.testing.assert_array_equal(dq[0, 21:], 0.0)


def test_poison_spreads_where_it_is_not_kept_out():
    query = jnp.full((1, 2, 1, 4), jnp.nan)
    assert jnp.isnan(jax.nn.dot_product_attention(query, query, query)).all()
