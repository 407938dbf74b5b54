"""The table of cases: every implementation, values and gradients together, against the budget."""

import functools

import pytest

from pallas_flash import backends, flash_attention_with_lse
from pallas_flash.backends.xla import XlaBackend
from pallas_flash.testing import Case, compare, make_inputs

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
    Case(**GROUPED, logits_soft_cap=5.0, is_causal=True, bias="NTS", spread=3.0),
    Case(**GROUPED, sinks=True),
    Case(**GROUPED, sinks=True, query_seq_lengths=(113, 50), key_value_seq_lengths=(0, 203)),
    Case(**GROUPED, scale=0.0, is_causal=True),
    Case(**GROUPED, scale=-0.25, mask="BNTS"),
    Case(**GROUPED, scale="traced", is_causal=True, bias="NTS"),
    Case(T=150, S=150, dtype="bfloat16", is_causal=True, N=4, K=2, H=64),
    Case(T=150, S=150, dtype="float16", is_causal=True, N=4, K=2, H=64, sinks=True),
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

IMPLEMENTATIONS = {
    "xla": "xla",
    "xla-small-blocks": XlaBackend(block_q=16, block_k=32),
    "interpret": "interpret",
    "triton": "triton",
}

# What each implementation must be able to run here. A row leaves `SKIPPED` as soon as it can run:
# then this test fails until the row is taken out.
SKIPPED = {"interpret": CASES, "triton": CASES}


def reasons(implementation: str, case: Case) -> tuple[str, ...]:
    chosen = IMPLEMENTATIONS[implementation]
    backend = backends.load(chosen) if isinstance(chosen, str) else chosen
    inputs = make_inputs(case, seed=0)
    spec, operands = inputs.spec_and_operands()
    return backends.unsupported_reasons(backend, spec, operands)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_runs_what_it_is_said_to_run(implementation):
    refused = [case.id for case in CASES if reasons(implementation, case)]
    assert refused == [case.id for case in SKIPPED.get(implementation, [])]


# Implementations vary fastest, so that they share one case's reference.
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_values_and_gradients(implementation, case, seed):
    refusals = reasons(implementation, case)
    if refusals:
        pytest.skip(f"{implementation}: {'; '.join(refusals)}")
    attention = functools.partial(
        flash_attention_with_lse,
        implementation=IMPLEMENTATIONS[implementation],
        precision="highest",
    )
    wrong = [str(c) for c in compare(attention, case, seed) if not c.is_right]
    assert not wrong


def test_case_ids_are_unique():
    assert len({case.id for case in CASES}) == len(CASES)
