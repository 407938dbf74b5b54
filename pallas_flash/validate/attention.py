"""The arrays of `flash_attention`, checked, and in the one form that backends see."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from pallas_flash.spec import Operands
from pallas_flash.validate import arguments


def query_key_value(
    query: ArrayLike, key: ArrayLike, value: ArrayLike
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The three operands as arrays, [*batch, T, N, H], [*batch, S, K, H] and [*batch, S, K, Hv]."""
    arrays = {
        name: arguments.array(name, x)
        for name, x in (("query", query), ("key", key), ("value", value))
    }
    q, k, v = arrays.values()
    arguments.require(q.ndim >= 3, "query", "[T, N, H], [B, T, N, H] or more batch dims", q)
    for name in ("key", "value"):
        x, last = arrays[name], "H" if name == "key" else "Hv"
        expected = f"as many dims as query's {q.ndim}, [..., S, K, {last}]"
        arguments.require(x.ndim == q.ndim, name, expected, x)
        arguments.require(
            x.shape[:-3] == q.shape[:-3], name, f"query's batch dims {list(q.shape[:-3])}", x
        )
    arguments.agree(arrays)
    expected = f"key's length and heads [..., {k.shape[-3]}, {k.shape[-2]}, Hv]"
    arguments.require(v.shape[-3:-1] == k.shape[-3:-1], "value", expected, v)
    return q, k, v


def operands(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    bias: ArrayLike | None,
    mask: ArrayLike | None,
    scale: jax.Array | None,
    query_offset: ArrayLike,
    query_seq_lengths: ArrayLike | None,
    key_value_seq_lengths: ArrayLike | None,
    query_segment_ids: ArrayLike | None,
    key_value_segment_ids: ArrayLike | None,
    sinks: ArrayLike | None,
) -> Operands:
    """All arrays of a call in backends' form; the first three as `query_key_value` gave them."""
    batch = query.shape[:-3]
    query_length, heads = query.shape[-3:-1]
    key_length = key.shape[-3]
    pairs = (*(batch or (1,)), heads, query_length, key_length)
    query_ids, key_ids = _segment_ids(
        query_segment_ids, key_value_segment_ids, batch, query_length, key_length
    )
    return Operands(
        query=_merge_batch(query, batch),
        key=_merge_batch(key, batch),
        value=_merge_batch(value, batch),
        bias=_pairs("bias", bias, pairs, jnp.floating),
        mask=_pairs("mask", mask, pairs, jnp.bool_),
        scale=scale,
        query_offset=_query_offset(query_offset, batch),
        query_seq_lengths=_lengths("query_seq_lengths", query_seq_lengths, batch),
        key_value_seq_lengths=_lengths("key_value_seq_lengths", key_value_seq_lengths, batch),
        query_segment_ids=query_ids,
        key_value_segment_ids=key_ids,
        sinks=arguments.sinks(sinks, heads),
    )


def _merge_batch(x: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """[*batch, ...] as [B, ...]; without batch dims, B is 1."""
    return x.reshape(math.prod(batch), *x.shape[len(batch) :])


def _pairs(name: str, x: ArrayLike | None, full: tuple[int, ...], kind: type) -> jax.Array | None:
    """A bias or mask as [B or 1, N or 1, T or 1, S or 1]; `full` is [*batch, N, T, S]."""
    if x is None:
        return None
    x = arguments.array(name, x)
    word = "bool" if kind is jnp.bool_ else "float"
    expected = f"a {word} array, each axis 1 or that of [..., N, T, S] = {list(full)}"
    shape = (1,) * (len(full) - x.ndim) + x.shape
    fits = len(shape) == len(full) and all(
        size in (1, whole) for size, whole in zip(shape, full, strict=True)
    )
    arguments.require(fits and jnp.issubdtype(x.dtype, kind), name, expected, x)
    batch = shape[:-3]
    if max(batch) > 1:
        # Batch dims of which one is broadcast and another is not have no form with one batch dim.
        batch = full[:-3]
        shape = (*batch, *shape[-3:])
    return _merge_batch(jnp.broadcast_to(x, shape), batch)


def _lengths(name: str, x: ArrayLike | None, batch: tuple[int, ...]) -> jax.Array | None:
    """int32 [B]; a scalar will do where there is no batch dim."""
    if x is None:
        return None
    x = arguments.integers(name, x, [batch] if batch else [(), (1,)])
    return arguments.clip(x, 0, arguments.FARTHEST).reshape(math.prod(batch))


def _query_offset(x: ArrayLike, batch: tuple[int, ...]) -> jax.Array | None:
    """int32 [B], one number for each row; None for zero."""
    shape = batch or (1,)
    expected = f"an int, or integers of shape [] or {list(shape)}, within +-{arguments.FARTHEST}"
    if isinstance(x, int) and not isinstance(x, bool):
        if x == 0:
            return None
        # Wide enough to hold all that is in range, and what is not must be told.
        if abs(x) > arguments.FARTHEST:
            arguments.fail("query_offset", expected, x)
        x = np.int32(x)
    x = arguments.integers("query_offset", x, [(), shape])
    if arguments.is_known_beyond(x, -arguments.FARTHEST, arguments.FARTHEST):
        arguments.fail("query_offset", expected, x.tolist())
    offset = arguments.clip(x, -arguments.FARTHEST, arguments.FARTHEST)
    return jnp.broadcast_to(offset, shape).reshape(math.prod(batch))


def _ids(name: str, x: ArrayLike | None, batch: tuple[int, ...], length: int) -> jax.Array | None:
    """int32 [B, length], or int64 where an array of JAX has it: a cast would make ids equal."""
    if x is None:
        return None
    shapes = [(*batch, length)] if batch else [(length,), (1, length)]
    x = arguments.integers(name, x, shapes)
    info = jnp.iinfo(jnp.int32)
    if arguments.is_known_beyond(x, info.min, info.max):
        arguments.fail(name, "integers that int32 can hold", f"{x.min()} to {x.max()}")
    is_wide = isinstance(x, jax.Array) and x.dtype.itemsize > 4
    ids = x if is_wide else jnp.asarray(x.astype(np.int32))
    return ids.reshape(math.prod(batch), length)


def _segment_ids(
    query_ids: ArrayLike | None,
    key_ids: ArrayLike | None,
    batch: tuple[int, ...],
    query_length: int,
    key_length: int,
) -> tuple[jax.Array | None, jax.Array | None]:
    """Both sides' ids, [B, T] and [B, S]; where the lengths agree, one side's serve for both."""
    if query_length != key_length and (query_ids is None) != (key_ids is None):
        given, missing = "query_segment_ids", "key_value_segment_ids"
        if query_ids is None:
            given, missing = missing, given
        expected = f"an integer array, for {given} is given and T = {query_length} is not S"
        arguments.fail(missing, f"{expected} = {key_length}", "None")
    query_ids = _ids("query_segment_ids", query_ids, batch, query_length)
    key_ids = _ids("key_value_segment_ids", key_ids, batch, key_length)
    if query_ids is None or key_ids is None:
        either = key_ids if query_ids is None else query_ids
        return either, either
    wide = max(query_ids.dtype, key_ids.dtype, key=lambda dtype: dtype.itemsize)
    return query_ids.astype(wide), key_ids.astype(wide)
