"""How a program reads and writes rows of heads, whose head dim comes in pieces."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_flash.backends.triton import lowering
from pallas_flash.backends.triton.config import pieces


def read(
    ref: Any, batch: jax.Array, rows: jax.Array, head: jax.Array, exists: jax.Array | None
) -> tuple[jax.Array, ...]:
    """Rows of [B, length, heads, head dim], in pieces of [..., width].

    Args:
      ref: what is read.
      batch: their batch rows, int32 [] or [rows]. This and the next two broadcast to the [...] of
        the pieces, [rows] or, for one row, [].
      rows: where they are along the length, likewise.
      head: their heads, likewise.
      exists: which of the rows there are, bool [rows]; the others come as 0. None: all.
    """

    def piece(start: int, width: int) -> jax.Array:
        index, mask = _index(ref, batch, rows, head, exists, start, width)
        if mask is None:
            return lowering.load(ref.at[index])
        return lowering.load(ref.at[index], mask=mask, other=0.0)

    return tuple(piece(start, width) for start, width in pieces(ref.shape[3]))


def write(
    ref: Any,
    batch: jax.Array,
    rows: jax.Array,
    head: jax.Array,
    exists: jax.Array | None,
    values: tuple[jax.Array, ...],
) -> None:
    """The inverse of `read`, in the reference's dtype; rows that do not exist are left alone."""
    for (start, width), value in zip(pieces(ref.shape[3]), values, strict=True):
        index, mask = _index(ref, batch, rows, head, exists, start, width)
        lowering.store(ref.at[index], value.astype(ref.dtype), mask=mask)


def _index(
    ref: Any,
    batch: jax.Array,
    rows: jax.Array,
    head: jax.Array,
    exists: jax.Array | None,
    start: int,
    width: int,
) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """Where a piece lies, and a mask of what there is of it; None where it is all there."""
    columns = start + jnp.arange(width, dtype=jnp.int32)
    rows_shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in (batch, rows, head)))
    place = tuple(x[:, None] if jnp.ndim(x) else x for x in (batch, rows, head))
    mask = None
    if exists is not None:
        mask = jnp.broadcast_to(exists[:, None], (*rows_shape, width))
    if rows_shape:
        columns = columns[None, :]
    if start + width > ref.shape[3]:
        is_column = jnp.broadcast_to(columns < ref.shape[3], (*rows_shape, width))
        mask = is_column if mask is None else mask & is_column
    return (*place, columns), mask
