"""The backward kernels: FlashAttention-2, algorithm 2 (Dao, 2023), split in two.

One has a program for each key block and gives dk and dv (or, for wide rows, runs twice and gives
one at a time), the other has one for each query block and gives dq. Each sums in registers, so
there are no atomics and the bits are the same every time.
Names follow the derivation in `pallas_flash.autodiff`; m and log_l are as in `softmax.Finished`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash import sharding
from pallas_flash.backends.triton import lowering, memory, schedule, tile
from pallas_flash.backends.triton.config import Config, Configs, widths
from pallas_flash.spec import DIFFERENTIABLE, AttentionSpec, Dims, Operands, Residuals


class _Rows(NamedTuple):
    """What the forward and the cotangents say of the query rows, as references or tiles."""

    do: Any  # [B, T, N, Hv]
    m: Any  # float32 [B, N, T], as are the next two; of a tile None, where all are 0
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
    reads_m: bool,
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
        do=memory.read(refs.do, row.batch, rows, head, sees),
        m=statistic(refs.m, exists, 0.0) if reads_m else None,
        log_l=log_l,
        delta=statistic(refs.delta, sees, 0.0),
    )


def _with_or_without_m(
    has_m_ref: Any, batch: jax.Array, key_head: jax.Array, program: Callable[[bool], None]
) -> None:
    """Run `program(reads_m)`, with False where all m are 0.

    A program that reads no m has less to read in its loop and less to keep in registers: the
    kernels for dk, dv and dq took 3 to 12 % less time for it (H200).

    Args:
      has_m_ref: int32 [B, K], whether there are m other than 0 among the rows of the heads that
        share a key head; None: everywhere.
    """
    if has_m_ref is None:
        program(True)
        return
    reads_m = has_m_ref[batch, key_head] > 0
    lowering.run_if(reads_m, lambda: program(True))
    lowering.run_if(~reads_m, lambda: program(False))


def _weights(
    row: tile.BatchRow, logits: tile.Tile, m: jax.Array | None, log_l: jax.Array
) -> jax.Array:
    """p of a tile, to which the last two broadcast."""
    if m is None:
        return row.weights(logits.score, log_l - row.offset)
    # At most 1 in exact arithmetic; where logits are so large that a float32 step is many units,
    # the two passes' roundings may differ, and the exponential must not overflow.
    return row.exp2(jnp.minimum((logits.score - m) * row.factor - (log_l - row.offset), 0.0))


def _logit_gradient(logits: tile.Tile, p: jax.Array, dp: jax.Array, delta: jax.Array) -> jax.Array:
    """dx of a tile, to which delta broadcasts."""
    dx = p * (dp - delta)
    return dx if logits.slope is None else dx * logits.slope


class _KeySums(NamedTuple):
    """What a key block sums over its queries, in pieces; None for what another kernel sums."""

    dk: tuple[jax.Array, ...] | None
    dv: tuple[jax.Array, ...] | None


def _key_gradient_kernel(
    with_dk: bool,
    with_dv: bool,
    kernel: tile.Kernel,
    refs: Operands,
    row_refs: _Rows,
    has_m_ref: Any,
    *gradient_refs: Any,
) -> None:
    dims, config = kernel.dims, kernel.config
    row, block, key_head = schedule.key_program(kernel, refs)

    def program(reads_m: bool) -> None:
        columns, exists = row.columns(block, is_full=False)
        k = memory.read(refs.key, row.batch, columns, key_head, exists)
        v = memory.read(refs.value, row.batch, columns, key_head, exists)
        signed_k = row.signed(k)

        def query_head(head: jax.Array, sums: _KeySums) -> _KeySums:
            def query_block(i: jax.Array, sums: _KeySums, is_full: bool) -> _KeySums:
                rows, exists = row.rows(i, is_full=is_full)
                q = memory.read(refs.query, row.batch, rows, head, exists)
                do, m, log_l, delta = _read_rows(
                    row_refs, row, rows, head, exists, is_full=is_full, reads_m=reads_m
                )
                product = row.dot(signed_k, q)
                # Before the exponentials, for a tensor core to have work meanwhile.
                dp = row.dot(v, do) if with_dk else None
                logits = row.tile(product, rows[None, :], columns[:, None], is_full=is_full)
                p = _weights(row, logits, None if m is None else m[None, :], log_l[None, :])
                dk, dv = sums
                if dv is not None:
                    dv = _add(dv, row.weigh(p, do))
                if dk is not None and dp is not None:
                    dx = _logit_gradient(logits, p, dp, delta[None, :])
                    dk = _add(dk, row.weigh(dx, q))
                return _KeySums(dk, dv)

            return row.fold_queries(row.query_blocks(block), query_block, sums)

        sums = _KeySums(
            _zeros(config.block_k, dims.head_dim) if with_dk else None,
            _zeros(config.block_k, dims.value_head_dim) if with_dv else None,
        )
        first_head = key_head * dims.group
        dk, dv = lax.fori_loop(first_head, first_head + dims.group, query_head, sums)
        if dk is not None:
            dk = tuple(row.scale * piece for piece in dk)
        is_stored = columns < dims.key_length
        results = [x for x in (dk, dv) if x is not None]
        for ref, result in zip(gradient_refs, results, strict=True):
            if exists is not None:
                # Their keys were read as 0, which makes logits like any other.
                result = tuple(jnp.where(exists[:, None], piece, 0.0) for piece in result)
            memory.write(ref, row.batch, columns, key_head, is_stored, result)

    _with_or_without_m(has_m_ref, row.batch, key_head, program)


def _query_gradient_kernel(
    kernel: tile.Kernel,
    refs: Operands,
    row_refs: _Rows,
    has_m_ref: Any,
    dq_ref: Any,
    dscale_ref: Any = None,
) -> None:
    dims, config = kernel.dims, kernel.config
    row, block, head, key_head = schedule.query_program(kernel, refs)

    def program(reads_m: bool) -> None:
        rows, exists = row.rows(block, is_full=False)
        q = memory.read(refs.query, row.batch, rows, head, exists)
        do, m, log_l, delta = _read_rows(
            row_refs, row, rows, head, exists, is_full=False, reads_m=reads_m
        )
        signed_q = row.signed(q)

        def key_block(j: jax.Array, dq: tuple[jax.Array, ...], is_full: bool):
            columns, exists = row.columns(j, is_full=is_full)
            k = memory.read(refs.key, row.batch, columns, key_head, exists)
            v = memory.read(refs.value, row.batch, columns, key_head, exists)
            product = row.dot(signed_q, k)
            dp = row.dot(do, v)
            logits = row.tile(product, rows[:, None], columns[None, :], is_full=is_full)
            p = _weights(row, logits, None if m is None else m[:, None], log_l[:, None])
            dx = _logit_gradient(logits, p, dp, delta[:, None])
            return _add(dq, row.weigh(dx, k))

        dq = _zeros(config.block_q, dims.head_dim)
        dq = row.fold_keys(row.key_blocks(block), key_block, dq)
        # What is not finite may have come into rows that see nothing, by 0 * NaN.
        sees = (log_l < jnp.inf)[:, None]
        dq = tuple(jnp.where(sees, piece, 0.0) for piece in dq)
        is_stored = rows < dims.query_length
        scaled = tuple(row.scale * piece for piece in dq)
        memory.write(dq_ref, row.batch, rows, head, is_stored, scaled)
        if dscale_ref is not None:
            # sum_j dx_j (q . k_j) = q . sum_j dx_j k_j
            dscale = jnp.zeros((config.block_q,), jnp.float32)
            for x, y in zip(q, dq, strict=True):
                dscale += jnp.sum(x.astype(jnp.float32) * y, axis=1)
            lowering.store(dscale_ref.at[row.batch, head, rows], dscale, mask=is_stored)

    _with_or_without_m(has_m_ref, row.batch, key_head, program)


def _zeros(rows: int, head_dim: int) -> tuple[jax.Array, ...]:
    return tuple(jnp.zeros((rows, width), jnp.float32) for width in widths(head_dim))


def _add(sums: tuple[jax.Array, ...], terms: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(x + y for x, y in zip(sums, terms, strict=True))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def backward(
    spec: AttentionSpec,
    configs: Configs,
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
    has_m = None
    if operands.query.dtype != jnp.float32:
        groups = residuals.m.reshape(dims.batch, dims.key_heads, -1)
        has_m = jnp.any(groups != 0.0, axis=-1).astype(jnp.int32)

    def like(x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    def launch(
        body: Callable, name: str, config: Config, programs: int, outputs: Sequence[Any]
    ) -> Any:
        return lowering.launch(
            functools.partial(body, tile.Kernel(spec, dims, config, interpret, is_forward=False)),
            name=f"flash_attention_{name}_gradient",
            programs=dims.batch * programs,
            outputs=outputs,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            interpret=interpret,
            like=operands.query,
        )(operands, rows, has_m)

    def key_gradient(name: str, config: Config, outputs: dict[str, Any]) -> Any:
        body = functools.partial(_key_gradient_kernel, "dk" in outputs, "dv" in outputs)
        programs = dims.key_heads * config.key_blocks(dims)
        return launch(body, name, config, programs, list(outputs.values()))

    dk, dv = like(operands.key), like(operands.value)
    if configs.value_gradient is None:
        dk, dv = key_gradient("key", configs.key_gradient, {"dk": dk, "dv": dv})
    else:
        (dk,) = key_gradient("key", configs.key_gradient, {"dk": dk})
        (dv,) = key_gradient("value", configs.value_gradient, {"dv": dv})
    config = configs.query_gradient
    outputs = [like(operands.query)] + ([] if operands.scale is None else [like(delta)])
    programs = dims.query_heads * config.query_blocks(dims)
    dq, *dscale = launch(_query_gradient_kernel, "query", config, programs, outputs)
    return Operands(dq, dk, dv, scale=jnp.sum(dscale[0]) if dscale else None)
