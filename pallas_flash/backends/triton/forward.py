"""The forward kernel: FlashAttention-2, algorithm 1 (Dao, 2023), one program for a query block."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash import sharding
from pallas_flash.backends.triton import lowering, softmax, tile
from pallas_flash.backends.triton.config import Config, widths
from pallas_flash.spec import AttentionSpec, Dims, ForwardOutput, Operands


def _kernel(
    spec: AttentionSpec,
    dims: Dims,
    config: Config,
    refs: Operands,
    out_ref: Any,
    lse_ref: Any,
    m_ref: Any = None,
    log_l_ref: Any = None,
) -> None:
    blocks = -(-dims.query_length // config.block_q)
    place, head, batch = lowering.program(blocks, dims.query_heads)
    # From the last block on: with causality it has the most to do, and should not come last.
    block = blocks - 1 - place
    row = tile.BatchRow.read(spec, dims, config, refs, batch)
    key_head = lax.div(head, jnp.int32(dims.group))

    rows, exists = row.rows(block, is_full=False)
    q = row.signed(tile.read(refs.query, row.batch, rows, head, exists))

    def key_block(j: jax.Array, state: softmax.SoftmaxState, is_full: bool):
        columns, exists = row.columns(j, is_full=is_full)
        k = tile.read(refs.key, row.batch, columns, key_head, exists)
        logits = row.tile(row.dot(q, k), rows[:, None], columns[None, :], is_full=is_full)

        def weigh(p: jax.Array) -> tuple[jax.Array, ...]:
            return row.weigh(p, tile.read(refs.value, row.batch, columns, key_head, exists))

        return softmax.update(state, logits.score, row.factor, weigh)

    state = softmax.init(config.block_q, widths(dims.value_head_dim))
    state = row.fold_keys(block, key_block, state)
    result = softmax.finish(state, row.factor, exists if row.has_query_lengths else None)

    is_stored = rows < dims.query_length
    tile.write(out_ref, row.batch, rows, head, is_stored, result.out)
    lowering.store(lse_ref.at[row.batch, rows, head], result.lse, mask=is_stored)
    for ref, x in ((m_ref, result.m), (log_l_ref, result.log_l)):
        if ref is not None:
            lowering.store(ref.at[row.batch, head, rows], x, mask=is_stored)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def forward(
    spec: AttentionSpec,
    config: Config,
    interpret: bool,
    with_statistics: bool,
    operands: Operands,
) -> ForwardOutput:
    """Attention, its lse, and where asked for the statistics that the backward needs."""
    dims = Dims.of(operands)
    rows = (dims.batch, dims.query_length, dims.query_heads)
    statistics = (dims.batch, dims.query_heads, dims.query_length)
    outputs = [
        jax.ShapeDtypeStruct((*rows, dims.value_head_dim), operands.query.dtype),
        jax.ShapeDtypeStruct(rows, jnp.float32),
    ]
    if with_statistics:
        outputs += [jax.ShapeDtypeStruct(statistics, jnp.float32)] * 2
    if 0 in (dims.batch, dims.query_length, dims.key_length):
        values = (0.0, -jnp.inf, 0.0, jnp.inf)
        empty = [
            jnp.full(x.shape, value, x.dtype) for x, value in zip(outputs, values, strict=False)
        ]
        return sharding.vary_like(ForwardOutput(*empty), operands.query)
    results = lowering.launch(
        functools.partial(_kernel, spec, dims, config),
        name="flash_attention_forward",
        programs=dims.batch * dims.query_heads * -(-dims.query_length // config.block_q),
        outputs=outputs,
        config=config,
        interpret=interpret,
        like=operands.query,
    )(operands)
    return ForwardOutput(*results)
