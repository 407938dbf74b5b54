"""The online softmax of a kernel: `pallas_flash.softmax` in base 2, with a factor put off.

A logit comes as score * factor, in base 2, where factor > 0 is one number for all. The maximum is
taken of the scores, and p = 2^((score - m) * factor): the difference is exact where it matters, so
that p is as accurate at a logit of 1e9 as at 1, and the factor costs one product.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

LN_2 = math.log(2)
LOG2_E = math.log2(math.e)

Factor = float | jax.Array


class SoftmaxState(NamedTuple):
    """Running statistics of a tile's rows, float32."""

    m: jax.Array  # [rows], in scores
    l: jax.Array  # [rows]  # noqa: E741 - the literature's name
    acc: tuple[jax.Array, ...]  # each [rows, width of a piece of the value's head dim]


def init(rows: int, widths: tuple[int, ...]) -> SoftmaxState:
    """The state before any key."""
    return SoftmaxState(
        jnp.full((rows,), -jnp.inf, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        tuple(jnp.zeros((rows, width), jnp.float32) for width in widths),
    )


def update(
    state: SoftmaxState,
    score: jax.Array,
    factor: Factor,
    weigh: Callable[[jax.Array], tuple[jax.Array, ...]],
) -> SoftmaxState:
    """Take in one block of keys.

    Args:
      state: of [rows].
      score: float32 [rows, block_k], -inf where a key may not be seen.
      factor: logits in base 2 are score * factor.
      weigh: takes the unnormalised probabilities p, [rows, block_k], to the pieces of p . v.
    """
    m = jnp.maximum(state.m, jnp.max(score, axis=1))
    # A row that has met nothing yet: -inf - (-inf) is NaN, and 0 is meant.
    shift = jnp.where(m == -jnp.inf, 0.0, m)
    p = jnp.exp2((score - shift[:, None]) * factor)
    alpha = jnp.exp2((state.m - shift) * factor)
    acc = tuple(x * alpha[:, None] + y for x, y in zip(state.acc, weigh(p), strict=True))
    return SoftmaxState(m, state.l * alpha + jnp.sum(p, axis=1), acc)


class Finished(NamedTuple):
    """Of rows that saw nothing: out 0, lse -inf, m 0 and log_l inf."""

    out: tuple[jax.Array, ...]  # as `SoftmaxState.acc`
    lse: jax.Array  # [rows], natural
    m: jax.Array  # [rows], in scores
    log_l: jax.Array  # [rows], in base 2


def finish(state: SoftmaxState, factor: Factor, is_row: jax.Array | None) -> Finished:
    """Normalise. Rows that are not (`is_row`, bool [rows]; None: all are) see nothing."""
    is_empty = state.l == 0.0
    if is_row is not None:
        is_empty = is_empty | ~is_row
    divisor = jnp.where(is_empty, 1.0, state.l)
    log_l = jnp.log(divisor)
    return Finished(
        tuple(jnp.where(is_empty[:, None], 0.0, x / divisor[:, None]) for x in state.acc),
        jnp.where(is_empty, -jnp.inf, state.m * (factor * LN_2) + log_l),
        jnp.where(is_empty, 0.0, state.m),
        jnp.where(is_empty, jnp.inf, log_l * LOG2_E),
    )
