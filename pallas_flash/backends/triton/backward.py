"""The backward kernels: FlashAttention-2, algorithm 2 (Dao, 2023), split in two.

One has a program for each key block and gives dk and dv, the other one for each query block and
gives dq: each sums in registers, so there are no atomics and the bits are the same every time.
Names follow the derivation in `pallas_flash.autodiff`; m and log_l are as in `ForwardOutput`, in
scores and in base 2.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash import sharding
from pallas_flash.backends.triton import lowering, tile
from pallas_flash.backends.triton.config import Config, widths
from pallas_flash.spec import DIFFERENTIABLE, AttentionSpec, Dims, Operands, Residuals


class _Rows(NamedTuple):
    """What the forward and the cotangents say of the query rows, as references or tiles."""

    do: Any  # [B, T, N, Hv]
    m: Any  # float32 [B, N, T], as are the next two
    log_l: Any
    delta: Any


def _read_rows(
    refs: _Rows,
    row: tile.BatchRow,
    rows: jax.Array,
    head: jax.Array,
    exists: jax.Array | None,
    *,
    is_full: bool,
) -> _Rows:
    """Of a block's rows; in a full tile each of them sees something."""

    def statistic(ref: Any, where: jax.Array | None, other: float) -> jax.Array:
        index = (row.batch, head, rows)
        if where is None:
            return lowering.load(ref.at[index])
        return lowering.load(ref.at[index], mask=where, other=other)

    log_l = statistic(refs.log_l, exists, jnp.inf)
    # A row that sees nothing has no gradient to give, whatever its cotangents hold. Where it does
    # not exist, log_l was read as inf.
    sees = None if is_full else log_l < jnp.inf
    return _Rows(
        do=tile.read(refs.do, row.batch, rows, head, sees),
        m=statistic(refs.m, exists, 0.0),
        log_l=log_l,
        delta=statistic(refs.delta, sees, 0.0),
    )


def _gradient_tile(
    row: tile.BatchRow, logits: tile.Tile, dp: jax.Array, m, log_l, delta
) -> tuple[jax.Array, jax.Array]:
    """p and dx of a tile; the last three broadcast to it."""
    # At most 1 in exact arithmetic; where logits are so large that a float32 step is many units,
    # the two passes' roundings may differ, and the exponential must not overflow.
    p = jnp.exp2(jnp.minimum((logits.score - m) * row.factor - log_l, 0.0))
    dx = p * (dp - delta)
    return p, dx if logits.slope is None else dx * logits.slope


def _key_gradient_kernel(
    spec: AttentionSpec,
    dims: Dims,
    config: Config,
    refs: Operands,
    row_refs: _Rows,
    dk_ref: Any,
    dv_ref: Any,
) -> None:
    blocks = -(-dims.key_length // config.block_k)
    # From the first block on: with causality it has the most to do, and should not come last.
    block, key_head, batch = lowering.program(blocks, dims.key_heads)
    row = tile.BatchRow.read(spec, dims, config, refs, batch)

    columns, exists = row.columns(block, is_full=False)
    k = tile.read(refs.key, row.batch, columns, key_head, exists)
    v = tile.read(refs.value, row.batch, columns, key_head, exists)
    signed_k = row.signed(k)

    def query_head(head: jax.Array, sums):
        def query_block(i: jax.Array, sums, is_full: bool):
            dk, dv = sums
            rows, exists = row.rows(i, is_full=is_full)
            q = tile.read(refs.query, row.batch, rows, head, exists)
            do, m, log_l, delta = _read_rows(row_refs, row, rows, head, exists, is_full=is_full)
            logits = row.tile(
                row.dot(signed_k, q), rows[None, :], columns[:, None], is_full=is_full
            )
            p, dx = _gradient_tile(
                row, logits, row.dot(v, do), m[None, :], log_l[None, :], delta[None, :]
            )
            dv = _add(dv, row.weigh(p, do))
            dk = _add(dk, row.weigh(dx, q))
            return dk, dv

        return row.fold_queries(block, query_block, sums)

    sums = tuple(
        tuple(jnp.zeros((config.block_k, width), jnp.float32) for width in widths(head_dim))
        for head_dim in (dims.head_dim, dims.value_head_dim)
    )
    first_head = key_head * dims.group
    dk, dv = lax.fori_loop(first_head, first_head + dims.group, query_head, sums)
    dk = tuple(row.scale * piece for piece in dk)
    if exists is not None:
        # Their keys were read as 0, which makes logits like any other.
        dk, dv = (tuple(jnp.where(exists[:, None], x, 0.0) for x in sums) for sums in (dk, dv))
    is_stored = columns < dims.key_length
    tile.write(dk_ref, row.batch, columns, key_head, is_stored, dk)
    tile.write(dv_ref, row.batch, columns, key_head, is_stored, dv)


def _query_gradient_kernel(
    spec: AttentionSpec,
    dims: Dims,
    config: Config,
    refs: Operands,
    row_refs: _Rows,
    dq_ref: Any,
    dscale_ref: Any = None,
) -> None:
    blocks = -(-dims.query_length // config.block_q)
    place, head, batch = lowering.program(blocks, dims.query_heads)
    block = blocks - 1 - place
    row = tile.BatchRow.read(spec, dims, config, refs, batch)
    key_head = lax.div(head, jnp.int32(dims.group))

    rows, exists = row.rows(block, is_full=False)
    q = tile.read(refs.query, row.batch, rows, head, exists)
    do, m, log_l, delta = _read_rows(row_refs, row, rows, head, exists, is_full=False)
    signed_q = row.signed(q)

    def key_block(j: jax.Array, dq: tuple[jax.Array, ...], is_full: bool):
        columns, exists = row.columns(j, is_full=is_full)
        k = tile.read(refs.key, row.batch, columns, key_head, exists)
        v = tile.read(refs.value, row.batch, columns, key_head, exists)
        logits = row.tile(row.dot(signed_q, k), rows[:, None], columns[None, :], is_full=is_full)
        _, dx = _gradient_tile(
            row, logits, row.dot(do, v), m[:, None], log_l[:, None], delta[:, None]
        )
        return _add(dq, row.weigh(dx, k))

    zeros = tuple(
        jnp.zeros((config.block_q, width), jnp.float32) for width in widths(dims.head_dim)
    )
    dq = row.fold_keys(block, key_block, zeros)
    is_stored = rows < dims.query_length
    tile.write(dq_ref, row.batch, rows, head, is_stored, tuple(row.scale * piece for piece in dq))
    if dscale_ref is not None:
        # sum_j dx_j (q . k_j) = q . sum_j dx_j k_j
        dscale = jnp.zeros((config.block_q,), jnp.float32)
        for x, y in zip(q, dq, strict=True):
            dscale += jnp.sum(x.astype(jnp.float32) * y, axis=1)
        lowering.store(dscale_ref.at[row.batch, head, rows], dscale, mask=is_stored)


def _add(sums: tuple[jax.Array, ...], terms: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(x + y for x, y in zip(sums, terms, strict=True))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def backward(
    spec: AttentionSpec,
    key_config: Config,
    query_config: Config,
    interpret: bool,
    residuals: Residuals,
    dout: jax.Array,
    dlse: jax.Array | None,
) -> Operands:
    """The gradient of each float operand."""
    operands = residuals.operands
    dims = Dims.of(operands)
    if 0 in (dims.batch, dims.query_length, dims.key_length):
        zeros = {name: getattr(operands, name) for name in DIFFERENTIABLE}
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), zeros)
        return sharding.vary_like(Operands(**zeros), operands.query)
    delta = jnp.sum(dout.astype(jnp.float32) * residuals.out.astype(jnp.float32), axis=-1)
    delta = (delta if dlse is None else delta - dlse).swapaxes(1, 2)
    rows = _Rows(dout, residuals.m, residuals.log_l, delta)

    def like(x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    dk, dv = lowering.launch(
        functools.partial(_key_gradient_kernel, spec, dims, key_config),
        name="flash_attention_key_gradient",
        programs=dims.batch * dims.key_heads * -(-dims.key_length // key_config.block_k),
        outputs=(like(operands.key), like(operands.value)),
        config=key_config,
        interpret=interpret,
        like=operands.query,
    )(operands, rows)
    dq, *dscale = lowering.launch(
        functools.partial(_query_gradient_kernel, spec, dims, query_config),
        name="flash_attention_query_gradient",
        programs=dims.batch * dims.query_heads * -(-dims.query_length // query_config.block_q),
        outputs=(like(operands.query),) + (() if operands.scale is None else (like(delta),)),
        config=query_config,
        interpret=interpret,
        like=operands.query,
    )(operands, rows)
    return Operands(dq, dk, dv, scale=jnp.sum(dscale[0]) if dscale else None)
