"""Whether an attention computes what it should. No figure without."""

import dataclasses
import functools

import jax
import numpy as np
import problems
from peers import Attention
from problems import Arrays

from pallas_flash.testing import Case, Inputs, Truth, error, make_inputs, split


def program(attention: Attention, case: Case, with_gradients: bool) -> jax.stages.Wrapped:
    """Compiles to a function of what `problems.draw` gives: results by name."""
    options = problems.options(case)

    def forward(primals: Arrays, others: Arrays) -> jax.Array:
        return attention(**primals, **others, **options)

    def results(primals: Arrays, others: Arrays, dout: jax.Array) -> Arrays:
        if not with_gradients:
            return {"out": forward(primals, others)}
        out, vjp = jax.vjp(lambda x: forward(x, others), primals)
        return {"out": out, **{f"d{name}": x for name, x in vjp(dout)[0].items()}}

    return jax.jit(results)


@functools.cache
def _inputs(case: Case, seed: int) -> Inputs:
    inputs = make_inputs(case, seed)
    return dataclasses.replace(inputs, dlse=np.zeros_like(inputs.dlse))


@functools.cache
def reference(case: Case, seed: int) -> Truth:
    """What the reduced problem should give. Kept."""
    return Truth.of(_inputs(problems.reduced(case), seed))


def judge(
    attention: Attention, case: Case, with_gradients: bool, seed: int
) -> tuple[dict[str, float], list[str]]:
    """Compare with the float64 reference, on a reduced problem of the same options.

    Returns:
      The error of each result, relative to its largest entry; and in words, those too large.
    """
    truth = reference(case, seed)
    case = problems.reduced(case)
    primals, others, cotangents = split(_inputs(case, seed))
    computed: Arrays = program(attention, case, with_gradients)(primals, others, cotangents.out)
    results = {name: np.asarray(x).astype(np.float64) for name, x in computed.items()}
    truth = Truth({name: truth.expected[name] for name in results}, truth.budget)
    errors = {name: error(x, truth.expected[name]) for name, x in results.items()}
    return errors, truth.wrong(results)
