"""What the tests run: each implementation, a skip where one cannot run a call, and the verdict."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import AttentionOutput, backends, flash_attention_with_lse, testing
from pallas_flash.backends.xla import XlaBackend
from pallas_flash.reference import reference_attention
from pallas_flash.testing import DIFFERENTIABLE, Case, Comparison, Inputs, error

Implementation = str | backends.Backend

# So small that short calls have several blocks both ways, and a last one that is not full.
SMALL_BLOCKS = XlaBackend(block_q=16, block_k=32)


def each_implementation(*forms_of_xla: Implementation) -> pytest.MarkDecorator:
    """Parametrize `implementation` over these and over the kernels."""

    def name(implementation: Implementation) -> str:
        if isinstance(implementation, XlaBackend):
            return f"xla-{implementation.block_q}x{implementation.block_k}"
        return str(implementation)

    return pytest.mark.parametrize(
        "implementation", [*forms_of_xla, "interpret", "triton"], ids=name
    )


def reasons(implementation: Implementation, inputs: Inputs) -> tuple[str, ...]:
    """Why the implementation cannot run the call; empty where it can."""
    is_name = isinstance(implementation, str)
    backend = backends.load(implementation) if is_name else implementation
    return backends.unsupported_reasons(backend, *inputs.spec_and_operands())


@functools.cache
def _attention(implementation: Implementation, precision: str | None) -> Callable:
    return functools.partial(
        flash_attention_with_lse, implementation=implementation, precision=precision
    )


def runnable(
    implementation: Implementation, inputs: Inputs, precision: str | None = "highest"
) -> Callable[..., AttentionOutput]:
    """`flash_attention_with_lse` by the implementation; skips the test where it cannot run."""
    refusals = reasons(implementation, inputs)
    if refusals:
        pytest.skip(f"{implementation}: {'; '.join(refusals)}")
    return _attention(implementation, precision)


def differentiate(attention, options, primals, others, dout, dlse):
    """Outputs, and gradients by the names of what is in `primals`."""
    result, vjp = jax.vjp(lambda x: attention(**x, **others, **dict(options)), primals)
    return result, vjp(AttentionOutput(dout, dlse))[0]


_differentiate = jax.jit(differentiate, static_argnums=(0, 1))


def split(
    inputs: Inputs, dtype: np.dtype | None = None
) -> tuple[dict[str, jax.Array], dict[str, jax.Array], jax.Array, jax.Array]:
    """The last four arguments of `differentiate`, all floats cast to `dtype`."""

    def cast(x: np.ndarray) -> jax.Array:
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        return jnp.asarray(x, dtype if is_float and dtype is not None else x.dtype)

    others = {name: cast(x) for name, x in inputs.arrays.items()}
    primals = {name: others.pop(name) for name in DIFFERENTIABLE if name in others}
    return primals, others, cast(inputs.dout), cast(inputs.dlse)


def evaluate(
    attention: Callable, inputs: Inputs, dtype: np.dtype | None = None
) -> Mapping[str, np.ndarray]:
    """As `pallas_flash.testing.evaluate`, but calls of the same form share one compilation."""
    options = tuple(inputs.options.items())
    (out, lse), gradients = _differentiate(attention, options, *split(inputs, dtype))
    results = {"out": out, "lse": lse, **{f"d{name}": x for name, x in gradients.items()}}
    return {name: np.asarray(x).astype(np.float64) for name, x in results.items()}


def oracle(inputs: Inputs) -> Mapping[str, np.ndarray]:
    """`evaluate` of the reference in float64."""
    with jax.enable_x64(True):
        return evaluate(reference_attention, inputs, np.dtype(np.float64))


def draw(
    seed: int | np.random.Generator,
    dtype: str,
    *,
    B: int = 1,
    T: int,
    S: int | None = None,
    N: int,
    K: int | None = None,
    H: int,
    Hv: int | None = None,
    spread: float = 1.0,
    **options: object,
) -> Inputs:
    """A call on normal numbers: query, key, value and dout in this order, then rounded to dtype."""
    rng = np.random.default_rng(seed)
    S, K, Hv = T if S is None else S, K or N, Hv or H
    dlse = rng.spawn(1)[0].standard_normal((B, T, N), np.float32)
    query = spread * rng.standard_normal((B, T, N, H))
    key = spread * rng.standard_normal((B, S, K, H))
    value = rng.standard_normal((B, S, K, Hv))
    arrays = {"query": query, "key": key, "value": value}
    arrays = {name: x.astype(jnp.dtype(dtype)) for name, x in arrays.items()}
    dout = rng.standard_normal((B, T, N, Hv)).astype(jnp.dtype(dtype))
    return Inputs(arrays, options, dout, dlse)


def extend(inputs: Inputs, **arrays: np.ndarray) -> Inputs:
    """The same call with further arrays, or others."""
    return dataclasses.replace(inputs, arrays={**inputs.arrays, **arrays})


class Truth(NamedTuple):
    """What a call should give, by results' names, and how far off each may be."""

    expected: Mapping[str, np.ndarray]
    budget: Mapping[str, float]

    def wrong(self, got: Mapping[str, np.ndarray]) -> list[str]:
        """What of the results is not within the budget, in words."""
        comparisons = [
            Comparison(name, error(got[name], x), self.budget[name])
            for name, x in self.expected.items()
        ]
        return [str(comparison) for comparison in comparisons if not comparison.is_right]


@functools.cache
def truth(build: Callable[..., Inputs], *args: object) -> Truth:
    """Of the call that `build` makes of `args`. Kept, so that implementations share it."""
    inputs = build(*args)
    expected = oracle(inputs)
    plain = evaluate(reference_attention, inputs)
    B, T, N, H = inputs.arrays["query"].shape
    _, S, K, Hv = inputs.arrays["value"].shape
    dtype = inputs.arrays["query"].dtype.name
    case = Case(B=B, T=T, S=S, N=N, K=K, H=H, Hv=Hv, dtype=dtype)
    budget = {
        name: 2 * error(plain[name], x) + testing._rounding_step(case, name, x.shape)
        for name, x in expected.items()
    }
    return Truth(expected, budget)


def judge(
    implementation: Implementation, build: Callable[..., Inputs], *args: object
) -> tuple[Mapping[str, np.ndarray], list[str]]:
    """What the implementation gives for the call that `build` makes of `args`, and what is wrong."""
    inputs = build(*args)
    got = evaluate(runnable(implementation, inputs), inputs)
    return got, truth(build, *args).wrong(got)
