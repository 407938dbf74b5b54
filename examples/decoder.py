"""A decoder of Llama's or Qwen3's shape, in Flax NNX, on `GroupedQueryAttention`.

Axes: B batch, T tokens of this call, D embedding, V vocabulary. A decoder is a pytree: `jax.jit`,
`jax.grad` and the rest take it as it is.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.dtypes import promote_dtype

from pallas_flash import KVCache, flash_attention, flash_decode
from pallas_flash.backends import Backend
from pallas_flash.flax import AttentionConfig
from pallas_flash.flax.nnx import GroupedQueryAttention

# The keys and values of a layer, each [B, S, K, H].
Pair = tuple[jax.Array, jax.Array]

# A layer on hidden states [B, T, D] and its share of a pytree: the states after it, and another
# share.
Step = Callable[["Layer", jax.Array, Any], tuple[jax.Array, Any]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Caches:
    """The caches of all layers, which hold the same positions.

    Attributes:
      pairs: one for each layer; of a decoder that scans, a single one with a leading axis for its
        layers.
      lengths: int32 [B], how many positions of each row are valid, in every layer.
    """

    pairs: tuple[Pair, ...] | Pair
    lengths: jax.Array


@dataclass(frozen=True)
class DecoderConfig:
    """The sizes and constants that define one decoder.

    Attributes:
      vocabulary_size: V.
      context_length: positions that the model was made for.
      num_layers: how many there are.
      feed_forward_size: of the gated network in each.
      rms_epsilon: of every norm over D.
      attention: of every layer; D is its `features`.
      has_tied_embeddings: logits come of the embedding matrix, and not of one of their own.
      windows: `local_window_size` of each layer, where they differ; None for what `attention` says.
      is_scanned: layers hold their parameters in one array and are run by `jax.lax.scan`: compiled
        once, not once each. Decoding by it copies each layer's parameters and cache out of theirs.
    """

    vocabulary_size: int
    context_length: int
    num_layers: int
    feed_forward_size: int
    rms_epsilon: float
    attention: AttentionConfig
    has_tied_embeddings: bool = False
    windows: tuple[int | tuple[int, int] | None, ...] | None = None
    is_scanned: bool = False

    def __post_init__(self) -> None:
        for name in (
            "vocabulary_size",
            "context_length",
            "num_layers",
            "feed_forward_size",
            "rms_epsilon",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.windows is not None:
            # A list has no hash.
            object.__setattr__(self, "windows", tuple(self.windows))
            if len(self.windows) != self.num_layers:
                layers = f"{self.num_layers} layers"
                raise ValueError(f"windows must be one for each of {layers}, got {self.windows}")
            if self.is_scanned:
                alike = "layers that a scan runs are all alike"
                raise ValueError(f"{alike}, got windows {self.windows}")
        # Each has checks of its own.
        _ = [self.layer(index) for index in range(self.num_layers)]

    def layer(self, index: int) -> AttentionConfig:
        """The attention of one layer."""
        if self.windows is None:
            return self.attention
        return replace(self.attention, local_window_size=self.windows[index])


class Layer(nnx.Module):
    """Attention, then a gated feed-forward network, each of normed states and added to them."""

    def __init__(
        self,
        config: DecoderConfig,
        attention: AttentionConfig,
        *,
        attention_fn: Callable[..., jax.Array],
        decode_fn: Callable[..., jax.Array],
        rngs: nnx.Rngs,
    ) -> None:
        def linear(inputs: int, outputs: int) -> nnx.Linear:
            return nnx.Linear(
                inputs,
                outputs,
                use_bias=False,
                dtype=attention.dtype,
                param_dtype=attention.param_dtype,
                precision=attention.precision,
                rngs=rngs,
            )

        self.attention_norm = _norm(config, rngs)
        self.attention = GroupedQueryAttention(
            attention, attention_fn=attention_fn, decode_fn=decode_fn, rngs=rngs
        )
        self.feed_forward_norm = _norm(config, rngs)
        self.gate = linear(attention.features, config.feed_forward_size)
        self.up = linear(attention.features, config.feed_forward_size)
        self.down = linear(config.feed_forward_size, attention.features)

    def feed_forward(self, hidden: jax.Array) -> jax.Array:
        """[B, T, D] to the same, with what the network gives added."""
        normed = self.feed_forward_norm(hidden)
        return hidden + self.down(jax.nn.silu(self.gate(normed)) * self.up(normed))


class Decoder(nnx.Module):
    """Tokens in, hidden states out, from which `logits` makes those of the next tokens.

    Attributes:
      config: its sizes.
      layers: an `nnx.List` of each `Layer`; of a decoder that scans, a single one whose parameters
        have a leading axis for them.
    """

    config: DecoderConfig
    layers: Any

    def __init__(
        self,
        config: DecoderConfig,
        *,
        attention_fn: Callable[..., jax.Array] = flash_attention,
        decode_fn: Callable[..., jax.Array] = flash_decode,
        rngs: nnx.Rngs,
    ) -> None:
        """Random parameters. The two functions are those of `GroupedQueryAttention`."""
        self.config = config
        attention = config.attention
        options = {"dtype": attention.dtype, "param_dtype": attention.param_dtype, "rngs": rngs}

        def layer(index: int, rngs: nnx.Rngs) -> Layer:
            return Layer(
                config,
                config.layer(index),
                attention_fn=attention_fn,
                decode_fn=decode_fn,
                rngs=rngs,
            )

        self.embedding = nnx.Embed(config.vocabulary_size, attention.features, **options)
        if config.is_scanned:
            keys = jax.random.split(rngs.params(), config.num_layers)
            self.layers = jax.vmap(lambda key: layer(0, nnx.Rngs(key)))(keys)
        else:
            self.layers = nnx.List([layer(index, rngs) for index in range(config.num_layers)])
        self.output_norm = _norm(config, rngs)
        if not config.has_tied_embeddings:
            self.unembedding = nnx.Linear(
                attention.features,
                config.vocabulary_size,
                use_bias=False,
                precision=attention.precision,
                **options,
            )

    def __call__(
        self,
        tokens: jax.Array,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        remat: Callable[[Step], Step] | None = None,
    ) -> jax.Array:
        """Run `tokens` [B, T] without a cache; `jax.checkpoint` as `remat` recomputes each layer.

        The three arrays in between are those of `GroupedQueryAttention`. Returns normed hidden
        states [B, T, D].
        """

        def step(layer: Layer, hidden: jax.Array, _: None) -> tuple[jax.Array, None]:
            attended = layer.attention(
                layer.attention_norm(hidden),
                lengths=lengths,
                segment_ids=segment_ids,
                positions=positions,
            )
            return layer.feed_forward(hidden + attended), None

        hidden, _ = self._run(tokens, step if remat is None else remat(step), None)
        return hidden

    def prefill(
        self, tokens: jax.Array, lengths: jax.Array | None = None, *, capacity: int
    ) -> tuple[jax.Array, Caches]:
        """Run prompts [B, T], each padded on its right from its length, of `lengths` [B], on.

        Returns normed hidden states [B, T, D] and caches with room for `capacity` positions a row.
        """

        def step(layer: Layer, hidden: jax.Array, _: None) -> tuple[jax.Array, KVCache]:
            normed = layer.attention_norm(hidden)
            attended, cache = layer.attention.prefill(normed, lengths, capacity=capacity)
            return layer.feed_forward(hidden + attended), cache

        hidden, caches = self._run(tokens, step, None)
        return hidden, self._together(caches)

    def extend(
        self, tokens: jax.Array, caches: Caches, counts: jax.Array | None = None
    ) -> tuple[jax.Array, Caches]:
        """Run the next tokens of each row, [B, T], of which `counts` [B] are no padding.

        Returns normed hidden states [B, T, D] and the caches with these tokens.
        """

        def step(layer: Layer, hidden: jax.Array, pair: Pair) -> tuple[jax.Array, KVCache]:
            normed = layer.attention_norm(hidden)
            cache = KVCache(*pair, caches.lengths)
            attended, cache = layer.attention.extend(normed, cache, counts)
            return layer.feed_forward(hidden + attended), cache

        hidden, extended = self._run(tokens, step, caches.pairs)
        return hidden, self._together(extended)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Normed hidden states [..., D] to [..., V]."""
        if not self.config.has_tied_embeddings:
            return self.unembedding(hidden)
        attention = self.config.attention
        hidden, matrix = promote_dtype(hidden, self.embedding.embedding, dtype=attention.dtype)
        # `attend` would copy the matrix to turn it, with JAX 0.12 on a CPU, and know no precision.
        return jnp.einsum("...d,vd->...v", hidden, matrix, precision=attention.precision)

    def with_attention(
        self,
        attention_fn: Callable[..., jax.Array] = flash_attention,
        decode_fn: Callable[..., jax.Array] = flash_decode,
        *,
        implementation: str | Backend | None = None,
    ) -> "Decoder":
        """One that attends by these functions, and that implementation, and shares its parameters.

        The two functions are those of `GroupedQueryAttention`.
        """
        attention = replace(self.config.attention, implementation=implementation)
        config = replace(self.config, attention=attention)
        other = nnx.eval_shape(
            lambda: Decoder(
                config, attention_fn=attention_fn, decode_fn=decode_fn, rngs=nnx.Rngs(0)
            )
        )
        return jax.tree.unflatten(jax.tree.structure(other), jax.tree.leaves(self))

    def empty_caches(self, batch: int, capacity: int) -> Caches:
        """Caches that hold nothing, for `extend`."""
        attention = self.config.attention
        dtype = attention.dtype or attention.param_dtype
        heads, head_dim = attention.num_key_value_heads, attention.head_dim

        def empty(_: None = None) -> KVCache:
            return KVCache.empty(batch, capacity, heads, head_dim, dtype)

        num_layers = self.config.num_layers
        if self.config.is_scanned:
            return self._together(jax.vmap(empty, axis_size=num_layers)(None))
        return self._together([empty() for _ in range(num_layers)])

    def _together(self, caches: Any) -> Caches:
        """The caches of layers, each with lengths of its own, all of them the same."""
        if self.config.is_scanned:
            return Caches((caches.key, caches.value), caches.lengths[0])
        return Caches(tuple((x.key, x.value) for x in caches), caches[0].lengths)

    def _run(self, tokens: jax.Array, step: Step, shares: Any) -> tuple[jax.Array, Any]:
        """All layers, one after the other, each with its share: None, or as in `Caches.pairs`."""
        hidden = self.embedding(tokens)
        if self.config.is_scanned:

            def body(hidden: jax.Array, layer: tuple[Layer, Any]) -> tuple[jax.Array, Any]:
                return step(layer[0], hidden, layer[1])

            hidden, after = jax.lax.scan(body, hidden, (self.layers, shares))
        else:
            shares = [None] * self.config.num_layers if shares is None else shares
            after = []
            for layer, share in zip(self.layers, shares, strict=True):
                hidden, share = step(layer, hidden, share)
                after.append(share)
        return self.output_norm(hidden), after


def _norm(config: DecoderConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
    """Of D features."""
    attention = config.attention
    return nnx.RMSNorm(
        attention.features,
        epsilon=config.rms_epsilon,
        dtype=attention.dtype,
        param_dtype=attention.param_dtype,
        rngs=rngs,
    )
