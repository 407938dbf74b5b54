"""What all checks share: arrays out of arguments, and the form of a refusal."""

from collections.abc import Collection, Mapping
from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from pallas_flash.spec import DTYPES

# Positions are int32. Offsets within this, and windows within twice this, can be added to a
# position without a wrap; a window that reaches farther than that reaches everything.
FARTHEST = 2**29

ONE_OF_DTYPES = f"one of {', '.join(jnp.dtype(dtype).name for dtype in DTYPES)}"


def fail(name: str, expected: str, got: object) -> NoReturn:
    raise ValueError(f"{name}: expected {expected}, got {got}")


def describe(x: np.ndarray | jax.Array) -> str:
    return f"{x.dtype}{list(x.shape)}"


def size(name: str, x: object, least: int = 1, most: int | None = None) -> int:
    """An int within both, as Python's own."""
    is_int = isinstance(x, (int, np.integer)) and not isinstance(x, bool)
    if not is_int or x < least or (most is not None and x > most):
        bounds = f">= {least}" if most is None else f"from {least} to {most}"
        fail(name, f"an int {bounds}", f"{x!r:.80}")
    return int(x)


def dtype(name: str, x: DTypeLike) -> np.dtype:
    """One of `DTYPES`."""
    try:
        is_known = jnp.dtype(x) in DTYPES
    except TypeError:
        is_known = False
    if not is_known:
        fail(name, ONE_OF_DTYPES, f"{x!r:.80}")
    return jnp.dtype(x)


def array(name: str, x: ArrayLike) -> jax.Array:
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError, OverflowError):
        fail(name, "an array", f"{type(x).__name__}: {x!r:.80}")


def require(condition: bool, name: str, expected: str, x: np.ndarray | jax.Array) -> None:
    if not condition:
        fail(name, expected, describe(x))


def agree(arrays: Mapping[str, jax.Array]) -> None:
    """Whether query, key and value, of [..., heads, head dim] and in this order, fit in these."""
    (_, q), (key, k), (value, v) = arrays.items()
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        fail(
            ", ".join(arrays),
            f"one dtype for all three, {ONE_OF_DTYPES}",
            ", ".join(f"{name} {x.dtype}" for name, x in arrays.items()),
        )
    heads, key_heads = q.shape[-2], k.shape[-2]
    require(heads > 0, "query", "at least one head", q)
    require(key_heads > 0, key, "at least one head", k)
    require(heads % key_heads == 0, key, f"a head count that divides query's {heads}", k)
    require(q.shape[-1] > 0, "query", "a head dim of at least 1", q)
    require(k.shape[-1] == q.shape[-1], key, f"query's head dim {q.shape[-1]}", k)
    require(v.shape[-1] > 0, value, "a head dim of at least 1", v)


def integers(
    name: str, x: ArrayLike, shapes: Collection[tuple[int, ...]]
) -> np.ndarray | jax.Array:
    """An integer array of one of the shapes; what is not JAX's keeps all its bits."""
    x = _numbers(name, x)
    expected = "an integer array of shape " + " or ".join(str(list(shape)) for shape in shapes)
    is_integer = jnp.issubdtype(x.dtype, jnp.integer)
    require(is_integer and x.shape in shapes, name, expected, x)
    return x


def _numbers(name: str, x: ArrayLike) -> np.ndarray | jax.Array:
    wide = known(x)
    return wide if isinstance(wide, np.ndarray) else array(name, x)


def known(x: ArrayLike) -> np.ndarray | None:
    """What is NumPy's or a list of ints as NumPy has it, in 64 bits where need be; else None."""
    if not isinstance(x, (np.ndarray, np.generic, list, tuple)):
        return None
    try:
        array = np.asarray(x)
    except (TypeError, ValueError):
        # A list that holds tracers, or rows of several lengths.
        return None
    if array.size == 0 and isinstance(x, (list, tuple)):
        # No numbers have no type, and NumPy's default is a float.
        return array.astype(np.int32)
    return None if array.dtype == object else array


def int32(name: str, x: ArrayLike, shape: tuple[int | None, ...]) -> jax.Array:
    """An integer array as int32; what that cannot hold becomes its bound.

    Args:
      name: of the argument.
      x: the argument.
      shape: its shape, with None for any size above zero.
    """
    x = _numbers(name, x)
    fits = x.ndim == len(shape) and all(
        size > 0 if wanted is None else size == wanted
        for size, wanted in zip(x.shape, shape, strict=True)
    )
    sizes = ", ".join("at least 1" if size is None else str(size) for size in shape)
    is_integer = jnp.issubdtype(x.dtype, jnp.integer)
    require(fits and is_integer, name, f"an integer array of shape [{sizes}]", x)
    if x.dtype != np.int32:
        info = jnp.iinfo(np.int32)
        return clip(x, info.min, info.max)
    # Never weakly typed: what loops carry has one type from the first step on.
    return jnp.asarray(x, np.int32)


def require_near(name: str, positions: int) -> None:
    """What `name` gives a row so many positions of."""
    if positions > FARTHEST:
        fail(name, f"at most {FARTHEST} positions a row", positions)


def page_table(name: str, x: ArrayLike, rows: int | None, page_size: int) -> jax.Array:
    """As int32 [rows, pages per row]; rows None for any number above zero."""
    table = int32(name, x, (rows, None))
    require_near(name, table.shape[1] * page_size)
    return table


def is_known_beyond(x: np.ndarray | jax.Array, least: int, most: int) -> bool:
    """Whether a value lies outside; never of an array of JAX, which would have to be waited for."""
    if isinstance(x, jax.Array) or not x.size:
        return False
    return not least <= x.min() <= x.max() <= most


def clip(x: np.ndarray | jax.Array, least: int, most: int) -> jax.Array:
    """As int32, and what lies outside at the bound: a cast alone would wrap wide integers."""
    info = jnp.iinfo(x.dtype)
    clipped = x.clip(max(least, info.min), min(most, info.max))
    return jnp.asarray(clipped.astype(np.int32))


def sinks(x: ArrayLike | None, heads: int) -> jax.Array | None:
    if x is None:
        return None
    x = array("sinks", x)
    fits = x.shape == (heads,) and jnp.issubdtype(x.dtype, jnp.floating)
    require(fits, "sinks", f"a float array [N] = [{heads}]", x)
    return x.astype(jnp.float32)
