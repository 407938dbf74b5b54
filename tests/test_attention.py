"""The table of cases: every implementation, values and gradients together, against the budget."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from implementations import (
    SMALL_BLOCKS,
    each_implementation,
    judge,
    name_of,
    reasons,
    runnable,
    truth,
)

from pallas_flash import flash_attention
from pallas_flash.testing import Case, error, make_inputs, split

GROUPED = {"T": 113, "S": 203, "N": 6, "K": 3}

CASES = [
    Case(),
    Case(T=1, S=1),
    Case(**GROUPED),
    Case(**GROUPED, is_causal=True),
    Case(T=203, S=113, N=4, K=1, is_causal=True),
    Case(T=1, S=203, N=8, K=2, is_causal=True, query_offset=(202, 40)),
    Case(T=65, S=65, N=4, K=2, H=80, Hv=48, is_causal=True),
    Case(T=40, S=72, N=4, K=4, H=8, Hv=130),
    Case(T=33, S=130, N=12, K=4, is_causal=True, query_offset=(97, 20)),
    Case(T=100, S=100, is_causal=True, query_offset=(-30, -200)),
    Case(T=100, S=100, is_causal=True, local_window_size=(16, 0)),
    Case(T=100, S=120, local_window_size=(0, 0)),
    Case(T=100, S=120, local_window_size=(7, 31), query_offset=(0, 90)),
    Case(T=100, S=120, key_value_seq_lengths=(120, 33)),
    Case(T=100, S=120, key_value_seq_lengths=(0, 1), is_causal=True),
    Case(T=100, S=120, query_seq_lengths=(0, 77), key_value_seq_lengths=(50, 90)),
    Case(T=100, S=120, segments=3),
    Case(T=90, S=90, segments=2, is_causal=True, N=4, K=2),
    Case(**GROUPED, bias="BNTS"),
    Case(**GROUPED, bias="NTS"),
    Case(**GROUPED, bias="BTS"),
    Case(**GROUPED, bias="BNS"),
    Case(**GROUPED, bias="BNT"),
    Case(**GROUPED, bias="", is_causal=True),
    Case(**GROUPED, bias="NTS", dtype="bfloat16", bias_dtype="float32"),
    Case(**GROUPED, mask="BNTS"),
    Case(**GROUPED, mask="TS", is_causal=True),
    Case(**GROUPED, mask="BS"),
    Case(**GROUPED, mask="NT"),
    Case(**GROUPED, logits_soft_cap=5.0, spread=3.0),
    # Where tanh is nearly the identity, and its argument small.
    Case(**GROUPED, logits_soft_cap=3e4, spread=3.0),
    Case(**GROUPED, logits_soft_cap=3e4, spread=3.0, dtype="bfloat16"),
    Case(**GROUPED, logits_soft_cap=900.0, spread=3.0, dtype="float16"),
    Case(**GROUPED, logits_soft_cap=120.0, spread=3.0, dtype="float16"),
    Case(**GROUPED, logits_soft_cap=30.0, spread=3.0, dtype="bfloat16"),
    # Rows with few keys have an lse as small as a logit.
    Case(T=16, S=1, H=64, logits_soft_cap=127.0, scale=0.02, dtype="bfloat16"),
    Case(T=32, S=32, H=64, logits_soft_cap=30.0, local_window_size=(1, 0), dtype="float16"),
    Case(**GROUPED, logits_soft_cap=5.0, is_causal=True, bias="NTS", spread=3.0),
    Case(**GROUPED, sinks=True),
    Case(**GROUPED, sinks=True, query_seq_lengths=(113, 50), key_value_seq_lengths=(0, 203)),
    Case(**GROUPED, scale=0.0, is_causal=True),
    Case(**GROUPED, scale=-0.25, mask="BNTS"),
    Case(**GROUPED, scale="traced", is_causal=True, bias="NTS"),
    # With a spread a row hangs on a few keys, and late rows are not small beside the first.
    Case(T=150, S=150, dtype="bfloat16", is_causal=True, N=4, K=2, H=64, spread=2.0),
    Case(T=150, S=150, dtype="float16", is_causal=True, N=4, K=2, H=64, spread=2.0),
    Case(T=150, S=150, dtype="float16", is_causal=True, N=4, K=2, H=64, sinks=True),
    # Logits of some thousands, where one float32 has no room for a row's whole lse.
    Case(**GROUPED, dtype="bfloat16", is_causal=True, spread=40.0),
    Case(**GROUPED, dtype="float16", is_causal=True, spread=40.0),
    Case(T=300, S=520, is_causal=True, query_offset=(220, 0), N=4, K=2),
    Case(T=600, S=270, local_window_size=(100, 40), N=2, K=1),
    Case(
        **GROUPED,
        Hv=16,
        bias="BTS",
        mask="NTS",
        is_causal=True,
        local_window_size=(90, 5),
        query_offset=(60, 10),
        query_seq_lengths=(100, 113),
        key_value_seq_lengths=(203, 150),
        segments=2,
        logits_soft_cap=4.0,
        sinks=True,
        scale="traced",
    ),
]

# What each implementation cannot run here. A row that it learns to run must leave: a test below
# fails until it does.
NOT_IN_KERNELS = [
    case
    for case in CASES
    if case.bias is not None or case.mask is not None or case.segments or case.sinks
]
REFUSED = {
    "interpret": NOT_IN_KERNELS,
    "triton": NOT_IN_KERNELS if jax.default_backend() == "gpu" else CASES,
}


@each_implementation("xla", SMALL_BLOCKS)
def test_runs_what_it_is_said_to_run(implementation):
    refused = [case.id for case in CASES if reasons(implementation, make_inputs(case, seed=0))]
    assert refused == [case.id for case in REFUSED.get(name_of(implementation), [])]


# Implementations vary fastest, so that they share one case's reference.
@each_implementation("xla", SMALL_BLOCKS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_values_and_gradients(implementation, case, seed):
    _, wrong = judge(implementation, make_inputs, case, seed)
    assert wrong == []
    # A budget in which a fault finds room would be a fault of the budget.
    eps = float(jnp.finfo(case.dtype).eps)
    most = 10 * eps if case.dtype != "float32" else 300 * eps
    expected = truth(make_inputs, case, seed)
    sums = {"dscale", "dsinks"} | ({"dbias"} if case.bias == "" else set())
    budget = {name: x for name, x in expected.budget.items() if name not in sums}
    assert {name: x for name, x in budget.items() if x > most} == {}
    # A sum over all rows may cancel by chance, and then what it may be off by is little to its
    # terms and much to itself.
    terms = math.sqrt(case.B * case.N * case.T)
    for name in sums & set(expected.budget):
        assert expected.budget[name] * np.max(np.abs(expected.expected[name])) < 1e-2 * terms


# Without an lse to give, a logit may be as rough as a 16-bit output shows it.
@each_implementation("xla")
@pytest.mark.parametrize("case", [x for x in CASES if x.logits_soft_cap], ids=lambda x: x.id)
def test_out_alone(implementation, case, seed):
    inputs = make_inputs(case, seed)
    runnable(implementation, inputs)
    primals, others, _ = split(inputs)
    out = flash_attention(
        **primals, **others, **inputs.options, implementation=implementation, precision="highest"
    )
    expected = truth(make_inputs, case, seed)
    assert error(np.asarray(out, np.float64), expected.expected["out"]) <= expected.budget["out"]


def test_case_ids_are_unique():
    assert len({case.id for case in CASES}) == len(CASES)
