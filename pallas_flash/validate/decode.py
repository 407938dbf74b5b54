"""The arrays of `flash_decode`, checked, and in the one form that backends see."""

import jax
import numpy as np
from jax.typing import ArrayLike

from pallas_flash.spec import DecodeOperands
from pallas_flash.validate import arguments

# What one tile of a kernel takes of each head: more is a prefill.
MOST_TOKENS = 16


def query_and_caches(
    query: ArrayLike, key_cache: ArrayLike, value_cache: ArrayLike
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The three as arrays, [B, T, N, H] and the caches as they come."""
    arrays = {
        name: arguments.array(name, x)
        for name, x in (
            ("query", query),
            ("key_cache", key_cache),
            ("value_cache", value_cache),
        )
    }
    q, k, v = arrays.values()
    arguments.require(q.ndim in (3, 4), "query", "[B, N, H] or [B, T, N, H]", q)
    for name, last in (("key_cache", "H"), ("value_cache", "Hv")):
        expected = f"[B, S, K, {last}], or with a page table [P, page size, K, {last}]"
        arguments.require(arrays[name].ndim == 4, name, expected, arrays[name])
    arguments.agree(arrays)
    expected = f"key_cache's sizes [{', '.join(map(str, k.shape[:3]))}, Hv]"
    arguments.require(v.shape[:3] == k.shape[:3], "value_cache", expected, v)
    tokens = q[:, None] if q.ndim == 3 else q
    expected = f"at most {MOST_TOKENS} tokens, [B, T, N, H]; more are for flash_attention"
    arguments.require(tokens.shape[1] <= MOST_TOKENS, "query", expected, q)
    return tokens, k, v


def operands(
    query: jax.Array,
    key_cache: jax.Array,
    value_cache: jax.Array,
    lengths: ArrayLike,
    *,
    page_table: ArrayLike | None,
    scale: jax.Array | None,
    sinks: ArrayLike | None,
) -> DecodeOperands:
    """All arrays of a call in backends' form; the first three as `query_and_caches` gave them."""
    batch, _, heads, _ = query.shape
    rows, capacity = key_cache.shape[:2]
    if page_table is None:
        expected = f"query's batch {batch} first, or a page_table beside it"
        arguments.require(rows == batch, "key_cache", expected, key_cache)
        arguments.require_near("key_cache", capacity)
    else:
        page_table = arguments.page_table("page_table", page_table, batch, capacity)
        for name, count in (("page", rows), ("position in a page", capacity)):
            arguments.require(count > 0, "key_cache", f"at least one {name}", key_cache)
        capacity *= page_table.shape[1]
    return DecodeOperands(
        query=query,
        key=key_cache,
        value=value_cache,
        lengths=_lengths(lengths, batch, capacity),
        page_table=page_table,
        scale=scale,
        sinks=arguments.sinks(sinks, heads),
    )


def _lengths(x: ArrayLike, batch: int, capacity: int) -> jax.Array:
    lengths, known = arguments.int32("lengths", x, (batch,)), arguments.known(x)
    if known is not None:
        outside = np.flatnonzero((known < 0) | (known > capacity))
        if outside.size:
            row = outside[0]
            expected = f"from 0 to the cache's {capacity} positions for row {row}"
            arguments.fail("lengths", expected, known[row])
    return lengths
