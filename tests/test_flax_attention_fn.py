"""Flax's stock attention modules give with our `attention_fn` what they give with their own."""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from flax_modules import (
    QUICK,
    B,
    F,
    N,
    T,
    both_kinds,
    evaluate,
    flat,
    functional,
    make,
    needs,
    normal,
    parameters,
    random_mask,
)
from implementations import INTERPRET

from pallas_flash import flash_attention
from pallas_flash.flax import attention_fn, make_attention_fn
from pallas_flash.testing import error

S = 9


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of a module.

    Attributes:
      mask: its shape behind the batch dims, [1 or N, T, S]; None for no mask.
      options: of the module.
      call: keywords, beside the mask.
    """

    batch: tuple[int, ...] = (2,)
    is_cross: bool = False
    mask: tuple[int, ...] | None = None
    mask_dtype: type = bool
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)
    call: Mapping[str, object] = dataclasses.field(default_factory=dict)

    def inputs(self, rng: np.random.Generator) -> tuple[jax.Array, ...]:
        lengths = (T, S) if self.is_cross else (T,)
        return tuple(normal(rng, *self.batch, length, F) for length in lengths)

    def keywords(self, rng: np.random.Generator) -> dict[str, object]:
        call = dict(self.call)
        if self.mask is not None:
            call["mask"] = random_mask(rng, *self.batch, *self.mask).astype(self.mask_dtype)
        return call


CASES = {
    "float mask, normalize_qk": Case(
        mask=(1, T, T), mask_dtype=jnp.float32, options={"normalize_qk": True}
    ),
    "mask of each head, two batch dims": Case(batch=(2, 3), mask=(N, T, T)),
    "cross, int mask, no batch dim": Case(
        batch=(), is_cross=True, mask=(1, 1, S), mask_dtype=jnp.int32
    ),
    "dropout that is not active": Case(options={"dropout_rate": 0.5, "deterministic": True}),
}
GROUPED = Case(mask=(1, T, T), options={"num_kv_heads": 2})


def assert_close(got: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    errors = {name: error(got[name], x) for name, x in expected.items()}
    assert {name: e for name, e in errors.items() if not e <= 5e-6} == {}


def assert_agrees(kind: type, case: Case, rng: np.random.Generator) -> None:
    module, inputs, keywords = make(kind, **case.options), case.inputs(rng), case.keywords(rng)
    params = parameters(module, rng, inputs)
    expected = evaluate(functional(module), params, inputs, **keywords)
    got = evaluate(functional(module, attention_fn), params, inputs, **keywords)
    assert_close(got, expected)


@pytest.mark.parametrize("kind", [linen.MultiHeadAttention, linen.SelfAttention])
def test_subclasses_in_linen(kind, rng):
    assert_agrees(kind, Case(), rng)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@both_kinds
def test_each_option(kind, case, rng):
    assert_agrees(kind, case, rng)


@needs(nnx.MultiHeadAttention.__init__, "num_kv_heads")
def test_grouped_key_value_heads(rng):
    assert_agrees(nnx.MultiHeadAttention, GROUPED, rng)


@needs(nnx.MultiHeadAttention.__call__, "is_causal")
def test_causal_by_the_call(rng):
    assert_agrees(nnx.MultiHeadAttention, Case(mask=(1, T, T), call={"is_causal": True}), rng)


@pytest.mark.parametrize(
    ("kind", "settings", "reach"),
    [
        (linen.MultiHeadDotProductAttention, {"is_causal": True}, (T, 0)),
        (
            nnx.MultiHeadAttention,
            {"is_causal": True, "local_window_size": (2, 1), "implementation": INTERPRET},
            (2, 0),
        ),
    ],
    ids=["causal", "causal window, interpret"],
)
def test_settings_in_place_of_a_mask(kind, settings, reach, rng, on_cpu):
    module, inputs = make(kind), Case().inputs(rng)
    params = parameters(module, rng, inputs)
    distance = np.arange(T)[:, None] - np.arange(T)
    mask = jnp.asarray((-reach[1] <= distance) & (distance <= reach[0]))[None, None]
    expected = evaluate(functional(module), params, inputs, mask=mask)
    ours = functional(module, make_attention_fn(**settings))
    assert_close(evaluate(ours, params, inputs), expected)


@both_kinds
def test_bfloat16(kind, rng):
    """Off a module in float32 at most twice as far as with Flax's attention, and a rounding."""
    inputs, mask = Case().inputs(rng), random_mask(rng, B, 1, T, T)
    module, exact = make(kind, dtype=jnp.bfloat16), make(kind)
    params = parameters(module, rng, inputs)
    expected = evaluate(functional(exact), params, inputs, mask=mask)
    plain = evaluate(functional(module), params, inputs, mask=mask)
    got = evaluate(functional(module, attention_fn), params, inputs, mask=mask)
    for name, x in expected.items():
        budget = 2 * error(plain[name], x) + float(jnp.finfo(jnp.bfloat16).eps)
        assert error(got[name], x) <= budget, name


@pytest.mark.parametrize(
    ("bias", "mask"),
    [
        ((N, 1, S), (2, 3, 1, T, S)),
        ((3, 1, T, S), (1, S)),
        ((2, 3, N, T, S), ()),
    ],
)
def test_forms_of_bias_and_mask(bias, mask, rng):
    query, key, value = (normal(rng, 2, 3, length, N, F) for length in (T, S, S))
    mask = random_mask(rng, *mask) if mask else jnp.array(True)

    @functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
    def run(attention, *operands):
        out, vjp = jax.vjp(lambda *x: attention(*x, mask), *operands)
        return out, *vjp(jnp.cos(out))

    with jax.numpy_rank_promotion("allow"):
        operands = (query, key, value, normal(rng, *bias))
        expected = run(linen.dot_product_attention, *operands)
    got = run(attention_fn, *operands)
    for x, y in zip(got, expected, strict=True):
        assert x.shape == y.shape
        assert error(np.asarray(x), np.asarray(y)) <= 5e-6


@pytest.mark.parametrize(
    ("dtypes", "dtype"),
    [
        (("bfloat16", "float32", "bfloat16"), None),
        (("float32", "float32", "float32"), jnp.bfloat16),
        (("int32", "int32", "int32"), None),
    ],
)
def test_promotion_is_flax_own(dtypes, dtype, rng):
    operands = [(4 * normal(rng, 1, T, N, F)).astype(dtype) for dtype in dtypes]
    with jax.numpy_dtype_promotion("standard"):
        theirs = functools.partial(linen.dot_product_attention, dtype=dtype)
        common = jax.eval_shape(theirs, *operands).dtype
        got = attention_fn(*operands, dtype=dtype)
    expected = flash_attention(*(x.astype(common) for x in operands))
    assert got.dtype == common
    np.testing.assert_array_equal(got, expected)


def test_numbers_as_a_mask(rng):
    query, key, value = (normal(rng, 2, T, N, F) for _ in range(3))
    mask = rng.integers(-1, 2, (2, 1, T, T))
    expected = flash_attention(query, key, value, mask=mask != 0)
    for dtype in (np.int8, np.float32, jnp.bfloat16):
        got = attention_fn(query, key, value, None, mask.astype(dtype) / dtype(2))
        np.testing.assert_array_equal(got, expected)


def test_settings_and_precision_reach_attention(rng):
    operands = [normal(rng, 2, T, N, F) for _ in range(3)]
    options = {"logits_soft_cap": 0.5, "local_window_size": (2, 1), "implementation": "xla"}
    ours = make_attention_fn(**options)
    np.testing.assert_array_equal(ours(*operands), flash_attention(*operands, **options))

    def program(attention, **options):
        return str(jax.make_jaxpr(functools.partial(attention, **options))(*operands))

    texts = {p: program(flash_attention, **options, precision=p) for p in ("default", "highest")}
    assert texts["default"] != texts["highest"]
    assert {p: program(ours, precision=p) for p in texts} == texts


def test_equal_settings_are_equal():
    pairs = [
        ({}, {"is_causal": False}),
        ({"local_window_size": 3}, {"local_window_size": [3, 3]}),
        ({"logits_soft_cap": 30}, {"logits_soft_cap": 30.0}),
        ({"implementation": INTERPRET}, {"implementation": dataclasses.replace(INTERPRET)}),
    ]
    for one, other in pairs:
        one, other = make_attention_fn(**one), make_attention_fn(**other)
        assert one == other
        assert hash(one) == hash(other)
    assert len({make_attention_fn(**settings) for pair in pairs for settings in pair}) == 4


@both_kinds
def test_equal_ones_share_what_is_compiled(kind, rng):
    inputs = Case().inputs(rng)
    params = parameters(make(kind), rng, inputs)
    traced = []

    def run(module, params, inputs):
        traced.append(module)
        return functional(module)(params, inputs)

    jitted = nnx.jit(run) if kind is nnx.MultiHeadAttention else jax.jit(run, static_argnums=0)
    windows = (2, (2, 2), 1)
    outs = [
        jitted(make(kind, attention_fn=make_attention_fn(local_window_size=w)), params, inputs)
        for w in windows
    ]
    assert len(traced) == 2
    np.testing.assert_array_equal(outs[0], outs[1])
    assert not np.array_equal(outs[0], outs[2])


class Layers(linen.Module):
    """Two layers, rematerialized, in one scan."""

    attention_fn: object

    @linen.compact
    def __call__(self, x):
        def layer(module, x, _):
            return x + module(x), None

        module = linen.remat(linen.MultiHeadDotProductAttention)(
            num_heads=N, attention_fn=self.attention_fn
        )
        scan = linen.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return scan(module, x, None)[0]


def test_inside_scan_and_remat(rng):
    inputs = Case().inputs(rng)
    theirs = Layers(linen.dot_product_attention)
    params = parameters(theirs, rng, inputs)
    expected = evaluate(functional(theirs), params, inputs)
    assert_close(evaluate(functional(theirs, attention_fn), params, inputs), expected)


def test_nnx_transforms(rng):
    (x,) = Case().inputs(rng)
    module = make(nnx.MultiHeadAttention)
    nnx.update(module, parameters(module, rng, (x,)))

    @nnx.remat
    def forward(module, x):
        return module(x)

    @nnx.jit
    def gradient(module, x):
        return nnx.grad(lambda module, x: forward(module, x).sum())(module, x)

    expected = gradient(module, x)
    module.attention_fn = attention_fn
    assert_close({"gradient": flat(gradient(module, x))}, {"gradient": flat(expected)})
