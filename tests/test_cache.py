"""The key/value caches beside arrays of NumPy: what is written where, and what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from malformed import ints, zeros

from pallas_flash.cache import KVCache, PagedKVCache

B, T, K, H, Hv = 3, 20, 2, 4, 3
PAGES, PAGE_SIZE, PAGES_PER_ROW = 14, 16, 3
CAPACITY = PAGES_PER_ROW * PAGE_SIZE
LENGTHS = (0, 15, 20)

KINDS = [KVCache, PagedKVCache]
both_kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


@pytest.fixture
def rng(seed):
    return np.random.default_rng(seed)


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


def place(cache, row: int, position: int) -> tuple[int, int] | None:
    """Where a position is kept, by its definition; None for nowhere."""
    if not 0 <= position < cache.capacity:
        return None
    if cache.page_table is None:
        return row, position
    page = int(np.asarray(cache.page_table)[row, position // PAGE_SIZE])
    return (page, position % PAGE_SIZE) if 0 <= page < PAGES else None


def appended(cache, *new) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Key, value and lengths after `append`, by NumPy, one position after the other."""
    count = new[0].shape[1]
    arrays, news = [np.array(cache.key), np.array(cache.value)], jax.tree.map(np.asarray, new)
    for row, length in enumerate(np.asarray(cache.lengths).tolist()):
        for i in range(count):
            where = place(cache, row, length + i)
            if where is not None:
                for array, x in zip(arrays, news, strict=True):
                    array[where] = x[row, i]
    return *arrays, np.asarray(cache.lengths) + count


def assert_holds(cache, expected) -> None:
    """Bit for bit, in all of its storage, in the types that a cache has."""
    for got, array in zip((cache.key, cache.value, cache.lengths), expected, strict=True):
        np.testing.assert_array_equal(got, array)
        assert got.dtype == array.dtype
        assert not got.weak_type
    assert cache.lengths.dtype == jnp.int32


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


def directly(cache, key, value):
    return cache.append(key, value)


def jitted(cache, key, value):
    return jax.jit(lambda cache, key, value: cache.append(key, value))(cache, key, value)


WAYS = [directly, jitted]
both_ways = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


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
    assert memory.alias_size_in_bytes >= cache.key.nbytes + cache.value.nbytes
    assert memory.temp_size_in_bytes < cache.value.nbytes // 8


@both_kinds
def test_donated_caches_of_two_layers_leave_the_callers_arrays(kind, rng):
    given = (*normal(rng, B, CAPACITY), ints(B), jnp.asarray(page_table(rng)))
    held = jax.tree.map(np.array, given)
    layers = [prefilled(kind, *given) for _ in range(2)]
    append = jax.jit(lambda layers, new: [x.append(*new) for x in layers], donate_argnums=0)
    append(layers, normal(rng, B))
    jax.tree.map(np.testing.assert_array_equal, given, held)


def full(kind, rng):
    """Row 0 has room for 2 more, row 1 for none, row 2 for many."""
    lengths = (CAPACITY - 2, CAPACITY, 1)
    return prefilled(kind, *normal(rng, B, CAPACITY), lengths, page_table(rng))


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


SIZES = {"heads": K, "head_dim": H, "dtype": "float32"}
CONTIGUOUS = {"batch": B, "capacity": CAPACITY, **SIZES}
PAGED = {"page_table": ints(B, PAGES_PER_ROW), "pages": PAGES, "page_size": PAGE_SIZE, **SIZES}
PREFILL = {"key": zeros(B, T, K, H), "value": zeros(B, T, K, Hv), "lengths": ints(B)}
POOL = {name: PAGED[name] for name in ("page_table", "pages", "page_size")}

CALLS = {
    KVCache.empty: CONTIGUOUS,
    PagedKVCache.empty: PAGED,
    KVCache.from_prefill: {**PREFILL, "capacity": CAPACITY},
    PagedKVCache.from_prefill: {**PREFILL, **POOL},
}

NOT_SIZES = [0, -1, 2.0, True, None, "16", np.array([16, 16])]
DTYPES = "one of float32, bfloat16, float16"
TABLES = r"an integer array of shape \[(3|at least 1), at least 1\]"

MALFORMED = [
    *((name, x, "an int >= 1") for name in ("batch", "capacity", "pages") for x in NOT_SIZES),
    *((name, x, "an int >= 1") for name in ("heads", "head_dim") for x in NOT_SIZES),
    *(("value_head_dim", x, "an int >= 1") for x in NOT_SIZES if x is not None),
    *(("page_size", x, "an int from 16 to 256") for x in (*NOT_SIZES, 15, 257)),
    *(("dtype", x, DTYPES) for x in ("float64", "int8", "float8_e4m3fn", "half a float", None, 3)),
    *(("page_table", x, TABLES) for x in (ints(B), ints(B, 2, 1), ints(B, 0), zeros(B, 2), 3)),
    *(("page_table", x, "an array") for x in ("pages", [[1], [1, 2]])),
    *(
        ("lengths", x, r"an integer array of shape \[3\]")
        for x in (ints(B + 1), ints(B, 1), 3, zeros(B), [True, False, True])
    ),
    ("lengths", "33", "an array"),
    *(
        ("key", x, f"{DTYPES}, of 4 dims")
        for x in (
            zeros(T, K, H),
            zeros(1, B, T, K, H),
            zeros(B, T, 0, H),
            zeros(B, T, K, 0),
            ints(B, T, K, H),
        )
    ),
    ("key", None, "an array"),
    *(
        ("value", x, r"float32, \[3, 20, 2, Hv\] beside key's")
        for x in (
            zeros(B, T, K),
            zeros(B, T + 1, K, Hv),
            zeros(B + 1, T, K, Hv),
            zeros(B, T, K + 1, Hv),
            zeros(B, T, K, 0),
            zeros(B, T, K, Hv, dtype="bfloat16"),
        )
    ),
    ("value", None, "an array"),
]


def got_of(x: object) -> str:
    return f"{x.dtype}{list(x.shape)}" if isinstance(x, jax.Array) else ""


@pytest.mark.parametrize(
    ("call", "name", "x", "expected"),
    [
        pytest.param(call, name, x, expected, id=f"{call.__qualname__}-{name}-{number}")
        for number, (name, x, expected) in enumerate(MALFORMED)
        for call, arguments in CALLS.items()
        if name in arguments or (name == "value_head_dim" and "dtype" in arguments)
    ],
)
def test_malformed_cache(call, name, x, expected):
    with pytest.raises(ValueError, match=rf"^{name}: expected {expected}") as caught:
        call(**{**CALLS[call], name: x})
    assert f", got {got_of(x)}" in str(caught.value)


@pytest.mark.parametrize("rows", [0, 1, B + 1])
def test_page_table_of_other_rows(rows, rng):
    expected = rf"^page_table: .* shape \[3, at least 1\], got int32\[{rows}, 2\]$"
    with pytest.raises(ValueError, match=expected):
        prefilled(PagedKVCache, *normal(rng, B, T), LENGTHS, ints(rows, 2))


NEW = {"key": zeros(B, 2, K, H), "value": zeros(B, 2, K, Hv)}
KEYS = r"float32, \[3, T, 2, 4\] or \[3, 2, 4\]"
VALUES = r"float32, \[3, 2, 2, 3\] beside key's"


@both_ways
@both_kinds
@pytest.mark.parametrize(
    ("name", "x", "expected"),
    [
        *(
            ("key", x, KEYS)
            for x in (
                zeros(),
                zeros(B),
                zeros(B, H),
                zeros(B, K, H + 1),
                zeros(K, H),
                zeros(B + 1, K, H),
                zeros(B + 1, 2, K, H),
                zeros(B, 2, K + 1, H),
                zeros(B, 2, K, H + 1),
                zeros(1, B, 2, K, H),
                zeros(B, 2, K, H, dtype="bfloat16"),
                ints(B, 2, K, H),
            )
        ),
        *(
            ("value", x, VALUES)
            for x in (
                zeros(B, K, Hv),
                zeros(B, 1, K, Hv),
                zeros(B, 2, K, H),
                zeros(B, 2, K + 1, Hv),
                zeros(B, 2, K, Hv, dtype="float16"),
            )
        ),
    ],
    ids=lambda x: got_of(x) if isinstance(x, jax.Array) else None,
)
def test_malformed_append(kind, way, name, x, expected, rng):
    cache = prefilled(kind, *normal(rng, B, T), LENGTHS, page_table(rng))
    with pytest.raises(ValueError, match=rf"^{name}: expected {expected}") as caught:
        way(cache, **{**NEW, name: x})
    assert str(caught.value).endswith(f", got {got_of(x)}")


@pytest.mark.parametrize("name", ["key", "value"])
@both_kinds
def test_append_of_what_is_no_array(kind, name, rng):
    cache = prefilled(kind, *normal(rng, B, T), LENGTHS, page_table(rng))
    with pytest.raises(ValueError, match=rf"^{name}: expected an array, got NoneType: None$"):
        cache.append(**{**NEW, name: None})


@both_ways
@pytest.mark.parametrize(
    ("kind", "name", "x"),
    [
        *((kind, "key", zeros(B, K, H)) for kind in KINDS),
        *((kind, "value", zeros(B, CAPACITY, K + 1, Hv)) for kind in KINDS),
        *((kind, "lengths", x) for kind in KINDS for x in (ints(B + 1), zeros(B), ints())),
        *((PagedKVCache, "page_table", x) for x in (ints(B), zeros(B, 2), ints(B, 0))),
    ],
)
def test_append_to_a_cache_that_was_put_together_wrongly(kind, name, x, way, rng):
    cache = prefilled(kind, *normal(rng, B, T), LENGTHS, page_table(rng))
    cache = dataclasses.replace(cache, **{name: x})
    with pytest.raises(ValueError, match=rf"^cache\.{name}: expected .*, got ") as caught:
        way(cache, **NEW)
    assert str(caught.value).endswith(got_of(x))


@both_kinds
def test_negative_lengths_are_refused_outside_jit(kind, rng):
    cache = prefilled(kind, *normal(rng, B, T), LENGTHS, page_table(rng))
    cache = dataclasses.replace(cache, lengths=cache.lengths - 1)
    with pytest.raises(ValueError, match=r"^cache\.lengths: expected 0 to 48 for row 0, got -1$"):
        cache.append(**NEW)


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


def test_no_two_rows_write_to_one_page(rng):
    shared = np.array([[0, 1, -1], [0, 2, -1], [3, 4, -1]], np.int32)
    message = "^page_table: expected a page for positions 0 to 15 of row 1 that no other row writes"
    with pytest.raises(ValueError, match=f"{message}.* to, got 0, to which row 0 writes$"):
        prefilled(PagedKVCache, *normal(rng, B, T), (20, 20, 20), shared)
    # A prefix that is read by both is well.
    cache = PagedKVCache.empty(shared, PAGES, PAGE_SIZE, K, H, "float32", value_head_dim=Hv)
    cache = dataclasses.replace(cache, lengths=jnp.asarray([16, 20, 0], jnp.int32))
    new = normal(rng, B, 3)
    assert_holds(cache.append(*new), appended(cache, *new))
    cache = dataclasses.replace(cache, lengths=jnp.asarray([15, 15, 0], jnp.int32))
    with pytest.raises(ValueError, match=r"^cache\.page_table: expected .* of row 1 .*, got 0, to"):
        cache.append(*new)


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


@both_kinds
def test_scan_carry(kind, rng):
    cache = prefilled(kind, *normal(rng, B, T), LENGTHS, page_table(rng))
    key, value = normal(rng, B, 7)

    @jax.jit
    def decode(cache, key, value):
        steps = (key.swapaxes(0, 1), value.swapaxes(0, 1))
        return jax.lax.scan(lambda cache, new: (cache.append(*new), cache.lengths), cache, steps)

    got, lengths = decode(cache, key, value)
    assert_holds(got, appended(cache, key, value))
    np.testing.assert_array_equal(lengths, np.array(LENGTHS) + np.arange(7)[:, None])


@both_kinds
def test_types_are_never_weak(kind, rng):
    """One program serves every step, and a loop's carry keeps its type."""
    key, value = jnp.full((B, T, K, H), 1.0), jnp.full((B, T, K, Hv), 1.0)
    lengths = jnp.full(B, 3)
    assert key.weak_type
    assert lengths.weak_type
    cache = prefilled(kind, key, value, lengths, page_table(rng))
    traces = []

    @jax.jit
    def step(cache, key, value):
        traces.append(cache)
        return cache.append(key, value)

    for _ in range(3):
        expected = appended(cache, key[:, :1], value[:, :1])
        cache = step(cache, key[:, 0], value[:, 0])
        assert_holds(cache, expected)
    assert len(traces) == 1


@both_kinds
def test_vmap(kind, rng):
    caches = [
        prefilled(kind, *normal(rng, B, T), rng.integers(0, T, B), page_table(rng))
        for _ in range(3)
    ]
    news = [normal(rng, B, 2) for _ in caches]
    stacked, new = (jax.tree.map(lambda *xs: jnp.stack(xs), *trees) for trees in (caches, news))
    got = jax.vmap(kind.append)(stacked, *new)
    for i, (cache, new) in enumerate(zip(caches, news, strict=True)):
        assert_holds(jax.tree.map(lambda x, i=i: x[i], got), appended(cache, *new))


@both_ways
@both_kinds
def test_x64(kind, way, rng):
    prefill, new, table = normal(rng, B, T), normal(rng, B, 2), page_table(rng)
    with jax.enable_x64(True):
        lengths = jnp.asarray(LENGTHS, "int64")
        cache = prefilled(kind, *prefill, lengths, jnp.asarray(table, "int64"))
        np.testing.assert_array_equal(rows_of(cache)[2][0], prefill[0][2])
        wide = dataclasses.replace(cache, lengths=lengths)
        assert_holds(way(wide, *new), appended(cache, *new))


@both_kinds
def test_lengths_that_int32_cannot_hold_do_not_wrap(kind, rng):
    cache = prefilled(kind, *normal(rng, B, T), LENGTHS, page_table(rng))
    with jax.enable_x64(True):
        far = dataclasses.replace(cache, lengths=jnp.asarray([2**32, 2**40 + 1, -(2**32)], "int64"))
        got = jitted(far, *normal(rng, B))
    np.testing.assert_array_equal(got.key, cache.key)
    np.testing.assert_array_equal(got.value, cache.value)


def test_float64_is_refused():
    with jax.enable_x64(True), pytest.raises(ValueError, match=r"^key: expected .* float64\["):
        KVCache.empty(B, CAPACITY, K, H, "float32").append(**{**NEW, "key": np.zeros((B, K, H))})


@both_kinds
def test_a_cache_is_a_frozen_pytree(kind, rng):
    cache = prefilled(kind, *normal(rng, B, T), LENGTHS, page_table(rng))
    names = [field.name for field in dataclasses.fields(kind)]
    paths, tree = jax.tree_util.tree_flatten_with_path(cache)
    assert [jax.tree_util.keystr(path) for path, _ in paths] == [f".{name}" for name in names]
    # Whatever a transformation puts there.
    held = tree.unflatten(names)
    assert [getattr(held, name) for name in names] == names
    with pytest.raises(dataclasses.FrozenInstanceError):
        cache.lengths = cache.lengths
    shapes = jax.eval_shape(kind.append, cache, **NEW)
    assert shapes.lengths.shape == (B,)
    assert shapes.key.shape == cache.key.shape


@both_kinds
def test_gradient(kind, rng):
    """What was written over, or dropped, has none."""
    cache = full(kind, rng)
    cotangents = [
        jnp.asarray(rng.standard_normal(x.shape), x.dtype) for x in (cache.key, cache.value)
    ]

    def loss(held, new, cache):
        got = dataclasses.replace(cache, key=held[0], value=held[1]).append(*new)
        return sum(jnp.vdot(x, y) for x, y in zip((got.key, got.value), cotangents, strict=True))

    arguments = ((cache.key, cache.value), normal(rng, B, 3), cache)
    held, new = jax.jit(jax.grad(loss, (0, 1)))(*arguments)
    for old_grad, new_grad, cotangent in zip(held, new, map(np.array, cotangents), strict=True):
        expected = np.zeros(new_grad.shape, np.float32)
        for row, length in enumerate(cache.lengths.tolist()):
            for i in range(3):
                where = place(cache, row, length + i)
                if where is not None:
                    expected[row, i] = cotangent[where]
                    cotangent[where] = 0
        np.testing.assert_array_equal(new_grad, expected)
        np.testing.assert_array_equal(old_grad, cotangent)


def mesh_of(kind: AxisType) -> jax.sharding.Mesh:
    devices = jax.devices("cpu")[:4]
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind), devices=devices)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(
    ("kind", "prefill_spec", "row_spec", "spec"),
    [
        (KVCache, ("data", None, "model"), ("data",), ("data", None, "model")),
        (KVCache, (None, "data", "model"), (), (None, "data", "model")),
        # A pool has no rows.
        (PagedKVCache, ("data", None, "model"), ("data",), (None, None, "model")),
    ],
    ids=["rows", "length", "paged"],
)
@both_ways
def test_sharded_cache(kind, prefill_spec, row_spec, spec, way, axes, rng):
    batch = 4
    table = np.arange(batch * PAGES_PER_ROW).reshape(batch, PAGES_PER_ROW).astype(np.int32)
    prefill, new = normal(rng, batch, T), normal(rng, batch, 3)
    lengths = np.array([*LENGTHS, 1], np.int32)
    expected = prefilled(kind, *prefill, lengths, table)
    expected_after = appended(expected, *new)
    mesh = mesh_of(axes)
    with jax.set_mesh(mesh):
        prefill = jax.device_put(prefill, NamedSharding(mesh, PartitionSpec(*prefill_spec)))
        rows = NamedSharding(mesh, PartitionSpec(*row_spec))
        new, lengths, table = jax.device_put((new, lengths, table), rows)
        cache = prefilled(kind, *prefill, lengths, table)
        jax.tree.map(np.testing.assert_array_equal, cache, expected)
        got = way(cache, *new)
    assert_holds(got, expected_after)
    for x in (cache.key, cache.value, got.key, got.value):
        assert x.sharding.spec[:3] == spec


@pytest.mark.usefixtures("on_cpu")
@both_kinds
def test_inside_shard_map(kind, rng):
    """Every device has rows of its own and, where there are pages, a pool of its own."""
    batch = 4
    table = np.tile(rng.permutation(PAGES)[:PAGES_PER_ROW].astype(np.int32), (batch, 1))
    prefill, new = normal(rng, batch, T), normal(rng, batch, 3)
    lengths = np.array([*LENGTHS, 1], np.int32)

    def decode(prefill, lengths, table, new):
        return prefilled(kind, *prefill, lengths, table).append(*new)

    sharded = jax.shard_map(
        decode,
        mesh=mesh_of(AxisType.Auto),
        in_specs=PartitionSpec(("data", "model")),
        out_specs=PartitionSpec(("data", "model")),
    )
    parts = [
        decode(*jax.tree.map(lambda x, i=i: x[i : i + 1], (prefill, lengths, table, new)))
        for i in range(batch)
    ]
    expected = jax.tree.map(lambda *xs: np.concatenate(xs), *parts)
    jax.tree.map(np.testing.assert_array_equal, sharded(prefill, lengths, table, new), expected)
