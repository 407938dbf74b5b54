"""Who sees whom, from positions alone, and which keys a stretch of queries needs, and the inverse.

Pure arithmetic: positions come in and are never built here, so the same lines serve a block of
plain JAX and a tile inside a kernel. Positions may be Python ints or integer arrays that broadcast.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash.spec import AttentionSpec

Positions = int | jax.Array


def visible(
    spec: AttentionSpec,
    q_pos: Positions,
    k_pos: Positions,
    *,
    key_length: Positions | None = None,
    q_segment: jax.Array | None = None,
    k_segment: jax.Array | None = None,
) -> jax.Array | None:
    """Whether the query at q_pos may see the key at k_pos, bool, or None where nothing is masked.

    Args:
      spec: gives causality and the window.
      q_pos: positions of the queries, the offset counted in.
      k_pos: positions of the keys.
      key_length: the number of keys that exist, where fewer than the array holds.
      q_segment: segment ids of the queries, or None.
      k_segment: segment ids of the keys, or None.
    """
    conditions = []
    if spec.left is not None:
        conditions.append(k_pos >= q_pos - spec.left)
    if spec.right is not None:
        conditions.append(k_pos <= q_pos + spec.right)
    if key_length is not None:
        conditions.append(k_pos < key_length)
    if q_segment is not None:
        conditions.append(q_segment == k_segment)
    if not conditions:
        return None
    result = jnp.asarray(conditions[0])
    for condition in conditions[1:]:
        result = result & condition
    return result


def key_range(
    spec: AttentionSpec, q_first: Positions, q_last: Positions, key_length: Positions
) -> tuple[jax.Array, jax.Array]:
    """The keys [start, stop) outside of which no query at q_first..q_last sees any."""
    start = 0 if spec.left is None else q_first - spec.left
    stop = key_length if spec.right is None else q_last + spec.right + 1
    return _clip(start, stop, key_length)


def query_range(
    spec: AttentionSpec,
    k_first: Positions,
    k_last: Positions,
    query_length: Positions,
    query_offset: Positions = 0,
) -> tuple[jax.Array, jax.Array]:
    """The queries [start, stop), by index, outside of which none sees a key at k_first..k_last.

    The inverse of `key_range`: key j is seen from the positions [j - right, j + left].
    """
    start = 0 if spec.right is None else k_first - spec.right - query_offset
    stop = query_length if spec.left is None else k_last + spec.left + 1 - query_offset
    return _clip(start, stop, query_length)


def _clip(start: Positions, stop: Positions, length: Positions) -> tuple[jax.Array, jax.Array]:
    start = jnp.maximum(start, 0)
    return start, jnp.maximum(jnp.minimum(stop, length), start)


def blocks(start: jax.Array, stop: jax.Array, block_size: int) -> tuple[jax.Array, jax.Array]:
    """The blocks [first, last) of `block_size` that hold the positions [start, stop)."""
    first = _divide(start, block_size)
    return first, jnp.where(stop > start, _divide(stop + block_size - 1, block_size), first)


class Stretch(NamedTuple):
    """Blocks along one axis against one block of the other.

    Those of [first, last) hold a pair that is seen; those of [full_first, full_last), which lie
    within, hold no other.
    """

    first: jax.Array
    full_first: jax.Array
    full_last: jax.Array
    last: jax.Array

    def only_if(self, condition: jax.Array) -> "Stretch":
        """The same, or no block."""
        return Stretch(*(condition.astype(jnp.int32) * block for block in self))


def key_blocks(
    spec: AttentionSpec,
    q_first: Positions,
    q_last: Positions,
    key_length: Positions,
    block_size: int,
) -> Stretch:
    """The key blocks that the queries at q_first..q_last need."""
    start = 0 if spec.left is None else q_last - spec.left
    stop = key_length if spec.right is None else q_first + spec.right + 1
    needed = key_range(spec, q_first, q_last, key_length)
    return _stretch(*blocks(*needed, block_size), start, jnp.minimum(stop, key_length), block_size)


def has_full_blocks(spec: AttentionSpec, block_q: int, block_k: int) -> bool:
    """Whether a window is wide enough for all queries of a block to see all keys of one."""
    if spec.left is None or spec.right is None:
        return True
    return spec.left + 1 + spec.right >= block_q + block_k - 1


def query_blocks(
    spec: AttentionSpec,
    k_first: Positions,
    k_last: Positions,
    query_length: Positions,
    query_offset: Positions,
    block_size: int,
) -> Stretch:
    """The query blocks, by index and not by position, that need the keys at k_first..k_last."""
    start = 0 if spec.right is None else k_last - spec.right - query_offset
    stop = query_length if spec.left is None else k_first + spec.left + 1 - query_offset
    needed = query_range(spec, k_first, k_last, query_length, query_offset)
    return _stretch(
        *blocks(*needed, block_size), start, jnp.minimum(stop, query_length), block_size
    )


def _stretch(
    first: jax.Array, last: jax.Array, start: Positions, stop: Positions, block_size: int
) -> Stretch:
    """Of the blocks [first, last), full are those that lie within the positions [start, stop)."""
    full_first = _divide(jnp.maximum(start, 0) + block_size - 1, block_size)
    full_first = jnp.minimum(jnp.maximum(full_first, first), last)
    full_last = _divide(jnp.maximum(stop, 0), block_size)
    full_last = jnp.maximum(jnp.minimum(full_last, last), full_first)
    return Stretch(first, full_first, full_last, last)


def _divide(x: Positions, divisor: int) -> jax.Array:
    """x // divisor, for x >= 0: what is left out is all that `//` does for other signs."""
    return lax.div(jnp.int32(x), jnp.int32(divisor))
