"""The online softmax of a kernel: `pallas_flash.softmax` in base 2, with a factor put off.

A logit comes as score * factor + offset, in base 2, where factor > 0 and offset are one number each
for all, and on the latter hangs lse alone. The maximum is taken of the scores, and
p = 2^((score - m) * factor): the difference is exact where it matters and adds nothing to what a
large score has lost by itself, and the factor costs one product.
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
    exp2: Callable[[jax.Array], jax.Array],
    weigh: Callable[[jax.Array], tuple[jax.Array, ...]],
) -> SoftmaxState:
    """Take in one block of keys.

    Args:
      state: of [rows].
      score: float32 [rows, block_k], -inf where a key may not be seen.
      factor: logits in base 2 are score * factor.
      exp2: of float32.
      weigh: takes the unnormalised probabilities p, [rows, block_k], to the pieces of p . v.
    """
    m = jnp.maximum(state.m, jnp.max(score, axis=1))
    # A row that has met nothing yet: -inf - (-inf) is NaN, and 0 is meant.
    shift = jnp.where(m == -jnp.inf, 0.0, m)
    p = exp2((score - shift[:, None]) * factor)
    alpha = exp2((state.m - shift) * factor)
    acc = tuple(x * alpha[:, None] + y for x, y in zip(state.acc, weigh(p), strict=True))
    return SoftmaxState(m, state.l * alpha + jnp.sum(p, axis=1), acc)


# Up to this a step of a float32 costs p 2e-5, a twentieth of a step of float16; and a lse, which
# lies at most 160 beyond, no more than `_LARGEST_WHOLE_LSE` allows.
_LARGEST_GUESS = 512.0


def add(
    state: SoftmaxState, p: jax.Array, weigh: Callable[[jax.Array], tuple[jax.Array, ...]]
) -> SoftmaxState:
    """Take in one block of keys by a guess for m that stays, a logit in base 2.

    There is no maximum to find and nothing to scale again: 400 instructions in the loop for rows of
    128 entries in place of 700, and the forward took 8 to 14 % less time (H200). Any m is right as
    long as nothing overflows or all but vanishes: it is the logit of a key that the row sees, so
    sums are about as large as `update` has them or larger, and `is_right` tells in the end
    (FlashDecoding++, Hong et al., 2023, section 3, with this for its unified maximum).

    Args:
      state: of [rows].
      p: 2^(logit - m), float32 [rows, block_k].
      weigh: as in `update`.
    """
    acc = tuple(x + y for x, y in zip(state.acc, weigh(p), strict=True))
    return SoftmaxState(state.m, state.l + jnp.sum(p, axis=1), acc)


def is_right(state: SoftmaxState) -> jax.Array:
    """Whether `add` served every row, bool []: sums lie well within float32, guesses were small.

    Sums of 2^126 would have no inverse that a GPU or XLA knows. And a guess comes by another order
    of additions than the logit of the same key: where large terms cancel, even that key's p may
    vanish.
    """
    size = state.l
    for piece in state.acc:
        size = size + jnp.sum(jnp.abs(piece), axis=1)
    is_right = (state.l > _LEAST_SUM) & (size < _LARGEST_SUM)
    is_right &= jnp.abs(state.m) <= _LARGEST_GUESS
    return jnp.min(is_right.astype(jnp.int32)) > 0


_LEAST_SUM, _LARGEST_SUM = 2.0**-20, 2.0**120


class Finished(NamedTuple):
    """What becomes of a state; of a row that saw nothing out is 0, lse -inf, m 0 and log_l inf.

    The backward recomputes p as 2^((score - m) * factor - log_l). With m = 0 that is the same with
    log_l the lse in base 2, one statistic to read in place of two, and it is as good as long as a
    step of that is small.
    """

    out: tuple[jax.Array, ...]  # as `SoftmaxState.acc`
    lse: jax.Array  # [rows], natural
    m: jax.Array  # [rows], in scores: the maximum of a row that keeps it, else 0
    log_l: jax.Array  # [rows], in base 2


# Below this, in base 2, a step of lse costs p 4e-5: a twelfth of a step of float16.
_LARGEST_WHOLE_LSE = 1024.0


def finish(
    state: SoftmaxState, factor: Factor, offset: float, is_row: jax.Array | None, *, keeps_m: bool
) -> Finished:
    """Normalise.

    Args:
      state: of [rows].
      factor: as in `update`.
      offset: what logits in base 2 are above score * factor. 0 where any m is kept.
      is_row: which rows are any, bool [rows]; the others see nothing. None: all are.
      keeps_m: every row keeps its maximum, and not only those with a large lse.
    """
    is_empty = state.l == 0.0
    if is_row is not None:
        is_empty = is_empty | ~is_row
    divisor = jnp.where(is_empty, 1.0, state.l)
    log_l = jnp.log(divisor)
    out = tuple(jnp.where(is_empty[:, None], 0.0, x / divisor[:, None]) for x in state.acc)
    lse = jnp.where(is_empty, -jnp.inf, state.m * (factor * LN_2) + offset * LN_2 + log_l)
    m, log_l = state.m, log_l * LOG2_E
    if not keeps_m:
        whole = m * factor + offset + log_l
        is_large = jnp.abs(whole) > _LARGEST_WHOLE_LSE
        m, log_l = jnp.where(is_large, m, 0.0), jnp.where(is_large, log_l, whole)
    return Finished(out, lse, jnp.where(is_empty, 0.0, m), jnp.where(is_empty, jnp.inf, log_l))
