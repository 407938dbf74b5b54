"""The arrays and sizes of a cache, checked, and in the one form that it holds."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from pallas_flash.spec import DTYPES
from pallas_flash.validate import arguments

# A key and its value.
Pair = tuple[jax.Array, jax.Array]


def capacity(x: object) -> int:
    """Of a row, in positions."""
    positions = arguments.size("capacity", x)
    arguments.require_near("capacity", positions)
    return positions


def new_positions(key: ArrayLike, value: ArrayLike, batch: int, into: Pair) -> Pair:
    """Both as [B, T, ...], checked against the cache that they shall go into."""
    key, value = _array("key", key), _array("value", value)
    cache_key, cache_value = into
    heads, head_dim = cache_key.shape[2:]
    fits = key.ndim in (3, 4) and (key.shape[0], *key.shape[-2:]) == (batch, heads, head_dim)
    if not fits or key.dtype != cache_key.dtype:
        shapes = f"[{batch}, T, {heads}, {head_dim}] or [{batch}, {heads}, {head_dim}]"
        arguments.fail("key", f"{cache_key.dtype}, {shapes}", arguments.describe(key))
    shape = (*key.shape[:-1], cache_value.shape[-1])
    if value.shape != shape or value.dtype != cache_value.dtype:
        arguments.fail(
            "value", f"{cache_value.dtype}, {list(shape)} beside key's", arguments.describe(value)
        )
    return (key, value) if key.ndim == 4 else (key[:, None], value[:, None])


def key_value(key: ArrayLike, value: ArrayLike, owner: str = "") -> Pair:
    """Both as arrays that agree with each other; `owner` comes before their names."""
    key, value = _array(f"{owner}key", key), _array(f"{owner}value", value)
    if key.ndim != 4 or min(key.shape[2:]) == 0 or key.dtype not in DTYPES:
        expected = f"{arguments.ONE_OF_DTYPES}, of 4 dims [..., K, H] with K and H above zero"
        arguments.fail(f"{owner}key", expected, arguments.describe(key))
    fits = value.ndim == 4 and value.shape[:3] == key.shape[:3] and value.shape[3] > 0
    if not fits or value.dtype != key.dtype:
        expected = f"{key.dtype}, [{', '.join(map(str, key.shape[:3]))}, Hv] beside key's"
        arguments.fail(f"{owner}value", expected, arguments.describe(value))
    return key, value


def require_room_for(key: jax.Array, capacity: int) -> None:
    """For all that a prefill gave, padding included."""
    if key.shape[1] > capacity:
        expected = f"at most {capacity} positions, the capacity, so with less padding"
        arguments.fail("key", expected, arguments.describe(key))


def require_lengths(name: str, lengths: jax.Array, most: int) -> None:
    for row, length in enumerate(_values(lengths)):
        if not 0 <= length <= most:
            arguments.fail(name, f"0 to {most} for row {row}", length)


def require_room(lengths: jax.Array, counts: jax.Array, capacity: int) -> None:
    for row, (length, count) in enumerate(zip(_values(lengths), _values(counts), strict=False)):
        if length + count > capacity:
            room = f"at most {capacity - length} new positions for row {row}"
            arguments.fail("key", f"{room}, which holds {length} of {capacity}", count)


def require_pages(
    name: str,
    page_table: jax.Array,
    starts: jax.Array,
    stops: jax.Array,
    pages: int,
    page_size: int,
) -> None:
    """A page for each position from a row's start on and before its stop, each page once."""
    # Where one of them is not known, nothing is.
    rows = zip(_values(page_table), _values(starts), _values(stops), strict=False)
    # What is written to a page.
    written: dict[int, str] = {}
    for row, (entries, start, stop) in enumerate(rows):
        for column in range(start // page_size, -(-stop // page_size)):
            page, begin = entries[column], column * page_size
            positions = f"positions {begin} to {begin + page_size - 1} of row {row}"
            if not 0 <= page < pages:
                arguments.fail(name, f"a page of 0 to {pages - 1} for {positions}", page)
            if page in written:
                what = f"a page for {positions} that no others are written to"
                arguments.fail(name, what, f"{page}, to which {written[page]} are")
            written[page] = positions


def _values(x: jax.Array) -> list:
    """The numbers, where they can be had now; none while tracing, and of other hosts' arrays."""
    is_known = not isinstance(x, jax.core.Tracer) and x.is_fully_addressable
    return np.asarray(x).tolist() if is_known else []


def _array(name: str, x: ArrayLike) -> jax.Array:
    array = arguments.array(name, x)
    # Never weakly typed: a cache has one type from its first step on.
    return jnp.asarray(array, array.dtype)
