"""Flash decoding: few queries against a long cache, its keys split over programs.

A tile's rows are the query heads that share a key head, of all new tokens, so that each key and
value is read once. That leaves too few tiles to fill a GPU, so each is the work of several
programs with a part of the keys each ("Flash-Decoding for long-context inference", Dao, Haziza,
Massa and Sizov, 2023), and a second kernel merges what they found.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash import masks, sharding
from pallas_flash import softmax as natural
from pallas_flash.backends.triton import lowering, memory, softmax, tile
from pallas_flash.backends.triton.config import widths
from pallas_flash.backends.triton.decode_config import DecodeConfig
from pallas_flash.spec import AttentionSpec, DecodeOperands, Dims, ForwardOutput


class _Keys(NamedTuple):
    """Where the keys of a block lie in the cache."""

    batch: jax.Array  # int32 [] or [block_k], along the cache's first axis: batch row or page
    rows: jax.Array  # int32 [block_k], along its second
    exists: jax.Array  # bool [block_k], False also where there is no page
    has_page: jax.Array | None  # bool [] or [block_k]; None without pages


def _locate(row: tile.BatchRow, refs: Any, block: jax.Array, columns: jax.Array) -> _Keys:
    """Those of a block, which are at the positions `columns`."""
    exists = columns < row.key_length
    left = row.kernel.spec.left
    if left is not None:
        # Pages before a window may have been given to others.
        exists &= columns >= row.query_offset - left
    if refs.page_table is None:
        return _Keys(row.batch, columns, exists, None)
    block_k = row.kernel.config.block_k
    pages, page_size = refs.key.shape[:2]
    if page_size % block_k == 0:
        # A block that is needed holds a key that exists.
        which = lax.div(block * block_k, jnp.int32(page_size))
        page = refs.page_table[row.batch, which]
    else:
        which = lax.div(columns, jnp.int32(page_size))
        page = lowering.load(refs.page_table.at[row.batch, which], mask=exists, other=0)
    has_page = (page >= 0) & (page < pages)
    return _Keys(page, columns - which * page_size, exists & has_page, has_page)


def _blocks(row: tile.BatchRow) -> tuple[jax.Array, jax.Array]:
    """The key blocks [first, last) that a batch row needs."""
    last = row.key_length - 1
    needed = masks.key_range(row.kernel.spec, row.query_offset, last, row.key_length)
    return masks.blocks(*needed, row.kernel.config.block_k)


def _kernel(
    kernel: tile.Kernel, cut: DecodeConfig, refs: DecodeOperands, out_ref: Any, *lse_ref: Any
) -> None:
    """Rows of a tile over one part of the keys; where that is all of them, the result."""
    dims, config = kernel.dims, kernel.config
    tile_index, key_head, part, batch = lowering.program(
        cut.tiles(dims), dims.key_heads, cut.splits
    )
    row = tile.BatchRow.decoding(kernel, refs, batch)
    first, last = _blocks(row)
    size = cut.part_size(last - first)
    first = jnp.minimum(first + part * size, last)
    last = jnp.minimum(first + size, last)
    index = tile_index * config.block_q + jnp.arange(config.block_q, dtype=jnp.int32)
    token = lax.div(index, jnp.int32(dims.group))
    head = key_head * dims.group + index - token * dims.group
    exists = index < dims.query_length * dims.group
    q = row.signed(memory.read(refs.query, batch, token, head, exists))

    def key_block(block: jax.Array, state: softmax.SoftmaxState) -> softmax.SoftmaxState:
        columns, _ = row.columns(block, is_full=False)
        keys = _locate(row, refs, block, columns)
        where = (keys.batch, keys.rows, key_head, keys.exists)
        product = row.dot(q, memory.read(refs.key, *where))
        if keys.has_page is not None:
            has_page = keys.has_page[None, :] if keys.has_page.ndim else keys.has_page
            product = jnp.where(has_page, product, jnp.nan)
        score = row.tile(product, token[:, None], columns[None, :], is_full=False).score

        def weigh(p: jax.Array) -> tuple[jax.Array, ...]:
            return row.weigh(p, memory.read(refs.value, *where))

        return softmax.update(state, score, row.factor, row.exp2, weigh)

    state = softmax.init(config.block_q, widths(dims.value_head_dim))
    state = lax.fori_loop(first, last, key_block, state)
    found = softmax.finish(state, row.factor, row.offset, None, keeps_m=True)
    # The row has it within the cache.
    is_outside = refs.lengths[batch] != row.key_length
    out = tuple(jnp.where(is_outside, jnp.nan, x) for x in found.out)
    lse = jnp.where(is_outside, jnp.nan, found.lse)
    if cut.splits == 1:
        _write(refs.sinks, batch, token, head, exists, out, lse, out_ref, *lse_ref)
        return
    place = token * dims.query_heads + head
    # What is not written nobody will use.
    memory.write(out_ref, batch, part, place, exists & (first < last), out)
    lowering.store(lse_ref[0].at[batch, part, place], lse, mask=exists)


def _merge_kernel(
    dims: Dims,
    cut: DecodeConfig,
    sinks_ref: Any,
    part_out_ref: Any,
    part_lse_ref: Any,
    out_ref: Any,
    *lse_ref: Any,
) -> None:
    """One query head of one token, from all parts of the keys.

    That is attention again: an lse is the logit of its part, and an output the value. An lse also
    tells whether there is an output: to find that by the row's length takes 15 % more time (H200).
    """
    head, token, batch = lowering.program(dims.query_heads, dims.query_length)
    place = token * dims.query_heads + head
    block, _ = cut.merge_tile(dims)

    def some_parts(number: jax.Array, states: tuple[natural.SoftmaxState, ...]) -> tuple[Any, ...]:
        part = number * block + jnp.arange(block, dtype=jnp.int32)
        exists = None if cut.splits % block == 0 else part < cut.splits
        other = None if exists is None else -jnp.inf
        lse = lowering.load(part_lse_ref.at[batch, part, place], mask=exists, other=other)
        values = memory.read(part_out_ref, batch, part, place, exists)
        is_written = ~jnp.isneginf(lse)[:, None]
        return tuple(
            natural.update(
                state,
                lse,
                lambda p, x=x: jnp.sum(p[:, None] * jnp.where(is_written, x, 0.0), axis=0),
            )
            for state, x in zip(states, values, strict=True)
        )

    states = tuple(natural.init((), width) for width in widths(dims.value_head_dim))
    states = lax.fori_loop(0, -(-cut.splits // block), some_parts, states)
    found = [natural.finish(state) for state in states]
    out = tuple(x.out for x in found)
    _write(sinks_ref, batch, token, head, None, out, found[0].lse, out_ref, *lse_ref)


def _write(
    sinks_ref: Any,
    batch: jax.Array,
    token: jax.Array,
    head: jax.Array,
    exists: jax.Array | None,
    out: tuple[jax.Array, ...],
    lse: jax.Array,
    out_ref: Any,
    *lse_ref: Any,
) -> None:
    """The result of rows, with their sinks."""
    if sinks_ref is not None:
        other = None if exists is None else 0.0
        sink = lowering.load(sinks_ref.at[head], mask=exists, other=other)
        joined = [natural.add_sink(x, lse, sink) for x in out]
        out, lse = tuple(x for x, _ in joined), joined[0][1]
    memory.write(out_ref, batch, token, head, exists, out)
    for ref in lse_ref:
        lowering.store(ref.at[batch, token, head], lse, mask=exists)


def _without_keys(
    operands: DecodeOperands, out: jax.ShapeDtypeStruct, lse: jax.ShapeDtypeStruct
) -> tuple[jax.Array, jax.Array]:
    """The result where nothing is asked for, or of a cache that has no room for any key."""
    result = jnp.zeros(out.shape, jnp.float32), jnp.full(lse.shape, -jnp.inf, lse.dtype)
    if operands.sinks is not None:
        result = natural.add_sink(*result, operands.sinks[None, None])
    is_outside = (operands.lengths != 0)[:, None, None]
    return (
        jnp.where(is_outside[..., None], jnp.nan, result[0]).astype(out.dtype),
        jnp.where(is_outside, jnp.nan, result[1]),
    )


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def decode(
    spec: AttentionSpec,
    cut: DecodeConfig,
    interpret: bool,
    with_lse: bool,
    operands: DecodeOperands,
) -> ForwardOutput:
    """Attention of few queries, and its lse where asked for."""
    dims = Dims.of(operands)
    rows = (dims.batch, dims.query_length, dims.query_heads)
    out = jax.ShapeDtypeStruct((*rows, dims.value_head_dim), operands.query.dtype)
    lse = jax.ShapeDtypeStruct(rows, jnp.float32)
    outputs = [out, lse] if with_lse else [out]
    if 0 in (dims.batch, dims.query_length, dims.key_length):
        empty = sharding.vary_like(_without_keys(operands, out, lse), operands.query)
        return ForwardOutput(*empty[: len(outputs)])
    kernel = tile.Kernel(spec, dims, cut.tile, interpret, is_forward=True, gives_lse=True)
    launch = functools.partial(lowering.launch, interpret=interpret, like=operands.query)

    places = (dims.batch, cut.splits, dims.query_length * dims.query_heads)
    partial_outputs = [
        jax.ShapeDtypeStruct((*places, dims.value_head_dim), jnp.float32),
        jax.ShapeDtypeStruct(places, jnp.float32),
    ]
    found = launch(
        functools.partial(_kernel, kernel, cut),
        name="flash_decode",
        programs=dims.batch * dims.key_heads * cut.tiles(dims) * cut.splits,
        outputs=outputs if cut.splits == 1 else partial_outputs,
        num_warps=cut.tile.num_warps,
        num_stages=cut.tile.num_stages,
    )(operands)
    if cut.splits > 1:
        found = launch(
            functools.partial(_merge_kernel, dims, cut),
            name="flash_decode_merge",
            programs=dims.batch * dims.query_length * dims.query_heads,
            outputs=outputs,
            num_warps=cut.merge_tile(dims)[1],
            num_stages=1,
        )(operands.sinks, *found)
    return ForwardOutput(*found)
