"""What an `attention_fn` for Flax knows of, and what it refuses: nothing is dropped unseen."""

import inspect
import subprocess
import sys
import types

import flax.linen.attention
import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx
from flax_modules import B, F, N, T, functional, has, make, normal, parameters

from pallas_flash.flax import AttentionFn, attention_fn, make_attention_fn

NAMED = {
    name: parameter
    for name, parameter in inspect.signature(attention_fn).parameters.items()
    if parameter.kind is not inspect.Parameter.VAR_KEYWORD
}


@pytest.mark.parametrize("theirs", [linen.dot_product_attention, nnx.dot_product_attention])
def test_the_signature_holds_theirs(theirs):
    expected = dict(inspect.signature(theirs).parameters)
    # No module passes it, and who does is told.
    expected.pop("promote_dtype", None)
    for name, parameter in expected.items():
        assert NAMED[name].default == parameter.default
    # The two of Flax agree up to here.
    order = list(expected)[: list(expected).index("module") + 1]
    assert list(NAMED)[: len(order)] == order


def spy(passed):
    """An `attention_fn` that keeps the names of what it is passed."""

    def attend(query, key, value, **keywords):
        passed.update(keywords)
        return query

    return attend


class Everything:
    def __contains__(self, name):
        return True


def test_every_keyword_of_linen_is_named(rng, monkeypatch):
    passed = {}
    inputs = (normal(rng, B, T, F),)
    module = make(linen.MultiHeadDotProductAttention, attention_fn=spy(passed))
    params = parameters(module, rng, inputs)
    # It asks for a signature and leaves out what is not in it.
    signature = types.SimpleNamespace(parameters=Everything())
    inspector = types.SimpleNamespace(signature=lambda function: signature)
    monkeypatch.setattr(flax.linen.attention, "inspect", inspector)
    functional(module)(params, inputs, sow_weights=True)
    assert {"mask", "deterministic", "module", "qk_attn_weights_einsum"} <= set(passed)
    assert set(passed) <= set(NAMED)


def test_every_keyword_of_nnx_is_named(rng):
    passed = {}
    inputs = (normal(rng, B, T, F),)
    module = make(nnx.MultiHeadAttention, attention_fn=spy(passed))
    call = {"input_positions": jnp.arange(T), "is_causal": True, "sow_weights": True}
    module(*inputs, **{name: x for name, x in call.items() if has(type(module).__call__, name)})
    assert {"mask", "deterministic", "module"} <= set(passed)
    assert set(passed) <= set(NAMED)


def operands(rng):
    return [normal(rng, B, T, N, F) for _ in range(3)]


REFUSED = {
    "dropout": ({"dropout_rate": 0.1}, NotImplementedError, "dropout_rate=0.1: .*; set it to 0"),
    "not a rate": ({"dropout_rate": float("nan")}, NotImplementedError, "dropout_rate=nan: "),
    "weights": ({"module": object()}, NotImplementedError, "module: .*; leave sow_weights False"),
    **{
        name: ({name: jnp.einsum}, NotImplementedError, f"{name}: .*; leave it None")
        for name in ("einsum_dot_general", "qk_attn_weights_einsum", "attn_weights_value_einsum")
    },
    "positions": ({"input_positions": 0}, NotImplementedError, "input_positions: .*; rotate query"),
    "promote_dtype": ({"promote_dtype": max}, TypeError, "has no argument 'promote_dtype', got"),
    "unknown": ({"sinks": 3}, TypeError, "attention_fn has no argument 'sinks', got 3"),
    "is_causal": ({"is_causal": 1}, ValueError, "is_causal: expected a bool, got int: 1"),
    "precision": ({"precision": "fast"}, ValueError, "precision: expected .*, got 'fast'"),
    "mask": ({"mask": "causal"}, ValueError, "mask: expected an array, got str: 'causal'"),
    "mask shape": ({"mask": jnp.ones((T, 3))}, ValueError, "mask: expected a bool array, each"),
    "bias": ({"bias": jnp.ones(T, int)}, ValueError, "bias: expected a float array"),
}


@pytest.mark.parametrize(("keywords", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_calls_that_are_refused(keywords, kind, message, rng):
    with pytest.raises(kind, match=message):
        attention_fn(*operands(rng), **keywords)


def test_shapes_are_refused_by_name(rng):
    query, key, value = operands(rng)
    with pytest.raises(ValueError, match=r"query: expected \[T, N, H\]"):
        make_attention_fn(is_causal=True)(query[0, 0], key, value, mask=jnp.ones(T))
    with pytest.raises(ValueError, match="key: expected query's batch dims"):
        attention_fn(query, key[:1], value)


@pytest.mark.parametrize("name", ["dropout_rate", "deterministic"])
def test_what_decides_on_dropout_is_static(name, rng):
    query, key, value = operands(rng)
    known = {"dropout_rate": 0.5, "deterministic": False}

    @jax.jit
    def run(x):
        return attention_fn(query, key, value, **known | {name: x})

    with pytest.raises(ValueError, match=f"{name}: expected a value known when jit traces"):
        run(known[name])


def test_what_has_no_effect_is_taken(rng):
    query, key, value = operands(rng)
    expected = attention_fn(query, key, value)
    harmless = {
        "broadcast_dropout": False,
        "dropout_rng": jax.random.key(0),
        "force_fp32_for_softmax": True,
        "unknown": None,
    }
    for dropout in ({"dropout_rate": 0.5, "deterministic": True}, {"deterministic": False}):
        assert (attention_fn(query, key, value, **harmless, **dropout) == expected).all()


def by_module(kind, rng, options, call):
    """A forward pass of a module."""
    inputs = (normal(rng, B, T, F),)
    params = parameters(make(kind), rng, inputs)
    functional(make(kind, attention_fn=attention_fn, **options))(params, inputs, **call)


EINSUMS = ("qk_attn_weights_einsum_cls", "attn_weights_value_einsum_cls")
LINEN_REFUSED = {
    "dropout_rate": ({"dropout_rate": 0.5}, {"deterministic": False, "dropout_rng": 0}),
    "module": ({}, {"sow_weights": True}),
    "qk_attn_weights_einsum": (dict.fromkeys(EINSUMS, lambda: jnp.einsum), {}),
}


@pytest.mark.parametrize("name", LINEN_REFUSED)
def test_linen_is_told(name, rng):
    options, call = LINEN_REFUSED[name]
    with pytest.raises(NotImplementedError, match=name):
        by_module(linen.MultiHeadDotProductAttention, rng, options, call)


def test_nnx_is_told(rng):
    kind = nnx.MultiHeadAttention
    with pytest.raises(NotImplementedError, match="dropout_rate=0"):
        by_module(kind, rng, {"dropout_rate": 0.5}, {"deterministic": False})
    with pytest.raises(NotImplementedError, match="module: "):
        by_module(kind, rng, {}, {"sow_weights": True})
    if has(kind.__call__, "input_positions"):
        with pytest.raises(NotImplementedError, match="input_positions: "):
            by_module(kind, rng, {}, {"input_positions": jnp.arange(T)})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"is_causal": 1}, "is_causal: expected a bool, got int: 1"),
        ({"local_window_size": (1, -1)}, r"local_window_size: expected .*, got \(1, -1\)"),
        ({"local_window_size": [1, 2, 3]}, r"local_window_size: expected .*, got \[1, 2, 3\]"),
        ({"logits_soft_cap": 0.0}, "logits_soft_cap: expected .*, got 0.0"),
        ({"implementation": "cudnn"}, "implementation: expected None, one of .*, got 'cudnn'"),
        ({"implementation": AttentionFn}, "implementation: expected None, one of .*, got <class"),
    ],
)
def test_settings_are_refused_when_made(settings, message):
    with pytest.raises(ValueError, match=message):
        make_attention_fn(**settings)


def test_without_flax_one_sentence_says_what_to_install():
    code = """
import sys

sys.modules[sys.argv[1]] = None
try:
    import pallas_flash.flax
except ModuleNotFoundError as error:
    print(error.name, error, sep="|", end="")
"""

    def without(name):
        command = [sys.executable, "-c", code, name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("|")

    assert without("flax") == [
        "flax",
        "pallas_flash.flax needs Flax, which is not installed: pip install 'pallas-flash[flax]'",
    ]
    # What else may be missing, of Flax or of what it needs, is not taken for Flax.
    for name in ("flax.linen.dtypes", "msgpack"):
        assert without(name)[0] == name
