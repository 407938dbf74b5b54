"""The Llama architecture as pure functions on a pytree of parameters.

Axes: B batch, T tokens of this call, S cache capacity, D embedding, N query heads, K key/value
heads, H head dim, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from pallas_flash import KVCache


class Attention(Protocol):
    """The two ways in which the model attends; hashable, since programs are compiled for it."""

    def prefill(
        self, query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array
    ) -> jax.Array:
        """Prompts over themselves: query [B, T, N, H], key and value [B, T, K, H] to [B, T, N, H].

        A token sees itself and those before it. What lies at or past a row's length, of
        `lengths` [B], is padding.
        """
        ...

    def decode(self, query: jax.Array, cache: KVCache) -> jax.Array:
        """The newest token of each row, [B, 1, N, H], over its cache, which holds it already."""
        ...


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


# One for each layer.
Cache = tuple[KVCache, ...]

# How one layer attends: the new tokens' query [B, T, N, H], key and value [B, T, K, H] give the
# attended values [B, T, N, H], and the layer's cache with the new keys and values in it.
Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, KVCache]]


def rms_norm(hidden: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    """Scale `hidden` [B, T, D] to unit root mean square, then by `weight` [D]."""
    mean_square = jnp.mean(jnp.square(hidden), axis=-1, keepdims=True)
    return hidden * jax.lax.rsqrt(mean_square + epsilon) * weight[None, None, :]


def project(hidden: jax.Array, matrix: jax.Array) -> jax.Array:
    """Apply `matrix` [outputs, inputs] to the last axis of `hidden` [B, T, inputs]."""
    return jnp.einsum("bti,oi->bto", hidden, matrix)


def rotary_angles(config: LlamaConfig, positions: jax.Array) -> jax.Array:
    """The angle of each pair of head dimensions at `positions` [B, T]: [B, T, 1, H/2]."""
    exponents = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    frequencies = config.rotary_base**-exponents
    return positions.astype(jnp.float32)[:, :, None, None] * frequencies[None, None, None, :]


def rotate(heads: jax.Array, angles: jax.Array) -> jax.Array:
    """Turn the pairs (0, 1), (2, 3), ... of `heads` [B, T, N, H] by `angles` [B, T, 1, H/2].

    GGUF files store the rows of the query and key matrices for these interleaved pairs.
    """
    even, odd = heads[..., 0::2], heads[..., 1::2]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return turned.reshape(heads.shape)


def self_attention(
    layer: Layer, hidden: jax.Array, angles: jax.Array, attend: Attend, config: LlamaConfig
) -> tuple[jax.Array, KVCache]:
    """Self-attention of `hidden` [B, T, D], and the layer's cache."""

    def heads(matrix: jax.Array) -> jax.Array:
        return project(hidden, matrix).reshape(*hidden.shape[:2], -1, config.head_dim)

    query, key = rotate(heads(layer.query), angles), rotate(heads(layer.key), angles)
    attended, cache = attend(query, key, heads(layer.value))
    return project(attended.reshape(hidden.shape), layer.output), cache


def feed_forward(layer: Layer, hidden: jax.Array) -> jax.Array:
    """The gated feed-forward network on `hidden` [B, T, D]."""
    return project(jax.nn.silu(project(hidden, layer.gate)) * project(hidden, layer.up), layer.down)


def forward(
    parameters: Parameters,
    tokens: jax.Array,
    positions: jax.Array,
    attends: Sequence[Attend],
    config: LlamaConfig,
) -> tuple[jax.Array, Cache]:
    """Run `tokens` [B, T], which sit at `positions` [B, T], through all layers.

    `attends` holds one function for each layer. Returns the normalised hidden states [B, T, D] and
    the cache.
    """
    hidden = parameters.embedding[tokens]
    angles = rotary_angles(config, positions)
    cache = []
    # Unrolled on purpose: a scan over stacked layers would copy each layer's weights out of the
    # stack, which halves the decoding speed on a CPU.
    for layer, attend in zip(parameters.layers, attends, strict=True):
        normed = rms_norm(hidden, layer.attention_norm, config.rms_epsilon)
        attended, layer_cache = self_attention(layer, normed, angles, attend, config)
        hidden = hidden + attended
        normed = rms_norm(hidden, layer.feed_forward_norm, config.rms_epsilon)
        hidden = hidden + feed_forward(layer, normed)
        cache.append(layer_cache)
    return rms_norm(hidden, parameters.output_norm, config.rms_epsilon), tuple(cache)


def prefill(
    parameters: Parameters,
    tokens: jax.Array,
    lengths: jax.Array,
    *,
    capacity: int,
    config: LlamaConfig,
    attention: Attention,
) -> tuple[jax.Array, Cache]:
    """Run prompts, `tokens` [B, T], each padded on its right from its length, `lengths` [B], on.

    Returns the normalised hidden states [B, T, D] and a cache with room for `capacity` positions.
    """

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, KVCache]:
        attended = attention.prefill(query, key, value, lengths)
        return attended, KVCache.from_prefill(key, value, lengths, capacity=capacity)

    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return forward(parameters, tokens, positions, [attend] * config.num_layers, config)


def decode(
    parameters: Parameters,
    tokens: jax.Array,
    cache: Cache,
    *,
    config: LlamaConfig,
    attention: Attention,
) -> tuple[jax.Array, Cache]:
    """Run one more token of each row, `tokens` [B], after those that its cache holds.

    Returns the normalised hidden states [B, 1, D] and the cache with these tokens.
    """

    def attend(
        layer_cache: KVCache, query: jax.Array, key: jax.Array, value: jax.Array
    ) -> tuple[jax.Array, KVCache]:
        layer_cache = layer_cache.append(key, value)
        return attention.decode(query, layer_cache), layer_cache

    positions = cache[0].lengths[:, None]
    attends = [partial(attend, layer_cache) for layer_cache in cache]
    return forward(parameters, tokens[:, None], positions, attends, config)


def unembed(parameters: Parameters, hidden: jax.Array) -> jax.Array:
    """Logits [B, T, V] of normalised hidden states [B, T, D]."""
    return project(hidden, parameters.unembedding)
