"""The problems that are timed, by suite and name, and their arrays."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash.models import MODELS
from pallas_flash.testing import Case

Arrays = dict[str, jax.Array]

# Query, key and value; the other arrays; a cotangent of the output.
Arguments = tuple[Arrays, Arrays, jax.Array]

# What the float64 reference can afford.
_LONGEST_JUDGED = 1024

# More than any card's cache, so that no call finds its inputs there. The smallest problems take
# turns through fewer sets than that would be.
_ROTATED_BYTES = 2**28
_MOST_SETS = 128


@dataclass(frozen=True)
class Metric:
    """By what a suite's peers are compared.

    Attributes:
      name: in JSON.
      unit: as in a column's heading.
      title: the unit, and of what where that is not plain.
      digits: how many of its fraction are published.
    """

    name: str
    unit: str
    title: str
    digits: int


TFLOPS = Metric("tflops", "TFLOP/s", "TFLOP/s", 0)
TBPS = Metric("tbps", "TB/s", "TB/s of valid keys and values, queries and outputs", 2)


@dataclass(frozen=True)
class Suite:
    """Cases that are shown together.

    Attributes:
      cases: by name.
      directions: whether with gradients, each in turn.
      peers: who is asked by default; empty for those of `peers.DEFAULT`.
      baselines: whose times the others' are compared with, where they have any.
      is_series: whether the cases are one at growing lengths.
      metric: what its tables and plots show: the speed of what its time goes into.
    """

    cases: Mapping[str, Case]
    directions: tuple[bool, ...] = (False, True)
    peers: tuple[str, ...] = ()
    baselines: tuple[str, ...] = ("jax-cudnn",)
    is_series: bool = False
    metric: Metric = TFLOPS


def _square(S: int, dtype: str = "bfloat16", **sizes_and_options: Any) -> Case:
    return Case(T=S, S=S, dtype=dtype, **sizes_and_options)


def _lengths(rows: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(0).integers(1, 8192, rows, endpoint=True).tolist())


_causal = partial(_square, is_causal=True)
_decode = partial(Case, T=1, N=32, K=8, H=128, dtype="bfloat16")
_H128 = {"N": 16, "K": 16, "H": 128}

SUITES = {
    "headline": Suite(
        {
            "full": _square(8192, B=2, **_H128),
            "causal": _causal(8192, B=2, **_H128),
            "grouped": _causal(4096, B=2, N=32, K=8, H=128),
            "short": _causal(2048, B=8, **_H128),
            "h64": _causal(8192, B=2, N=32, K=32, H=64),
            "h256": _causal(8192, B=2, N=8, K=8, H=256),
        }
    ),
    "models": Suite(MODELS),
    "shapes": Suite(
        {
            "s8192-h128": _causal(8192, B=2, **_H128),
            "s8191-h128": _causal(8191, B=2, **_H128),
            "s8192-h96": _causal(8192, B=2, N=16, K=16, H=96),
            "s8192-h80": _causal(8192, B=2, N=16, K=16, H=80),
        }
    ),
    "masks": Suite(
        {
            "long": _causal(32768, B=1, **_H128),
            "long-window": _causal(32768, B=1, **_H128, local_window_size=(1023, 0)),
            "cap-none": _causal(8192, B=2, **_H128),
            "cap-50": _causal(8192, B=2, **_H128, logits_soft_cap=50.0),
            "lengths-full": _square(8192, B=16, **_H128),
            "lengths-uniform": _square(8192, B=16, **_H128, key_value_seq_lengths=_lengths(16)),
        }
    ),
    # The newest token of each row against all that its cache holds, with the heads of Llama-3-8B.
    "decode": Suite(
        {
            "b1": _decode(B=1, S=32768),
            "b16": _decode(B=16, S=8192),
            "b64": _decode(B=64, S=4096),
            "ragged": _decode(B=64, S=8192, key_value_seq_lengths=_lengths(64)),
            # With those of Gemma-2B: one key head, so that one row has to fill the GPU.
            "multi-query": _decode(B=1, S=131072, N=8, K=1, H=256),
            # So small that with `--wall` it shows what a call costs beside its kernels.
            "step": _decode(B=1, S=4096),
        },
        directions=(False,),
        peers=(
            "ours-decode",
            "ours-paged",
            "ours-triton",
            "jax-cudnn",
            "jax-xla",
            "tokamax-triton",
            "tokamax-mosaic",
            "pallas-decode",
        ),
        metric=TBPS,
    ),
    # The experiment of a write-up that this project comes from, with the heads of Qwen3-0.6B: how
    # time and memory grow with the length, and what parallelism over query blocks buys.
    "origin": Suite(
        {
            f"s{length}": _square(length, "float32", B=2, N=16, K=8, H=128)
            for length in (2**power for power in range(6, 15))
        },
        directions=(False,),
        peers=("jax-xla", "three-steps", "flash-1", "ours-triton"),
        baselines=("jax-xla",),
        is_series=True,
    ),
    # For a machine without a GPU: does the script run?
    "smoke": Suite({"smoke": _causal(64, B=1, N=2, K=1, H=16, local_window_size=(31, 0))}),
}


def options(case: Case) -> dict[str, Any]:
    """The static arguments that are not at their default."""
    names = ("is_causal", "local_window_size", "logits_soft_cap")
    return {name: getattr(case, name) for name in names if getattr(case, name)}


def asked(case: Case) -> frozenset[str]:
    """The names of all options that are used, arrays among them."""
    return frozenset(options(case)) | frozenset(shapes(case)[1])


def shapes(case: Case) -> Any:
    """A program's arguments without their numbers."""
    return jax.eval_shape(lambda: _draw(case, jax.random.key(0)))


def argument_bytes(case: Case, with_gradients: bool) -> int:
    """What a program reads; without gradients that is not the cotangent."""
    primals, others, dout = shapes(case)
    read = (primals, others, dout) if with_gradients else (primals, others)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(read))


def draw(case: Case, seed: int) -> list[Arguments]:
    """Sets of a program's arguments, normal and on the device: as many as outgrow its cache."""
    sets = min(_MOST_SETS, math.ceil(_ROTATED_BYTES / argument_bytes(case, False)))
    draw_one = jax.jit(partial(_draw, case))
    return [draw_one(key) for key in jax.random.split(jax.random.key(seed), sets)]


def _draw(case: Case, key: jax.Array) -> Arguments:
    queries, keys = (case.B, case.T, case.N), (case.B, case.S, case.K)
    query, key_, value, dout = (
        jax.random.normal(part, shape, case.dtype)
        for part, shape in zip(
            jax.random.split(key, 4),
            (
                (*queries, case.H),
                (*keys, case.H),
                (*keys, case.value_head_dim),
                (*queries, case.value_head_dim),
            ),
            strict=True,
        )
    )
    lengths = case.key_value_seq_lengths
    others = {} if lengths is None else {"key_value_seq_lengths": jnp.array(lengths, jnp.int32)}
    return {"query": query, "key": key_, "value": value}, others, dout


def judged(case: Case) -> Case:
    """The smaller problem on which it is seen whether a peer is right."""
    return case.reduced(_LONGEST_JUDGED)


def sizes(case: Case) -> str:
    """Its id without its lengths, dozens of which are no name."""
    return dataclasses.replace(case, key_value_seq_lengths=None).id
