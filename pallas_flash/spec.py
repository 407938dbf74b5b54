"""What an attention call means: the conventions every backend keeps, written down once.

Letters follow `jax.nn.dot_product_attention`: B batch, T query length, S key length, N query
heads, K key/value heads, G = N // K, H head dim, Hv value head dim. Query head n reads key/value
head n // G.

The contract, whatever runs it:

1. logits = scale * (query . key) + bias, then the soft cap cap * tanh(logits / cap), then masks.
2. `is_causal` and `local_window_size` compare positions: query i sits at i + query_offset, key j
   at j. A window (left, right) lets the query at position p see the keys in [p - left, p + right].
3. A row that may see nothing gives output 0, lse -inf and zero gradients.
4. What lies at or past `key_value_seq_lengths` never matters, not even NaN. Rows at or past
   `query_seq_lengths` give output 0 and lse -inf, and nothing in them matters either.
5. lse is float32 and natural: the log of the softmax's denominator, sinks included.
6. query, key and value share one dtype of `DTYPES`. Softmax and every accumulation are float32. The
   output has the query's dtype, each gradient its input's.
7. float32 products follow `precision`, forward and backward alike.
8. Same inputs, same bits, every run.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)

Precision = jax.lax.Precision | jax.lax.DotAlgorithmPreset


class AttentionOutput(NamedTuple):
    """What attention gives back.

    Attributes:
      out: weighted values, [B, T, N, Hv], in the query's dtype.
      lse: natural log of the softmax's denominator, float32 [B, T, N]; -inf for a row that sees
        nothing.
    """

    out: jax.Array
    lse: jax.Array


class ForwardOutput(NamedTuple):
    """What a backend's forward gives back: `AttentionOutput`, and the statistics of the softmax.

    The backward recomputes probabilities as exp((logit - m) - log_l) and not as exp(logit - lse):
    near a logit of 1e6 one float32 step is 0.06, so what the sum lse = m + log_l has lost would be
    missing from each probability of the row. Units and base of m and log_l are the backend's own,
    and where little is lost, it may give m = 0 and the sum as log_l.
    A row that sees nothing has m = 0 and log_l = inf, which makes all its probabilities 0.
    """

    out: jax.Array  # [B, T, N, Hv]
    lse: jax.Array | None = None  # float32 [B, T, N]; None where nobody asked for it
    # Both float32 [B, N, T], or None where no backward will follow.
    m: jax.Array | None = None
    log_l: jax.Array | None = None


class Operands(NamedTuple):
    """Every array of a call, in the one form that backends see. None: an option not used."""

    query: jax.Array  # [B, T, N, H]
    key: jax.Array  # [B, S, K, H]
    value: jax.Array  # [B, S, K, Hv]
    bias: jax.Array | None = None  # [B or 1, N or 1, T or 1, S or 1], any float dtype
    mask: jax.Array | None = None  # the same forms, bool, True where a key may be seen
    scale: jax.Array | None = None  # float32 []; None: that of `AttentionSpec`
    query_offset: jax.Array | None = None  # int32 [B]; None: zero
    query_seq_lengths: jax.Array | None = None  # int32 [B]
    key_value_seq_lengths: jax.Array | None = None  # int32 [B]
    # int32, or int64 where it was given so. Both or neither; [B, T] and [B, S].
    query_segment_ids: jax.Array | None = None
    key_value_segment_ids: jax.Array | None = None
    sinks: jax.Array | None = None  # float32 [N]


class DecodeOperands(NamedTuple):
    """Every array of a decoding call, in the one form that backends see.

    Query i of a row is at position lengths - T + i, and sees no key past its own position.
    """

    query: jax.Array  # [B, T, N, H]
    key: jax.Array  # [B, S, K, H], or with a page table [P, page size, K, H]
    value: jax.Array  # [B, S, K, Hv], or [P, page size, K, Hv]
    # int32 [B]: how many positions of a row are valid, its queries' own included. A row with a
    # length not within 0 and S gives NaN, out and lse.
    lengths: jax.Array
    # int32 [B, pages per row]: the page of the pages' first axis that holds a row's next positions.
    # What lies past a row's length, or before its window, may be any number; another page that
    # does not exist gives NaN to the queries that see it.
    page_table: jax.Array | None = None
    scale: jax.Array | None = None  # float32 []; None: that of `AttentionSpec`
    sinks: jax.Array | None = None  # float32 [N]


AnyOperands = Operands | DecodeOperands

# The operands that a gradient is taken in.
DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks", "scale")


class Residuals(NamedTuple):
    """What the backward gets from the forward, whichever backend ran it."""

    operands: Operands
    out: jax.Array  # [B, T, N, Hv]
    m: jax.Array  # float32 [B, N, T]; this and the next as in `ForwardOutput`
    log_l: jax.Array  # float32 [B, N, T]


@dataclass(frozen=True)
class Dims:
    """The sizes of a call: B, T, S, N, K, H and Hv."""

    batch: int
    query_length: int
    key_length: int
    query_heads: int
    key_heads: int
    head_dim: int
    value_head_dim: int

    @property
    def group(self) -> int:
        """G, the number of query heads that share one key/value head."""
        return self.query_heads // self.key_heads

    @classmethod
    def of(cls, operands: AnyOperands) -> Self:
        """The sizes of operands that have been validated."""
        batch, query_length, query_heads, head_dim = operands.query.shape
        _, key_length, key_heads, value_head_dim = operands.value.shape
        if isinstance(operands, DecodeOperands) and operands.page_table is not None:
            key_length *= operands.page_table.shape[1]
        return cls(
            batch, query_length, key_length, query_heads, key_heads, head_dim, value_head_dim
        )


@dataclass(frozen=True)
class AttentionSpec:
    """The static half of a call: what is fixed when a kernel is built. Hashable.

    Attributes:
      scale: the logits' factor, unless the operands hold one.
      is_causal: a query sees no key at a later position than its own.
      local_window_size: (left, right), each None where that side has no limit; None for no window.
      logits_soft_cap: the cap in cap * tanh(logits / cap), or None for none.
      precision: of products of float32 operands; 16-bit operands are always multiplied exactly.
    """

    scale: float = 1.0
    is_causal: bool = False
    local_window_size: tuple[int | None, int | None] | None = None
    logits_soft_cap: float | None = None
    precision: Precision = jax.lax.Precision.DEFAULT

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise ValueError(f"scale: expected a finite number, got {self.scale}")
        window = self.local_window_size
        if window is not None and any(side is not None and side < 0 for side in window):
            raise ValueError(
                f"local_window_size: expected (left, right), each >= 0 or None, got {window}"
            )
        cap = self.logits_soft_cap
        if cap is not None and not (math.isfinite(cap) and cap > 0):
            raise ValueError(f"logits_soft_cap: expected a finite number > 0 or None, got {cap}")

    @property
    def left(self) -> int | None:
        """How far back of its own position a query sees; None for without limit."""
        return None if self.local_window_size is None else self.local_window_size[0]

    @property
    def right(self) -> int | None:
        """How far past its own position a query sees; None for without limit."""
        if self.is_causal:
            return 0
        return None if self.local_window_size is None else self.local_window_size[1]
