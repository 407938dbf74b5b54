"""The forward kernel: FlashAttention-2, algorithm 1 (Dao, 2023), one program for a query block.

In bfloat16 it first takes the logit of one key for each row's maximum, which spares its loop almost
half of the instructions, and does the block over again in the rare case that this was too little.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash import sharding
from pallas_flash.backends.triton import lowering, memory, schedule, softmax, tile
from pallas_flash.backends.triton.config import Config, widths
from pallas_flash.spec import AttentionSpec, Dims, ForwardOutput, Operands


def _kernel(
    kernel: tile.Kernel,
    with_lse: bool,
    with_statistics: bool,
    refs: Operands,
    *output_refs: Any,
) -> None:
    dims, config = kernel.dims, kernel.config
    row, block, head, key_head = schedule.query_program(kernel, refs)
    rows, exists = row.rows(block, is_full=False)
    q = row.signed(memory.read(refs.query, row.batch, rows, head, exists))
    stretch = row.key_blocks(block)
    start = softmax.init(config.block_q, widths(dims.value_head_dim))

    def read(j: jax.Array, is_full: bool) -> tuple[jax.Array, Callable]:
        """The scores of a block of keys, and what weighs its values."""
        columns, exists = row.columns(j, is_full=is_full)
        k = memory.read(refs.key, row.batch, columns, key_head, exists)
        logits = row.tile(row.dot(q, k), rows[:, None], columns[None, :], is_full=is_full)

        def weigh(p: jax.Array) -> tuple[jax.Array, ...]:
            return row.weigh(p, memory.read(refs.value, row.batch, columns, key_head, exists))

        return logits.score, weigh

    def by_maximum(j: jax.Array, state: softmax.SoftmaxState, is_full: bool):
        score, weigh = read(j, is_full)
        return softmax.update(state, score, row.factor, row.exp2, weigh)

    def by_guess(j: jax.Array, state: softmax.SoftmaxState, is_full: bool):
        score, weigh = read(j, is_full)
        return softmax.add(state, row.weights(score, state.m[:, None]), weigh)

    def write(state: softmax.SoftmaxState, factor: softmax.Factor) -> None:
        is_row = exists if row.has_query_lengths else None
        result = softmax.finish(state, factor, row.offset, is_row, keeps_m=not row.has_16_bits)
        # l is never below 0, which no compiler knows. So where a row lies is reckoned here, and not
        # where the query is read, to wait in memory for the end of the loop: that took 6 % of the
        # time at a length of 2048 (H200).
        stored = rows + (state.l < 0.0).astype(jnp.int32)
        is_stored = stored < dims.query_length
        out_ref, *row_refs = output_refs
        memory.write(out_ref, row.batch, stored, head, is_stored, result.out)
        if with_lse:
            lse_ref, *row_refs = row_refs
            lowering.store(lse_ref.at[row.batch, stored, head], result.lse, mask=is_stored)
        if with_statistics:
            for ref, x in zip(row_refs, (result.m, result.log_l), strict=True):
                lowering.store(ref.at[row.batch, head, stored], x, mask=is_stored)

    # Its range lets p be far above 1. In float16 it may be 2^16.
    if refs.value.dtype != jnp.bfloat16 or not kernel.has_full_blocks:
        write(row.fold_keys(stretch, by_maximum, start), row.factor)
        return

    # A key that every row sees: there is one where there is a full block.
    has_full = stretch.full_first < stretch.full_last
    column = jnp.minimum(stretch.full_first * config.block_k, dims.key_length - 1)
    product = row.dot_row(q, memory.read(refs.key, row.batch, column, key_head, None))
    guess = row.tile(product, rows, column, is_full=True).score * row.factor
    # Where a guess is too large it is known to be wrong by now. But ends that hang on data make the
    # compiler take a loop for one that threads leave one by one, and it is a third slower.
    state = row.fold_keys(stretch.only_if(has_full), by_guess, start._replace(m=guess))
    # Before `write`, for the sums to be needed no longer than that.
    is_right = has_full & softmax.is_right(state)
    write(state, 1.0)

    def again() -> None:
        def by_masked(j: jax.Array, state: softmax.SoftmaxState) -> softmax.SoftmaxState:
            return by_maximum(j, state, False)

        write(lax.fori_loop(stretch.first, stretch.last, by_masked, start), row.factor)

    lowering.run_if(~is_right, again)


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
    kernel = tile.Kernel(spec, dims, config, interpret, is_forward=True, gives_lse=with_lse)
    results = lowering.launch(
        functools.partial(_kernel, kernel, with_lse, with_statistics),
        name="flash_attention_forward",
        programs=dims.batch * dims.query_heads * config.query_blocks(dims),
        outputs=[x for x, _ in outputs.values()],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        like=operands.query,
    )(operands)
    return ForwardOutput(**dict(zip(outputs, results, strict=True)))
