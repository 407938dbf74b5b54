"""Which block, head and batch row a program has, and so in which order the work is begun."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash.backends.triton import lowering, tile
from pallas_flash.spec import Operands


def query_program(
    kernel: tile.Kernel, refs: Operands
) -> tuple[tile.BatchRow, jax.Array, jax.Array, jax.Array]:
    """Of a program that has a query block: its batch row, block, head and key head."""
    dims = kernel.dims
    blocks = kernel.config.query_blocks(dims)
    together = _CACHED_BYTES // _bytes_of_rows(refs.key, refs.value)
    place, head, batch = _place(kernel, blocks, dims.group, together)
    # From the last block on: with causality it has the most to do.
    block = blocks - 1 - place
    key_head = lax.div(head, jnp.int32(dims.group))
    return tile.BatchRow.read(kernel, refs, batch), block, head, key_head


def key_program(kernel: tile.Kernel, refs: Operands) -> tuple[tile.BatchRow, jax.Array, jax.Array]:
    """Of a program that has a key block: its batch row, block and key head."""
    dims = kernel.dims
    blocks = kernel.config.key_blocks(dims)
    # Of query and do.
    row_bytes = (dims.head_dim + dims.value_head_dim) * refs.query.dtype.itemsize
    together = _CACHED_BYTES // (dims.group * dims.query_length * row_bytes)
    # From the first block on, which has the most to do.
    block, key_head, batch = _place(kernel, blocks, 1, together)
    return tile.BatchRow.read(kernel, refs, batch), block, key_head


# What heads that are worked on together may read, for most of it to be read once from memory: the
# L2 caches of A100 (40 MB), H200 (50 MB), L4 (48 MB) and RTX 4090 (72 MB) hold it.
_CACHED_BYTES = 32 * 2**20


def _place(
    kernel: tile.Kernel, blocks: int, group: int, together: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A program's block, counted in the order in which blocks are begun, head and batch row.

    Heads are as many as key heads times `group`. With causality blocks differ in length. The heads
    of up to so many key heads are then worked on `together`, the longest blocks of them all first
    and the shortest last: head by head, the longest blocks of the last head would be begun when all
    others are nearly done (32 heads of 8192 on an H200: a seventh of the time).
    """
    if kernel.spec.right is None or kernel.spec.left is not None:
        together = 1
    heads = kernel.dims.key_heads * group
    total = kernel.dims.batch * kernel.dims.key_heads
    together = min(max(together, 1), 1024)
    together = group * max(size for size in range(1, together + 1) if total % size == 0)
    which, block, several = lowering.program(together, blocks)
    head = several * together + which
    return block, lax.rem(head, jnp.int32(heads)), lax.div(head, jnp.int32(heads))


def _bytes_of_rows(*refs: Any) -> int:
    """Of one head, of references to [B, length, heads, head dim]."""
    return sum(ref.shape[1] * ref.shape[3] * ref.dtype.itemsize for ref in refs)
