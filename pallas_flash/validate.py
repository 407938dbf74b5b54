"""Arguments in, and out comes what backends see, checked and in its one form, or a ValueError.

Every message names the argument, what was expected and what came.
"""

import math
from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from pallas_flash.spec import DTYPES, Operands, Precision

# Positions are int32 inside; windows and offsets within this leave room to add one to the other.
FARTHEST = 2**30 - 1


def _fail(name: str, expected: str, got: object) -> NoReturn:
    raise ValueError(f"{name}: expected {expected}, got {got}")


def _describe(x: jax.Array) -> str:
    return f"{x.dtype}{list(x.shape)}"


def _array(name: str, x: ArrayLike) -> jax.Array:
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError):
        _fail(name, "an array", f"{type(x).__name__}: {x!r:.80}")


def _require(condition: bool, name: str, expected: str, x: jax.Array) -> None:
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
        query_seq_lengths=_integers("query_seq_lengths", query_seq_lengths, batch),
        key_value_seq_lengths=_integers("key_value_seq_lengths", key_value_seq_lengths, batch),
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
    name: str, x: ArrayLike | None, batch: tuple[int, ...], tail: tuple[int, ...] = ()
) -> jax.Array | None:
    """An integer array [*batch, *tail] as int32 [B, *tail]."""
    if x is None:
        return None
    x = _array(name, x)
    shapes = [(*batch, *tail)] if batch else [tail, (1, *tail)]
    expected = "an integer array of shape " + " or ".join(str(list(shape)) for shape in shapes)
    is_integer = jnp.issubdtype(x.dtype, jnp.integer)
    _require(is_integer and x.shape in shapes, name, expected, x)
    return x.astype(jnp.int32).reshape(math.prod(batch), *tail)


def _query_offset(x: ArrayLike, batch: tuple[int, ...]) -> jax.Array | None:
    """int32 [B], one number for each row; None for zero."""
    if isinstance(x, (int, np.integer)) and not isinstance(x, bool):
        if abs(x) > FARTHEST:
            _fail("query_offset", f"an int within +-{FARTHEST}", x)
        return None if x == 0 else jnp.full(math.prod(batch), x, jnp.int32)
    x = _array("query_offset", x)
    shapes = {(), batch}
    expected = f"an int, or an integer array of shape [] or {list(batch)}"
    is_integer = jnp.issubdtype(x.dtype, jnp.integer)
    _require(is_integer and x.shape in shapes, "query_offset", expected, x)
    return jnp.broadcast_to(x.astype(jnp.int32), batch).reshape(math.prod(batch))


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
    query_ids = _integers("query_segment_ids", query_ids, batch, (query_length,))
    key_ids = _integers("key_value_segment_ids", key_ids, batch, (key_length,))
    return (
        key_ids if query_ids is None else query_ids,
        query_ids if key_ids is None else key_ids,
    )


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
    if isinstance(x, (bool, np.bool_)):
        _fail("scale", expected, x)
    # An array of JAX stays one, for it may be a tracer or differentiated.
    if isinstance(x, (int, float, np.generic)) or (isinstance(x, np.ndarray) and x.shape == ()):
        if not np.isrealobj(x):
            _fail("scale", expected, x)
        return float(x), None
    x = _array("scale", x)
    is_real = jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)
    _require(is_real and x.shape == (), "scale", expected, x)
    return 1.0, x.astype(jnp.float32)


def is_causal(x: object) -> bool:
    """A static bool."""
    if not isinstance(x, (bool, np.bool_)):
        _fail("is_causal", "a bool", f"{type(x).__name__}: {x!r:.80}")
    return bool(x)


def local_window_size(x: object) -> tuple[int, int] | None:
    """(left, right); one int stands for both. None: no window."""
    if x is None:
        return None
    sides = x if isinstance(x, (tuple, list)) else (x, x)
    reach = [
        min(int(side), FARTHEST)
        for side in sides
        if isinstance(side, (int, np.integer)) and not isinstance(side, bool) and side >= 0
    ]
    if len(sides) != 2 or len(reach) != 2:
        _fail("local_window_size", "an int >= 0 or a pair (left, right) of such", repr(x))
    return reach[0], reach[1]


def logits_soft_cap(x: object) -> float | None:
    """A static number above zero."""
    if x is None:
        return None
    is_number = isinstance(x, (int, float, np.integer, np.floating)) and not isinstance(x, bool)
    if not (is_number and math.isfinite(x) and x > 0):
        _fail("logits_soft_cap", "a finite number > 0 or None", repr(x))
    return float(x)


def precision(x: object) -> Precision:
    """What products of float32 operands follow; None is `jax_default_matmul_precision`."""
    # pyrefly: ignore[missing-attribute]  # JAX makes its options attributes at run time.
    given = jax.config.jax_default_matmul_precision if x is None else x
    if given is None:
        return jax.lax.Precision.DEFAULT
    if isinstance(given, (jax.lax.Precision, jax.lax.DotAlgorithmPreset)):
        return given
    if isinstance(given, str):
        presets = jax.lax.DotAlgorithmPreset.__members__
        if given in presets:
            return presets[given]
        try:
            return jax.lax.Precision(given)
        except ValueError:
            pass
    _fail(
        "precision",
        "None, 'default', 'high', 'highest', a jax.lax.Precision or a jax.lax.DotAlgorithmPreset",
        repr(given),
    )
