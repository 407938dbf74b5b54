"""Key/value caches for decoding: contiguous, one stretch for each row, or over pages.

Letters as in `spec`; P is the number of pages in a pool. Both caches are immutable pytrees with the
same verbs, and either serves attention over key, value, lengths and page_table.

What a row's length does not cover means nothing, so a decoder that guessed ahead takes back the
tokens that were rejected by `dataclasses.replace(cache, lengths=...)`. Where caches of several
layers are donated together, that belongs inside `jax.jit`, or each needs a copy of its own, of a
page table too: a buffer can be donated once.

Inside `jax.jit`, with the cache donated, `append` writes in place; lengths and pages are not known
there, what does not fit is dropped, and a row's length, which is then beyond the capacity or below
0, makes `flash_decode` give NaN for it. Outside, each verb copies the cache, and waits for lengths
and pages to refuse what does not fit. Under `jax.vmap` it is as inside `jax.jit`.
"""

from dataclasses import dataclass, replace
from typing import Self, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from pallas_flash import sharding
from pallas_flash.validate import arguments
from pallas_flash.validate import cache as validate
from pallas_flash.validate.cache import Pair

# The least and the most positions in a page.
_PAGE_SIZES = (16, 256)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class KVCache:
    """Keys and values of each row in one stretch.

    Attributes:
      key: float32, bfloat16 or float16 [B, S, K, H].
      value: of the same dtype, [B, S, K, Hv].
      lengths: int32 [B], how many positions of each row are valid.
    """

    key: jax.Array
    value: jax.Array
    lengths: jax.Array

    @property
    def page_table(self) -> None:
        """There is none; so that the same code reads a `PagedKVCache`."""
        return None

    @property
    def capacity(self) -> int:
        """S, how many positions a row has room for."""
        return self.key.shape[1]

    def contiguous(self) -> Self:
        """The cache itself; so that the same code reads a `PagedKVCache`."""
        return self

    @classmethod
    def empty(
        cls,
        batch: int,
        capacity: int,
        heads: int,
        head_dim: int,
        dtype: DTypeLike,
        *,
        value_head_dim: int | None = None,
    ) -> Self:
        """A cache that holds nothing.

        Args:
          batch: B.
          capacity: S, how many positions each row has room for, 2^29 at most.
          heads: K.
          head_dim: H.
          dtype: float32, bfloat16 or float16.
          value_head_dim: Hv, H by default.

        Raises:
          ValueError: a size is not an int above zero, or the dtype is another.
        """
        rows = (arguments.size("batch", batch), validate.capacity(capacity))
        key, value = _zeros(rows, heads, head_dim, value_head_dim, dtype)
        return cls(key, value, jnp.zeros(batch, jnp.int32))

    @classmethod
    def from_prefill(
        cls, key: ArrayLike, value: ArrayLike, lengths: ArrayLike, *, capacity: int
    ) -> Self:
        """A cache of what a prefill gave, with room for more.

        Args:
          key: float32, bfloat16 or float16 [B, T, K, H], each row padded on its right.
          value: of the same dtype, [B, T, K, Hv].
          lengths: integers [B], how many of the T positions are no padding.
          capacity: S, from T to 2^29.

        Returns:
          A cache with position i of the prefill at i, padding included. Inside `jax.jit` a length
          beyond T becomes one beyond the capacity.

        Raises:
          ValueError: an argument is malformed, T exceeds the capacity, or, outside `jax.jit`, a
            length is not within 0 and T.
        """
        key, value = validate.key_value(key, value)
        batch, length = key.shape[:2]
        lengths = arguments.int32("lengths", lengths, (batch,))
        capacity = validate.capacity(capacity)
        validate.require_room_for(key, capacity)
        validate.require_lengths("lengths", lengths, length)
        room = ((0, 0), (0, capacity - length), (0, 0), (0, 0))
        lengths = jnp.where(lengths > length, capacity + 1, lengths)
        return cls(jnp.pad(key, room), jnp.pad(value, room), lengths)

    def append(self, key: ArrayLike, value: ArrayLike, counts: ArrayLike | None = None) -> Self:
        """The cache with T more positions in every row, after those that the row has.

        Inside `jax.jit` what does not fit is dropped, as is all for a length below 0, which stays.
        Other lengths grow all the same, beyond the capacity, which tells; `flash_decode` gives NaN
        for such rows.

        Args:
          key: of the cache's dtype, [B, T, K, H], or [B, K, H] for one position.
          value: of the cache's dtype, [B, T, K, Hv] or [B, K, Hv].
          counts: integers [B], how many of the T positions are no padding, which stands on the
            right and is not written; None for all. Inside `jax.jit` a count that is not within 0
            and T makes a length beyond the capacity.

        Raises:
          ValueError: an argument is malformed, or, outside `jax.jit`, does not fit.
        """
        return _append(self, key, value, counts)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class PagedKVCache:
    """Keys and values in pages of a pool: position p of row b is in page
    page_table[b, p // page size], there at p % page size.

    Which page is whose is the affair of an allocator outside, which hands out another by
    `dataclasses.replace(cache, page_table=...)`. No two rows may write to one page. Outside
    `jax.jit` two places in one page that one call would write are an error; whether a page holds
    what somebody still reads only the allocator knows.

    Attributes:
      key: float32, bfloat16 or float16 [P, page size, K, H].
      value: of the same dtype, [P, page size, K, Hv].
      lengths: int32 [B], how many positions of each row are valid.
      page_table: int32 [B, pages per row]. Where no page is needed yet, anything, by custom -1.
    """

    key: jax.Array
    value: jax.Array
    lengths: jax.Array
    page_table: jax.Array

    @property
    def capacity(self) -> int:
        """How many positions a row has room for, once it has all its pages."""
        return self.page_table.shape[1] * self.key.shape[1]

    def contiguous(self) -> KVCache:
        """A copy with each row in one stretch of the capacity; NaN where a row has no page."""

        def rows(pool: jax.Array, page_table: jax.Array) -> jax.Array:
            # A negative index would count from the end.
            pages = pool.at[page_table].get(mode="fill", wrap_negative_indices=False)
            return pages.reshape(page_table.shape[0], self.capacity, *pool.shape[2:])

        page_table = jnp.asarray(self.page_table)
        batch = jax.typeof(page_table).sharding.spec[0]

        def sharded_rows(pool: ArrayLike) -> jax.Array:
            pool = jnp.asarray(pool)
            spec = PartitionSpec(batch, None, *jax.typeof(pool).sharding.spec[2:])
            return sharding.automatic(rows, spec)(pool, page_table)

        key, value = (sharded_rows(pool) for pool in (self.key, self.value))
        return KVCache(key, value, _own(self.lengths))

    @classmethod
    def empty(
        cls,
        page_table: ArrayLike,
        pages: int,
        page_size: int,
        heads: int,
        head_dim: int,
        dtype: DTypeLike,
        *,
        value_head_dim: int | None = None,
    ) -> Self:
        """A cache that holds nothing.

        Args:
          page_table: integers [B, pages per row], for 2^29 positions a row at most.
          pages: P.
          page_size: positions in a page, 16 to 256.
          heads: K.
          head_dim: H.
          dtype: float32, bfloat16 or float16.
          value_head_dim: Hv, H by default.

        Raises:
          ValueError: a size is not an int within its bounds, the dtype is another, or the page
            table is malformed.
        """
        rows = (
            arguments.size("pages", pages),
            arguments.size("page_size", page_size, *_PAGE_SIZES),
        )
        page_table = _own(arguments.page_table("page_table", page_table, None, rows[1]))
        key, value = _zeros(rows, heads, head_dim, value_head_dim, dtype)
        return cls(key, value, jnp.zeros(page_table.shape[0], jnp.int32), page_table)

    @classmethod
    def from_prefill(
        cls,
        key: ArrayLike,
        value: ArrayLike,
        lengths: ArrayLike,
        *,
        page_table: ArrayLike,
        pages: int,
        page_size: int,
    ) -> Self:
        """A cache of what a prefill gave.

        Args:
          key: float32, bfloat16 or float16 [B, T, K, H], each row padded on its right.
          value: of the same dtype, [B, T, K, Hv].
          lengths: integers [B], how many of the T positions are no padding.
          page_table: integers [B, pages per row], for 2^29 positions a row at most.
          pages: P.
          page_size: positions in a page, 16 to 256.

        Returns:
          A cache with position i of the prefill at i, where i is before the row's length. Nothing
          else is written, so padding needs no pages. Inside `jax.jit` a length beyond T becomes one
          beyond the capacity.

        Raises:
          ValueError: an argument is malformed, or, outside `jax.jit`, a length is not within 0, T
            and the capacity, or a position before it has no page.
        """
        key, value = validate.key_value(key, value)
        batch, length = key.shape[:2]
        lengths = arguments.int32("lengths", lengths, (batch,))
        rows = (
            arguments.size("pages", pages),
            arguments.size("page_size", page_size, *_PAGE_SIZES),
        )
        page_table = _own(arguments.page_table("page_table", page_table, batch, rows[1]))
        capacity = page_table.shape[1] * rows[1]
        validate.require_lengths("lengths", lengths, min(length, capacity))
        starts = jnp.zeros_like(lengths)
        validate.require_pages("page_table", page_table, starts, lengths, *rows)
        lengths = jnp.where(lengths > length, capacity + 1, lengths)

        def write(new: Pair, *where: jax.Array) -> Pair:
            into = jax.tree.map(lambda x: jnp.zeros((*rows, *x.shape[2:]), x.dtype), new)
            return _write_pages(into, new, *where)

        # Heads that are sharded stay so.
        specs = [PartitionSpec(None, None, *jax.typeof(x).sharding.spec[2:]) for x in (key, value)]
        write = sharding.automatic(write, tuple(specs))
        key, value = write((key, value), page_table, starts, lengths)
        return cls(key, value, lengths, page_table)

    def append(self, key: ArrayLike, value: ArrayLike, counts: ArrayLike | None = None) -> Self:
        """The cache with T more positions in every row, after those that the row has.

        Inside `jax.jit` what does not fit, or has no page, is dropped, as is all for a length below
        0, which stays. Other lengths grow all the same. `flash_decode` gives NaN for a row whose
        length is no more within the capacity, or that has no page for a key that it sees.

        Args:
          key: of the cache's dtype, [B, T, K, H], or [B, K, H] for one position.
          value: of the cache's dtype, [B, T, K, Hv] or [B, K, Hv].
          counts: integers [B], how many of the T positions are no padding, which stands on the
            right and is not written; None for all. Inside `jax.jit` a count that is not within 0
            and T makes a length beyond the capacity.

        Raises:
          ValueError: an argument is malformed, or, outside `jax.jit`, does not fit or has no page.
        """
        return _append(self, key, value, counts)


_AnyCache = TypeVar("_AnyCache", bound=KVCache | PagedKVCache)


def _append(
    cache: _AnyCache, key: ArrayLike, value: ArrayLike, counts: ArrayLike | None
) -> _AnyCache:
    """`append` of either cache."""
    into = validate.key_value(cache.key, cache.value, owner="cache.")
    page_table = cache.page_table
    if page_table is not None:
        page_size = into[0].shape[1]
        page_table = arguments.page_table("cache.page_table", page_table, None, page_size)
    batch = (into[0] if page_table is None else page_table).shape[0]
    lengths = arguments.int32("cache.lengths", cache.lengths, (batch,))
    new = validate.new_positions(key, value, batch, into)
    validate.require_lengths("cache.lengths", lengths, cache.capacity)
    counts = _counts(counts, lengths, new[0].shape[1], cache.capacity)
    validate.require_room(lengths, counts, cache.capacity)
    is_lost = lengths < 0
    starts = jnp.where(is_lost, cache.capacity, lengths)
    stops = jnp.where(is_lost, lengths, lengths + counts)
    if page_table is None:
        written = sharding.automatic(_write_rows, into)(into, new, starts, stops)
    else:
        validate.require_pages("cache.page_table", page_table, starts, stops, *into[0].shape[:2])
        write = sharding.automatic(_write_pages, into)
        written = write(into, new, page_table, starts, stops)
        cache = replace(cache, page_table=_own(page_table))
    return replace(cache, key=written[0], value=written[1], lengths=stops)


def _counts(x: ArrayLike | None, lengths: jax.Array, most: int, capacity: int) -> jax.Array:
    """How many positions each row gets: int32 [B]."""
    if x is None:
        return jnp.full_like(lengths, most)
    counts = arguments.int32("counts", x, lengths.shape)
    validate.require_lengths("counts", counts, most)
    return jnp.where((counts < 0) | (counts > most), capacity + 1 - lengths, counts)


def _write_rows(into: Pair, new: Pair, starts: jax.Array, stops: jax.Array) -> Pair:
    """New positions of each row, from its start on and before its stop."""
    positions = _positions(starts, new[0].shape[1])
    # Padding has no place, and each of it another: no two indices may be the same.
    positions = jnp.where(positions < stops[:, None], positions, positions + into[0].shape[1])
    return jax.tree.map(lambda x, y: jax.vmap(_put)(x, y, positions), into, new)


def _write_pages(
    into: Pair, new: Pair, page_table: jax.Array, starts: jax.Array, stops: jax.Array
) -> Pair:
    """New positions of each row, from its start on and before its stop, into their pages."""
    page_size = into[0].shape[1]
    positions = _positions(starts, new[0].shape[1])

    def pages_of(row: jax.Array, columns: jax.Array) -> jax.Array:
        return row.at[columns].get(mode="fill", fill_value=-1, wrap_negative_indices=False)

    pages = jax.vmap(pages_of)(page_table, positions // page_size)
    pages = jnp.where(positions < stops[:, None], pages, -1)
    where = (pages, positions % page_size)
    return jax.tree.map(lambda x, y: _put(x, y, where), into, new)


def _positions(starts: jax.Array, count: int) -> jax.Array:
    """[B, count]: those from each row's start on."""
    return starts[:, None] + jnp.arange(count, dtype=jnp.int32)[None]


def _put(into: jax.Array, new: jax.Array, where: jax.Array | tuple[jax.Array, ...]) -> jax.Array:
    """Write where there is such a place, and nowhere else: `dynamic_update_slice` would clamp."""
    return into.at[where].set(new, mode="drop", wrap_negative_indices=False, unique_indices=True)


def _own(x: jax.Array) -> jax.Array:
    """A copy: who donates a cache must not take what was the caller's, or other layers'."""
    return jnp.array(x, copy=True)


def _zeros(
    rows: tuple[int, int],
    heads: int,
    head_dim: int,
    value_head_dim: int | None,
    dtype: DTypeLike,
) -> Pair:
    """Key and value of a cache that holds nothing."""
    arguments.size("heads", heads)
    sizes = [arguments.size("head_dim", head_dim)]
    if value_head_dim is None:
        sizes += sizes
    else:
        sizes.append(arguments.size("value_head_dim", value_head_dim))
    dtype = arguments.dtype("dtype", dtype)
    key, value = (jnp.zeros((*rows, heads, size), dtype) for size in sizes)
    return key, value
