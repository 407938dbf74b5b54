"""Inputs on which fused attention has gone wrong in public: lengths, masks and extreme numbers.

Each stands for its kind of fault.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from implementations import SMALL_BLOCKS, draw, each_implementation, extend, judge, runnable, truth

from pallas_flash import flash_attention
from pallas_flash.backends.xla import XlaBackend
from pallas_flash.testing import Inputs, differentiate, error, evaluate, oracle, split


def tail_block(length: int) -> Inputs:
    return draw(100, "bfloat16", T=length, N=8, H=16)


# Keys past the end that are not masked, or rows past the end that land in the next head.
@each_implementation(SMALL_BLOCKS)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 65, 127, 129, 192, 257])
def test_length_that_is_no_multiple_of_the_block(implementation, length):
    _, wrong = judge(implementation, tail_block, length)
    assert not wrong


# Shorter ones are one block of 128.
@each_implementation(XlaBackend(block_q=128, block_k=128))
@pytest.mark.parametrize("length", [127, 129, 192, 257])
def test_length_that_is_no_multiple_of_a_larger_block(implementation, length):
    _, wrong = judge(implementation, tail_block, length)
    assert not wrong


def causal(T: int, S: int, offset: int) -> Inputs:
    inputs = draw(2336, "float16", T=T, S=S, N=2, K=1, H=128, is_causal=True)
    return extend(inputs, query_offset=np.full(1, offset, np.int32)) if offset else inputs


def padded_causal(T: int, S: int) -> Inputs:
    """With NaN keys and values past the S that exist."""
    inputs = causal(T, S, 0)
    pad = ((0, 0), (0, 40), (0, 0), (0, 0))
    arrays = {
        name: np.pad(inputs.arrays[name], pad, constant_values=np.nan) for name in ("key", "value")
    }
    return extend(inputs, **arrays, key_value_seq_lengths=np.full(1, S, np.int32))


@each_implementation(SMALL_BLOCKS)
@pytest.mark.parametrize(
    ("T", "S", "offset"),
    [
        *((T, S, 0) for T, S in [(3, 128), (128, 3), (1, 16), (5, 2), (64, 80)]),
        *((T, S, S - T) for T, S in [(3, 128), (1, 16), (64, 80)]),
    ],
)
def test_causal_alignment_where_lengths_differ(implementation, T, S, offset):
    got, wrong = judge(implementation, causal, T, S, offset)
    assert not wrong
    assert np.isfinite(got["lse"]).all()
    if T == 1 and not offset:
        first = causal(T, S, offset).arrays["value"][:, 0].astype(np.float64)
        np.testing.assert_array_equal(got["out"][:, 0], np.repeat(first, 2, axis=1))


@each_implementation(SMALL_BLOCKS)
@pytest.mark.parametrize(("T", "S"), [(128, 3), (5, 2)])
def test_causal_with_more_queries_than_keys_reads_nothing_past_the_keys(implementation, T, S):
    attention = runnable(implementation, padded_causal(T, S))
    got = evaluate(attention, padded_causal(T, S))
    past = {name: got[name][:, S:] for name in ("dkey", "dvalue")}
    assert (
        truth(causal, T, S, 0).wrong(
            {name: got[name][:, :S] if name in past else got[name] for name in got}
        )
        == []
    )
    assert not past["dkey"].any()
    assert not past["dvalue"].any()


@each_implementation("xla")
@pytest.mark.parametrize("is_jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    "sizes",
    [{"B": 2, "T": 4, "S": 0}, {"B": 2, "T": 0, "S": 8}, {"B": 0, "T": 4, "S": 8}],
    ids=["no-keys", "no-queries", "no-batch"],
)
def test_empty_axis(implementation, sizes, is_causal, is_jitted):
    inputs = draw(2470, "bfloat16", **sizes, N=4, K=2, H=64, is_causal=is_causal)
    attention = runnable(implementation, inputs)

    options, operands = tuple(inputs.options.items()), split(inputs)
    run = jax.jit(differentiate, static_argnums=(0, 1)) if is_jitted else differentiate
    (out, lse), gradients = run(attention, options, *operands)
    assert (out.shape, out.dtype) == (inputs.dout.shape, jnp.bfloat16)
    assert lse.shape == inputs.dlse.shape
    assert not out.any()
    assert jnp.isneginf(lse).all()
    for name, x in operands[0].items():
        assert (gradients[name].shape, gradients[name].dtype) == (x.shape, x.dtype), name
        assert not gradients[name].any(), name


@pytest.mark.parametrize(("N", "K"), [(0, 0), (4, 0), (0, 2)])
@pytest.mark.parametrize("S", [0, 8])
def test_no_heads_is_a_value_error(S, N, K):
    query, key = jnp.ones((2, 4, N, 64)), jnp.ones((2, S, K, 64))
    with pytest.raises(ValueError, match="expected at least one head"):
        flash_attention(query, key, key)


DECODE_LENGTHS = (128, 17, 0, 1)
OTHERS = np.array([0, 1, 3])


def decode(length_of_empty_row: int) -> Inputs:
    """One query a row, at the end of its keys."""
    lengths = np.array(DECODE_LENGTHS, np.int32)
    lengths[2] = length_of_empty_row
    inputs = draw(57017, "bfloat16", B=4, T=1, S=128, N=8, K=2, H=64, is_causal=True)
    return extend(inputs, key_value_seq_lengths=lengths, query_offset=lengths - 1)


# 1, 2, 4 and 8 blocks of keys, most of them empty in most rows: 0 / 0, or -inf minus -inf.
@each_implementation(*(XlaBackend(block_k=block_k) for block_k in (128, 64, 32, 16)))
def test_cache_of_length_zero_in_a_decode_batch(implementation):
    got, wrong = judge(implementation, decode, 0)
    assert not wrong
    assert not got["out"][2].any()
    assert np.isneginf(got["lse"][2]).all()
    other = evaluate(runnable(implementation, decode(77)), decode(77))
    assert other["out"][2].any()
    for name, x in got.items():
        np.testing.assert_array_equal(other[name][OTHERS], x[OTHERS], err_msg=name)


def row_without_keys(loss: str) -> Inputs:
    """A band and a mask of keys that together leave row 3 of batch row 1 no key."""
    inputs = draw(41508, "float32", B=2, T=4, N=1, H=16)
    i = np.arange(4)
    band = (i[None, :] <= i[:, None]) & (i[None, :] >= i[:, None] - 1)
    keep = np.array([[1, 1, 1, 1], [1, 1, 0, 0]], bool)
    inputs = extend(inputs, mask=(band[None] & keep[:, None, :])[:, None])
    if loss == "all-rows-and-lse":
        return inputs
    dout = inputs.dout
    if loss == "first-rows":
        dout = np.broadcast_to((i < 2)[None, :, None, None], dout.shape).astype(dout.dtype)
    return dataclasses.replace(inputs, dout=dout, dlse=np.zeros_like(inputs.dlse))


@each_implementation("xla")
@pytest.mark.parametrize("loss", ["first-rows", "all-rows", "all-rows-and-lse"])
def test_row_without_keys_does_not_poison_the_batch(implementation, loss):
    got, wrong = judge(implementation, row_without_keys, loss)
    assert not wrong
    assert all(np.isfinite(x).all() for name, x in got.items() if name != "lse")
    assert not got["out"][1, 3].any()
    assert not got["dquery"][1, 3].any()


# What key[..., 0] must be for logits near the number, scaled.
KEY_FOR_LOGIT = {-1e3: -25.25, -1e4: -252.0, -7.4e4: -1880.0, -1e6: -25216.0}


def low_logits(logit: float, T: int) -> Inputs:
    inputs = draw(4267, "bfloat16", T=T, S=64, N=8, K=2, H=128, is_causal=T > 1)
    inputs.arrays["query"][..., 0] = 448.0
    inputs.arrays["key"][..., 0] = KEY_FOR_LOGIT[logit]
    return dataclasses.replace(inputs, dlse=np.zeros_like(inputs.dlse))


# A finite stand-in for -inf in the running maximum: rows that lie below it give zeros.
@each_implementation("xla", SMALL_BLOCKS)
@pytest.mark.parametrize("T", [1, 64], ids=["one-row", "causal"])
@pytest.mark.parametrize("logit", KEY_FOR_LOGIT, ids="{:g}".format)
def test_all_logits_far_below_zero(implementation, logit, T):
    got, wrong = judge(implementation, low_logits, logit, T)
    assert not [result for result in wrong if result.startswith(("out", "lse"))]
    expected = truth(low_logits, logit, T).expected
    # A float32 step is 0.008 at 7.4e4, and 0.06 at 1e6: there only the budget can say.
    if logit > -1e5:
        assert error(got["out"], expected["out"]) < 5e-2
    np.testing.assert_allclose(got["lse"], expected["lse"], rtol=1e-5)
    np.testing.assert_allclose(got["lse"], logit, rtol=0.02)


# The logits' gradients of a row sum to zero, which alone keeps what all keys share out of dquery.
@each_implementation("xla", SMALL_BLOCKS)
@pytest.mark.parametrize("T", [1, 64], ids=["one-row", "causal"])
@pytest.mark.parametrize("logit", KEY_FOR_LOGIT, ids="{:g}".format)
def test_gradients_where_all_logits_are_far_below_zero(implementation, logit, T):
    _, wrong = judge(implementation, low_logits, logit, T)
    assert not wrong


HUGE = {"bfloat16": 133120.0, "float16": 240.0}


def huge(dtype: str, S: int, values: str = "equal") -> Inputs:
    """Dot products of 1e12, and in float16 ones beyond its largest number; all keys equal."""
    inputs = draw(5, dtype, T=1, S=S, N=1, H=64)
    query = np.full_like(inputs.arrays["query"], HUGE[dtype])
    key = np.full_like(inputs.arrays["key"], HUGE[dtype])
    value = key if values == "equal" else inputs.arrays["value"]
    inputs = extend(inputs, query=query, key=key, value=value)
    return dataclasses.replace(
        inputs, dout=np.ones_like(inputs.dout), dlse=np.zeros_like(inputs.dlse)
    )


@each_implementation("xla", XlaBackend(block_q=1, block_k=1))
@pytest.mark.parametrize("S", [1, 2], ids=["one-key", "two-equal-keys"])
@pytest.mark.parametrize("dtype", HUGE)
def test_huge_finite_inputs(implementation, dtype, S):
    inputs = huge(dtype, S)
    got = evaluate(runnable(implementation, inputs), inputs)
    assert (got["out"] == HUGE[dtype]).all()
    np.testing.assert_allclose(got["lse"], 64 * HUGE[dtype] ** 2 / 8 + np.log(S), rtol=1e-6)
    assert (got["dvalue"] == 1 / S).all()
    assert not got["dquery"].any()
    assert not got["dkey"].any()


@each_implementation("xla", XlaBackend(block_q=1, block_k=1))
@pytest.mark.parametrize("dtype", HUGE)
def test_huge_finite_inputs_with_values_that_differ(implementation, dtype):
    _, wrong = judge(implementation, huge, dtype, 2, "different")
    assert not wrong


LOWEST = float(np.finfo(np.float16).min)


def bias_as_mask(keeps_diagonal: bool, has_cotangent: bool = True) -> Inputs:
    rng = np.random.default_rng(1)
    inputs = draw(rng, "float16", B=2, T=160, N=4, H=64, spread=6.0, is_causal=True)
    diagonal = np.eye(160, dtype=bool)[None, None]
    mask = (rng.random((2, 1, 160, 160)) < 0.5) | diagonal
    if not keeps_diagonal:
        mask &= ~diagonal
    inputs = extend(inputs, bias=np.where(mask, 0.0, LOWEST).astype(np.float16))
    if has_cotangent:
        return inputs
    return dataclasses.replace(
        inputs, dout=np.zeros_like(inputs.dout), dlse=np.zeros_like(inputs.dlse)
    )


@each_implementation("xla", SMALL_BLOCKS)
@pytest.mark.parametrize("keeps_diagonal", [True, False], ids=["right-rows", "all-biased-rows"])
def test_large_finite_bias_and_a_zero_cotangent(implementation, keeps_diagonal):
    inputs = bias_as_mask(keeps_diagonal, has_cotangent=False)
    got = evaluate(runnable(implementation, inputs), inputs)
    assert not any(got[name].any() for name in ("dquery", "dkey", "dvalue", "dbias"))


@each_implementation("xla", SMALL_BLOCKS)
def test_large_finite_bias(implementation):
    _, wrong = judge(implementation, bias_as_mask, True)
    assert not wrong


# There a float32 step is 0.004, and the sum of logit and bias must not be -inf, as in float16.
@each_implementation("xla", SMALL_BLOCKS)
def test_large_finite_bias_on_every_key_of_a_row(implementation):
    got, wrong = judge(implementation, bias_as_mask, False)
    assert not wrong
    expected = truth(bias_as_mask, False).expected
    is_open = (bias_as_mask(False).arrays["bias"] == 0) & np.tril(np.ones((160, 160), bool))
    is_biased = ~is_open.any(-1)[:, 0]
    assert is_biased.sum() > 2
    for name in ("out", "dquery"):
        assert error(got[name][is_biased], expected[name][is_biased]) < 1e-2, name


def uniform_window(length: int, left: int) -> Inputs:
    """Equal logits, and values that show which key they come from."""
    inputs = draw(7, "float32", T=length, N=2, K=1, H=64, Hv=length)
    zeros = {name: np.zeros_like(inputs.arrays[name]) for name in ("query", "key")}
    eye = np.eye(length, dtype=np.float32)[None, :, None]
    inputs = dataclasses.replace(inputs, options={"local_window_size": (left, 0)})
    return extend(inputs, **zeros, value=eye)


def uniform_weights(length: int, left: int) -> np.ndarray:
    i, j = np.arange(length)[:, None], np.arange(length)[None, :]
    return np.where((i - left <= j) & (j <= i), 1 / (np.minimum(i, left) + 1), 0)


WINDOWS = [
    *((64, left) for left in (0, 1, 3, 4, 15, 16, 31, 62, 63, 64)),
    *((300, left) for left in (0, 1, 63, 64, 65, 127, 128, 298, 299, 300)),
]


# A window of w keys, or of w back and the key itself; and tiles that get lost at blocks' edges.
@each_implementation(SMALL_BLOCKS)
@pytest.mark.parametrize(("length", "left"), WINDOWS)
def test_window_reaches_exactly_as_far_as_said(implementation, length, left):
    inputs = uniform_window(length, left)
    is_causal = {"is_causal": True}
    inputs = dataclasses.replace(inputs, options={**inputs.options, **is_causal})
    attention = runnable(implementation, inputs)
    out = jax.jit(lambda q, k, v: attention(q, k, v, **inputs.options).out)(*inputs.arrays.values())
    expected = uniform_weights(length, left)[:, None].repeat(2, axis=1)
    np.testing.assert_allclose(out[0], expected, rtol=2**-23, atol=0)
    if left >= length - 1:
        plain = jax.jit(lambda q, k, v: attention(q, k, v, **is_causal).out)
        np.testing.assert_array_equal(out, plain(*inputs.arrays.values()))


@each_implementation(SMALL_BLOCKS)
@pytest.mark.parametrize("left", [0, 4, 16, 63])
def test_window_gives_gradients_exactly_as_far_as_said(implementation, left):
    inputs = uniform_window(64, left)
    got = evaluate(runnable(implementation, inputs), inputs)
    assert not got["dquery"].any()
    assert not got["dkey"].any()
    expected = np.einsum("ij,inh->jh", uniform_weights(64, left), inputs.dout[0])
    assert error(got["dvalue"][0, :, 0], expected) < 1e-6


BOUNDARIES = (100, 190)


def packed(form: str) -> Inputs:
    """Two sequences in each batch row, kept apart by segment ids or by a mask."""
    inputs = draw(4476, "bfloat16", B=2, T=256, N=4, K=2, H=64, is_causal=True)
    ids = (np.arange(256)[None] >= np.array(BOUNDARIES)[:, None]).astype(np.int32)
    if form == "mask":
        return extend(inputs, mask=(ids[:, :, None] == ids[:, None, :])[:, None])
    return extend(inputs, query_segment_ids=ids, key_value_segment_ids=ids)


def second_sequence(row: int) -> Inputs:
    """What `packed` holds past the boundary of a batch row, as a call of its own."""
    inputs, rows = packed("ids"), (slice(row, row + 1), slice(BOUNDARIES[row], None))
    arrays = {name: inputs.arrays[name][rows] for name in ("query", "key", "value")}
    return Inputs(arrays, inputs.options, inputs.dout[rows], inputs.dlse[rows])


@each_implementation(SMALL_BLOCKS)
@pytest.mark.parametrize("form", ["ids", "mask"])
def test_packed_sequences_do_not_see_each_other(implementation, form):
    inputs = packed(form)
    attention = runnable(implementation, inputs)
    # One truth for both forms: they mean the same.
    expected = truth(packed, "ids").expected
    assert not truth(packed, "ids").wrong(evaluate(attention, inputs))
    rows = [(slice(row, row + 1), slice(start, None)) for row, start in enumerate(BOUNDARIES)]
    for row, place in enumerate(rows):
        for name, x in oracle(second_sequence(row)).items():
            np.testing.assert_allclose(expected[name][place], x, rtol=0, atol=1e-12, err_msg=name)
    for row, start in enumerate(BOUNDARIES):
        inputs.dout[row, :start] = 0
        inputs.dlse[row, :start] = 0
    got = evaluate(attention, inputs)
    for name in ("dquery", "dkey", "dvalue"):
        for row, start in enumerate(BOUNDARIES):
            assert not got[name][row, :start].any(), name
            assert got[name][row, start:].any(), name


def test_unknown_keyword_is_a_type_error():
    x = jnp.ones((1, 4, 1, 16))
    with pytest.raises(TypeError, match="segment_ids"):
        flash_attention(x, x, x, segment_ids=jnp.zeros((1, 4), jnp.int32))
