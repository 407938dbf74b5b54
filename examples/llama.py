"""The Llama architecture as pure functions on a pytree of parameters.

Axes: B batch, T tokens of this call, S cache capacity, D embedding, N query heads, K key/value
heads, H head dim, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

import jax
import jax.numpy as jnp

# attention(query [B, T, N, H], key [B, S, K, H], value [B, S, K, H], offset [], length [B])
# -> [B, T, N, H]: query i sits at position offset + i, sees no key after its own position, and
# none at or past `length`.
Attention = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes and constants that define one Llama model."""

    vocabulary_size: int
    context_length: int
    embedding_size: int
    feed_forward_size: int
    num_layers: int
    num_query_heads: int
    num_key_value_heads: int
    rotary_base: float
    rms_epsilon: float

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) <= 0:
                raise ValueError(f"{field.name} must be positive, got {getattr(self, field.name)}")
        if self.embedding_size % self.num_query_heads:
            raise ValueError(
                f"embedding_size must be a multiple of num_query_heads, got "
                f"{self.embedding_size} and {self.num_query_heads}"
            )
        if self.num_query_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_query_heads must be a multiple of num_key_value_heads, got "
                f"{self.num_query_heads} and {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"the head dim must be even for rotary pairs, got {self.head_dim}")

    @property
    def head_dim(self) -> int:
        return self.embedding_size // self.num_query_heads


class Layer(NamedTuple):
    """Parameters of one transformer layer; every matrix is [outputs, inputs]."""

    attention_norm: jax.Array
    query: jax.Array
    key: jax.Array
    value: jax.Array
    output: jax.Array
    feed_forward_norm: jax.Array
    gate: jax.Array
    up: jax.Array
    down: jax.Array


class Parameters(NamedTuple):
    """All parameters; a model with tied embeddings holds one array under two names."""

    embedding: jax.Array
    layers: tuple[Layer, ...]
    output_norm: jax.Array
    unembedding: jax.Array


class LayerCache(NamedTuple):
    """Keys and values of one layer, each [B, S, K, H]."""

    key: jax.Array
    value: jax.Array


Cache = tuple[LayerCache, ...]


def empty_cache(config: LlamaConfig, batch_size: int, capacity: int) -> Cache:
    """A cache with room for `capacity` positions in every layer."""
    shape = (batch_size, capacity, config.num_key_value_heads, config.head_dim)
    return tuple(
        LayerCache(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32))
        for _ in range(config.num_layers)
    )


def rms_norm(hidden: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    """Scale `hidden` [B, T, D] to unit root mean square, then by `weight` [D]."""
    mean_square = jnp.mean(jnp.square(hidden), axis=-1, keepdims=True)
    return hidden * jax.lax.rsqrt(mean_square + epsilon) * weight[None, None, :]


def project(hidden: jax.Array, matrix: jax.Array) -> jax.Array:
    """Apply `matrix` [outputs, inputs] to the last axis of `hidden` [B, T, inputs]."""
    return jnp.einsum("bti,oi->bto", hidden, matrix)


def rotary_angles(config: LlamaConfig, positions: jax.Array) -> jax.Array:
    """The angle of each pair of head dimensions at `positions` [T]: [1, T, 1, H/2]."""
    exponents = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    frequencies = config.rotary_base**-exponents
    return (positions.astype(jnp.float32)[:, None] * frequencies[None, :])[None, :, None, :]


def rotate(heads: jax.Array, angles: jax.Array) -> jax.Array:
    """Turn the pairs (0, 1), (2, 3), ... of `heads` [B, T, N, H] by `angles` [1, T, 1, H/2].

    GGUF files store the rows of the query and key matrices for these interleaved pairs.
    """
    even, odd = heads[..., 0::2], heads[..., 1::2]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return turned.reshape(heads.shape)


def attend(
    layer: Layer,
    hidden: jax.Array,
    cache: LayerCache,
    offset: jax.Array,
    length: jax.Array,
    config: LlamaConfig,
    attention: Attention,
) -> tuple[jax.Array, LayerCache]:
    """Self-attention of `hidden` [B, T, D] over the cache, which takes in its keys and values."""

    def heads(matrix: jax.Array) -> jax.Array:
        return project(hidden, matrix).reshape(*hidden.shape[:2], -1, config.head_dim)

    angles = rotary_angles(config, offset + jnp.arange(hidden.shape[1], dtype=jnp.int32))
    query, key = rotate(heads(layer.query), angles), rotate(heads(layer.key), angles)
    cache = LayerCache(
        jax.lax.dynamic_update_slice_in_dim(cache.key, key, offset, axis=1),
        jax.lax.dynamic_update_slice_in_dim(cache.value, heads(layer.value), offset, axis=1),
    )
    attended = attention(query, cache.key, cache.value, offset, length)
    return project(attended.reshape(hidden.shape), layer.output), cache


def feed_forward(layer: Layer, hidden: jax.Array) -> jax.Array:
    """The gated feed-forward network on `hidden` [B, T, D]."""
    return project(jax.nn.silu(project(hidden, layer.gate)) * project(hidden, layer.up), layer.down)


def forward(
    parameters: Parameters,
    tokens: jax.Array,
    cache: Cache,
    offset: jax.Array,
    length: jax.Array,
    *,
    config: LlamaConfig,
    attention: Attention,
) -> tuple[jax.Array, Cache]:
    """Run `tokens` [B, T], which sit at positions `offset` + (0 ... T-1), through all layers.

    `offset` is an int32 scalar; `length` [B] (int32) counts the positions in use once these
    tokens are in the cache, so that padding after them is ignored. Returns the normalised hidden
    states [B, T, D] and the updated cache.
    """
    hidden = parameters.embedding[tokens]
    updated = []
    # Unrolled on purpose: a scan over stacked layers would copy each layer's weights out of the
    # stack, which halves the decoding speed on a CPU.
    for layer, layer_cache in zip(parameters.layers, cache, strict=True):
        normed = rms_norm(hidden, layer.attention_norm, config.rms_epsilon)
        attended, layer_cache = attend(
            layer, normed, layer_cache, offset, length, config, attention
        )
        hidden = hidden + attended
        normed = rms_norm(hidden, layer.feed_forward_norm, config.rms_epsilon)
        hidden = hidden + feed_forward(layer, normed)
        updated.append(layer_cache)
    return rms_norm(hidden, parameters.output_norm, config.rms_epsilon), tuple(updated)


def unembed(parameters: Parameters, hidden: jax.Array) -> jax.Array:
    """Logits [B, T, V] of normalised hidden states [B, T, D]."""
    return project(hidden, parameters.unembedding)
