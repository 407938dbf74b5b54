"""What the key/value caches refuse, and how."""

import dataclasses
import re

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
    PAGES_PER_ROW,
    B,
    H,
    Hv,
    K,
    T,
    appended,
    assert_holds,
    both_kinds,
    both_ways,
    full,
    normal,
    page_table,
    prefilled,
)
from malformed import ints, zeros

from pallas_flash.cache import KVCache, PagedKVCache

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
@both_kinds
@pytest.mark.parametrize("x", [ints(B + 1), ints(B, 1), ints(), zeros(B)], ids=lambda x: got_of(x))
def test_malformed_counts(kind, way, x, rng):
    cache = prefilled(kind, *normal(rng, B, T), LENGTHS, page_table(rng))
    expected = rf"^counts: expected an integer array of shape \[3\], got {re.escape(got_of(x))}"
    with pytest.raises(ValueError, match=expected):
        way(cache, **NEW, counts=x)


@pytest.mark.parametrize("x", [2, "22", [1.0, 2.0, 0.0], [True, False, True], [[1], [2, 0]]])
def test_malformed_counts_that_are_no_arrays_of_jax(x, rng):
    cache = prefilled(KVCache, *normal(rng, B, T), LENGTHS, None)
    with pytest.raises(ValueError, match=r"^counts: expected an (integer )?array"):
        cache.append(**NEW, counts=x)


@pytest.mark.parametrize("count", [-1, 3, -(2**32), 2**32 + 1])
@both_kinds
def test_counts_beyond_what_is_given_are_refused_outside_jit(kind, count, rng):
    """Those that int32 cannot hold do not wrap."""
    cache = prefilled(kind, *normal(rng, B, T), LENGTHS, page_table(rng))
    shown = np.clip(count, -(2**31), 2**31 - 1)
    with pytest.raises(ValueError, match=f"^counts: expected 0 to 2 for row 1, got {shown}$"):
        cache.append(**NEW, counts=np.array([2, count, 0]))


@both_kinds
def test_counts_without_room_are_refused_outside_jit(kind, rng):
    cache = full(kind, rng)
    expected = "^key: expected at most 2 new positions for row 0, which holds 46 of 48, got 3$"
    with pytest.raises(ValueError, match=expected):
        cache.append(*normal(rng, B, 5), [3, 0, 5])


def test_counts_without_a_page_are_refused_outside_jit(rng):
    table = page_table(rng)
    table[1, 1] = -1
    cache = prefilled(PagedKVCache, *normal(rng, B, T), LENGTHS, table)
    cache.append(*normal(rng, B, 5), [5, 1, 5])
    expected = "a page of 0 to 13 for positions 16 to 31 of row 1, got -1"
    with pytest.raises(ValueError, match=rf"^cache\.page_table: expected {expected}$"):
        cache.append(*normal(rng, B, 5), [5, 2, 5])


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


def test_more_positions_than_can_be_counted(rng):
    message = "expected at most 536870912 positions a row, got 536870928"
    wide = np.broadcast_to(np.int32(0), (1, 2**25 + 1))
    with pytest.raises(ValueError, match=f"^capacity: {message}"):
        KVCache.empty(1, 2**29 + 16, K, H, "float32")
    with pytest.raises(ValueError, match=f"^capacity: {message}"):
        KVCache.from_prefill(*normal(rng, 1, T), [T], capacity=2**29 + 16)
    pool = {"pages": PAGES, "page_size": PAGE_SIZE}
    with pytest.raises(ValueError, match=f"^page_table: {message}"):
        PagedKVCache.empty(wide, heads=K, head_dim=H, dtype="float32", **pool)
    with pytest.raises(ValueError, match=f"^page_table: {message}"):
        PagedKVCache.from_prefill(*normal(rng, 1, T), [T], page_table=wide, **pool)
    cache = PagedKVCache.empty(wide[:, :1], heads=K, head_dim=H, dtype="float32", **pool)
    cache = dataclasses.replace(cache, page_table=wide)
    with pytest.raises(ValueError, match=f"^cache.page_table: {message}"):
        jax.eval_shape(lambda key, value: cache.append(key, value), *normal(rng, 1, 1))


@both_kinds
def test_negative_lengths_are_refused_outside_jit(kind, rng):
    cache = prefilled(kind, *normal(rng, B, T), LENGTHS, page_table(rng))
    cache = dataclasses.replace(cache, lengths=cache.lengths - 1)
    with pytest.raises(ValueError, match=r"^cache\.lengths: expected 0 to 48 for row 0, got -1$"):
        cache.append(**NEW)


def test_no_two_rows_write_to_one_page(rng):
    shared = np.array([[0, 1, -1], [0, 2, -1], [3, 4, -1]], np.int32)
    message = "expected a page for positions 0 to 15 of row 1 that no others are written to"
    got = "got 0, to which positions 0 to 15 of row 0 are"
    with pytest.raises(ValueError, match=f"^page_table: {message}, {got}$"):
        prefilled(PagedKVCache, *normal(rng, B, T), (20, 20, 20), shared)
    # A prefix that is read by both is well.
    cache = PagedKVCache.empty(shared, PAGES, PAGE_SIZE, K, H, "float32", value_head_dim=Hv)
    cache = dataclasses.replace(cache, lengths=jnp.asarray([16, 20, 0], jnp.int32))
    new = normal(rng, B, 3)
    assert_holds(cache.append(*new), appended(cache, *new))
    cache = dataclasses.replace(cache, lengths=jnp.asarray([15, 15, 0], jnp.int32))
    with pytest.raises(ValueError, match=r"^cache\.page_table: expected .* of row 1 .*, got 0, to"):
        cache.append(*new)


def test_no_row_writes_twice_to_one_page(rng):
    table = np.array([[0, 1, -1], [2, 3, 2], [5, 5, -1]], np.int32)
    message = "expected a page for positions 16 to 31 of row 2 that no others are written to"
    got = "got 5, to which positions 0 to 15 of row 2 are"
    with pytest.raises(ValueError, match=f"^page_table: {message}, {got}$"):
        prefilled(PagedKVCache, *normal(rng, B, T), (20, 20, 20), table)
    # Beyond a window its pages may come round again.
    cache = prefilled(PagedKVCache, *normal(rng, B, T), (20, 20, 0), table)
    cache = dataclasses.replace(cache, lengths=jnp.asarray([20, 32, 0], jnp.int32))
    new = normal(rng, B, 3)
    assert_holds(cache.append(*new), appended(cache, *new))
    new = normal(rng, B, 17)
    cache = dataclasses.replace(cache, lengths=jnp.asarray([15, 15, 0], jnp.int32))
    with pytest.raises(ValueError, match=r"^cache\.page_table: .* 16 to 31 of row 2 .*, got 5, to"):
        cache.append(*new)
