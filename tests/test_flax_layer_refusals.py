"""What `GroupedQueryAttention` and its config refuse, and how."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax_layers import D, H, K, config_of, layer_of, parameters
from malformed import ints, zeros

import pallas_flash.flax.linen
from pallas_flash import KVCache, PagedKVCache
from pallas_flash.flax import RotaryEmbedding

B, T, S, C = 2, 3, 5, 10

DTYPES = "one of float32, bfloat16, float16"
NOT_SIZES = [0, -1, 2.0, True, "2"]
AXES = "strings or None, of features, heads and head dim"
WINDOW = "an int >= 0 or a pair (left, right) of such"
NOT_CAUSAL = {"is_causal": False}

# A field, what it is, and what the message says was expected.
BAD_FIELDS = [
    *(
        (name, x, "an int >= 1")
        for name in ("features", "num_query_heads", "num_key_value_heads", "head_dim")
        for x in (*NOT_SIZES, None)
    ),
    *(("context_features", x, "an int >= 1") for x in NOT_SIZES),
    ("num_key_value_heads", 3, "a divisor of num_query_heads = 4"),
    *(
        (name, x, "a bool")
        for name in ("use_bias", "use_sinks", "is_causal")
        for x in (None, 1, "yes", np.bool_(True))
    ),
    *(("use_output_bias", x, "a bool") for x in (1, "yes")),
    *(("rotary", x, "None or a RotaryEmbedding") for x in (1e4, True, RotaryEmbedding)),
    *(
        ("norm_epsilon", x, "a number above 0 and below 1")
        for x in (0, 0.0, 1.0, -1e-6, math.nan, True, "1e-6", np.array([0.1]))
    ),
    *(("local_window_size", x, WINDOW) for x in (-1, (1, -1), (1,), 1.0, "11", [1, 2, 3])),
    *(("logits_soft_cap", x, "a finite number > 0") for x in (0, -1.0, math.inf, True, "30")),
    *(("scale", x, "a real number") for x in ("1", np.array([1.0]), 1j)),
    *(("scale", x, "a finite number") for x in (math.inf, math.nan)),
    ("scale", jnp.float32(2.0), "a number known when the layer is made"),
    *(("dtype", x, DTYPES) for x in ("float64", "int8", 3)),
    *(("param_dtype", x, DTYPES) for x in ("float64", "int8", 3, None)),
    *(("precision", x, "None, 'default', 'high', 'highest'") for x in ("exact", 3)),
    *(("kernel_init", x, "a function") for x in (None, 0.02)),
    *(("kernel_axes", x, AXES) for x in ("abc", ("a", "b"), ("a", "b", 3), 3)),
]


@pytest.mark.parametrize(
    ("name", "x", "expected"), BAD_FIELDS, ids=[f"{name}-{x!r:.20}" for name, x, _ in BAD_FIELDS]
)
def test_every_bad_field_is_told(name, x, expected):
    with pytest.raises(ValueError, match=f"^{name}: expected {re.escape(expected)}") as caught:
        config_of(**{name: x})
    assert str(caught.value).endswith((f", got {x!r}", f", got {x}"))


def test_fields_that_do_not_go_together_are_told():
    with pytest.raises(ValueError, match=r"^head_dim: expected an even int, .*, got 7$"):
        config_of(head_dim=7, rotary=RotaryEmbedding())
    with pytest.raises(ValueError, match=r"^logits_soft_cap: expected at least \|scale\| / 1e\+38"):
        config_of(scale=1e30, logits_soft_cap=1e-10)


def test_equal_configs_are_equal():
    pairs = [
        ({"local_window_size": 3}, {"local_window_size": [3, np.int64(3)]}),
        ({"kernel_axes": ["a", None, "b"]}, {"kernel_axes": ("a", None, "b")}),
        ({"scale": 0.5}, {"scale": np.array(0.5)}),
        ({"norm_epsilon": 0.25}, {"norm_epsilon": np.float32(0.25)}),
    ]
    for one, other in pairs:
        one, other = config_of(**one), config_of(**other)
        assert one == other
        assert hash(one) == hash(other)
        assert dataclasses.replace(one) == one


HIDDEN, CONTEXT, STEP = zeros(B, T, D), zeros(B, S, C), zeros(B, 1, D)
CACHE = KVCache.empty(B, S, K, H, "float32")
PAGED = PagedKVCache.empty(ints(B, 1), 4, 16, K, H, "float32")
CROSS = {**NOT_CAUSAL, "context_features": C}
ANY_BATCH = f"expected a float array of shape [..., T, {D}]"
ONE_BATCH = f"expected a float array of shape [B, T, {D}]"
NO_CONTEXT = "as there is a context"
GROWS = "for a cache that grows"

# The config's options, the verb, its arguments and keywords, and the message.
BAD_CALLS = {
    "features": ({}, "__call__", [zeros(B, T, D + 1)], {}, f"hidden: {ANY_BATCH}"),
    "no length": ({}, "__call__", [zeros(D)], {}, f"hidden: {ANY_BATCH}, got float32[{D}]"),
    "integers": ({}, "__call__", [ints(B, T, D)], {}, f"hidden: {ANY_BATCH}, got int32"),
    "no array": ({}, "__call__", ["hidden"], {}, "hidden: expected an array, got str: 'hidden'"),
    "prefill, features": (
        {},
        "prefill",
        [zeros(B, T, C)],
        {"capacity": S},
        f"hidden: {ONE_BATCH}, got float32[2, 3, 10]",
    ),
    "prefill, batch dims": ({}, "prefill", [HIDDEN[None]], {"capacity": S}, f"hidden: {ONE_BATCH}"),
    "prefill, no batch dim": ({}, "prefill", [HIDDEN[0]], {"capacity": S}, f"hidden: {ONE_BATCH}"),
    "extend, features": ({}, "extend", [zeros(B, T, C), CACHE], {}, f"hidden: {ONE_BATCH}"),
    "extend, no length": ({}, "extend", [STEP[:, 0], CACHE], {}, f"hidden: {ONE_BATCH}"),
    "extend, other batch": (
        {"rotary": RotaryEmbedding()},
        "extend",
        [zeros(B + 1, 1, D), CACHE],
        {},
        "cache.lengths: expected an integer array of shape [3], got int32[2]",
    ),
    "extend, no cache": (
        {},
        "extend",
        [STEP, (CACHE.key, CACHE.value)],
        {},
        "cache: expected a KVCache or PagedKVCache, got (Array",
    ),
    "extend, other dtype": (
        {},
        "extend",
        [STEP, KVCache.empty(B, S, K, H, "bfloat16")],
        {},
        "key: expected bfloat16, ",
    ),
    "counts": ({}, "extend", [HIDDEN, CACHE, ints(B, 1)], {}, "counts: expected an integer array"),
    "capacity": (
        {},
        "prefill",
        [HIDDEN],
        {"capacity": 2},
        "capacity: expected at least the 3 positions of hidden, got 2",
    ),
    "lengths": (
        {},
        "__call__",
        [HIDDEN],
        {"lengths": zeros(B)},
        "lengths: expected an integer array of shape [2], got float32[2]",
    ),
    "prefill, lengths": (
        {},
        "prefill",
        [HIDDEN, ints(B + 1)],
        {"capacity": S},
        "lengths: expected an integer array of shape [2], got int32[3]",
    ),
    "segment_ids": (
        {},
        "__call__",
        [HIDDEN],
        {"segment_ids": ints(T)},
        "segment_ids: expected an integer array of shape [2, 3], got int32[3]",
    ),
    "positions": (
        {"rotary": RotaryEmbedding()},
        "__call__",
        [HIDDEN],
        {"positions": zeros(B, T)},
        "positions: expected an integer array of shape [2, 3], got float32[2, 3]",
    ),
    "context, features": (
        CROSS,
        "__call__",
        [HIDDEN, zeros(B, S, D)],
        {},
        "context: expected a float array of shape [..., S, 10], got float32[2, 5, 12]",
    ),
    "context, pages": (CROSS, "__call__", [HIDDEN, PAGED], {}, "context: expected an array, got"),
    "context_cache, features": (
        CROSS,
        "context_cache",
        [HIDDEN],
        {},
        "context: expected a float array of shape [B, S, 10], got float32[2, 3, 12]",
    ),
    "context_lengths": (
        CROSS,
        "__call__",
        [HIDDEN, CONTEXT],
        {"context_lengths": ints(B + 1)},
        "context_lengths: expected an integer array of shape [2], got int32[3]",
    ),
    "context_lengths, no context": (
        NOT_CAUSAL,
        "__call__",
        [HIDDEN],
        {"context_lengths": ints(B)},
        "context_lengths: expected None, as there is no context",
    ),
    "context_lengths, a cache": (
        CROSS,
        "__call__",
        [HIDDEN, CACHE],
        {"context_lengths": ints(B)},
        "context_lengths: expected None, as the context is a cache",
    ),
    "context of another batch": (
        CROSS,
        "__call__",
        [HIDDEN, CONTEXT[:1]],
        {},
        "context: expected hidden's batch dims [2], got float32[1, ",
    ),
    "context of another batch, a cache": (
        CROSS,
        "__call__",
        [HIDDEN[:1], CACHE],
        {},
        "context: expected a cache of hidden's batch dims [1], got float32[2, ",
    ),
    "positions that nothing is turned by": (
        {"rotary": None},
        "__call__",
        [HIDDEN],
        {"positions": ints(B, T + 1)},
        "positions: expected an integer array",
    ),
    "no context": (
        CROSS,
        "__call__",
        [HIDDEN],
        {},
        "context: expected an array or a cache, as context_features = 10, got None",
    ),
    **{
        f"context, {name}": (
            CROSS,
            "__call__",
            [HIDDEN, CONTEXT],
            {name: ints(B, T)},
            f"{name}: expected None, {NO_CONTEXT}",
        )
        for name in ("segment_ids", "positions")
    },
    **{
        f"{verb}, {name}": (
            {**NOT_CAUSAL, name: x},
            verb,
            [HIDDEN, HIDDEN] if verb == "__call__" else [HIDDEN],
            {},
            f"config.{name}: expected {none}, {NO_CONTEXT}, got {x}",
        )
        for verb in ("__call__", "context_cache")
        for name, none, x in (
            ("is_causal", False, True),
            ("local_window_size", None, (1, 1)),
            ("rotary", None, RotaryEmbedding()),
        )
    },
    "prefill, not causal": (
        NOT_CAUSAL,
        "prefill",
        [HIDDEN],
        {"capacity": S},
        f"config.is_causal: expected True, {GROWS}, got False",
    ),
    "extend, not causal": (
        NOT_CAUSAL,
        "extend",
        [STEP, CACHE],
        {},
        f"config.is_causal: expected True, {GROWS}, got False",
    ),
    "prefill, cross": (
        {"context_features": C},
        "prefill",
        [HIDDEN],
        {"capacity": S},
        f"config.context_features: expected None, {GROWS}, got 10",
    ),
}


@pytest.mark.parametrize(
    ("options", "verb", "arguments", "keywords", "message"), BAD_CALLS.values(), ids=BAD_CALLS
)
def test_calls_that_are_refused(options, verb, arguments, keywords, message, rng):
    config = config_of(**options)
    # Whose kernels have the same shapes.
    params = parameters(config_of(context_features=config.context_features, is_causal=False), rng)

    def call(params):
        return getattr(layer_of("nnx", config, params), verb)(*arguments, **keywords)

    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        jax.eval_shape(call, params)


def test_linen_does_not_make_parameters_of_other_features():
    layer = pallas_flash.flax.linen.GroupedQueryAttention(config_of())
    with pytest.raises(ValueError, match=re.escape(f"hidden: {ANY_BATCH}, got float32[2, 3, 10]")):
        jax.eval_shape(layer.init, jax.random.key(0), zeros(B, T, C))
