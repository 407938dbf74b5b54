"""What a layer of attention does, whatever holds its parameters: with a cache and without."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from pallas_flash.cache import KVCache, PagedKVCache
from pallas_flash.flax.config import AttentionConfig
from pallas_flash.validate import arguments
from pallas_flash.validate.decode import MOST_TOKENS

AnyCache = KVCache | PagedKVCache
Cache = TypeVar("Cache", KVCache, PagedKVCache)


class AttentionLayer:
    """The verbs of `GroupedQueryAttention`: the same for nnx and for linen.

    B is the batch (without a cache no dim or several will do as well), T the length, D the
    features; other letters as in `flash_attention`.

    Attributes:
      config: an `AttentionConfig`.
      attention_fn: what attends in place of `flash_attention`, to compare with it.
      decode_fn: what attends in place of `flash_decode`.
    """

    config: AttentionConfig
    attention_fn: Callable[..., jax.Array]
    decode_fn: Callable[..., jax.Array]

    def query_heads(self, hidden: jax.Array) -> jax.Array:
        """[..., T, D] to queries [..., T, N, H], normed and not yet turned."""
        raise NotImplementedError

    def key_value_heads(self, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[..., S, D] to keys, normed and not yet turned, and values, both [..., S, K, H]."""
        raise NotImplementedError

    def output(self, heads: jax.Array) -> jax.Array:
        """[..., T, N, H] to [..., T, D]."""
        raise NotImplementedError

    def sink_logits(self) -> jax.Array | None:
        """[N], or None without sinks."""
        raise NotImplementedError

    def __call__(
        self,
        hidden: jax.Array,
        context: jax.Array | KVCache | None = None,
        *,
        lengths: ArrayLike | None = None,
        context_lengths: ArrayLike | None = None,
        segment_ids: ArrayLike | None = None,
        positions: ArrayLike | None = None,
    ) -> jax.Array:
        """Attention of a sequence over itself, or over a context: for training, and encoders.

        Args:
          hidden: floats [B, T, D].
          context: another sequence, [B, S, context features], or what `context_cache` made of it;
            None for `hidden` itself.
          lengths: integers [B], how many of the T tokens are no padding, which stands on the right;
            as in `flash_attention`, more than T are T, and less than 0 are 0.
          context_lengths: likewise, of the context's S.
          segment_ids: integers [B, T]: packed sequences, or padding anywhere under an id of its
            own. A token sees those of its own id.
          positions: integers [B, T], where rotary embedding has each token; 0 to T - 1 by default.
            It decides nothing else.

        Returns:
          [B, T, D]. Padding that `lengths` names comes out as if nothing were seen.

        Raises:
          ValueError: an argument is malformed, or does not go with the others or with the config.
          NotImplementedError: the implementation cannot run this call.
        """
        hidden = _states("hidden", hidden, self.config.features)
        lengths = _integers("lengths", lengths, hidden.shape[:-2])
        if context is not None:
            if segment_ids is not None or positions is not None:
                name = "segment_ids" if positions is None else "positions"
                arguments.fail(name, "None, as there is a context", "an array")
            return self._over_context(hidden, context, lengths, context_lengths)
        if context_lengths is not None:
            arguments.fail("context_lengths", "None, as there is no context", "an array")
        if self.config.context_features is not None:
            expected = f"an array or a cache, as context_features = {self.config.context_features}"
            arguments.fail("context", expected, None)
        query, key, value = self._heads(hidden, positions)
        attended = self.attention_fn(
            query,
            key,
            value,
            is_causal=self.config.is_causal,
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
            query_segment_ids=_integers("segment_ids", segment_ids, hidden.shape[:-1]),
            **self._options(),
        )
        return self.output(attended)

    def prefill(
        self, hidden: jax.Array, lengths: ArrayLike | None = None, *, capacity: int
    ) -> tuple[jax.Array, KVCache]:
        """Attention of prompts over themselves, and a cache of their keys and values.

        Args:
          hidden: floats [B, T, D].
          lengths: integers [B], how many of the T tokens are no padding, which stands on the right;
            None for all.
          capacity: positions that each row of the cache has room for, from T to 2^29.

        Returns:
          [B, T, D], and the cache.

        Raises:
          ValueError: an argument is malformed, or the layer is not causal.
          NotImplementedError: the implementation cannot run this call.
        """
        self._require_causal()
        hidden = _states("hidden", hidden, self.config.features, is_batch=True)
        lengths = _integers("lengths", lengths, hidden.shape[:1])
        if arguments.size("capacity", capacity) < hidden.shape[1]:
            expected = f"at least the {hidden.shape[1]} positions of hidden"
            arguments.fail("capacity", expected, capacity)
        query, key, value = self._heads(hidden, None)
        attended = self.attention_fn(
            query,
            key,
            value,
            is_causal=True,
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
            **self._options(),
        )
        if lengths is None:
            lengths = jnp.full(key.shape[0], key.shape[1], jnp.int32)
        cache = KVCache.from_prefill(key, value, lengths, capacity=capacity)
        return self.output(attended), cache

    def extend(
        self, hidden: jax.Array, cache: Cache, counts: ArrayLike | None = None
    ) -> tuple[jax.Array, Cache]:
        """Attention of each row's next tokens over its cache and themselves.

        One step of decoding, a chunk of a long prompt, or, on an empty cache, a prefill: tokens sit
        after those that the cache holds. Up to 16 of them without `counts` are `flash_decode`'s;
        others are `flash_attention`'s, which reads a cache over pages as a contiguous copy.

        Args:
          hidden: floats [B, T, D].
          cache: a `KVCache` or `PagedKVCache` in the dtype of keys and values.
          counts: integers [B], how many of the T tokens are no padding, which stands on the right;
            None for all.

        Returns:
          [B, T, D], and the cache with the new tokens. A row that has no room for them, or no page,
          is an error outside `jax.jit`, and NaN inside.

        Raises:
          ValueError: an argument is malformed, or the layer is not causal.
          NotImplementedError: the implementation cannot run this call.
        """
        self._require_causal()
        hidden = _states("hidden", hidden, self.config.features, is_batch=True)
        if not isinstance(cache, AnyCache):
            arguments.fail("cache", "a KVCache or PagedKVCache", f"{cache!r:.80}")
        starts = arguments.int32("cache.lengths", cache.lengths, hidden.shape[:1])
        positions = starts[:, None] + jnp.arange(hidden.shape[-2], dtype=jnp.int32)[None]
        query, key, value = self._heads(hidden, positions)
        cache = cache.append(key, value, counts)
        if counts is None and query.shape[1] <= MOST_TOKENS:
            attended = self.decode_fn(
                query,
                cache.key,
                cache.value,
                cache.lengths,
                page_table=cache.page_table,
                **self._options(),
            )
        else:
            attended = self._over_chunk(query, cache, starts, counts)
        return self.output(attended), cache

    def context_cache(self, context: jax.Array, lengths: ArrayLike | None = None) -> KVCache:
        """Keys and values of a context, for many calls over it.

        Args:
          context: floats [B, S, context features].
          lengths: integers [B], how many of the S are no padding, which stands on the right; None
            for all.

        Raises:
          ValueError: an argument is malformed, or does not go with the config.
        """
        self._require_no_order()
        context = _states("context", context, self.config.key_value_features, is_batch=True)
        key, value = self.key_value_heads(context)
        if lengths is None:
            lengths = jnp.full(key.shape[0], key.shape[1], jnp.int32)
        return KVCache.from_prefill(key, value, lengths, capacity=key.shape[1])

    def _over_chunk(
        self, query: jax.Array, cache: AnyCache, starts: jax.Array, counts: ArrayLike | None
    ) -> jax.Array:
        """Of many tokens of each row over a cache that holds them already, from `starts` on."""
        rows = cache.contiguous()
        key, value, window = rows.key, rows.value, self.config.local_window_size
        if isinstance(window, tuple) and cache.page_table is not None:
            # Pages before the window may have been given to others, and 0 * NaN is NaN.
            positions = jnp.arange(cache.capacity, dtype=jnp.int32)
            first = starts - min(window[0], arguments.FARTHEST)
            is_before = positions[None, :] < first[:, None]
            key, value = (jnp.where(is_before[..., None, None], 0, x) for x in (key, value))
        attended = self.attention_fn(
            query,
            key,
            value,
            is_causal=True,
            query_offset=starts,
            query_seq_lengths=counts,
            key_value_seq_lengths=cache.lengths,
            **self._options(),
        )
        return _or_nan(attended, cache, starts)

    def _over_context(
        self,
        hidden: jax.Array,
        context: jax.Array | KVCache,
        lengths: ArrayLike | None,
        context_lengths: ArrayLike | None,
    ) -> jax.Array:
        """Cross-attention, which knows no positions."""
        self._require_no_order()
        query = self.query_heads(hidden)
        if isinstance(context, KVCache):
            if context_lengths is not None:
                arguments.fail("context_lengths", "None, as the context is a cache", "an array")
            key, value, context_lengths = context.key, context.value, context.lengths
            expected = f"a cache of hidden's batch dims {list(hidden.shape[:-2])}"
            arguments.require(key.shape[:1] == hidden.shape[:-2], "context", expected, key)
        else:
            context = _states("context", context, self.config.key_value_features)
            batch = hidden.shape[:-2]
            expected = f"hidden's batch dims {list(batch)}"
            arguments.require(context.shape[:-2] == batch, "context", expected, context)
            key, value = self.key_value_heads(context)
            context_lengths = _integers("context_lengths", context_lengths, context.shape[:-2])
        is_step = query.ndim == 4 and query.shape[1] == 1 and lengths is None
        if isinstance(context, KVCache) and is_step:
            # One token sees all that there is, wherever it is said to sit.
            attended = self.decode_fn(query, key, value, context.lengths, **self._options())
        else:
            attended = self.attention_fn(
                query,
                key,
                value,
                is_causal=False,
                query_seq_lengths=lengths,
                key_value_seq_lengths=context_lengths,
                **self._options(),
            )
            if isinstance(context, KVCache):
                attended = _or_nan(attended, context, context.lengths)
        return self.output(attended)

    def _heads(
        self, hidden: jax.Array, positions: ArrayLike | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Query, key and value, turned."""
        if positions is None:
            positions = jnp.arange(hidden.shape[-2], dtype=jnp.int32)
            positions = jnp.broadcast_to(positions, hidden.shape[:-1])
        else:
            positions = arguments.int32("positions", positions, hidden.shape[:-1])
        query = self.query_heads(hidden)
        key, value = self.key_value_heads(hidden)
        if self.config.rotary is not None:
            query, key = (self.config.rotary(x, positions) for x in (query, key))
        return query, key, value

    def _options(self) -> dict:
        """What either function takes."""
        return {
            "local_window_size": self.config.local_window_size,
            "logits_soft_cap": self.config.logits_soft_cap,
            "scale": self.config.scale,
            "sinks": self.sink_logits(),
            "precision": self.config.precision,
            "implementation": self.config.implementation,
        }

    def _require_causal(self) -> None:
        if not self.config.is_causal:
            arguments.fail("config.is_causal", "True, for a cache that grows", False)
        if self.config.context_features is not None:
            expected = "None, for a cache that grows"
            arguments.fail("config.context_features", expected, self.config.context_features)

    def _require_no_order(self) -> None:
        for name, none in (("is_causal", False), ("local_window_size", None), ("rotary", None)):
            if (x := getattr(self.config, name)) != none:
                arguments.fail(f"config.{name}", f"{none}, as there is a context", x)


def _or_nan(attended: jax.Array, cache: AnyCache, starts: jax.Array) -> jax.Array:
    """What was found, and NaN for rows that began below 0 or are longer than the cache has room."""
    is_lost = (starts < 0) | (cache.lengths > cache.capacity)
    return jnp.where(is_lost[:, None, None, None], jnp.nan, attended)


def _states(name: str, x: ArrayLike, features: int, *, is_batch: bool = False) -> jax.Array:
    """Hidden states as an array; with a single batch dim where they go with a cache."""
    x = arguments.array(name, x)
    is_sequence = x.ndim == 3 if is_batch else x.ndim >= 2
    is_fit = is_sequence and x.shape[-1] == features and jnp.issubdtype(x.dtype, jnp.floating)
    shape = f"[{'B' if is_batch else '...'}, {'T' if name == 'hidden' else 'S'}, {features}]"
    arguments.require(is_fit, name, f"a float array of shape {shape}", x)
    return x


def _integers(name: str, x: ArrayLike | None, shape: tuple[int, ...]) -> ArrayLike | None:
    """Checked under the name that they have here."""
    return None if x is None else arguments.integers(name, x, [shape])
