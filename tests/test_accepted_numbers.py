"""Integers, scalars and 64-bit types: each form means what the plainest form means."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equal_calls import SIZES, assert_close, assert_means, case_of, given_to_backend, run

from pallas_flash import flash_attention, flash_attention_with_lse
from pallas_flash.backends.xla import XlaBackend
from pallas_flash.testing import Inputs, make_inputs
from pallas_flash.validate.arguments import FARTHEST


@pytest.mark.parametrize(
    "form",
    [
        lambda x: x.astype(np.int64),
        lambda x: x.astype(np.uint8),
        lambda x: x.astype(np.int8),
        jnp.asarray,
        lambda x: jnp.asarray(x, "uint16"),
        np.ndarray.tolist,
        lambda x: tuple(x) if x.ndim == 1 else tuple(map(tuple, x)),
    ],
    ids=["int64", "uint8", "int8", "jax", "jax-uint16", "list", "tuple-of-numpy"],
)
def test_integer_arrays(form, seed):
    """Lengths, offsets and segment ids, in whatever holds them."""
    inputs = make_inputs(case_of("all", 2), seed)
    integers = {name: form(x) for name, x in inputs.arrays.items() if x.dtype == np.int32}
    assert len(integers) == 5
    assert_means({**inputs.arrays, **integers}, inputs.arrays)


@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
@pytest.mark.parametrize("form", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32, np.uint8])
def test_lengths_beyond_the_arrays(dtype, form, x64, seed):
    """As large as the dtype allows, which says "all of them"."""
    if form is jnp.asarray and dtype == np.int64 and not x64:
        pytest.skip("such an array does not exist")
    arrays = make_inputs(case_of("plain", 2), seed).arrays
    with jax.enable_x64(x64):
        lengths = form(np.full(2, np.iinfo(dtype).max, dtype))
        _, operands = given_to_backend(
            **arrays, query_seq_lengths=lengths, key_value_seq_lengths=lengths
        )
    assert min(operands.query_seq_lengths.tolist()) >= SIZES["T"]
    assert min(operands.key_value_seq_lengths.tolist()) >= SIZES["S"]


def test_lengths_outside_the_arrays(seed):
    """Below zero there is nothing, and past the end there is no more than the array."""
    inputs = make_inputs(case_of("plain", 3), seed)
    least, most = -(2**31), 2**31 - 1
    lengths = {
        "query_seq_lengths": np.array([-1, most, most], np.int32),
        "key_value_seq_lengths": np.array([most, least, most], np.int32),
    }
    got = run(Inputs({**inputs.arrays, **lengths}, {}, inputs.dout, inputs.dlse))
    expected = {
        name: np.where(np.arange(3).reshape(3, *[1] * (x.ndim - 1)) < 2, 0, x)
        for name, x in run(inputs).items()
    }
    expected["lse"][:2] = -np.inf
    assert_close(got, expected)


@pytest.mark.parametrize("number", [np.float32, np.float64, np.float16, np.int8, np.uint64])
def test_scale_and_cap_as_numpy_scalars(number, seed):
    arrays = make_inputs(case_of("plain", 2), seed).arrays
    assert_means(
        {**arrays, "scale": number(3), "logits_soft_cap": number(2)},
        {**arrays, "scale": 3.0, "logits_soft_cap": 2.0},
    )


@pytest.mark.parametrize(
    "scale", [3, np.array(3), np.array(3.0, np.float16), jnp.bfloat16(3)], ids=repr
)
def test_scale_of_any_real_type(scale, seed):
    arrays = make_inputs(case_of("plain", 2), seed).arrays
    spec, operands = given_to_backend(**arrays, scale=scale)
    assert float(spec.scale if operands.scale is None else operands.scale) == 3.0
    assert operands.scale is None or operands.scale.dtype == np.float32


def test_scale_beyond_64_bits(seed):
    arrays = make_inputs(case_of("plain", 2), seed).arrays
    spec, _ = given_to_backend(**arrays, scale=10**30)
    assert spec.scale == 1e30


@pytest.mark.parametrize(
    ("given", "same"),
    [
        (np.int64(2), (2, 2)),
        (2, (2, 2)),
        (0, (0, 0)),
        ([1, 3], (1, 3)),
        ((np.uint8(1), np.int32(3)), (1, 3)),
        (2**31 - 1, (2**70, 2**40)),
        ((2**31 - 1, 0), (2**70, 0)),
    ],
    ids=str,
)
def test_window_forms(given, same, seed):
    arrays = make_inputs(case_of("plain", 2), seed).arrays
    assert_means({**arrays, "local_window_size": given}, {**arrays, "local_window_size": same})


@pytest.mark.parametrize(
    ("offset", "options", "sees_all"),
    [
        (FARTHEST, {}, True),
        (FARTHEST, {"is_causal": True}, True),
        (FARTHEST, {"local_window_size": (3, 3)}, False),
        (FARTHEST, {"local_window_size": (3, 2**31 - 1)}, False),
        (FARTHEST, {"local_window_size": 2**31 - 1}, True),
        (FARTHEST, {"local_window_size": (2**31 - 1, 0)}, True),
        (-FARTHEST, {}, True),
        (-FARTHEST, {"is_causal": True}, False),
        (-FARTHEST, {"local_window_size": (3, 3)}, False),
        (-FARTHEST, {"local_window_size": 2**31 - 1}, True),
    ],
    ids=str,
)
def test_farthest_offsets(offset, options, sees_all, seed):
    arrays = make_inputs(case_of("plain", 2), seed).arrays
    got = flash_attention_with_lse(**arrays, **options, query_offset=offset)
    if sees_all:
        assert_close(got._asdict(), flash_attention_with_lse(**arrays)._asdict())
    else:
        assert np.isneginf(got.lse).all()
        assert not np.any(got.out)


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint32"])
def test_offset_arrays_beyond_all_keys(dtype, seed):
    """Whatever an array holds, causal queries there see all keys, or none before the first."""
    arrays = make_inputs(case_of("plain", 2), seed).arrays
    with jax.enable_x64(dtype == "int64"):
        info = jnp.iinfo(dtype)
        offset = jnp.array([info.min, info.max], dtype)
        got = flash_attention_with_lse(**arrays, is_causal=True, query_offset=offset)
    expected = flash_attention_with_lse(**arrays)
    np.testing.assert_allclose(got.out[1], expected.out[1], rtol=1e-4, atol=2e-5)
    if info.min < 0:
        assert np.isneginf(got.lse[0]).all()


@pytest.mark.parametrize("form", [np.int64, np.uint8, jnp.int32, jnp.asarray, np.array])
def test_offset_forms(form, seed):
    """NumPy scalars, 0-d arrays, and weakly typed ones."""
    arrays = make_inputs(case_of("plain", 2), seed).arrays
    assert_means({**arrays, "query_offset": form(2)}, {**arrays, "query_offset": 2})


def test_weakly_typed_floats():
    weak = jnp.full((2, 3, 2, 4), 0.5)
    assert weak.weak_type
    gradients = jax.grad(lambda *x: flash_attention(*x).sum(), argnums=(0, 1, 2, 3))(
        weak, weak, weak, jnp.asarray(0.5)
    )
    assert all(np.isfinite(x).all() for x in gradients)


def test_wide_ids_stay_apart():
    """Ids that a cast to int32 would make equal."""
    with jax.enable_x64(True):
        query = jnp.ones((1, 3, 1, 4), jnp.float32)
        ids = {
            "query_segment_ids": jnp.full((1, 3), 2**32, jnp.int64),
            "key_value_segment_ids": jnp.zeros((1, 3), jnp.int32),
        }
        assert not flash_attention(query, query, query, **ids).any()
        _, operands = given_to_backend(query=query, key=query, value=query, **ids)
        assert operands.query_segment_ids.dtype == operands.key_value_segment_ids.dtype


@pytest.mark.parametrize("name", ["query_seq_lengths", "key_value_seq_lengths"])
def test_lengths_in_a_list(name, seed):
    """As in an array of NumPy: more than there are says "all of them"."""
    arrays = make_inputs(case_of("plain", 2), seed).arrays
    assert_means({**arrays, name: [2**40, 1]}, {**arrays, name: np.array([2**29, 1])})


@pytest.mark.parametrize("side", ["query", "key_value"])
def test_one_sides_segment_ids_serve_for_both(side, seed):
    arrays = make_inputs(case_of("segments", 2, S=SIZES["T"]), seed).arrays
    ids = arrays.pop("query_segment_ids")
    del arrays["key_value_segment_ids"]
    assert_means(
        {**arrays, f"{side}_segment_ids": ids},
        {**arrays, "query_segment_ids": ids, "key_value_segment_ids": ids},
    )


@pytest.mark.parametrize("option", ["plain", "all"])
def test_x64(option, seed):
    """Where JAX's own default is 64 bits: the same dtypes and the same values."""
    inputs = make_inputs(case_of(option, 2), seed)
    # Several blocks each way, the last of them moved back.
    options = {**inputs.options, "implementation": XlaBackend(block_q=2, block_k=3)}
    inputs = Inputs(inputs.arrays, options, inputs.dout, inputs.dlse)
    expected = run(inputs)
    with jax.enable_x64(True):
        got = run(inputs)
    assert {name: x.dtype for name, x in got.items()} == dict.fromkeys(got, np.float32)
    assert_close(got, expected)


def test_x64_options_in_64_bits(seed):
    """float64 bias, sinks and scale, int64 lengths, offsets and ids, with float32 operands."""
    inputs = make_inputs(case_of("all", 2), seed)
    wide = {"f": np.float64, "i": np.int64, "b": np.bool_}
    main = ("query", "key", "value")
    arrays = {
        name: x if name in main else np.asarray(x, wide[x.dtype.kind])
        for name, x in inputs.arrays.items()
    }
    expected = run(inputs)
    with jax.enable_x64(True):
        arrays = {name: jnp.asarray(x) for name, x in arrays.items()}
        got = run(Inputs(arrays, inputs.options, inputs.dout, inputs.dlse))
    for name, x in expected.items():
        is_wide = name in ("dbias", "dsinks", "dscale")
        assert got[name].dtype == (np.float64 if is_wide else np.float32), name
        np.testing.assert_allclose(got[name], x, rtol=1e-4, atol=1e-5, err_msg=name)
