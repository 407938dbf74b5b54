"""Decoding as the forward of few queries, whose positions end where their row does."""

import functools

import jax
import jax.numpy as jnp

from pallas_flash.backends.xla.forward import forward
from pallas_flash.spec import AttentionSpec, DecodeOperands, Dims, ForwardOutput, Operands


@functools.partial(jax.jit, static_argnums=(0, 1))
def decode(spec: AttentionSpec, blocks: tuple[int, int], operands: DecodeOperands) -> ForwardOutput:
    """Attention and its lse, with blocks of (block_q, block_k)."""
    dims = Dims.of(operands)
    lengths = jnp.clip(operands.lengths, 0, dims.key_length)
    is_page_read = _is_page_read(spec, operands)
    result = forward(
        spec,
        blocks,
        Operands(
            query=operands.query,
            # A missing page shows in the logits of the tokens that see it, and 0 * NaN in all.
            key=_contiguous(operands.key, operands.page_table, is_page_read, jnp.nan),
            value=_contiguous(operands.value, operands.page_table, is_page_read, 0.0),
            scale=operands.scale,
            query_offset=lengths - dims.query_length,
            key_value_seq_lengths=lengths,
            sinks=operands.sinks,
        ),
    )
    is_outside = (lengths != operands.lengths)[:, None, None]
    return ForwardOutput(
        jnp.where(is_outside[..., None], jnp.nan, result.out),
        jnp.where(is_outside, jnp.nan, result.lse),
    )


def _is_page_read(spec: AttentionSpec, operands: DecodeOperands) -> jax.Array | None:
    """Which pages of each row hold a key that is not before its window, [B, pages per row]."""
    if operands.page_table is None or spec.left is None:
        return None
    page_size, pages_per_row = operands.key.shape[1], operands.page_table.shape[1]
    first = operands.lengths - operands.query.shape[1] - spec.left
    stop = (1 + jnp.arange(pages_per_row, dtype=jnp.int32)) * page_size
    return stop[None, :] > first[:, None]


def _contiguous(
    cache: jax.Array,
    page_table: jax.Array | None,
    is_page_read: jax.Array | None,
    missing: float,
) -> jax.Array:
    """Pages [P, page size, K, ...] as [B, S, K, ...]; `missing` where there is no such page."""
    if page_table is None:
        return cache
    # A negative index would count from the end.
    page = jnp.where(page_table < 0, cache.shape[0], page_table)
    rows = cache.at[page].get(mode="fill", fill_value=missing)
    if is_page_read is not None:
        # Pages before a window may have been given to others.
        rows = jnp.where(is_page_read[..., None, None, None], rows, 0)
    batch, pages_per_row = page.shape
    return rows.reshape(batch, pages_per_row * cache.shape[1], *cache.shape[2:])
