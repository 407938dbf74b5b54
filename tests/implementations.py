"""What the tests run: each implementation, a skip where one cannot run a call, and the verdict."""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import (
    DISABLED_EXPORT_CHECKS,
    AttentionOutput,
    backends,
    flash_attention_with_lse,
)
from pallas_flash.backends.triton import TritonBackend
from pallas_flash.backends.triton.config import Config, Configs
from pallas_flash.backends.triton.decode_config import DecodeConfig
from pallas_flash.backends.xla import XlaBackend
from pallas_flash.testing import Inputs, Truth, evaluate

Implementation = str | backends.Backend

# So small that short calls have several blocks both ways, and a last one that is not full.
SMALL_BLOCKS = XlaBackend(block_q=16, block_k=32)
INTERPRET = TritonBackend(
    interpret=True,
    configs=Configs(
        forward=Config(16, 32, 4, 1),
        key_gradient=Config(32, 16, 4, 1),
        query_gradient=Config(32, 32, 4, 1),
    ),
    decode_config=DecodeConfig(Config(16, 32, 4, 1), splits=3),
)


def each_implementation(*forms_of_xla: Implementation) -> pytest.MarkDecorator:
    """Parametrize `implementation` over these and over the kernels."""
    everything = [*forms_of_xla, INTERPRET, "triton"]
    return pytest.mark.parametrize("implementation", everything, ids=name_of)


def name_of(implementation: Implementation) -> str:
    """Readable in a test's id."""
    if isinstance(implementation, XlaBackend):
        return f"xla-{implementation.block_q}x{implementation.block_k}"
    return implementation if isinstance(implementation, str) else implementation.name


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
        pytest.skip(f"{name_of(implementation)}: {'; '.join(refusals)}")
    return _attention(implementation, precision)


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


def truth(build: Callable[..., Inputs], *args: object) -> Truth:
    """Of the call that `build` makes of `args`. Kept, so that implementations share it."""
    # Plain attention, from which the budget comes, runs where the implementation does: a CPU takes
    # numbers below the normal ones for 0, and a GPU does not.
    return _truth(jax.config.jax_default_device, build, *args)


@functools.lru_cache(maxsize=64)
def _truth(_: jax.Device | None, build: Callable[..., Inputs], *args: object) -> Truth:
    return Truth.of(build(*args))


def judge(
    implementation: Implementation, build: Callable[..., Inputs], *args: object
) -> tuple[Mapping[str, np.ndarray], list[str]]:
    """Results of the call that `build` makes of `args`, and what is wrong with them."""
    inputs = build(*args)
    got = evaluate(runnable(implementation, inputs), inputs)
    return got, truth(build, *args).wrong(got)


def export(function: Callable, *args: jax.Array) -> jax.export.Exported:
    """For the machine that holds the arguments, which with a GPU need not be JAX's default one."""
    (device,) = args[0].devices()
    return jax.export.export(
        jax.jit(function),
        platforms=[{"gpu": "cuda"}.get(device.platform, device.platform)],
        disabled_checks=DISABLED_EXPORT_CHECKS,
    )(*args)
