"""`GroupedQueryAttention` of both kinds on the same parameters, and the same in plain JAX."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from flax_modules import lenient, normal

import pallas_flash.flax.linen
import pallas_flash.flax.nnx
from pallas_flash.flax import AttentionConfig, RotaryEmbedding

D, N, K, H = 12, 4, 2, 6

ROTARY = RotaryEmbedding(base=100.0)
# Every option of a causal layer over itself, every sort of parameter.
ALL = {
    "use_bias": True,
    "rotary": ROTARY,
    "norm_epsilon": 0.01,
    "local_window_size": (3, 0),
    "logits_soft_cap": 2.0,
    "scale": 0.7,
    "use_sinks": True,
}

# What sums of a few dozen terms lose in float32.
BUDGET = 32 * float(jnp.finfo(jnp.float32).eps)

both_kinds = pytest.mark.parametrize("kind", ["nnx", "linen"])


def config_of(**options: object) -> AttentionConfig:
    sizes = {"features": D, "num_query_heads": N, "num_key_value_heads": K, "head_dim": H}
    return AttentionConfig(**sizes | options)


def layer_of(kind: str, config: AttentionConfig, params: Any) -> Any:
    """A layer that holds these parameters, which may be tracers."""
    if kind == "linen":
        return pallas_flash.flax.linen.GroupedQueryAttention(config).bind({"params": params})
    make = pallas_flash.flax.nnx.GroupedQueryAttention
    layer = nnx.eval_shape(lambda: make(config, rngs=nnx.Rngs(0)))
    nnx.update(layer, params)
    return layer


def parameters(config: AttentionConfig, rng: np.random.Generator) -> Any:
    """Random, all of them, as linen has them."""
    with lenient():
        shapes = jax.eval_shape(lambda: linen.unbox(initial("linen", config)))
    return jax.tree.map(lambda x: normal(rng, *x.shape, spread=0.4), shapes)


def initial(kind: str, config: AttentionConfig) -> Any:
    """The parameters that a layer makes itself, with their metadata."""
    if kind == "nnx":
        layer = pallas_flash.flax.nnx.GroupedQueryAttention(config, rngs=nnx.Rngs(0))
        return nnx.state(layer)
    inputs = [jnp.zeros((1, 1, config.features))]
    if config.context_features is not None:
        inputs.append(jnp.zeros((1, 1, config.context_features)))
    layer = pallas_flash.flax.linen.GroupedQueryAttention(config)
    return layer.init(jax.random.key(0), *inputs)["params"]


def wide(tree: Any) -> Any:
    """In float64, under `jax.enable_x64`."""
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), tree)


def plain(
    config: AttentionConfig,
    params: Any,
    hidden: jax.Array,
    context: jax.Array | None = None,
    *,
    lengths: jax.Array | None = None,
    context_lengths: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
) -> jax.Array:
    """What a layer gives, by the definition and in the dtype of what comes; of float options."""
    source = hidden if context is None else context
    query = _heads(config, params, "query", hidden)
    key, value = (_heads(config, params, name, source) for name in ("key", "value"))
    query_length, key_length = query.shape[-3], key.shape[-3]
    i, j = jnp.arange(query_length)[:, None], jnp.arange(key_length)[None]
    if config.rotary is not None:
        positions = jnp.arange(query_length) if positions is None else positions
        query, key = (_turned(config, x, positions) for x in (query, key))
    key, value = (jnp.repeat(x, N // K, axis=-2) for x in (key, value))

    logits = jnp.einsum("...tnh,...snh->...nts", query, key)
    logits *= 1 / math.sqrt(H) if config.scale is None else config.scale
    if config.logits_soft_cap is not None:
        logits = config.logits_soft_cap * jnp.tanh(logits / config.logits_soft_cap)
    is_seen = jnp.ones((query_length, key_length), bool)
    if config.is_causal:
        is_seen &= j <= i
    if config.local_window_size is not None:
        left, right = config.local_window_size
        is_seen &= (i - left <= j) & (j <= i + right)
    if segment_ids is not None:
        is_seen &= segment_ids[..., :, None] == segment_ids[..., None, :]
    key_lengths = lengths if context is None else context_lengths
    if key_lengths is not None:
        is_seen &= j < key_lengths[..., None, None]
    weights = jnp.where(is_seen[..., None, :, :], jnp.exp(logits), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if config.use_sinks:
        total += jnp.exp(params["sinks"])[:, None, None]
    # Where nothing is seen there are no weights either.
    attended = jnp.einsum("...nts,...snh->...tnh", weights / jnp.where(total == 0, 1, total), value)
    if lengths is not None:
        is_token = jnp.arange(query_length) < lengths[..., None]
        attended = jnp.where(is_token[..., None, None], attended, 0)
    out = jnp.einsum("...tnh,nhd->...td", attended, params["out"]["kernel"])
    return out + params["out"]["bias"] if "bias" in params["out"] else out


def _heads(config: AttentionConfig, params: Any, name: str, x: jax.Array) -> jax.Array:
    """Projected and normed."""
    heads = jnp.einsum("...td,dnh->...tnh", x, params[name]["kernel"])
    if config.use_bias:
        heads += params[name]["bias"]
    if config.norm_epsilon is not None and name != "value":
        mean_square = jnp.mean(heads**2, axis=-1, keepdims=True)
        heads /= jnp.sqrt(mean_square + config.norm_epsilon)
        heads *= params[f"{name}_norm"]["scale"]
    return heads


def _turned(config: AttentionConfig, heads: jax.Array, positions: jax.Array) -> jax.Array:
    """As complex numbers, of a plain embedding."""
    # There are no complex numbers of 16 bits.
    wide = jnp.promote_types(heads.dtype, jnp.float32)
    frequencies = config.rotary.base ** (-2 * np.arange(H // 2) / H)
    angles = positions[..., None, None] * frequencies.astype(wide)
    turned = jax.lax.complex(*jnp.split(heads.astype(wide), 2, axis=-1)) * jnp.exp(1j * angles)
    return jnp.concatenate([turned.real, turned.imag], axis=-1).astype(heads.dtype)
