"""Products of float32 operands follow `precision`, in the backward as in the forward."""

import jax
import jax.numpy as jnp
import pytest

from pallas_flash import flash_attention
from pallas_flash.testing import Case, make_inputs

HIGHEST, HIGH, DEFAULT = (
    jax.lax.Precision.HIGHEST,
    jax.lax.Precision.HIGH,
    jax.lax.Precision.DEFAULT,
)


def products(jaxpr) -> list:
    """Precision of every product in a jaxpr, at any depth."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            precision = equation.params["precision"]
            found.append(precision[0] if isinstance(precision, tuple) else precision)
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(inner, "jaxpr"):
                inner = inner.jaxpr
            if hasattr(inner, "eqns"):
                found += products(inner)
    return found


def gradient_products(dtype: str = "float32", **options) -> list:
    arrays = make_inputs(Case(T=8, S=8, H=8, dtype=dtype), seed=0).arrays
    query, key, value = (jnp.asarray(arrays[name]) for name in ("query", "key", "value"))

    def loss(query, key, value):
        return jnp.sum(flash_attention(query, key, value, implementation="xla", **options))

    return products(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(query, key, value).jaxpr)


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        ("default", DEFAULT),
        ("high", HIGH),
        ("tensorfloat32", HIGH),
        ("highest", HIGHEST),
        ("float32", HIGHEST),
        (HIGHEST, HIGHEST),
        ("BF16_BF16_F32_X3", jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3),
    ],
    ids=str,
)
def test_all_products_follow_the_argument(precision, expected):
    # Two in the forward and five in the backward.
    assert gradient_products(precision=precision) == [expected] * 7


def test_none_follows_the_configuration():
    with jax.default_matmul_precision(None):
        assert gradient_products() == [DEFAULT] * 7
    with jax.default_matmul_precision("highest"):
        assert gradient_products() == [HIGHEST] * 7
    with jax.default_matmul_precision("tensorfloat32"):
        assert gradient_products() == [HIGH] * 7
        assert gradient_products(precision="highest") == [HIGHEST] * 7


def test_the_backward_keeps_the_forwards_precision():
    query = jnp.asarray(make_inputs(Case(T=8, S=8, H=8), seed=0).arrays["query"])
    with jax.default_matmul_precision("highest"):
        out, vjp = jax.vjp(lambda x: flash_attention(x, x, x, implementation="xla"), query)
    with jax.default_matmul_precision("bfloat16"):
        assert products(jax.make_jaxpr(vjp)(out).jaxpr) == [HIGHEST] * 5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_products_are_exact_whatever_is_asked(dtype):
    assert gradient_products(dtype, precision="highest") == [DEFAULT] * 7
