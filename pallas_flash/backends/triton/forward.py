"""The forward kernel: FlashAttention-2, algorithm 1 (Dao, 2023), one program for a query block."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_flash import sharding
from pallas_flash.backends.triton import lowering, schedule, softmax, tile
from pallas_flash.backends.triton.config import Config, widths
from pallas_flash.spec import AttentionSpec, Dims, ForwardOutput, Operands


def _kernel(
    kernel: tile.Kernel,
    with_lse: bool,
    with_statistics: bool,
    refs: Operands,
    *output_refs: Any,
) -> None:
    dims = kernel.dims
    row, block, head, key_head = schedule.query_program(kernel, refs)
    rows, exists = row.rows(block, is_full=False)
    q = row.signed(tile.read(refs.query, row.batch, rows, head, exists))

    def key_block(j: jax.Array, state: softmax.SoftmaxState, is_full: bool):
        columns, exists = row.columns(j, is_full=is_full)
        k = tile.read(refs.key, row.batch, columns, key_head, exists)
        logits = row.tile(row.dot(q, k), rows[:, None], columns[None, :], is_full=is_full)

        def weigh(p: jax.Array) -> tuple[jax.Array, ...]:
            return row.weigh(p, tile.read(refs.value, row.batch, columns, key_head, exists))

        return softmax.update(state, logits.score, row.factor, row.exp2, weigh)

    state = softmax.init(kernel.config.block_q, widths(dims.value_head_dim))
    state = row.fold_keys(block, key_block, state)
    is_row = exists if row.has_query_lengths else None
    result = softmax.finish(state, row.factor, is_row, keeps_m=not row.has_16_bits)

    out_ref, *row_refs = output_refs
    is_stored = rows < dims.query_length
    tile.write(out_ref, row.batch, rows, head, is_stored, result.out)
    if with_lse:
        lse_ref, *row_refs = row_refs
        lowering.store(lse_ref.at[row.batch, rows, head], result.lse, mask=is_stored)
    if with_statistics:
        for ref, x in zip(row_refs, (result.m, result.log_l), strict=True):
            lowering.store(ref.at[row.batch, head, rows], x, mask=is_stored)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def forward(
    spec: AttentionSpec,
    config: Config,
    interpret: bool,
    with_lse: bool,
    with_statistics: bool,
    operands: Operands,
) -> ForwardOutput:
    """Attention, and where asked for its lse and the statistics that the backward needs."""
    dims = Dims.of(operands)
    rows = (dims.batch, dims.query_length, dims.query_heads)
    row = jax.ShapeDtypeStruct(rows, jnp.float32)
    statistic = jax.ShapeDtypeStruct((rows[0], rows[2], rows[1]), jnp.float32)
    out = jax.ShapeDtypeStruct((*rows, dims.value_head_dim), operands.query.dtype)
    # What each holds where no row sees anything.
    outputs = {"out": (out, 0.0)}
    if with_lse:
        outputs["lse"] = (row, -jnp.inf)
    if with_statistics:
        outputs |= {"m": (statistic, 0.0), "log_l": (statistic, jnp.inf)}
    if 0 in (dims.batch, dims.query_length, dims.key_length):
        empty = {name: jnp.full(x.shape, value, x.dtype) for name, (x, value) in outputs.items()}
        return sharding.vary_like(ForwardOutput(**empty), operands.query)
    kernel = tile.Kernel(spec, dims, config, interpret, gives_lse=with_lse)
    results = lowering.launch(
        functools.partial(_kernel, kernel, with_lse, with_statistics),
        name="flash_attention_forward",
        programs=dims.batch * dims.query_heads * config.query_blocks(dims),
        outputs=[x for x, _ in outputs.values()],
        config=config,
        interpret=interpret,
        like=operands.query,
    )(operands)
    return ForwardOutput(**dict(zip(outputs, results, strict=True)))
