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
    result = forward(
        spec,
        blocks,
        Operands(
            query=operands.query,
            key=_contiguous(spec, operands, operands.key),
            value=_contiguous(spec, operands, operands.value),
            scale=operands.scale,
            query_offset=lengths - dims.query_length,
            key_value_seq_lengths=lengths,
            sinks=operands.sinks,
        ),
    )
    is_beyond = (operands.lengths > dims.key_length)[:, None, None]
    return ForwardOutput(
        jnp.where(is_beyond[..., None], jnp.nan, result.out),
        jnp.where(is_beyond, jnp.nan, result.lse),
    )


def _contiguous(spec: AttentionSpec, operands: DecodeOperands, pages: jax.Array) -> jax.Array:
    """Pages [P, page size, K, ...] as a cache [B, S, K, ...]; NaN where there is no such page."""
    table = operands.page_table
    if table is None:
        return pages
    # A negative index would count from the end.
    page = jnp.where(table < 0, pages.shape[0], table)
    cache = pages.at[page].get(mode="fill", fill_value=jnp.nan)
    if spec.left is not None:
        # Pages before a window may have been given to others.
        first = operands.lengths - operands.query.shape[1] - spec.left
        stop = (1 + jnp.arange(table.shape[1], dtype=jnp.int32)) * pages.shape[1]
        is_read = stop[None, :] > first[:, None]
        cache = jnp.where(is_read[..., None, None, None], cache, 0)
    return cache.reshape(table.shape[0], -1, *pages.shape[2:])
