"""Any combination of all options, drawn by hypothesis, against the float64 reference."""

import dataclasses

import jax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from implementations import INTERPRET, judge

from pallas_flash.backends.xla import XlaBackend
from pallas_flash.testing import Case, make_inputs


def maybe(strategy: st.SearchStrategy) -> st.SearchStrategy:
    return st.none() | strategy


axes = st.sets(st.sampled_from("BNTS")).map(lambda names: "".join(sorted(names)))


@st.composite
def cases(draw) -> Case:
    batch, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    key_heads = draw(st.integers(1, 3))
    query_length, key_length = draw(st.integers(1, 40)), draw(st.integers(1, 40))

    def for_each_row(low: int, high: int) -> st.SearchStrategy:
        return maybe(st.tuples(*[st.integers(low, high)] * batch))

    return Case(
        B=batch,
        T=query_length,
        S=key_length,
        N=group * key_heads,
        K=key_heads,
        H=draw(st.integers(1, 20)),
        Hv=draw(maybe(st.integers(1, 20))),
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        is_causal=draw(st.booleans()),
        local_window_size=draw(maybe(st.tuples(st.integers(0, 45), st.integers(0, 45)))),
        query_offset=draw(for_each_row(-45, 45)),
        query_seq_lengths=draw(for_each_row(0, 45)),
        key_value_seq_lengths=draw(for_each_row(0, 45)),
        segments=draw(st.integers(0, 3)),
        bias=draw(maybe(axes)),
        bias_dtype=draw(maybe(st.sampled_from(["float32", "bfloat16", "float16"]))),
        mask=draw(maybe(axes)),
        logits_soft_cap=draw(maybe(st.floats(0.1, 1e5))),
        sinks=draw(st.booleans()),
        scale=draw(maybe(st.just("traced") | st.floats(-2.0, 2.0))),
        spread=draw(st.sampled_from([0.0, 1.0, 3.0])),
    )


# What the kernels do not read.
OUTSIDE_KERNELS = {"bias": None, "bias_dtype": None, "mask": None, "segments": 0, "sinks": False}


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases(), seed=st.integers(0, 2**32 - 1))
def test_any_combination_in_the_kernels(case, seed):
    case = dataclasses.replace(case, **OUTSIDE_KERNELS)
    with jax.default_device(jax.devices("cpu")[0]):
        _, wrong = judge(INTERPRET, make_inputs, case, seed)
    assert wrong == []


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases(), seed=st.integers(0, 2**32 - 1))
def test_any_combination_on_a_gpu(case, seed):
    case = dataclasses.replace(case, **OUTSIDE_KERNELS)
    _, wrong = judge("triton", make_inputs, case, seed)
    assert wrong == []


@pytest.mark.parametrize(
    "backend", [XlaBackend(block_q=8, block_k=16), XlaBackend(block_q=7, block_k=3)], ids=str
)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases(), seed=st.integers(0, 2**32 - 1))
def test_any_combination(backend, case, seed):
    _, wrong = judge(backend, make_inputs, case, seed)
    assert wrong == []
