"""Arguments in, and out comes what backends see, checked and in its one form, or a ValueError.

Every message names the argument, what was expected and what came.
"""

import math
from collections.abc import Collection
from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from pallas_flash.spec import DTYPES, Operands, Precision

# Positions are int32. Offsets within this, and windows within twice this, can be added to a
# position without a wrap; a window that reaches farther than that reaches everything.
FARTHEST = 2**29

# Algorithms for float32 operands, and float32 sums, that some device has.
_ALGORITHMS = tuple(
    jax.lax.DotAlgorithmPreset[name]
    for name in (
        "DEFAULT",
        "F32_F32_F32",
        "TF32_TF32_F32",
        "TF32_TF32_F32_X3",
        "BF16_BF16_F32",
        "BF16_BF16_F32_X3",
        "BF16_BF16_F32_X6",
        "BF16_BF16_F32_X9",
    )
)

_LARGEST = float(jnp.finfo(jnp.float32).max)
_LARGEST_RATIO = 1e38


def _fail(name: str, expected: str, got: object) -> NoReturn:
    raise ValueError(f"{name}: expected {expected}, got {got}")


def _describe(x: np.ndarray | jax.Array) -> str:
    return f"{x.dtype}{list(x.shape)}"


def _array(name: str, x: ArrayLike) -> jax.Array:
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError, OverflowError):
        _fail(name, "an array", f"{type(x).__name__}: {x!r:.80}")


def _require(condition: bool, name: str, expected: str, x: np.ndarray | jax.Array) -> None:
    if not condition:
        _fail(name, expected, _describe(x))


def query_key_value(
    query: ArrayLike, key: ArrayLike, value: ArrayLike
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The three operands as arrays, [*batch, T, N, H], [*batch, S, K, H] and [*batch, S, K, Hv]."""
    arrays = {
        name: _array(name, x) for name, x in (("query", query), ("key", key), ("value", value))
    }
    q, k, v = arrays.values()
    _require(q.ndim >= 3, "query", "[T, N, H], [B, T, N, H] or more batch dims", q)
    for name in ("key", "value"):
        x, last = arrays[name], "H" if name == "key" else "Hv"
        expected = f"as many dims as query's {q.ndim}, [..., S, K, {last}]"
        _require(x.ndim == q.ndim, name, expected, x)
        _require(x.shape[:-3] == q.shape[:-3], name, f"query's batch dims {list(q.shape[:-3])}", x)
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        _fail(
            "query, key, value",
            f"one dtype for all three, one of {', '.join(jnp.dtype(d).name for d in DTYPES)}",
            f"query {q.dtype}, key {k.dtype}, value {v.dtype}",
        )
    heads, key_heads = q.shape[-2], k.shape[-2]
    _require(heads > 0, "query", "at least one head", q)
    _require(key_heads > 0, "key", "at least one head", k)
    _require(heads % key_heads == 0, "key", f"a head count that divides query's {heads}", k)
    _require(q.shape[-1] > 0, "query", "a head dim of at least 1", q)
    _require(k.shape[-1] == q.shape[-1], "key", f"query's head dim {q.shape[-1]}", k)
    expected = f"key's length and heads [..., {k.shape[-3]}, {key_heads}, Hv]"
    _require(v.shape[-3:-1] == k.shape[-3:-1], "value", expected, v)
    _require(v.shape[-1] > 0, "value", "a head dim of at least 1", v)
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
        sinks=_sinks(sinks, heads),
    )


def _merge_batch(x: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """[*batch, ...] as [B, ...]; without batch dims, B is 1."""
    return x.reshape(math.prod(batch), *x.shape[len(batch) :])


def _pairs(name: str, x: ArrayLike | None, full: tuple[int, ...], kind: type) -> jax.Array | None:
    """A bias or mask as [B or 1, N or 1, T or 1, S or 1]; `full` is [*batch, N, T, S]."""
    if x is None:
        return None
    x = _array(name, x)
    word = "bool" if kind is jnp.bool_ else "float"
    expected = f"a {word} array, each axis 1 or that of [..., N, T, S] = {list(full)}"
    shape = (1,) * (len(full) - x.ndim) + x.shape
    fits = len(shape) == len(full) and all(
        size in (1, whole) for size, whole in zip(shape, full, strict=True)
    )
    _require(fits and jnp.issubdtype(x.dtype, kind), name, expected, x)
    batch = shape[:-3]
    if max(batch) > 1:
        # Batch dims of which one is broadcast and another is not have no form with one batch dim.
        batch = full[:-3]
        shape = (*batch, *shape[-3:])
    return _merge_batch(jnp.broadcast_to(x, shape), batch)


def _integers(
    name: str, x: ArrayLike, shapes: Collection[tuple[int, ...]]
) -> np.ndarray | jax.Array:
    """An integer array of one of the shapes; what is not JAX's keeps all its bits."""
    wide = _wide(x)
    x = wide if isinstance(wide, np.ndarray) else _array(name, x)
    expected = "an integer array of shape " + " or ".join(str(list(shape)) for shape in shapes)
    is_integer = jnp.issubdtype(x.dtype, jnp.integer)
    _require(is_integer and x.shape in shapes, name, expected, x)
    return x


def _wide(x: ArrayLike) -> np.ndarray | None:
    """What is NumPy's or a list of ints as NumPy has it, in 64 bits where need be; else None."""
    if not isinstance(x, (np.ndarray, np.generic, list, tuple)):
        return None
    try:
        array = np.asarray(x)
    except (TypeError, ValueError):
        # A list that holds tracers, or rows of several lengths.
        return None
    return None if array.dtype == object else array


def _is_known_beyond(x: np.ndarray | jax.Array, least: int, most: int) -> bool:
    """Whether a value lies outside; never of an array of JAX, which would have to be waited for."""
    if isinstance(x, jax.Array) or not x.size:
        return False
    return not least <= x.min() <= x.max() <= most


def _clip(x: np.ndarray | jax.Array, least: int, most: int) -> jax.Array:
    """As int32, and what lies outside at the bound: a cast alone would wrap wide integers."""
    info = jnp.iinfo(x.dtype)
    clipped = x.clip(max(least, info.min), min(most, info.max))
    return jnp.asarray(clipped.astype(np.int32))


def _lengths(name: str, x: ArrayLike | None, batch: tuple[int, ...]) -> jax.Array | None:
    """int32 [B]; a scalar will do where there is no batch dim."""
    if x is None:
        return None
    x = _integers(name, x, [batch] if batch else [(), (1,)])
    return _clip(x, 0, FARTHEST).reshape(math.prod(batch))


def _query_offset(x: ArrayLike, batch: tuple[int, ...]) -> jax.Array | None:
    """int32 [B], one number for each row; None for zero."""
    shape = batch or (1,)
    expected = f"an int, or integers of shape [] or {list(shape)}, within +-{FARTHEST}"
    if isinstance(x, int) and not isinstance(x, bool):
        if x == 0:
            return None
        # Wide enough to hold all that is in range, and what is not must be told.
        if abs(x) > FARTHEST:
            _fail("query_offset", expected, x)
        x = np.int32(x)
    x = _integers("query_offset", x, [(), shape])
    if _is_known_beyond(x, -FARTHEST, FARTHEST):
        _fail("query_offset", expected, x.tolist())
    offset = _clip(x, -FARTHEST, FARTHEST)
    return jnp.broadcast_to(offset, shape).reshape(math.prod(batch))


def _ids(name: str, x: ArrayLike | None, batch: tuple[int, ...], length: int) -> jax.Array | None:
    """int32 [B, length], or int64 where an array of JAX has it: a cast would make ids equal."""
    if x is None:
        return None
    shapes = [(*batch, length)] if batch else [(length,), (1, length)]
    x = _integers(name, x, shapes)
    info = jnp.iinfo(jnp.int32)
    if _is_known_beyond(x, info.min, info.max):
        _fail(name, "integers that int32 can hold", f"{x.min()} to {x.max()}")
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
        _fail(missing, f"{expected} = {key_length}", "None")
    query_ids = _ids("query_segment_ids", query_ids, batch, query_length)
    key_ids = _ids("key_value_segment_ids", key_ids, batch, key_length)
    if query_ids is None or key_ids is None:
        either = key_ids if query_ids is None else query_ids
        return either, either
    wide = max(query_ids.dtype, key_ids.dtype, key=lambda dtype: dtype.itemsize)
    return query_ids.astype(wide), key_ids.astype(wide)


def _sinks(x: ArrayLike | None, heads: int) -> jax.Array | None:
    if x is None:
        return None
    x = _array("sinks", x)
    fits = x.shape == (heads,) and jnp.issubdtype(x.dtype, jnp.floating)
    _require(fits, "sinks", f"a float array [N] = [{heads}]", x)
    return x.astype(jnp.float32)


def scale(x: ArrayLike | None, head_dim: int) -> tuple[float, jax.Array | None]:
    """The scale as a static number, or as an array that takes its place; None is 1 / sqrt(H)."""
    if x is None:
        return 1 / math.sqrt(head_dim), None
    expected = "a real number, or a real array of shape []"
    try:
        # NumPy takes an int beyond 64 bits for an object.
        number = x if isinstance(x, jax.Array) else np.asarray(float(x) if type(x) is int else x)
    except (TypeError, ValueError, OverflowError):
        _fail("scale", expected, f"{x!r:.80}")
    kinds = (jnp.floating, jnp.integer)
    if number.shape != () or not any(jnp.issubdtype(number.dtype, kind) for kind in kinds):
        got = _describe(number) if isinstance(number, jax.Array) else f"{x!r:.80}"
        _fail("scale", expected, got)
    # An array of JAX stays one, for it may be a tracer or differentiated.
    if isinstance(number, jax.Array):
        return 1.0, number.astype(jnp.float32)
    if not abs(float(number)) <= _LARGEST:
        _fail("scale", "a finite number, as float32", f"{x!r:.80}")
    return float(number), None


def is_causal(x: object) -> bool:
    """A static bool."""
    if not isinstance(x, (bool, np.bool_)):
        _fail("is_causal", "a bool", f"{type(x).__name__}: {x!r:.80}")
    return bool(x)


def local_window_size(x: object) -> tuple[int | None, int | None] | None:
    """(left, right), None for a side without limit; one int stands for both. None: no window."""
    if x is None:
        return None
    sides = x if isinstance(x, (tuple, list)) else (x, x)
    reach = [
        int(side)
        for side in sides
        if isinstance(side, (int, np.integer)) and not isinstance(side, bool) and side >= 0
    ]
    if len(sides) != 2 or len(reach) != 2:
        _fail("local_window_size", "an int >= 0 or a pair (left, right) of such", repr(x))
    left, right = (side if side < 2 * FARTHEST else None for side in reach)
    return left, right


def logits_soft_cap(x: object, scale: float) -> float | None:
    """A static number above zero, for logits of that static scale."""
    if x is None:
        return None
    is_number = isinstance(x, (int, float, np.integer, np.floating)) and not isinstance(x, bool)
    # Not every int has a float, but all can be compared with one. Nearer to the ends of float32,
    # logits / cap would leave it.
    if not (is_number and 1e-20 <= (x if isinstance(x, int) else float(x)) <= 1e20):
        expected = "a finite number > 0, from 1e-20 to 1e20, or None"
        _fail("logits_soft_cap", expected, repr(x))
    # A compiler may make one factor of the two.
    if abs(scale) / float(x) > _LARGEST_RATIO:
        _fail(
            "logits_soft_cap",
            f"at least |scale| / {_LARGEST_RATIO:g}, where scale = {scale:g}",
            repr(x),
        )
    return float(x)


def precision(x: object) -> Precision:
    """What products of float32 operands follow; None is `jax_default_matmul_precision`."""
    # pyrefly: ignore[missing-attribute]  # JAX makes its options attributes at run time.
    given = jax.config.jax_default_matmul_precision if x is None else x
    if given is None:
        return jax.lax.Precision.DEFAULT
    if isinstance(given, str):
        given = jax.lax.DotAlgorithmPreset.__members__.get(given, given)
    if isinstance(given, str):
        try:
            return jax.lax.Precision(given)
        except ValueError:
            pass
    if isinstance(given, jax.lax.Precision):
        return given
    if isinstance(given, jax.lax.DotAlgorithmPreset) and given in _ALGORITHMS:
        return given
    _fail(
        "jax_default_matmul_precision, as precision is None" if x is None else "precision",
        "None, 'default', 'high', 'highest', a jax.lax.Precision, or one of "
        f"{', '.join(str(algorithm) for algorithm in _ALGORITHMS)}",
        repr(given),
    )
