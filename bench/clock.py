"""How long a program takes."""

import importlib
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Program = Callable[..., Any]

# Sets of a program's arguments, which its calls take in turn.
Sets = Sequence[tuple[Any, ...]]

_MOST_CALLS = 2000


@dataclass(frozen=True)
class Clock:
    """How time is taken.

    Attributes:
      name: for the reader.
      time: of a program, sets of its arguments and a number of queued calls, the ms that each took.
      round_ms: how long a round should be, so that what surrounds it does not matter.
    """

    name: str
    time: Callable[[Program, Sets, int], float]
    round_ms: float

    def calls(self, function: Program, sets: Sets) -> int:
        """How many calls make a round. Warms up with a round."""
        jax.block_until_ready(function(*sets[0]))
        once = self.time(function, sets, 1)
        calls = min(_MOST_CALLS, math.ceil(self.round_ms / once))
        self.time(function, sets, calls)
        return calls

    def rounds(
        self,
        functions: Mapping[str, tuple[Program, int]],
        sets: Sets,
        rounds: int,
        after_each: Callable[[], None],
    ) -> dict[str, list[float]]:
        """The ms of one call in each round, by name, of programs with their numbers of calls."""
        times: dict[str, list[float]] = {name: [] for name in functions}
        for _ in range(rounds):
            # In another order each time: a program finds the card as warm as the last one left it.
            for name in random.sample(list(functions), len(functions)):
                function, calls = functions[name]
                times[name].append(self.time(function, sets, calls))
            after_each()
        return times


def _queue(function: Program, sets: Sets, calls: int) -> None:
    """Call it, each time with the next set, and wait."""
    result = None
    for call in range(calls):
        # What an earlier call gave is let go, so that results take the place of one call's.
        result = function(*sets[call % len(sets)])
    jax.block_until_ready(result)


def wall_clock(round_ms: float, why: str) -> Clock:
    """The time from the first call of a round to the last result."""

    def time_calls(function: Program, sets: Sets, calls: int) -> float:
        start = time.perf_counter()
        _queue(function, sets, calls)
        return 1e3 * (time.perf_counter() - start) / calls

    return Clock(f"wall time of queued calls ({why})", time_calls, round_ms)


def device_clock(round_ms: float) -> Clock:
    """The time that kernels ran, where JAX's profiler can tell; else the wall clock."""

    def time_calls(function: Program, sets: Sets, calls: int) -> float:
        # Not its `measure`, which takes one set of arguments and JAX's programs only.
        profiler = importlib.import_module("jax.experimental.mosaic.gpu.profiler")
        cupti = profiler.mosaic_gpu_lib._mosaic_gpu_ext
        _queue(function, sets, 1)
        cupti._cupti_init()
        try:
            _queue(function, sets, calls)
        finally:
            kernels = cupti._cupti_get_timings(True)
        if not kernels:
            raise RuntimeError("CUPTI saw no kernel")
        return sum(ms for _, ms in kernels) / calls

    try:
        time_calls(jax.jit(lambda x: x + 1), [(np.ones(1024, np.float32),)], 2)
    except (ImportError, AttributeError, RuntimeError) as problem:
        return wall_clock(round_ms, f"no device time: {problem}")
    return Clock("device time, the sum of a call's kernels (CUPTI)", time_calls, round_ms)


@dataclass(frozen=True)
class Ceilings:
    """What the card reaches, measured in the run that is compared with it.

    Attributes:
      matmul_tflops: of a large matrix product, by dtype, at JAX's default precision.
      copy_tbps: of a large copy, bytes read and bytes written, in TB/s.
    """

    matmul_tflops: Mapping[str, float]
    copy_tbps: float


def measure_ceilings(clock: Clock, dtypes: Sequence[str], rounds: int) -> Ceilings:
    """Both ceilings, each the median of some rounds."""
    size, copied = (8192, 2**28) if jax.default_backend() == "gpu" else (512, 2**21)
    keys = jax.random.split(jax.random.key(0))

    def median_ms(function: Program, *arguments: jax.Array) -> float:
        programs = {"": (function, clock.calls(function, [arguments]))}
        return float(np.median(clock.rounds(programs, [arguments], rounds, lambda: None)[""]))

    matmul = {}
    for dtype in dtypes:
        pair = [jax.random.normal(key, (size, size), dtype) for key in keys]
        matmul[dtype] = 2 * size**3 / median_ms(jax.jit(jnp.matmul), *pair) / 1e9
    # XLA copies without a kernel, which CUPTI would not see; with another sign it is one.
    source = jax.random.normal(keys[0], (copied,))
    copy_ms = median_ms(jax.jit(jnp.negative), source)
    return Ceilings(matmul, 2 * source.nbytes / copy_ms / 1e9)
