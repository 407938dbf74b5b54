"""The key/value caches beside arrays of NumPy: what is written where."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from caches import (
    CAPACITY,
    KINDS,
    LENGTHS,
    NEW,
    PAGE_SIZE,
    PAGES,
    B,
    H,
    Hv,
    K,
    T,
    appended,
    assert_holds,
    assert_same_rows,
    both_kinds,
    both_ways,
    full,
    jitted,
    normal,
    padded,
    page_table,
    place,
    prefilled,
    rows_of,
)
from malformed import ints, zeros

from pallas_flash.cache import KVCache, PagedKVCache


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", jnp.bfloat16, np.float16])
@pytest.mark.parametrize("value_head_dim", [None, Hv])
def test_empty(dtype, value_head_dim, rng):
    table = page_table(rng)
    options = {"heads": K, "head_dim": H, "dtype": dtype, "value_head_dim": value_head_dim}
    contiguous = KVCache.empty(B, CAPACITY, **options)
    paged = PagedKVCache.empty(table, PAGES, PAGE_SIZE, **options)
    assert contiguous.page_table is None
    np.testing.assert_array_equal(paged.page_table, table)
    for cache, rows in ((contiguous, (B, CAPACITY)), (paged, (PAGES, PAGE_SIZE))):
        assert cache.capacity == CAPACITY
        shapes = [(*rows, K, size) for size in (H, value_head_dim or H)]
        nothing = [np.zeros(shape, jnp.dtype(dtype)) for shape in shapes]
        assert_holds(cache, [*nothing, np.zeros(B, np.int32)])


@pytest.mark.parametrize("length", [0, 1, T, CAPACITY])
@both_kinds
def test_prefill(kind, length, rng):
    lengths = rng.integers(0, length, B, endpoint=True)
    table = page_table(rng)
    key, value = normal(rng, B, length)
    cache = prefilled(kind, key, value, lengths, table)
    rows = (B, CAPACITY) if kind is KVCache else (PAGES, PAGE_SIZE)
    arrays = [np.zeros((*rows, K, size), np.float32) for size in (H, Hv)]
    # A cache over pages leaves out the padding.
    ends = [length] * B if kind is KVCache else lengths
    for row, end in enumerate(ends):
        for i in range(end):
            for array, x in zip(arrays, (key, value), strict=True):
                array[place(cache, row, i)] = x[row, i]
    assert_holds(cache, [*arrays, lengths.astype(np.int32)])
    assert cache.capacity == CAPACITY


def test_prefill_padded_beyond_the_pages(rng):
    """Of a prefill over pages only what is real must fit."""
    table = page_table(rng)
    key, value = normal(rng, B, 2 * CAPACITY)
    lengths = np.array([CAPACITY, 0, 17])
    cache = prefilled(PagedKVCache, key, value, lengths, table)
    cut = prefilled(KVCache, key[:, :CAPACITY], value[:, :CAPACITY], lengths, None)
    assert_same_rows(cache, cut)


# A position alone comes without its axis.
@pytest.mark.parametrize("count", [None, 1, 2, 5])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@both_ways
@both_kinds
def test_append(kind, way, dtype, count, rng):
    cache = prefilled(kind, *normal(rng, B, T, dtype=dtype), LENGTHS, page_table(rng))
    for _ in range(4):
        key, value = normal(rng, B, count or 1, dtype=dtype)
        before = jax.tree.map(np.array, cache)
        expected = appended(cache, key, value)
        old, cache = cache, way(cache, *(x[:, 0] if count is None else x for x in (key, value)))
        assert_holds(cache, expected)
        jax.tree.map(np.testing.assert_array_equal, old, before)


@both_ways
@both_kinds
def test_append_by_counts(kind, way, rng):
    """Padding is not written, whatever it is; of a position alone too."""
    cache = prefilled(kind, *normal(rng, B, T), LENGTHS, page_table(rng))
    for counts in ([5, 0, 2], [0, 0, 0], [5, 5, 5], np.array([1, 4, 5], np.uint8)):
        new = padded(normal(rng, B, 5), counts)
        expected = appended(cache, *new, counts=counts)
        cache = way(cache, *new, jnp.asarray(counts))
        assert_holds(cache, expected)
    new = padded(normal(rng, B, 1), [0, 1, 1])
    expected = appended(cache, *new, counts=[0, 1, 1])
    assert_holds(way(cache, *(x[:, 0] for x in new), np.array([0, 1, 1])), expected)


@both_ways
@both_kinds
def test_only_what_counts_needs_room(kind, way, rng):
    cache, counts = full(kind, rng), [2, 0, 5]
    new = padded(normal(rng, B, 5), counts)
    expected = appended(cache, *new, counts=counts)
    assert_holds(way(cache, *new, jnp.asarray(counts)), expected)


@both_ways
def test_only_what_counts_needs_a_page(way, rng):
    table, counts = page_table(rng), [0, 1, 5]
    table[0], table[1, 1] = -1, PAGES
    cache = prefilled(PagedKVCache, *normal(rng, B, T), (0, 15, 20), table)
    new = padded(normal(rng, B, 5), counts)
    expected = appended(cache, *new, counts=counts)
    assert_holds(way(cache, *new, jnp.asarray(counts)), expected)


@pytest.mark.parametrize("count", [-1, -(2**31), 6, 2**31 - 1])
@both_kinds
def test_a_count_that_cannot_be_shows_in_the_length_inside_jit(kind, count, rng):
    """Also of a row that is full, or beyond it; one below 0 stays. Other rows are as ever."""
    cache = prefilled(kind, *normal(rng, B, T), LENGTHS, page_table(rng))
    new = normal(rng, B, 5)
    for length, after in (
        (7, CAPACITY + 1),
        (CAPACITY, CAPACITY + 1),
        (60, CAPACITY + 1),
        (-3, -3),
    ):
        lengths = jnp.asarray([length, 15, 20], jnp.int32)
        odd = dataclasses.replace(cache, lengths=lengths)
        got = jitted(odd, *new, jnp.asarray([count, 3, 5], jnp.int32))
        assert got.lengths.tolist() == [after, 18, 25]
        expected = jitted(odd, *new, jnp.asarray([0, 3, 5], jnp.int32))
        # Of row 0 nothing is to be read.
        assert_same_rows(
            *(dataclasses.replace(x, lengths=x.lengths.at[0].set(0)) for x in (got, expected))
        )


def test_a_contiguous_cache_is_its_own_contiguous_form(rng):
    cache = prefilled(KVCache, *normal(rng, B, T), LENGTHS, None)
    assert cache.contiguous() is cache


@pytest.mark.parametrize("is_jitted", [False, True], ids=["directly", "jitted"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_contiguous_form_of_pages(dtype, is_jitted, rng):
    """Position for position, past the lengths too; NaN where there is no page."""
    table = page_table(rng)
    cache = prefilled(PagedKVCache, *normal(rng, B, T, dtype=dtype), LENGTHS, table)
    table[0] = [-1, PAGES, -PAGES]
    table[1, 2], table[2, 2] = 2**31 - 1, -(2**31)
    cache = dataclasses.replace(cache, page_table=jnp.asarray(table))
    got = (jax.jit(PagedKVCache.contiguous) if is_jitted else PagedKVCache.contiguous)(cache)
    arrays = []
    for pool in (np.asarray(cache.key), np.asarray(cache.value)):
        rows = np.full((B, CAPACITY, *pool.shape[2:]), np.nan, pool.dtype)
        for row in range(B):
            for position in range(CAPACITY):
                where = place(cache, row, position)
                if where is not None:
                    rows[row, position] = pool[where]
        arrays.append(rows)
    assert isinstance(got, KVCache)
    assert got.capacity == CAPACITY
    assert got.lengths.tolist() == list(LENGTHS)
    for x, expected in zip((got.key, got.value), arrays, strict=True):
        assert x.dtype == jnp.dtype(dtype)
        # NumPy knows no NaN in bfloat16.
        np.testing.assert_array_equal(x.astype(jnp.float32), expected.astype(np.float32))


def test_the_contiguous_form_goes_on_as_the_pages_do(rng):
    cache = prefilled(PagedKVCache, *normal(rng, B, T), LENGTHS, page_table(rng))
    new = normal(rng, B, 5)
    # Donated, it takes nothing of the pages.
    got = jax.jit(KVCache.append, donate_argnums=0)(cache.contiguous(), *new)
    assert_same_rows(got, cache.append(*new))


@both_ways
def test_paged_means_what_contiguous_means(way, rng):
    prefill, table = normal(rng, B, T), page_table(rng)
    caches = [prefilled(kind, *prefill, LENGTHS, table) for kind in KINDS]
    assert_same_rows(*caches)
    for count in (1, 5, 13, 2):
        new = normal(rng, B, count)
        caches = [way(cache, *new) for cache in caches]
        assert_same_rows(*caches)


@both_kinds
def test_numpy_and_lists_are_taken(kind, rng):
    prefill, new, table = normal(rng, B, T), normal(rng, B, 2), page_table(rng)
    expected = prefilled(kind, *prefill, jnp.asarray(LENGTHS), table).append(*new)
    table = table.astype(np.int64).tolist()
    cache = prefilled(kind, *map(np.asarray, prefill), list(LENGTHS), table)
    cache = dataclasses.replace(cache, lengths=np.array(LENGTHS, np.uint8))
    jax.tree.map(np.testing.assert_array_equal, cache.append(*map(np.asarray, new)), expected)


@both_ways
@both_kinds
def test_rejected_tokens_are_taken_back(kind, way, rng):
    cache = prefilled(kind, *normal(rng, B, T), LENGTHS, page_table(rng))
    guesses, others = normal(rng, B, 5), normal(rng, B, 3)
    ahead = way(cache, *guesses)
    accepted = np.array([0, 5, 2], np.int32)
    back = way(dataclasses.replace(ahead, lengths=cache.lengths + accepted), *others)
    expected = [
        tuple(
            np.concatenate([held, guess[row, : accepted[row]], other[row]])
            for held, guess, other in zip(rows, guesses, others, strict=True)
        )
        for row, rows in enumerate(rows_of(cache))
    ]
    jax.tree.map(np.testing.assert_array_equal, rows_of(back), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("count", [1, 5])
@both_kinds
def test_append_is_in_place_under_donation(kind, count, dtype):
    is_old = jax.version.__version_info__ < (0, 11) and jax.default_backend() == "cpu"
    if dtype == "bfloat16" and is_old:
        pytest.skip("this XLA has no bfloat16 scatter on a CPU, and converts all of the operand")
    if kind is KVCache:
        cache = KVCache.empty(4, 1024, K, 64, dtype, value_head_dim=32)
    else:
        table = np.arange(64).reshape(4, 16)
        cache = PagedKVCache.empty(table, 64, 64, K, 64, dtype, value_head_dim=32)
    key, value = zeros(4, count, K, 64, dtype=dtype), zeros(4, count, K, 32, dtype=dtype)
    memory = (
        jax.jit(kind.append, donate_argnums=0).lower(cache, key, value).compile().memory_analysis()
    )
    assert memory.alias_size_in_bytes >= sum(x.nbytes for x in jax.tree.leaves(cache))
    assert memory.temp_size_in_bytes < cache.value.nbytes // 8


@both_kinds
def test_donated_caches_of_two_layers_leave_the_callers_arrays(kind, rng):
    given = (*normal(rng, B, CAPACITY), ints(B), jnp.asarray(page_table(rng)))
    held = jax.tree.map(np.array, given)
    layers = [prefilled(kind, *given) for _ in range(2)]
    append = jax.jit(lambda layers, new: [x.append(*new) for x in layers], donate_argnums=0)
    append(layers, normal(rng, B))
    jax.tree.map(np.testing.assert_array_equal, given, held)


@both_kinds
def test_a_donated_cache_leaves_the_one_that_it_was_appended_to(kind, rng):
    cache = prefilled(kind, *normal(rng, B, T), LENGTHS, page_table(rng))
    held = jax.tree.map(np.array, cache)
    append = jax.jit(lambda cache: cache.append(**NEW), donate_argnums=0)
    append(cache.append(**NEW))
    jax.tree.map(np.testing.assert_array_equal, cache, held)


@both_kinds
def test_what_does_not_fit_is_dropped_inside_jit(kind, rng):
    cache = full(kind, rng)
    for count in (5, 1, 16):
        new = normal(rng, B, count)
        expected = appended(cache, *new)
        cache = jitted(cache, *new)
        assert_holds(cache, expected)
    assert cache.lengths.tolist() == [CAPACITY + 20, CAPACITY + 22, 23]


@both_kinds
def test_what_does_not_fit_is_refused_outside_jit(kind, rng):
    cache = full(kind, rng)
    expected = "^key: expected at most 2 new positions for row 0, which holds 46 of 48, got 3$"
    with pytest.raises(ValueError, match=expected):
        cache.append(*normal(rng, B, 3))
    expected = "^key: expected at most 0 new positions for row 1, which holds 48 of 48, got 1$"
    with pytest.raises(ValueError, match=expected):
        cache.append(*normal(rng, B))
    beyond = jitted(cache, *normal(rng, B, 3))
    expected = r"^cache\.lengths: expected 0 to 48 for row 0, got 49$"
    with pytest.raises(ValueError, match=expected):
        beyond.append(*normal(rng, B))


# Neither the last pages, counted from the end, nor any other.
NO_PAGES = [-1, -PAGES, -(2**31), PAGES, 2**31 - 1]


@pytest.mark.parametrize("no_page", NO_PAGES)
@both_ways
def test_pages_that_are_not_needed_may_be_anything(way, no_page, rng):
    prefill, new, table = normal(rng, B, T), normal(rng, B), page_table(rng)
    lengths = (1, 15, 20)
    expected = prefilled(PagedKVCache, *prefill, lengths, table).append(*new)
    sparse = table.copy()
    sparse[:2, 1:] = sparse[2, 2] = no_page
    cache = way(prefilled(PagedKVCache, *prefill, lengths, sparse), *new)
    np.testing.assert_array_equal(cache.page_table, sparse)
    whole = dataclasses.replace(cache, page_table=expected.page_table)
    jax.tree.map(np.testing.assert_array_equal, whole, expected)


@pytest.mark.parametrize("no_page", NO_PAGES)
def test_positions_without_a_page_are_dropped_inside_jit(no_page, rng):
    """Row 1 crosses into a page that it does not have, row 0 starts in one."""
    table = page_table(rng)
    table[0, 0] = table[1, 1] = no_page
    key, value = normal(rng, B, T)
    cache = prefilled(PagedKVCache, key, value, LENGTHS, table)
    new = normal(rng, B, 3)
    assert_holds(jitted(cache, *new), appended(cache, *new))

    lengths = np.array([3, 20, 20], np.int32)
    start = PagedKVCache.empty(table, PAGES, PAGE_SIZE, K, H, "float32", value_head_dim=Hv)
    got = jax.jit(functools.partial(prefilled, PagedKVCache, table=table))(key, value, lengths)
    cut = jnp.arange(T)[None, :, None, None] < lengths[:, None, None, None]
    # The padding is written as zeros, which is what is there.
    expected = appended(start, *(jnp.where(cut, x, jnp.zeros_like(x)) for x in (key, value)))
    assert_holds(got, [*expected[:2], lengths])


@pytest.mark.parametrize("no_page", NO_PAGES)
def test_positions_without_a_page_are_refused_outside_jit(no_page, rng):
    table = page_table(rng)
    table[1, 1] = no_page
    cache = prefilled(PagedKVCache, *normal(rng, B, T), LENGTHS, table)
    cache.append(*normal(rng, B, 1))
    message = (
        f"page_table: expected a page of 0 to 13 for positions 16 to 31 of row 1, got {no_page}$"
    )
    with pytest.raises(ValueError, match=rf"^cache\.{message}"):
        cache.append(*normal(rng, B, 2))
    with pytest.raises(ValueError, match=f"^{message}"):
        prefilled(PagedKVCache, *normal(rng, B, T), (0, 17, 0), table)


def test_pages_that_were_given_back_are_not_missed(rng):
    """Those of positions that a window has left behind."""
    cache = prefilled(PagedKVCache, *normal(rng, B, T), (16, 17, 20), page_table(rng))
    behind = dataclasses.replace(cache, page_table=cache.page_table.at[:, 0].set(-1))
    new = normal(rng, B, 2)
    assert_holds(behind.append(*new), appended(cache, *new))


@pytest.mark.parametrize("length", [-1, T + 1, 2**32 + 1])
@both_kinds
def test_prefill_lengths(kind, length, rng):
    """Those that int32 cannot hold do not wrap."""
    most = 2**31 - 1
    expected = rf"^lengths: expected 0 to {T} for row 1, got {min(length, most)}$"
    with pytest.raises(ValueError, match=expected):
        prefilled(kind, *normal(rng, B, T), np.array([T, length, 0]), page_table(rng))


def test_prefill_lengths_beyond_the_pages(rng):
    with pytest.raises(ValueError, match=r"^lengths: expected 0 to 48 for row 2, got 49$"):
        prefilled(PagedKVCache, *normal(rng, B, 60), (0, 48, 49), page_table(rng))


def test_prefill_longer_than_the_capacity(rng):
    """With its padding, which the message says to cut."""
    expected = r"^key: expected at most 48 positions, .*less padding, got float32\[3, 49, 2, 4\]$"
    with pytest.raises(ValueError, match=expected):
        prefilled(KVCache, *normal(rng, B, CAPACITY + 1), LENGTHS, None)


@both_kinds
def test_a_length_below_0_stays_and_nothing_is_written_inside_jit(kind, rng):
    cache = prefilled(kind, *normal(rng, B, T), LENGTHS, page_table(rng))
    lengths = jnp.asarray([-1, -PAGE_SIZE, -CAPACITY])
    cache = dataclasses.replace(cache, lengths=lengths)
    got = jitted(cache, *normal(rng, B, 3))
    assert_holds(got, (np.array(cache.key), np.array(cache.value), np.array(lengths)))


@both_kinds
def test_a_prefill_of_more_than_there_is_shows_inside_jit(kind, rng):
    table = page_table(rng)
    prefill = jax.jit(lambda lengths, *new: prefilled(kind, *new, lengths, table))
    cache = prefill(jnp.asarray([T + 1, T, CAPACITY]), *normal(rng, B, T))
    np.testing.assert_array_equal(cache.lengths, [CAPACITY + 1, T, CAPACITY + 1])


def test_sizes_may_be_narrow_integers_of_numpy(rng):
    key, value = normal(rng, 2, T)
    cache = PagedKVCache.from_prefill(
        key,
        value,
        [T, T],
        page_table=np.arange(40).reshape(2, 20),
        pages=np.uint8(40),
        page_size=np.uint8(128),
    )
    assert cache.capacity == 20 * 128
    np.testing.assert_array_equal(cache.key[0, :T], key[0])
    assert KVCache.from_prefill(key, value, [T, T], capacity=np.int8(100)).capacity == 100
