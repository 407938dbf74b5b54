"""The backward: FlashAttention-2, algorithm 2 (Dao, 2023), with its two loops exchanged.

Query blocks outside and key blocks inside, as in the forward, so that one rule finds the blocks
that are needed in both. Names follow the derivation in `pallas_flash.autodiff`.
"""

import functools
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash import sharding
from pallas_flash.backends.xla.tile import Call
from pallas_flash.spec import AttentionSpec, Operands, Residuals


class _Sums(NamedTuple):
    """Gradients as they accumulate, float32 throughout, each in its operand's shape."""

    dq: jax.Array
    dk: jax.Array
    dv: jax.Array
    dbias: jax.Array | None
    dscale: jax.Array | None
    dsinks: jax.Array | None

    @classmethod
    def zeros(cls, operands: Operands) -> Self:
        def zeros_like(x: jax.Array | None) -> jax.Array | None:
            return None if x is None else jnp.zeros(x.shape, jnp.float32)

        return cls(
            dq=jnp.zeros(operands.query.shape, jnp.float32),
            dk=jnp.zeros(operands.key.shape, jnp.float32),
            dv=jnp.zeros(operands.value.shape, jnp.float32),
            dbias=zeros_like(operands.bias),
            dscale=zeros_like(operands.scale),
            dsinks=zeros_like(operands.sinks),
        )


def _add_at(total: jax.Array, tile: jax.Array, starts: list[jax.Array]) -> jax.Array:
    current = lax.dynamic_slice(total, starts, tile.shape)
    return lax.dynamic_update_slice(total, current + tile, starts)


def _add_along(total: jax.Array, tile: jax.Array, start: jax.Array) -> jax.Array:
    """Add a tile of [B, length, heads, dim] that begins at `start` of axis 1."""
    zero = jnp.int32(0)
    return _add_at(total, tile, [zero, start, zero, zero])


def _add_bias_gradient(call: Call, dbias: jax.Array, dx: jax.Array, i, j) -> jax.Array:
    """Add tile (i, j) of the logits' gradient, summed over the bias's axes of size 1."""
    starts, sizes = call.pair_slice(dbias, i, j)
    tile = dx.reshape(dx.shape[0], call.dims.query_heads, *dx.shape[3:])
    axes = tuple(axis for axis, size in enumerate(sizes) if size == 1)
    return _add_at(dbias, jnp.sum(tile, axis=axes, keepdims=True), starts)


class _Rows(NamedTuple):
    """What query block i brings to each of its tiles."""

    q: jax.Array  # [B, K, G, bq, H]
    do: jax.Array  # [B, K, G, bq, Hv]
    delta: jax.Array  # [B, K, G, bq], as are the next two
    m: jax.Array
    log_l: jax.Array


def _rows(
    call: Call, residuals: Residuals, dout: jax.Array, dlse: jax.Array | None, i: jax.Array
) -> _Rows:
    m, log_l = (call.query_tile(x.swapaxes(1, 2), i) for x in (residuals.m, residuals.log_l))
    # A row that sees nothing, or that an earlier block has done, has no gradient to give, whatever
    # its cotangents hold: with log_l = inf all its probabilities are 0.
    is_idle = jnp.isposinf(log_l)
    is_new = call.queries.is_new(i)
    if is_new is not None:
        is_idle |= ~is_new[None, None, None]
    do = jnp.where(is_idle[..., None], 0, call.query_tile(dout, i))
    out = call.query_tile(residuals.out, i)
    delta = jnp.sum(do.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    if dlse is not None:
        delta -= jnp.where(is_idle, 0, call.query_tile(dlse, i))
    return _Rows(
        q=call.query(i),
        do=do,
        delta=delta,
        m=m,
        log_l=jnp.where(is_idle, jnp.inf, log_l),
    )


def _add_tile(
    call: Call, sums: _Sums, rows: _Rows, i: jax.Array, j: jax.Array
) -> tuple[jax.Array, _Sums]:
    """What tile (i, j) gives to dq, [B, K, G, bq, H] without the scale, and to all other sums."""
    k = call.key_tile(call.operands.key, j)
    v = call.key_tile(call.operands.value, j)
    tile = call.tile(rows.q, k, i, j)
    # At most 1 in exact arithmetic; where logits are so large that a float32 step is many units,
    # the two passes' roundings may differ, and the exponential must not overflow.
    log_p = (tile.logits - rows.m[..., None]) - rows.log_l[..., None]
    p = jnp.exp(jnp.minimum(log_p, 0.0))
    dp = call.dot("bkgqh,bkjh->bkgqj", rows.do, v)
    dx = p * (dp - rows.delta[..., None])
    if tile.slope is not None:
        dx = dx * tile.slope
    if tile.visible is not None:
        # What is masked may be NaN, and 0 * NaN is NaN.
        dx = jnp.where(tile.visible, dx, 0.0)
    start = call.keys.start(j)
    sums = sums._replace(
        dk=_add_along(sums.dk, call.dot("bkgqj,bkgqh->bjkh", dx, rows.q), start),
        dv=_add_along(sums.dv, call.dot("bkgqj,bkgqh->bjkh", p, rows.do), start),
    )
    if sums.dbias is not None:
        sums = sums._replace(dbias=_add_bias_gradient(call, sums.dbias, dx, i, j))
    if sums.dscale is not None:
        sums = sums._replace(dscale=sums.dscale + jnp.sum(dx * tile.product))
    return call.dot("bkgqj,bkjh->bkgqh", dx, k), sums


@functools.partial(jax.jit, static_argnums=(0, 1))
def backward(
    spec: AttentionSpec,
    blocks: tuple[int, int],
    residuals: Residuals,
    dout: jax.Array,
    dlse: jax.Array | None,
) -> Operands:
    """The gradient of each float operand, with blocks of (block_q, block_k)."""
    operands = residuals.operands
    call = Call.of(spec, operands, *blocks)

    def query_block(i, sums):
        rows = _rows(call, residuals, dout, dlse, i)

        def key_block(j, carry):
            dq, sums = carry
            dq_tile, sums = _add_tile(call, sums, rows, i, j)
            return dq + dq_tile, sums

        dq = sharding.vary_like(jnp.zeros(rows.q.shape, jnp.float32), rows.q)
        dq, sums = call.keys.fold(*call.key_blocks(i), key_block, (dq, sums))
        dq = call.from_query_tile(dq)
        sums = sums._replace(dq=_add_along(sums.dq, dq, call.queries.start(i)))
        sinks = call.sinks(i)
        if sums.dsinks is not None and sinks is not None:
            p_sink = jnp.exp((sinks - rows.m) - rows.log_l)
            dsinks = sums.dsinks - jnp.sum(p_sink * rows.delta, axis=(0, 3)).reshape(-1)
            sums = sums._replace(dsinks=dsinks)
        return sums

    sums = sharding.vary_like(_Sums.zeros(operands), operands.query)
    sums = call.queries.fold(0, call.queries.count, query_block, sums)
    bias = operands.bias
    return Operands(
        query=(call.scale * sums.dq).astype(operands.query.dtype),
        key=(call.scale * sums.dk).astype(operands.key.dtype),
        value=sums.dv.astype(operands.value.dtype),
        bias=None if bias is None or sums.dbias is None else sums.dbias.astype(bias.dtype),
        scale=sums.dscale,
        sinks=sums.dsinks,
    )
