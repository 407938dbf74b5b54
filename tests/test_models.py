"""Attention as real models call it: every implementation, values and gradients, in small."""

import pytest
from implementations import each_implementation, judge

from pallas_flash.models import MODELS
from pallas_flash.testing import Case, make_inputs

# So that the interpreter has several blocks of the heads and options of a model, and not many.
LONGEST = 96

# Some differ in their lengths alone.
REDUCED = dict.fromkeys(case.reduced(LONGEST) for case in MODELS.values())


@each_implementation("xla")
@pytest.mark.parametrize("case", REDUCED, ids=lambda case: case.id)
def test_values_and_gradients(implementation, case, seed):
    _, wrong = judge(implementation, make_inputs, case, seed)
    assert wrong == []


@pytest.mark.parametrize("name", MODELS)
def test_a_reduced_model_keeps_what_it_is_about(name):
    case = MODELS[name]
    reduced = case.reduced(LONGEST)
    assert max(reduced.T, reduced.S) <= LONGEST
    for kept in ("H", "Hv", "dtype", "is_causal", "logits_soft_cap"):
        assert getattr(reduced, kept) == getattr(case, kept)
    assert reduced.N // reduced.K == case.N // case.K
    assert (reduced.local_window_size is None) == (case.local_window_size is None)
    assert (reduced.T == reduced.S) == (case.T == case.S)


def test_numbers_of_rows_shrink_with_the_lengths():
    numbers = {"query_offset": (40, -80), "key_value_seq_lengths": (200, 7)}
    case = Case(B=2, T=100, S=400, N=6, K=2, **numbers).reduced(100)
    assert (case.B, case.T, case.S, case.N, case.K) == (2, 25, 100, 6, 2)
    assert case.query_offset == (10, -20)
    assert case.key_value_seq_lengths == (50, 2)
    assert Case(B=1, T=8, S=8, key_value_seq_lengths=(3,)).reduced(8).B == 1


@pytest.mark.parametrize(("length", "shrunk"), [(0, 0), (1, 1), (3, 1), (9, 2)])
def test_what_is_short_does_not_shrink_to_nothing(length, shrunk):
    case = Case(T=length, S=400).reduced(100)
    lengths = (case.T, case.S)
    assert lengths == (shrunk, 100)
