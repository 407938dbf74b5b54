"""What the tests run: each implementation, a skip where one cannot run a call, and the verdict."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import backends, flash_attention_with_lse, testing
from pallas_flash.backends.xla import XlaBackend
from pallas_flash.reference import reference_attention
from pallas_flash.testing import Case, Comparison, Inputs, error, evaluate, oracle

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


def runnable(
    implementation: Implementation, inputs: Inputs, precision: str | None = "highest"
) -> Callable:
    """`flash_attention_with_lse` by the implementation; skips the test where it cannot run."""
    refusals = reasons(implementation, inputs)
    if refusals:
        pytest.skip(f"{implementation}: {'; '.join(refusals)}")
    return functools.partial(
        flash_attention_with_lse, implementation=implementation, precision=precision
    )


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
    """A call, and by results' names what it should give and how far off each may be."""

    inputs: Inputs
    expected: dict[str, np.ndarray]
    budget: dict[str, float]


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
    return Truth(inputs, expected, budget)


class Verdict(NamedTuple):
    """What an implementation gave, and what of it is wrong, in words."""

    got: dict[str, np.ndarray]
    wrong: list[str]


def judge(implementation: Implementation, build: Callable[..., Inputs], *args: object) -> Verdict:
    """Run the call that `build` makes of `args`, and hold values and gradients to the budget."""
    attention = runnable(implementation, build(*args))
    inputs, expected, budget = truth(build, *args)
    got = evaluate(attention, inputs)
    comparisons = [
        Comparison(name, error(got[name], x), budget[name]) for name, x in expected.items()
    ]
    return Verdict(got, [str(c) for c in comparisons if not c.is_right])
