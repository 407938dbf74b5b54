"""Calls to try an implementation on, what they should give, and how far off it may be.

The budget comes from data: an implementation's error against the float64 reference may be twice
that of plain dense attention in the same dtype, and one rounding step more.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash.reference import reference_attention
from pallas_flash.spec import AttentionOutput, AttentionSpec, Operands

DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks", "scale")


@dataclass(frozen=True)
class Case:
    """One call of attention by its sizes and options.

    Attributes:
      bias, mask: which axes are not 1, such as "NTS" for [1, N, T, S]; None for no bias or mask.
      query_offset, query_seq_lengths, key_value_seq_lengths: one number for each batch row.
      segments: how many segments each row's tokens are drawn from, unsorted; 0 for no segment ids.
      scale: a static number, or "traced" for a random array; None for the default.
      spread: factor on query and key: larger makes sharper softmaxes.
    """

    B: int = 2
    T: int = 64
    S: int = 64
    N: int = 2
    K: int = 2
    H: int = 32
    Hv: int | None = None
    dtype: str = "float32"
    is_causal: bool = False
    local_window_size: tuple[int, int] | None = None
    query_offset: tuple[int, ...] | None = None
    query_seq_lengths: tuple[int, ...] | None = None
    key_value_seq_lengths: tuple[int, ...] | None = None
    segments: int = 0
    bias: str | None = None
    bias_dtype: str | None = None
    mask: str | None = None
    logits_soft_cap: float | None = None
    sinks: bool = False
    scale: float | str | None = None
    spread: float = 1.0

    @property
    def id(self) -> str:
        """Readable and unique: sizes, then each option in use, such as "B2-T3-...-causal"."""
        parts = [f"{name}{getattr(self, name)}" for name in ("B", "T", "S", "N", "K", "H")]
        short = {"is_causal": "causal", "local_window_size": "window", "logits_soft_cap": "cap"}
        for field in fields(self)[6:]:
            value = getattr(self, field.name)
            if value == field.default:
                continue
            name = short.get(field.name, field.name)
            if isinstance(value, tuple):
                value = "_".join(map(str, value))
            parts.append(name if value is True else value if name == "dtype" else f"{name}{value}")
        return "-".join(parts)


@dataclass(frozen=True)
class Inputs:
    """A call's arrays, and the cotangents of its two outputs.

    Attributes:
      arrays: by the names of `flash_attention`'s arguments, as NumPy arrays.
      options: its static arguments.
      dout: [B, T, N, Hv].
      dlse: float32 [B, T, N].
    """

    arrays: Mapping[str, np.ndarray]
    options: Mapping[str, object]
    dout: np.ndarray
    dlse: np.ndarray

    def spec_and_operands(self) -> tuple[AttentionSpec, Operands]:
        """The call as backends see it."""
        return AttentionSpec(**self.options), Operands(**self.arrays)


def make_inputs(case: Case, seed: int) -> Inputs:
    """Draw a case's arrays, rounded to its dtype once, here: everyone gets the same."""
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(case.dtype)
    value_head_dim = case.H if case.Hv is None else case.Hv

    def normal(*shape: int, dtype: np.dtype = dtype) -> np.ndarray:
        return rng.standard_normal(shape).astype(dtype)

    def pair_shape(axes: str) -> tuple[int, ...]:
        return tuple(getattr(case, axis) if axis in axes else 1 for axis in "BNTS")

    arrays = {
        "query": normal(case.B, case.T, case.N, case.H) * dtype.type(case.spread),
        "key": normal(case.B, case.S, case.K, case.H) * dtype.type(case.spread),
        "value": normal(case.B, case.S, case.K, value_head_dim),
    }
    if case.bias is not None:
        arrays["bias"] = normal(*pair_shape(case.bias), dtype=jnp.dtype(case.bias_dtype or dtype))
    if case.mask is not None:
        arrays["mask"] = rng.random(pair_shape(case.mask)) < 0.7
    for name in ("query_offset", "query_seq_lengths", "key_value_seq_lengths"):
        if getattr(case, name) is not None:
            arrays[name] = np.array(getattr(case, name), np.int32)
    if case.segments:
        for name, length in (("query", case.T), ("key_value", case.S)):
            ids = rng.integers(0, case.segments, (case.B, length), dtype=np.int32)
            arrays[f"{name}_segment_ids"] = ids
    if case.sinks:
        arrays["sinks"] = normal(case.N, dtype=np.dtype(np.float32))
    static = ("is_causal", "local_window_size", "logits_soft_cap", "scale")
    options = {name: getattr(case, name) for name in static if getattr(case, name) is not None}
    if case.scale == "traced":
        arrays["scale"] = np.float32(rng.uniform(0.1, 0.5))
        del options["scale"]
    dout = normal(case.B, case.T, case.N, value_head_dim)
    dlse = normal(case.B, case.T, case.N, dtype=np.dtype(np.float32))
    return Inputs(arrays, options, dout, dlse)


def evaluate(
    attention: Callable[..., AttentionOutput], inputs: Inputs, dtype: np.dtype | None = None
) -> dict[str, np.ndarray]:
    """Outputs and every gradient of a call, as float64 arrays.

    Args:
      attention: takes the arguments of `flash_attention_with_lse`.
      inputs: what it is called with.
      dtype: what to cast all floats to first; None leaves them as they are.

    Returns:
      "out", "lse", and "dquery", "dkey" and so on for each of `DIFFERENTIABLE` that is given.
    """

    def cast(x: np.ndarray) -> jax.Array:
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        return jnp.asarray(x, dtype if is_float and dtype is not None else x.dtype)

    arrays = {name: cast(x) for name, x in inputs.arrays.items()}
    primals = {name: arrays.pop(name) for name in DIFFERENTIABLE if name in arrays}

    @jax.jit
    def run(primals, arrays, dout, dlse):
        def call(primals):
            return attention(**primals, **arrays, **inputs.options)

        result, vjp = jax.vjp(call, primals)
        return result, vjp(AttentionOutput(dout, dlse))[0]

    (out, lse), gradients = run(primals, arrays, cast(inputs.dout), cast(inputs.dlse))
    results = {"out": out, "lse": lse, **{f"d{name}": x for name, x in gradients.items()}}
    return {name: np.asarray(x).astype(np.float64) for name, x in results.items()}


def oracle(inputs: Inputs) -> dict[str, np.ndarray]:
    """`evaluate` of the reference in float64."""
    with jax.enable_x64(True):
        return evaluate(reference_attention, inputs, np.dtype(np.float64))


def error(x: np.ndarray, expected: np.ndarray) -> float:
    """max |x - expected| / max |expected|, and where nothing but zeros is expected, max |x|.

    Infinite where one of the two is not finite and the other is not the same.
    """
    if x.shape != expected.shape:
        raise ValueError(f"x: expected shape {expected.shape}, got {x.shape}")
    is_finite = np.isfinite(expected)
    same = np.array_equal(x[~is_finite], expected[~is_finite])
    if not same or not np.isfinite(x[is_finite]).all():
        return np.inf
    largest = np.max(np.abs(expected[is_finite]), initial=0.0)
    worst = np.max(np.abs(x[is_finite] - expected[is_finite]), initial=0.0)
    return float(worst / (largest or 1.0))


@dataclass(frozen=True)
class Comparison:
    """One result's error and what it may be."""

    name: str
    error: float
    budget: float

    @property
    def is_right(self) -> bool:
        return self.error <= self.budget

    def __str__(self) -> str:
        return f"{self.name}: error {self.error:.3g}, budget {self.budget:.3g}"


@functools.lru_cache(maxsize=64)
def _expected(case: Case, seed: int) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """The float64 reference's results, and what error each may have."""
    inputs = make_inputs(case, seed)
    expected = oracle(inputs)
    plain = evaluate(reference_attention, inputs)
    return expected, {
        name: 2 * error(plain[name], value) + _rounding_step(case, name, value.shape)
        for name, value in expected.items()
    }


def _rounding_step(case: Case, name: str, shape: tuple[int, ...]) -> float:
    """What one more rounding may cost, relative to the largest entry.

    To the dtype of the products for all but lse, which meets none of their roundings; and of the
    float32 sums that lead to an entry, of n terms in all, sqrt(n) steps (Higham & Mary, "A new
    approach to probabilistic rounding error analysis", 2019, theorem 2.4). Another order of
    summation is one such rounding, and dp - delta is one where plain attention has none.
    """
    value_head_dim = case.Hv or case.H
    has_features = name in ("out", "dquery", "dkey", "dvalue")
    entries = math.prod(shape[:-1] if has_features else shape)
    terms = case.H + value_head_dim + case.B * case.N * case.T * case.S / max(1, entries)
    dtype = jnp.float32 if name == "lse" else case.dtype
    return float(jnp.finfo(dtype).eps + math.sqrt(terms) * jnp.finfo(jnp.float32).eps)


def compare(attention: Callable[..., AttentionOutput], case: Case, seed: int) -> list[Comparison]:
    """Hold an implementation's outputs and gradients against the budget, one comparison each.

    Args:
      attention: takes the arguments of `flash_attention_with_lse`.
      case: the call.
      seed: of its inputs.
    """
    expected, budget = _expected(case, seed)
    got = evaluate(attention, make_inputs(case, seed))
    return [
        Comparison(name, error(got[name], value), budget[name]) for name, value in expected.items()
    ]
