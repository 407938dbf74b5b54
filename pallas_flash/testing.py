"""Calls to try an implementation on, what they should give, and how far off it may be.

The budget comes from data: see `Truth.of`.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash.reference import reference_attention
from pallas_flash.spec import DIFFERENTIABLE, AttentionOutput, AttentionSpec, Operands


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
    def value_head_dim(self) -> int:
        return self.H if self.Hv is None else self.Hv

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

    def reduced(self, longest: int) -> "Case":
        """A case of the same options, dtype, head dims and group, no side longer than `longest`.

        What the float64 reference can afford. Lengths, positions and windows shrink together.
        """
        factor = math.ceil(max(self.T, self.S, 1) / longest)
        query_length, key_length = (min(x, max(1, x // factor)) for x in (self.T, self.S))
        window, key_heads = self.local_window_size, min(self.K, 2)
        by_row = ("query_offset", "query_seq_lengths", "key_value_seq_lengths")
        # Rows differ where they have numbers of their own.
        batch = min(self.B, 2 if any(getattr(self, name) for name in by_row) else 1)

        def shrunk(numbers: tuple[int, ...] | None) -> tuple[int, ...] | None:
            return numbers and tuple(math.ceil(x / factor) for x in numbers[:batch])

        return dataclasses.replace(
            self,
            B=batch,
            T=query_length,
            S=key_length,
            N=key_heads * self.N // self.K,
            K=key_heads,
            **{name: shrunk(getattr(self, name)) for name in by_row},
            # Not narrower than the blocks, so that some of these hold no masked pair.
            local_window_size=window and tuple(min(side, key_length // 4) for side in window),
            # Errors are relative to the largest entry, and a flat mean over a thousand keys is
            # small: it could be a tenth off unseen. A cap of 50 shows in logits of several tens
            # only.
            spread=2.0 if self.logits_soft_cap is None else 4.0,
        )


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
    options: Mapping[str, Any]
    dout: np.ndarray
    dlse: np.ndarray

    def spec_and_operands(self) -> tuple[AttentionSpec, Operands]:
        """The call as backends see it."""
        arrays = {name: jnp.asarray(x) for name, x in self.arrays.items()}
        return AttentionSpec(**self.options), Operands(**arrays)


def make_inputs(case: Case, seed: int) -> Inputs:
    """Draw a case's arrays, rounded to its dtype once, here: everyone gets the same."""
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(case.dtype)
    value_head_dim = case.value_head_dim

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
    attention: Callable[..., AttentionOutput],
    inputs: Inputs,
    dtype: np.dtype | None = None,
    *,
    with_gradients: bool = True,
) -> dict[str, np.ndarray]:
    """Outputs and every gradient of a call, as float64 arrays.

    Args:
      attention: takes the arguments of `flash_attention_with_lse`. Equal ones share what they
        compiled for calls of one form.
      inputs: what it is called with.
      dtype: what to cast all floats to first; None leaves them as they are.
      with_gradients: whether to compute them.

    Returns:
      "out", "lse", and "dquery", "dkey" and so on for each of `DIFFERENTIABLE` that is given.
    """
    options = tuple(inputs.options.items())
    primals, others, cotangents = split(inputs, dtype)
    if with_gradients:
        (out, lse), gradients = jitted(attention, options, primals, others, cotangents)
    else:
        (out, lse), gradients = jitted_forward(attention, options, primals, others), {}
    results = {"out": out, "lse": lse, **{f"d{name}": x for name, x in gradients.items()}}
    return {name: np.asarray(x).astype(np.float64) for name, x in results.items()}


def split(
    inputs: Inputs, dtype: np.dtype | None = None
) -> tuple[dict[str, jax.Array], dict[str, jax.Array], AttentionOutput]:
    """The last three arguments of `differentiate`, all floats cast to `dtype`."""

    def cast(x: np.ndarray) -> jax.Array:
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        return jnp.asarray(x, dtype if is_float and dtype is not None else x.dtype)

    others = {name: cast(x) for name, x in inputs.arrays.items()}
    primals = {name: others.pop(name) for name in DIFFERENTIABLE if name in others}
    return primals, others, AttentionOutput(cast(inputs.dout), cast(inputs.dlse))


def differentiate(
    attention: Callable[..., AttentionOutput],
    options: Iterable[tuple[str, Any]],
    primals: Mapping[str, jax.Array],
    others: Mapping[str, jax.Array],
    cotangents: AttentionOutput,
) -> tuple[AttentionOutput, dict[str, jax.Array]]:
    """Outputs, and gradients by the names of what is in `primals`."""
    result, vjp = jax.vjp(lambda x: attention(**x, **others, **dict(options)), primals)
    return result, vjp(cotangents)[0]


# `compiler_options` for what is compared and not timed, which need not be tuned. On a GPU XLA would
# try dozens of kernels for each product.
UNTUNED = {"xla_gpu_autotune_level": 0}

jitted = jax.jit(differentiate, static_argnums=(0, 1), compiler_options=UNTUNED)


def _forward(
    attention: Callable[..., AttentionOutput],
    options: Iterable[tuple[str, Any]],
    primals: Mapping[str, jax.Array],
    others: Mapping[str, jax.Array],
) -> AttentionOutput:
    return attention(**primals, **others, **dict(options))


jitted_forward = jax.jit(_forward, static_argnums=(0, 1), compiler_options=UNTUNED)


def oracle(inputs: Inputs, *, with_gradients: bool = True) -> dict[str, np.ndarray]:
    """`evaluate` of the reference in float64, on a CPU."""
    float64 = np.dtype(np.float64)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        return evaluate(reference_attention, inputs, float64, with_gradients=with_gradients)


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
class Truth:
    """What a call should give, by results' names, and how large the `error` of each may be."""

    expected: Mapping[str, np.ndarray]
    budget: Mapping[str, float]

    @classmethod
    def of(cls, inputs: Inputs, *, with_gradients: bool = True) -> Self:
        """The float64 reference, with gradients or without, and a budget from data: the sum of

        - twice the error of plain attention in the same dtype,
        - twice what FlashAttention-2's backward loses by its roundings, had it no other error,
        - a rounding of the result, and of the sums and exponentials that lead to it.
        """
        expected = oracle(inputs, with_gradients=with_gradients)
        plain = evaluate(reference_attention, inputs, with_gradients=with_gradients)
        rounded = expected
        if with_gradients:
            rounded = expected | _rounded_gradients(inputs, expected, plain["out"])
        largest_lse = np.max(np.abs(expected["lse"][np.isfinite(expected["lse"])]), initial=0.0)
        return cls(
            expected,
            {
                name: 2 * (error(plain[name], x) + error(rounded[name], x))
                + _rounding_step(inputs, name, x.shape, largest_lse)
                for name, x in expected.items()
            },
        )

    def wrong(self, results: Mapping[str, np.ndarray]) -> list[str]:
        """Those of the results that are not within the budget, in words."""
        errors = {name: error(results[name], x) for name, x in self.expected.items()}
        return [
            f"{name}: error {errors[name]:.3g}, budget {self.budget[name]:.3g}"
            for name in errors
            if not errors[name] <= self.budget[name]
        ]


def _rounded_gradients(
    inputs: Inputs, expected: Mapping[str, np.ndarray], plain_out: np.ndarray
) -> dict[str, np.ndarray]:
    """Gradients that are exact but for two roundings which a linear-memory backward cannot avoid.

    It takes delta = do . out - dlse from the output as it was computed, here by plain attention,
    and dx is rounded to the inputs' dtype where it meets k and q. Both leave sums over a row that
    should vanish a little off: seen where bias has no key axis, and where all keys have much in
    common.
    """
    dtype = inputs.dout.dtype
    out, dout = expected["out"], inputs.dout.astype(np.float64)
    lost = np.abs(np.sum(dout * (plain_out.astype(np.float64) - out), axis=-1))
    # An error of delta is one of the cotangent of lse, which is the other half of it. Its sign is
    # another one for the slightest change of out, so that nothing is to cancel.
    delta_error = lost + np.finfo(np.float32).eps * np.sum(np.abs(dout * out), axis=-1)
    exact, inputs = inputs, dataclasses.replace(inputs, dlse=inputs.dlse - delta_error)
    gradients = oracle(inputs)
    if dtype == np.float32 and "dscale" not in gradients:
        return gradients
    query = _before(inputs, "query", "query_seq_lengths")
    key = _before(inputs, "key", "key_value_seq_lengths")
    (batch, query_length, heads, head_dim), key_length = query.shape, key.shape[1]
    bias = inputs.arrays.get("bias", np.zeros((1, 1, 1, 1), np.float32)).astype(np.float64)
    bias = np.broadcast_to(bias, (batch, heads, query_length, key_length))

    def dx_of(inputs: Inputs) -> np.ndarray:
        return oracle(dataclasses.replace(inputs, arrays={**inputs.arrays, "bias": bias}))["dbias"]

    dx = dx_of(inputs)
    keys = np.repeat(key, heads // key.shape[2], axis=2)
    if "dscale" in gradients:
        # A sum over all pairs, which may cancel, and then what its terms' roundings come to is no
        # small part of it. Their signs are as random as those of delta, which is off for all terms
        # of a row at once; twice what is to be expected, and twice again in the budget.
        products = np.einsum("btnh,bsnh->bnts", query, keys)
        rows = np.sum((dx_of(exact) - dx) * products, axis=-1)
        terms = float(jnp.finfo(dtype).eps) / 2 * dx * products
        lost = 2 * np.sqrt(np.sum(rows**2) + np.sum(terms**2))
        gradients = gradients | {"dscale": expected["dscale"] + lost}
    if dtype == np.float32:
        return gradients
    dx = dx.astype(dtype).astype(np.float64)
    scale = float(inputs.arrays.get("scale", inputs.options.get("scale", head_dim**-0.5)))
    dkeys = scale * np.einsum("bnts,btnh->bsnh", dx, query)
    return gradients | {
        "dquery": scale * np.einsum("bnts,bsnh->btnh", dx, keys),
        "dkey": dkeys.reshape(*key.shape[:3], -1, head_dim).sum(axis=3),
    }


def _before(inputs: Inputs, name: str, lengths: str) -> np.ndarray:
    """An operand in float64, zero past its lengths, where it may be NaN."""
    x = inputs.arrays[name].astype(np.float64)
    if lengths not in inputs.arrays:
        return x
    exists = np.arange(x.shape[1]) < inputs.arrays[lengths][:, None]
    return np.where(exists[:, :, None, None], x, 0.0)


def _rounding_step(inputs: Inputs, name: str, shape: tuple[int, ...], largest_lse: float) -> float:
    """What one more rounding of each kind may cost, relative to the largest entry.

    To the dtype of the products for all but lse, which meets none of their roundings. Of the
    float32 sums that lead to an entry, of n terms in all, sqrt(n) steps (Higham & Mary, "A new
    approach to probabilistic rounding error analysis", 2019, theorem 2.4), for another order of
    summation is another rounding. And a float32 step of the largest logit, by which the logarithm
    of a probability may be off.
    """
    query, value = inputs.arrays["query"], inputs.arrays["value"]
    has_features = name in ("out", "dquery", "dkey", "dvalue")
    entries = math.prod(shape[:-1] if has_features else shape)
    pairs = math.prod(query.shape[:-1]) * value.shape[1]
    terms = query.shape[-1] + value.shape[-1] + pairs / max(1, entries)
    steps = math.sqrt(terms) + (0.0 if name == "lse" else largest_lse)
    dtype = jnp.float32 if name == "lse" else query.dtype
    return float(jnp.finfo(dtype).eps + steps * jnp.finfo(jnp.float32).eps)
