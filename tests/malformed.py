"""The table of malformed calls, and what the message of each must hold."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash import IMPLEMENTATIONS
from pallas_flash.backends.xla import XlaBackend
from pallas_flash.validate.arguments import FARTHEST


def zeros(*shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.zeros(shape, dtype)


def ints(*shape: int) -> jax.Array:
    return zeros(*shape, dtype="int32")


def base() -> dict[str, object]:
    """B = 2, T = 3, S = 5, N = 4, K = 2, H = 8 and Hv = 6."""
    return {"query": zeros(2, 3, 4, 8), "key": zeros(2, 5, 2, 8), "value": zeros(2, 5, 2, 6)}


def unbatched() -> dict[str, object]:
    return {name: x[0] for name, x in base().items()}


@dataclass(frozen=True)
class Bad:
    """A call, and what must be in the message: "name: expected ..., got ..."."""

    id: str
    arguments: dict[str, object]
    name: str
    expected: tuple[str, ...]
    got: str
    start: dict[str, object] = field(default_factory=base)

    @property
    def call(self) -> dict[str, object]:
        return {**self.start, **self.arguments}


def bad(
    id: str, name: str, x: object, expected: str | tuple, got: str | None = None, **more
) -> Bad:
    """The argument `name` is wrong: it is `x`, and the message says so."""
    if got is None:
        got = f"{x.dtype}{list(x.shape)}" if isinstance(x, jax.Array) else str(x)
    expected = (expected,) if isinstance(expected, str) else expected
    return Bad(id, {name: x, **more.pop("also", {})}, name, expected, got, **more)


def several_batch_dims(key_batch: tuple[int, int]) -> dict[str, object]:
    return {
        "query": zeros(2, 3, 3, 4, 8),
        "key": zeros(*key_batch, 5, 2, 8),
        "value": zeros(2, 3, 5, 2, 6),
    }


RANKS = ("[T, N, H]", "[B, T, N, H]")

SHAPES = [
    bad("query-1d", "query", zeros(8), RANKS),
    bad("query-2d", "query", zeros(3, 8), RANKS),
    bad("key-rank-lower", "key", zeros(5, 2, 8), ("query's 4", "[..., S, K, H]")),
    bad("key-rank-higher", "key", zeros(2, 1, 5, 2, 8), ("query's 4", "[..., S, K, H]")),
    bad("value-rank-lower", "value", zeros(5, 2, 6), ("query's 4", "[..., S, K, Hv]")),
    bad("value-rank-higher", "value", zeros(1, 2, 5, 2, 6), ("query's 4", "[..., S, K, Hv]")),
    bad("value-length", "value", zeros(2, 4, 2, 6), ("key's length", "[..., 5, 2, Hv]")),
    bad("value-heads", "value", zeros(2, 5, 4, 6), ("heads", "[..., 5, 2, Hv]")),
    bad("key-batch", "key", zeros(3, 5, 2, 8), "query's batch dims [2]"),
    bad("key-batch-1", "key", zeros(1, 5, 2, 8), "query's batch dims [2]"),
    bad("value-batch", "value", zeros(3, 5, 2, 6), "query's batch dims [2]"),
    bad(
        "key-batch-transposed",
        "key",
        zeros(3, 2, 5, 2, 8),
        "query's batch dims [2, 3]",
        start=several_batch_dims((3, 2)),
    ),
    bad("head-dim", "key", zeros(2, 5, 2, 7), "query's head dim 8"),
    bad("heads-not-a-multiple", "key", zeros(2, 5, 3, 8), "divides query's 4"),
    bad("heads-more-than-query", "key", zeros(2, 5, 8, 8), "divides query's 4"),
    bad("query-no-heads", "query", zeros(2, 3, 0, 8), "at least one head"),
    bad("key-no-heads", "key", zeros(2, 5, 0, 8), "at least one head"),
    bad(
        "no-heads-anywhere",
        "query",
        zeros(2, 3, 0, 8),
        "at least one head",
        also={"key": zeros(2, 5, 0, 8), "value": zeros(2, 5, 0, 6)},
    ),
    bad(
        "no-head-dim",
        "query",
        zeros(2, 3, 4, 0),
        "head dim of at least 1",
        also={"key": zeros(2, 5, 2, 0)},
    ),
    bad("no-value-head-dim", "value", zeros(2, 5, 2, 0), "head dim of at least 1"),
]


def dtypes(query: str, key: str, value: str) -> Bad:
    """The three dtypes named; all of them in the message."""
    given = base()
    given = {
        name: given[name].astype(dtype)
        for name, dtype in (("query", query), ("key", key), ("value", value))
    }
    got = f"query {query}, key {key}, value {value}"
    expected = ("one dtype for all three", "float32, bfloat16, float16")
    return Bad("-".join((query, key, value)), given, "query, key, value", expected, got)


DTYPES = [
    dtypes("bfloat16", "float32", "float32"),
    dtypes("float32", "float16", "float32"),
    dtypes("float32", "float32", "bfloat16"),
    dtypes("float32", "bfloat16", "float16"),
    *(dtypes(x, x, x) for x in ("int32", "int8", "bool", "complex64", "float8_e4m3fn")),
]

NOT_ARRAYS = [
    bad("query-none", "query", None, "an array", "None"),
    bad("query-string", "query", "tokens", "an array", "'tokens'"),
    bad("key-ragged", "key", [[1.0], [1.0, 2.0]], "an array", "[[1.0], [1.0, 2.0]]"),
    bad(
        "value-only-a-shape",
        "value",
        jax.ShapeDtypeStruct((2, 5, 2, 6), jnp.float32),
        "an array",
        "ShapeDtypeStruct",
    ),
    bad("bias-string", "bias", "alibi", "array", "'alibi'"),
    bad("mask-string", "mask", "causal", "array", "'causal'"),
    bad("sinks-string", "sinks", "zero", "array", "'zero'"),
]

PAIRS = "each axis 1 or that of [..., N, T, S] = "
MASK, BIAS = ("a bool array", PAIRS), ("a float array", PAIRS)

BIAS_AND_MASK = [
    bad("mask-float", "mask", zeros(2, 4, 3, 5), (*MASK, "[2, 4, 3, 5]")),
    bad("mask-int", "mask", ints(3, 5), MASK),
    bad("mask-length", "mask", zeros(2, 4, 3, 6, dtype="bool"), (*MASK, "[2, 4, 3, 5]")),
    bad("mask-key-heads", "mask", zeros(2, 2, 3, 5, dtype="bool"), MASK),
    bad("mask-transposed", "mask", zeros(5, 3, dtype="bool"), MASK),
    bad("mask-batch-only", "mask", zeros(2, 5, dtype="bool"), MASK),
    bad("mask-5d", "mask", zeros(1, 2, 4, 3, 5, dtype="bool"), MASK),
    bad("mask-empty-axis", "mask", zeros(2, 4, 3, 0, dtype="bool"), MASK),
    bad("bias-int", "bias", ints(2, 4, 3, 5), (*BIAS, "[2, 4, 3, 5]")),
    bad("bias-bool", "bias", zeros(3, 5, dtype="bool"), BIAS),
    bad("bias-complex", "bias", zeros(3, 5, dtype="complex64"), BIAS),
    bad("bias-length", "bias", zeros(4, 1, 4), BIAS),
    bad("bias-batch", "bias", zeros(3, 1, 1, 5), BIAS),
    bad("bias-5d", "bias", zeros(1, 1, 1, 3, 5), BIAS),
    bad("bias-6d", "bias", zeros(1, 1, 1, 1, 3, 5), BIAS),
    bad("bias-batch-of-unbatched", "bias", zeros(2, 4, 3, 5), BIAS, start=unbatched()),
    bad(
        "bias-one-batch-dim-of-two",
        "bias",
        zeros(6, 4, 3, 5),
        (*BIAS, "[2, 3, 4, 3, 5]"),
        start=several_batch_dims((2, 3)),
    ),
]

PAIR_OF_INTS = "an int >= 0 or a pair (left, right) of such"

WINDOW = [
    bad(id, "local_window_size", x, PAIR_OF_INTS, repr(x))
    for id, x in {
        "negative": -1,
        "negative-left": (-1, 2),
        "negative-right": (2, -1),
        "three": (1, 2, 3),
        "one": (1,),
        "none-at-all": (),
        "float": 2.0,
        "float-right": (1, 2.0),
        "bool": True,
        "bool-left": (False, 1),
        "half-open": (None, 0),
        "string": "12",
        "array": np.array([1, 2]),
    }.items()
]

SOFT_CAP = [
    bad(id, "logits_soft_cap", x, "a finite number > 0, from 1e-20 to 1e20, or None", repr(x))
    for id, x in {
        "zero": 0,
        "zero-float": 0.0,
        "negative": -30.0,
        "nan": float("nan"),
        "inf": float("inf"),
        "numpy-inf": np.float32("inf"),
        "beyond-float32": 1e300,
        "beyond-float": 10**400,
        "string": "30",
        "bool": True,
        "complex": 30 + 0j,
        "array": jnp.float32(30.0),
    }.items()
] + [
    bad(
        "small-beside-the-scale",
        "logits_soft_cap",
        1e-9,
        "at least |scale| / 1e+38, where scale = 1e+30",
        "1e-09",
        also={"scale": 1e30},
    )
]

ROWS = "an integer array of shape [2]"

ROWS = "an integer array of shape [2]"

LENGTHS = [
    case
    for name in ("query_seq_lengths", "key_value_seq_lengths")
    for case in (
        bad(f"{name}-shape", name, ints(3), ROWS),
        bad(f"{name}-rank", name, ints(2, 1), ROWS),
        bad(f"{name}-scalar", name, 3, ROWS, "int32[]"),
        bad(f"{name}-float", name, zeros(2), ROWS),
        bad(f"{name}-float-list", name, [3.0, 2.0], ROWS, "float64[2]"),
        bad(f"{name}-bool", name, zeros(2, dtype="bool"), ROWS),
        bad(f"{name}-string", name, "33", "array", "'33'"),
        bad(f"{name}-of-unbatched", name, ints(2), "shape [] or [1]", start=unbatched()),
    )
]

OFFSET_SHAPES = "an integer array of shape [] or [2]"
NEAR = f"{FARTHEST}"

OFFSET = [
    bad("offset-shape", "query_offset", ints(3), OFFSET_SHAPES),
    bad("offset-rank", "query_offset", ints(2, 1), OFFSET_SHAPES),
    bad("offset-per-row", "query_offset", ints(2, 3), OFFSET_SHAPES),
    bad("offset-float", "query_offset", 1.5, OFFSET_SHAPES, "float32[]"),
    bad("offset-float-array", "query_offset", zeros(2), OFFSET_SHAPES),
    bad("offset-bool", "query_offset", True, OFFSET_SHAPES, "bool[]"),
    bad("offset-numpy-bool", "query_offset", np.True_, OFFSET_SHAPES, "bool[]"),
    bad("offset-bool-array", "query_offset", zeros(2, dtype="bool"), OFFSET_SHAPES),
    bad("offset-complex", "query_offset", 1j, OFFSET_SHAPES, "complex64[]"),
    bad("offset-string", "query_offset", "1", "an", "'1'"),
    bad("offset-none", "query_offset", None, "an", "None"),
    bad("offset-too-large", "query_offset", FARTHEST + 1, NEAR),
    bad("offset-too-small", "query_offset", -FARTHEST - 1, NEAR),
    bad("offset-beyond-int64", "query_offset", 2**70, NEAR),
    bad("offset-numpy-too-large", "query_offset", np.int64(2**40), NEAR),
    bad("offset-list-too-large", "query_offset", [2**40, 0], NEAR, "[1099511627776, 0]"),
]

SEGMENTS = [
    bad(
        "only-query-ids",
        "key_value_segment_ids",
        None,
        ("an integer array", "query_segment_ids is given", "T = 3", "S = 5"),
        also={"query_segment_ids": ints(2, 3)},
    ),
    bad(
        "only-key-ids",
        "query_segment_ids",
        None,
        ("an integer array", "key_value_segment_ids is given", "T = 3", "S = 5"),
        also={"key_value_segment_ids": ints(2, 5)},
    ),
    bad(
        "ids-beyond-int32",
        "query_segment_ids",
        np.array([[0, 1, 2**32]] * 2),
        "int32",
        "4294967296",
        also={"key_value_segment_ids": ints(2, 5)},
    ),
    *(
        bad(
            f"{side}-ids-{id}",
            f"{side}_segment_ids",
            x,
            f"an integer array of shape [2, {length}]",
            also={f"{other}_segment_ids": ints(2, 8 - length)},
        )
        for side, other, length in (("query", "key_value", 3), ("key_value", "query", 5))
        for id, x in {
            "length": ints(2, 4),
            "batch": ints(1, length),
            "no-batch": ints(length),
            "rank": ints(2, length, 1),
            "float": zeros(2, length),
            "bool": zeros(2, length, dtype="bool"),
        }.items()
    ),
]

SINKS = [
    bad(f"sinks-{id}", "sinks", x, "a float array [N] = [4]", got)
    for id, x, got in (
        ("key-heads", zeros(2), None),
        ("batched", zeros(2, 4), None),
        ("scalar", 0.0, "float32[]"),
        ("int", ints(4), None),
        ("bool", zeros(4, dtype="bool"), None),
        ("complex", zeros(4, dtype="complex64"), None),
    )
]

SCALE = [
    bad(f"scale-{id}", "scale", x, expected, got)
    for id, x, expected, got in (
        ("complex", 1j, "real", "j"),
        ("numpy-complex", np.complex64(1j), "real", "j"),
        ("complex-array", zeros(dtype="complex64"), "real", "complex64[]"),
        ("bool", True, "real", "True"),
        ("numpy-bool", np.True_, "real", "True"),
        ("0d-numpy-bool", np.array(True), "real", "True"),
        ("bool-array", zeros(dtype="bool"), "real", "bool[]"),
        ("nan", float("nan"), "finite", "nan"),
        ("inf", float("inf"), "finite", "inf"),
        ("minus-inf", np.float32("-inf"), "finite", "-inf"),
        ("beyond-float", 10**400, "number", "1000"),
        ("beyond-float32", 1e300, "finite", "1e+300"),
        ("two", zeros(2), "real", "float32[2]"),
        ("one-in-a-row", zeros(1), "real", "float32[1]"),
        ("list", [0.5, 0.25], "real", "[0.5"),
        ("numpy-two", np.zeros(2, np.float32), "real", "array([0., 0.]"),
        ("string", "0.5", "real", "'0.5'"),
        ("numpy-string", np.str_("half"), "real", "half"),
        ("0d-numpy-string", np.array("half"), "real", "half"),
        ("0d-numpy-object", np.array(None), "real", "None"),
        ("date", np.datetime64("2020-01-01"), "real", "2020-01-01"),
    )
]

CAUSAL = [
    bad(f"is_causal-{id}", "is_causal", x, "a bool", got)
    for id, x, got in (
        ("int", 1, "int: 1"),
        ("none", None, "None"),
        ("string", "yes", "'yes'"),
        ("0d-numpy", np.array(True), "array(True)"),
        ("0d-array", jnp.array(True), "Array(True"),
    )
]

PRECISION = [
    bad(f"precision-{id}", "precision", x, ("'highest'", "jax.lax.Precision", "F32_F32_F32"), got)
    for id, x, got in (
        ("unknown", "quick", "'quick'"),
        ("int", 3, "3"),
        ("pair", ("highest", "highest"), "('highest', 'highest')"),
        ("array", np.zeros(2), "array([0., 0.])"),
        ("sums-in-float16", "F16_F16_F16", "F16_F16_F16"),
        ("sums-in-float64", jax.lax.DotAlgorithmPreset.F64_F64_F64, "F64_F64_F64"),
        ("of-8-bits", "ANY_F8_ANY_F8_F32", "ANY_F8_ANY_F8_F32"),
    )
]

IMPLEMENTATION = [
    bad(f"implementation-{id}", "implementation", x, tuple(map(repr, IMPLEMENTATIONS)), got)
    for id, x, got in (
        ("cudnn", "cudnn", "'cudnn'"),
        ("empty", "", "''"),
        ("capitals", "XLA", "'XLA'"),
        ("int", 3, "3"),
        ("bytes", b"xla", "b'xla'"),
        ("tuple", ("xla", "triton"), "('xla', 'triton')"),
        ("class", XlaBackend, "XlaBackend"),
        ("array", np.zeros(2), "array"),
    )
]

CALLS = [
    *SHAPES,
    *DTYPES,
    *NOT_ARRAYS,
    *BIAS_AND_MASK,
    *(Bad(f"window-{x.id}", x.arguments, x.name, x.expected, x.got) for x in WINDOW),
    *(Bad(f"cap-{x.id}", x.arguments, x.name, x.expected, x.got) for x in SOFT_CAP),
    *LENGTHS,
    *OFFSET,
    *SEGMENTS,
    *SINKS,
    *SCALE,
    *CAUSAL,
    *PRECISION,
    *IMPLEMENTATION,
]
