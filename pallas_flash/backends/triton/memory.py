"""How a program reads and writes rows of one head, whose head dim comes in pieces."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_flash.backends.triton import lowering
from pallas_flash.backends.triton.config import pieces


def read(
    ref: Any, batch: jax.Array, rows: jax.Array, head: jax.Array, exists: jax.Array | None
) -> tuple[jax.Array, ...]:
    """Rows of one head of [B, length, heads, head dim], in pieces of [rows, width].

    Args:
      ref: what is read.
      batch: which batch row, int32 [].
      rows: which rows, int32 [rows].
      head: which head, int32 [].
      exists: which of the rows there are, bool [rows]; the others come as 0. None: all.
    """

    def piece(start: int, width: int) -> jax.Array:
        index, mask = _index(ref, batch, rows, head, exists, start, width)
        if mask is None:
            return lowering.load(ref.at[index])
        return lowering.load(ref.at[index], mask=mask, other=0.0)

    return tuple(piece(start, width) for start, width in pieces(ref.shape[3]))


def read_row(ref: Any, batch: jax.Array, row: jax.Array, head: jax.Array) -> tuple[jax.Array, ...]:
    """One row, which exists, in pieces of [width]."""

    def piece(start: int, width: int) -> jax.Array:
        columns = start + jnp.arange(width, dtype=jnp.int32)
        where = ref.at[batch, row, head, columns]
        if start + width <= ref.shape[3]:
            return lowering.load(where)
        return lowering.load(where, mask=columns < ref.shape[3], other=0.0)

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
    mask = None
    if exists is not None:
        mask = jnp.broadcast_to(exists[:, None], (rows.shape[0], width))
    if start + width > ref.shape[3]:
        is_column = jnp.broadcast_to((columns < ref.shape[3])[None, :], (rows.shape[0], width))
        mask = is_column if mask is None else mask & is_column
    return (batch, rows[:, None], head, columns[None, :]), mask
