"""Inputs on which fused attention has gone wrong in public: heads, head dims, precision, logits.

Each stands for its kind of fault.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from implementations import SMALL_BLOCKS, draw, each_implementation, extend, judge, runnable, truth

from pallas_flash import flash_attention
from pallas_flash.testing import Inputs, differentiate, error, evaluate, split


def biased(axes: str, dtype: str = "float32", has_dlse: bool = True) -> Inputs:
    """With a bias of float32 that is 1 along the axes not named."""
    rng = np.random.default_rng(30593)
    inputs = draw(rng, dtype, B=3, T=40, S=72, N=4, K=2, H=32)
    whole = rng.standard_normal((3, 4, 40, 72)).astype(np.float32)
    inputs = extend(inputs, bias=whole[tuple(slice(None if x in axes else 1) for x in "BNTS")])
    dlse = inputs.dlse if has_dlse else np.zeros_like(inputs.dlse)
    return dataclasses.replace(inputs, dlse=dlse)


# The batch's or the heads' share of the sum forgotten, or the last one kept.
@each_implementation(SMALL_BLOCKS)
@pytest.mark.parametrize(
    ("axes", "dtype"),
    [
        *((axes, "float32") for axes in ("BNTS", "NTS", "BTS", "BNS", "BNT")),
        *((axes, "bfloat16") for axes in ("BNTS", "BNT")),
    ],
)
def test_bias_gradient_is_summed_over_broadcast_axes(implementation, axes, dtype):
    _, wrong = judge(implementation, biased, axes, dtype)
    assert not wrong
    attention = runnable(implementation, biased(axes, dtype))
    _, gradients = jax.eval_shape(
        functools.partial(differentiate, attention, ()), *split(biased(axes, dtype))
    )
    bias = biased(axes, dtype).arrays["bias"]
    assert (gradients["bias"].shape, gradients["bias"].dtype) == (bias.shape, bias.dtype)


@each_implementation(SMALL_BLOCKS)
def test_bias_along_rows_alone_has_no_gradient(implementation):
    inputs = biased("BNT", has_dlse=False)
    got = evaluate(runnable(implementation, inputs), inputs)
    assert np.abs(got["dbias"]).max() < 1e-5


def grouped(N: int, K: int, Hv: int) -> Inputs:
    return draw(27, "float32", B=2, T=80, N=N, K=K, H=32, Hv=Hv, is_causal=True)


# A map from query to key heads that is right only where there are as many groups as key heads.
@each_implementation(SMALL_BLOCKS)
@pytest.mark.parametrize(
    ("N", "K", "Hv"),
    [*((N, K, 32) for N, K in [(12, 4), (6, 2), (8, 1), (6, 3), (4, 4)]), (12, 4, 16), (12, 4, 64)],
)
def test_gradients_of_grouped_heads(implementation, N, K, Hv):
    _, wrong = judge(implementation, grouped, N, K, Hv)
    assert not wrong


@pytest.mark.parametrize(("N", "K"), [(12, 5), (4, 8), (6, 4)])
def test_heads_that_do_not_divide_are_a_value_error(N, K):
    query, key = jnp.ones((2, 8, N, 32)), jnp.ones((2, 8, K, 32))
    with pytest.raises(ValueError, match=f"divides query's {N}"):
        flash_attention(query, key, key)


def head_dim(H: int) -> Inputs:
    return draw(2896, "bfloat16", T=512, N=8, H=H)


# Columns of padding that hold what was there before, and differ from run to run.
@each_implementation("xla")
@pytest.mark.parametrize("H", [24, 40, 48, 72, 80, 96, 104, 112, 160, 192])
def test_head_dim_that_is_no_power_of_two(implementation, H):
    got, wrong = judge(implementation, head_dim, H)
    assert not wrong
    for _ in range(3):
        again = evaluate(runnable(implementation, head_dim(H)), head_dim(H))
        for name, x in got.items():
            np.testing.assert_array_equal(again[name], x, err_msg=name)


def single_precision() -> Inputs:
    return draw(6, "float32", T=128, N=1, H=32, is_causal=True)


# Products in TF32 that nobody asked for, in the forward alone or in the backward alone.
@each_implementation("xla", SMALL_BLOCKS)
@pytest.mark.parametrize(
    ("precision", "setting", "most"),
    [("highest", None, 5e-6), (None, "highest", 5e-6), ("default", None, 5e-3)],
    ids=["highest", "set-for-all-of-jax", "default"],
)
def test_precision_of_float32_products(implementation, precision, setting, most):
    inputs = single_precision()
    with jax.default_matmul_precision(setting):
        got = evaluate(runnable(implementation, inputs, precision), inputs)
    for name, x in truth(single_precision).expected.items():
        assert error(got[name], x) < most, name


@each_implementation("xla")
@pytest.mark.parametrize("precision", ["highest", "default"])
def test_precision_is_one_setting_forward_and_backward(implementation, precision):
    inputs = single_precision()
    attention = runnable(implementation, inputs, precision)
    run = functools.partial(differentiate, attention, (("is_causal", True),))
    # The jaxpr shows a kernel's inside too; a module lowered for a GPU does not.
    jaxpr = str(jax.make_jaxpr(run)(*split(inputs)))
    settings = re.findall(r"precision=\(Precision\.(\w+), Precision\.(\w+)\)", jaxpr)
    assert set(settings) == {(precision.upper(),) * 2}
    assert len(settings) == jaxpr.count("dot_general[") >= 7


# More batch rows, or rows times heads, than two of a CUDA grid's three axes can count.
@each_implementation("xla")
@pytest.mark.parametrize(("B", "N"), [(65536, 1), (10923, 6), (1, 65536)])
def test_more_than_65535_rows_and_heads(implementation, B, N):
    inputs = draw(146704, "float16", B=B, T=4, N=N, H=16)
    attention = runnable(implementation, inputs)
    got = evaluate(attention, inputs)
    axis = 0 if B > 1 else 2
    halves = [
        Inputs(dict(zip(inputs.arrays, xs[:3], strict=True)), {}, *xs[3:])
        for xs in zip(
            *(
                np.array_split(x, 2, axis)
                for x in (*inputs.arrays.values(), inputs.dout, inputs.dlse)
            ),
            strict=True,
        )
    ]
    parts = [evaluate(attention, half) for half in halves]
    for name, x in got.items():
        joined = np.concatenate([part[name] for part in parts], axis)
        np.testing.assert_array_equal(x, joined, err_msg=name)


def capped(cap: float | None) -> Inputs:
    is_capped = {} if cap is None else {"logits_soft_cap": cap}
    options = {"is_causal": True, **is_capped}
    return draw(1065, "bfloat16", B=2, T=128, N=4, K=2, H=64, spread=6.0, **options)


# A gradient without the factor 1 - tanh^2, or with one taken of the masked -inf.
@each_implementation(SMALL_BLOCKS)
@pytest.mark.parametrize("cap", [30.0, 5.0, 50.0])
def test_soft_cap(implementation, cap):
    got, wrong = judge(implementation, capped, cap)
    assert not wrong
    uncapped = evaluate(runnable(implementation, capped(None)), capped(None))
    for name, x in got.items():
        assert np.isfinite(x).all(), name
        assert error(uncapped[name], x) > 0.05, name


@each_implementation("xla")
def test_soft_cap_of_none_is_off(implementation):
    absent = capped(None)
    given = dataclasses.replace(absent, options={**absent.options, "logits_soft_cap": None})
    attention = runnable(implementation, absent)
    one, other = evaluate(attention, absent), evaluate(attention, given)
    for name, x in one.items():
        np.testing.assert_array_equal(other[name], x, err_msg=name)


@pytest.mark.parametrize("cap", [0, 0.0, -30.0])
def test_soft_cap_of_zero_or_less_is_a_value_error(cap):
    x = jnp.ones((1, 4, 1, 16))
    with pytest.raises(ValueError, match="logits_soft_cap"):
        flash_attention(x, x, x, logits_soft_cap=cap)


def scaled(scale: float, has_mask: bool, is_traced: bool) -> Inputs:
    rng = np.random.default_rng(1461)
    static = {} if is_traced else {"scale": scale}
    inputs = draw(rng, "float32", T=80, N=2, K=1, H=32, is_causal=True, **static)
    if is_traced:
        inputs = extend(inputs, scale=np.float32(scale))
    return extend(inputs, mask=rng.random((1, 1, 80, 80)) < 0.7) if has_mask else inputs


# 0 * -inf where the mask comes before the scale; a maximum taken before a negative scale.
@each_implementation(SMALL_BLOCKS)
@pytest.mark.parametrize("has_mask", [False, True], ids=["causal", "mask"])
# And what float32 holds as 0, or a GPU takes for it.
@pytest.mark.parametrize("is_traced", [False, True], ids=["static", "traced"])
@pytest.mark.parametrize("scale", [0.0, -0.25, -8.0, 1.0, 8.0, 5.5e-272, -1e-40])
def test_scale_of_any_sign(implementation, scale, has_mask, is_traced):
    got, wrong = judge(implementation, scaled, scale, has_mask, is_traced)
    assert not wrong
    if scale == 0:
        assert not got["dquery"].any()
        assert not got["dkey"].any()
    if abs(scale) < 1e-37 and not has_mask:
        value = scaled(scale, has_mask, is_traced).arrays["value"][0].astype(np.float64)
        means = np.cumsum(value, axis=0) / np.arange(1, 81)[:, None, None]
        assert error(got["out"][0], means.repeat(2, axis=1)) < 1e-6


# Times log2(e) it is beyond float32, and 0 * inf is NaN.
@each_implementation("xla")
@pytest.mark.parametrize("is_traced", [False, True], ids=["static", "traced"])
@pytest.mark.parametrize("scale", [2.4e38, -3.4e38])
def test_the_largest_scales(implementation, scale, is_traced):
    inputs = draw(7, "float32", T=8, N=1, H=16)
    inputs = extend(inputs, query=np.zeros_like(inputs.arrays["query"]))
    attention = runnable(implementation, inputs)
    out = attention(**inputs.arrays, scale=np.float32(scale) if is_traced else scale).out
    mean = inputs.arrays["value"].mean(axis=1, keepdims=True)
    np.testing.assert_allclose(out, np.broadcast_to(mean, out.shape), rtol=0, atol=1e-6)
