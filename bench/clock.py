"""How long a program takes."""

import importlib
import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Program = Callable[..., Any]

_MOST_CALLS = 2000


@dataclass(frozen=True)
class Clock:
    """How time is taken.

    Attributes:
      name: for the reader.
      time: of a program, its arguments and a number of queued calls, the ms that each took.
      round_ms: how long a round should be, so that what surrounds it does not matter.
    """

    name: str
    time: Callable[[Program, tuple[Any, ...], int], float]
    round_ms: float

    def calls(self, function: Program, arguments: tuple[Any, ...]) -> int:
        """How many calls make a round. Compiles, and warms up with a round."""
        jax.block_until_ready(function(*arguments))
        once = self.time(function, arguments, 1)
        calls = min(_MOST_CALLS, math.ceil(self.round_ms / once))
        self.time(function, arguments, calls)
        return calls

    def rounds(
        self,
        functions: Mapping[str, tuple[Program, int]],
        arguments: tuple[Any, ...],
        rounds: int,
        after_each: Callable[[], None],
    ) -> dict[str, list[float]]:
        """The ms of one call in each round, by name, of programs with their numbers of calls."""
        times: dict[str, list[float]] = {name: [] for name in functions}
        for _ in range(rounds):
            # In another order each time: a program finds the card as warm as the last one left it.
            for name in random.sample(list(functions), len(functions)):
                function, calls = functions[name]
                times[name].append(self.time(function, arguments, calls))
            after_each()
        return times


def wall_clock(round_ms: float, why: str) -> Clock:
    """The time from the first call of a round to the last result."""

    def time_calls(function: Program, arguments: tuple[Any, ...], calls: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready([function(*arguments) for _ in range(calls)])
        return 1e3 * (time.perf_counter() - start) / calls

    return Clock(f"wall time of queued calls ({why})", time_calls, round_ms)


def device_clock(round_ms: float) -> Clock:
    """The time that kernels ran, where JAX's profiler can tell; else the wall clock."""

    def time_calls(function: Program, arguments: tuple[Any, ...], calls: int) -> float:
        profiler = importlib.import_module("jax.experimental.mosaic.gpu.profiler")
        _, times = profiler.measure(function, iterations=calls)(*arguments)
        if times is None:
            raise RuntimeError("CUPTI saw no kernel")
        return float(np.mean(times))

    try:
        time_calls(jax.jit(lambda x: x + 1), (np.ones(1024, np.float32),), 2)
    except (ImportError, AttributeError, RuntimeError) as problem:
        return wall_clock(round_ms, f"no device time: {problem}")
    return Clock("device time, the sum of a call's kernels (CUPTI)", time_calls, round_ms)


def matmul_tflops(clock: Clock, rounds: int) -> float:
    """What a large bfloat16 matrix product reaches."""
    size = 8192 if jax.default_backend() == "gpu" else 512
    keys = jax.random.split(jax.random.key(0))
    pair = tuple(jax.random.normal(key, (size, size), jnp.bfloat16) for key in keys)
    multiply = jax.jit(jnp.matmul)
    functions = {"matmul": (multiply, clock.calls(multiply, pair))}
    times = clock.rounds(functions, pair, rounds, lambda: None)["matmul"]
    return 2 * size**3 / float(np.median(times)) / 1e9
