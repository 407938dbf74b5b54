"""Key/value caches for tests, and the same in arrays of NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from malformed import zeros

from pallas_flash.cache import KVCache, PagedKVCache

B, T, K, H, Hv = 3, 20, 2, 4, 3
PAGES, PAGE_SIZE, PAGES_PER_ROW = 14, 16, 3
CAPACITY = PAGES_PER_ROW * PAGE_SIZE
LENGTHS = (0, 15, 20)

# What `append` takes.
NEW = {"key": zeros(B, 2, K, H), "value": zeros(B, 2, K, Hv)}

KINDS = [KVCache, PagedKVCache]
both_kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def normal(rng, *shape: int, dtype: str = "float32") -> tuple[jax.Array, jax.Array]:
    """Key and value of `shape`, which has no heads and dims."""
    key, value = (rng.standard_normal((*shape, K, size)) for size in (H, Hv))
    return jnp.asarray(key, dtype), jnp.asarray(value, dtype)


def page_table(rng) -> np.ndarray:
    """Pages in no order, and some of the pool nobody's."""
    pages = rng.permutation(PAGES)[: B * PAGES_PER_ROW]
    return pages.reshape(B, PAGES_PER_ROW).astype(np.int32)


def prefilled(kind, key, value, lengths, table):
    if kind is KVCache:
        return KVCache.from_prefill(key, value, lengths, capacity=CAPACITY)
    return PagedKVCache.from_prefill(
        key, value, lengths, page_table=table, pages=PAGES, page_size=PAGE_SIZE
    )


def full(kind, rng):
    """Row 0 has room for 2 more, row 1 for none, row 2 for many."""
    lengths = (CAPACITY - 2, CAPACITY, 1)
    return prefilled(kind, *normal(rng, B, CAPACITY), lengths, page_table(rng))


def place(cache, row: int, position: int) -> tuple[int, int] | None:
    """Where a position is kept, by its definition; None for nowhere."""
    if not 0 <= position < cache.capacity:
        return None
    if cache.page_table is None:
        return row, position
    page = int(np.asarray(cache.page_table)[row, position // PAGE_SIZE])
    return (page, position % PAGE_SIZE) if 0 <= page < PAGES else None


def appended(cache, *new, counts=None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Key, value and lengths after `append`, by NumPy, one position after the other."""
    counts = np.full(cache.lengths.shape, new[0].shape[1]) if counts is None else np.array(counts)
    arrays, news = [np.array(cache.key), np.array(cache.value)], jax.tree.map(np.asarray, new)
    for row, length in enumerate(np.asarray(cache.lengths).tolist()):
        for i in range(counts[row]):
            where = place(cache, row, length + i)
            if where is not None:
                for array, x in zip(arrays, news, strict=True):
                    array[where] = x[row, i]
    return *arrays, np.asarray(cache.lengths) + counts.astype(np.int32)


def assert_holds(cache, expected) -> None:
    """Bit for bit, in all of its storage, in the types that a cache has."""
    for got, array in zip((cache.key, cache.value, cache.lengths), expected, strict=True):
        np.testing.assert_array_equal(got, array)
        assert got.dtype == array.dtype
        assert not got.weak_type
    assert cache.lengths.dtype == jnp.int32


def padded(new, counts) -> tuple[jax.Array, jax.Array]:
    """Key and value with NaN past each row's count."""
    is_padding = np.arange(new[0].shape[1]) >= np.array(counts)[:, None]
    return tuple(jnp.where(is_padding[..., None, None], jnp.nan, x) for x in new)


def rows_of(cache) -> list[tuple[np.ndarray, np.ndarray]]:
    """What each row holds, [length, K, H] and [length, K, Hv]."""
    return [
        tuple(
            np.stack([x[place(cache, row, i)] for i in range(length)]) if length else x[:0, 0]
            for x in (np.asarray(cache.key), np.asarray(cache.value))
        )
        for row, length in enumerate(np.asarray(cache.lengths).tolist())
    ]


def assert_same_rows(got, expected) -> None:
    jax.tree.map(np.testing.assert_array_equal, rows_of(got), rows_of(expected))


def directly(cache, key, value, counts=None):
    return cache.append(key, value, counts)


def jitted(cache, key, value, counts=None):
    return jax.jit(lambda cache, *new: cache.append(*new))(cache, key, value, counts)


WAYS = [directly, jitted]
both_ways = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
