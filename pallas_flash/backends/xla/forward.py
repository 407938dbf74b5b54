"""The forward: FlashAttention-2, algorithm 1 (Dao, 2023), over all batch rows and heads at once."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash import sharding, softmax
from pallas_flash.backends.xla.tile import Call
from pallas_flash.spec import AttentionSpec, ForwardOutput, Operands


@functools.partial(jax.jit, static_argnums=(0, 1))
def forward(spec: AttentionSpec, blocks: tuple[int, int], operands: Operands) -> ForwardOutput:
    """Attention and its lse, with blocks of (block_q, block_k)."""
    call = Call.of(spec, operands, *blocks)
    dims = call.dims
    tile_rows = (dims.batch, dims.key_heads, dims.group, call.queries.size)

    def query_block(i, outputs):
        q = call.query(i)
        first, last = call.key_blocks(i)

        def key_block(j, state):
            tile = call.tile(q, call.key_tile(operands.key, j), i, j)
            v = call.key_tile(operands.value, j)
            return softmax.update(state, tile.logits, lambda p: call.dot("bkgqj,bkjh->bkgqh", p, v))

        state = softmax.init(tile_rows, dims.value_head_dim, call.sinks(i))
        state = sharding.vary_like(state, q)
        result = softmax.finish(call.keys.fold(first, last, key_block, state))
        # XLA may leave out a cast down and up again, and the backward, compiled together with this,
        # would take another delta than one compiled apart. The exponent stays wide: with float16's,
        # numbers below its normal ones would become 0.
        mantissa = jnp.finfo(operands.query.dtype).nmant
        out = lax.reduce_precision(result.out, jnp.finfo(jnp.float32).nexp, mantissa)
        return [
            lax.dynamic_update_slice_in_dim(
                whole, call.from_query_tile(x).astype(whole.dtype), call.queries.start(i), 1
            )
            for whole, x in zip(outputs, (out, *result[1:]), strict=True)
        ]

    rows = jnp.zeros((dims.batch, dims.query_length, dims.query_heads), jnp.float32)
    out = jnp.zeros((*rows.shape, dims.value_head_dim), operands.query.dtype)
    outputs = sharding.vary_like([out, rows, rows, rows], operands.query)
    out, lse, m, log_l = call.queries.fold(0, call.queries.count, query_block, outputs)
    return ForwardOutput(out, lse, m.swapaxes(1, 2), log_l.swapaxes(1, 2))
