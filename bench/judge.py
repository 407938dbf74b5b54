"""Whether an attention computes what it should. No figure without."""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import numpy as np
from problems import Arguments

from pallas_flash.testing import Case, Inputs, Truth, error, make_inputs, split


@functools.cache
def _inputs(case: Case, seed: int) -> Inputs:
    inputs = make_inputs(case, seed)
    return dataclasses.replace(inputs, dlse=np.zeros_like(inputs.dlse))


@functools.cache
def reference(case: Case, seed: int) -> Truth:
    """What a smaller problem, `problems.judged`, should give. Kept."""
    return Truth.of(_inputs(case, seed))


def arguments(case: Case, seed: int) -> Arguments:
    """Those that `reference` is the answer to."""
    primals, others, cotangents = split(_inputs(case, seed))
    return primals, others, cotangents.out


def judge(
    computed: Mapping[str, jax.Array], case: Case, seed: int
) -> tuple[dict[str, float], list[str]]:
    """Compare with the float64 reference what a program made of `arguments`.

    Returns:
      The error of each result, relative to its largest entry; and in words, those too large.
    """
    truth = reference(case, seed)
    results = {name: np.asarray(x).astype(np.float64) for name, x in computed.items()}
    truth = Truth({name: truth.expected[name] for name in results}, truth.budget)
    errors = {name: error(x, truth.expected[name]) for name, x in results.items()}
    return errors, truth.wrong(results)
