"""The online softmax: one pass over blocks of logits, and the merge of partial results.

Milakov & Gimelshein, "Online normalizer calculation for softmax" (2018), algorithm 3; the deferred
division by the denominator is FlashAttention-2 (Dao, 2023), section 3.1.

A row's state holds the running maximum m, the denominator l and the unnormalised output acc, both
relative to exp(m). A row that has met no logit above -inf keeps m = -inf; its shift is then 0
rather than m, for -inf - (-inf) is NaN while exp(-inf - 0) is the 0 that is meant.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp


class SoftmaxState(NamedTuple):
    """Running statistics of rows [...], float32: m and l of that shape, acc of [..., Hv]."""

    m: jax.Array
    l: jax.Array  # noqa: E741 - the literature's name
    acc: jax.Array


def _shift(m: jax.Array) -> jax.Array:
    return jnp.where(jnp.isneginf(m), 0.0, m)


def init(
    rows: tuple[int, ...], value_head_dim: int, sinks: jax.Array | None = None
) -> SoftmaxState:
    """The state before any key.

    Args:
      rows: the shape [...] of the rows.
      value_head_dim: Hv.
      sinks: logits that join the denominator and have no value, float32, broadcastable to [...].
    """
    acc = jnp.zeros((*rows, value_head_dim), jnp.float32)
    if sinks is None:
        return SoftmaxState(
            jnp.full(rows, -jnp.inf, jnp.float32), jnp.zeros(rows, jnp.float32), acc
        )
    m = jnp.broadcast_to(sinks, rows)
    return SoftmaxState(m, jnp.exp(m - _shift(m)), acc)


def update(
    state: SoftmaxState, logits: jax.Array, weigh: Callable[[jax.Array], jax.Array]
) -> SoftmaxState:
    """Take in one block of keys.

    Args:
      state: of rows [...].
      logits: float32 [..., block_k], -inf where a key may not be seen.
      weigh: takes the unnormalised probabilities p, [..., block_k], to p . v, [..., Hv].
    """
    m = jnp.maximum(state.m, jnp.max(logits, axis=-1, initial=-jnp.inf))
    shift = _shift(m)
    p = jnp.exp(logits - shift[..., None])
    alpha = jnp.exp(state.m - shift)
    return SoftmaxState(
        m, alpha * state.l + jnp.sum(p, axis=-1), alpha[..., None] * state.acc + weigh(p)
    )


class Finished(NamedTuple):
    """Of rows [...]: out [..., Hv], lse [...], and its two parts.

    lse = m + log_l, but for a row without logits: there m = 0 and log_l = inf, so that
    exp((logit - m) - log_l) is 0 for each logit there may be, and lse = -inf.
    """

    out: jax.Array
    lse: jax.Array
    m: jax.Array
    log_l: jax.Array


def finish(state: SoftmaxState) -> Finished:
    """Normalise."""
    m, l, acc = state  # noqa: E741
    is_empty = l == 0.0
    divisor = jnp.where(is_empty, 1.0, l)
    log_l = jnp.log(divisor)
    return Finished(
        acc / divisor[..., None],
        jnp.where(is_empty, -jnp.inf, m + log_l),
        jnp.where(is_empty, 0.0, m),
        jnp.where(is_empty, jnp.inf, log_l),
    )


def merge(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Join attention over parts of the keys into attention over all of them.

    Args:
      out: one output for each part, [parts, ..., Hv].
      lse: their float32 lse, [parts, ...]; -inf for a part in which a row sees nothing.

    Returns:
      out [..., Hv] in the dtype given and lse [...] in float32.
    """
    m = jnp.max(lse, axis=0, initial=-jnp.inf)
    weights = jnp.exp(lse - _shift(m)[None])
    l = jnp.sum(weights, axis=0)  # noqa: E741
    acc = jnp.sum(weights[..., None] * out.astype(jnp.float32), axis=0)
    merged = finish(SoftmaxState(m, l, acc))
    return merged.out.astype(out.dtype), merged.lse


def add_sink(out: jax.Array, lse: jax.Array, sink: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Let a logit that has no value join the denominator of finished attention.

    Args:
      out: float32 [..., Hv].
      lse: float32 [...].
      sink: float32, broadcastable to [...].

    Returns:
      The same two with it.
    """
    m = jnp.maximum(lse, sink)
    weight, rest = jnp.exp(lse - _shift(m)), jnp.exp(sink - _shift(m))
    finished = finish(SoftmaxState(m, weight + rest, weight[..., None] * out))
    return finished.out, finished.lse
