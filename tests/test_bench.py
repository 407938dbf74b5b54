"""The bench: its count of operations, its gate, and that it runs where there is no GPU."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import judge
import numpy as np
import peers
import problems
import pytest
import run
from clock import device_clock, wall_clock
from peers import Peer
from report import Row

from pallas_flash import flash_attention
from pallas_flash.testing import Case

ROOT = Path(__file__).parent.parent
PROBLEMS = {name: case for suite in problems.SUITES.values() for name, case in suite.items()}

SMALL = Case(B=2, T=64, S=64, N=4, K=2, H=16, dtype="bfloat16")
OPTIONS = {
    "none": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (9, 3)},
    "causal window": {"local_window_size": (9, 3), "is_causal": True},
    "cap": {"logits_soft_cap": 50.0},
    "lengths": {"key_value_seq_lengths": (3, 41)},
}

JUDGED = ("causal window", "cap", "lengths")

ours = functools.partial(flash_attention, implementation="xla")


def brute_force_pairs(case: Case) -> int:
    left, right = case.local_window_size or (10**6, 10**6)
    lengths = case.key_value_seq_lengths or (case.S,) * case.B
    return sum(
        j < length and i - left <= j <= i + right and (j <= i or not case.is_causal)
        for length in lengths
        for i in range(case.T)
        for j in range(case.S)
    )


@pytest.mark.parametrize("sizes", [{}, {"T": 23}, {"S": 23, "B": 2}], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
def test_operations_are_those_of_the_pairs_that_are_seen(options, sizes):
    case = dataclasses.replace(SMALL, **sizes, **OPTIONS[options])
    pairs = brute_force_pairs(case)
    assert problems.visible_pairs(case) == pairs
    assert problems.flops(case, with_gradients=False) == 4 * pairs * case.N * case.H
    assert problems.flops(case, with_gradients=True) == 14 * pairs * case.N * case.H


def test_causal_counts_half():
    full, causal = (
        problems.flops(PROBLEMS[name], with_gradients=False) for name in ("full", "causal")
    )
    assert full == 4 * 2 * 8192**2 * 16 * 128
    assert causal == pytest.approx(full / 2, rel=2e-4)


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_reduced_problem_keeps_what_it_is_about(name):
    case = PROBLEMS[name]
    reduced = problems.reduced(case)
    assert problems.options(reduced).keys() == problems.options(case).keys()
    assert (reduced.H, reduced.dtype, reduced.N // reduced.K) == (
        case.H,
        case.dtype,
        case.N // case.K,
    )
    assert reduced.S <= 1024
    # Odd lengths stay odd.
    assert reduced.S % 16 == 0 or case.S % 16 != 0
    if case.local_window_size or case.key_value_seq_lengths:
        open_case = dataclasses.replace(reduced, local_window_size=None, key_value_seq_lengths=None)
        assert problems.visible_pairs(reduced) < 0.8 * problems.visible_pairs(open_case)


@jax.custom_vjp
def amplified(x: jax.Array) -> jax.Array:
    """Itself, with a gradient that is a tenth too large."""
    return x


amplified.defvjp(lambda x: (x, None), lambda _, dx: (dx * 1.1,))


def too_large(query, key, value, **options):
    return ours(query, key, value, **options) * 1.05


def not_finite(query, key, value, **options):
    return ours(query, key, value, **options).at[0, 0].set(np.nan)


def wrong_key_gradient(query, key, value, **options):
    return ours(query, amplified(key), value, **options)


def deaf(query, key, value, **options):
    return ours(query, key, value)


def late_rows_too_large(query, key, value, **options):
    out = ours(query, key, value, **options)
    return out.at[:, out.shape[1] // 2 :].multiply(1.1)


def row_of(attention, case: Case, with_gradients: bool, seed: int) -> Row:
    bench = run.Bench(wall_clock(1.0, "test"), rounds=1, seed=seed)
    peer = Peer("peer", lambda: attention)
    (row,) = bench.run(run.Job("job", case, with_gradients, [peer]), lambda: None)
    return row


@pytest.mark.parametrize("options", JUDGED)
def test_a_right_peer_gets_figures(options, seed):
    row = row_of(ours, dataclasses.replace(SMALL, **OPTIONS[options]), True, seed)
    assert not row.reason
    assert len(row.times) == 1
    assert set(row.errors) == {"out", "dquery", "dkey", "dvalue"}


@pytest.mark.parametrize("attention", [too_large, not_finite])
def test_a_wrong_peer_gets_none(attention, seed):
    row = row_of(attention, SMALL, False, seed)
    assert row.reason.startswith("wrong: out: error")
    assert not row.times
    _, record = run.report(run.Job("job", SMALL, False, []), [row], 1.0)
    assert "ms" not in record["rows"][0]
    # Not with an infinite error in it.
    json.dumps(record, allow_nan=False)


def test_a_long_row_counts_as_much_as_a_short_one(seed):
    _, wrong = judge.judge(late_rows_too_large, PROBLEMS["causal"], False, seed)
    assert wrong


def test_a_peer_with_one_wrong_gradient_gets_figures_for_its_forward_alone(seed):
    assert row_of(wrong_key_gradient, SMALL, False, seed).times
    row = row_of(wrong_key_gradient, SMALL, True, seed)
    assert not row.times
    assert row.reason.startswith("wrong: dkey: error")
    assert ";" not in row.reason


@pytest.mark.parametrize("options", JUDGED)
def test_a_peer_that_ignores_an_option_gets_none(options, seed):
    row = row_of(deaf, dataclasses.replace(SMALL, **OPTIONS[options]), False, seed)
    assert row.reason.startswith("wrong: out: error")


def test_figures():
    row = Row("peer", times=(2.0, 1.0, 4.0, 3.0, 5.0))
    figures = row.figures(flops=3e12, cudnn_ms=1.5, matmul_tflops=2000.0)
    expected = {"ms": 3, "iqr_ms": 2, "tflops": 1000, "percent_of_matmul": 50, "times_cudnn": 0.5}
    assert figures == expected
    assert "times_cudnn" not in row.figures(3e12, np.inf, 2000.0)


def replace_profiler(monkeypatch, measure):
    """Which needs packages that JAX itself does not."""
    module = types.SimpleNamespace(measure=measure)
    monkeypatch.setitem(sys.modules, "jax.experimental.mosaic.gpu.profiler", module)


def test_device_time_is_the_mean_of_what_the_profiler_saw(monkeypatch):
    def measure(function, *, iterations):
        return lambda *arguments: (function(*arguments), list(range(iterations)))

    replace_profiler(monkeypatch, measure)
    clock = device_clock(round_ms=1.0)
    assert clock.name.startswith("device time")
    assert clock.time(jax.jit(lambda x: x), (np.ones(3, np.float32),), 5) == 2


def test_without_a_profiler_the_clock_is_the_wall(monkeypatch):
    def measure(function, *, iterations):
        raise RuntimeError("CUPTI profiling is not supported on this platform")

    replace_profiler(monkeypatch, measure)
    assert device_clock(round_ms=1.0).name.startswith("wall time")


@pytest.mark.parametrize("kernel", peers.GRIDS)
def test_a_sweep_changes_one_kernel(kernel):
    swept = [peer.load().keywords["implementation"].configs for peer in peers.sweep(kernel, SMALL)]
    assert [getattr(configs, kernel) for configs in swept] == list(peers.GRIDS[kernel])
    assert len(set(swept)) == len(swept)
    others = [dataclasses.replace(configs, **{kernel: None}) for configs in swept]
    assert len(set(others)) == 1


def test_the_script_runs_on_a_cpu(tmp_path):
    asked = ["ours-xla", "ours-triton", "jax-xla", "jax-cudnn", "mha", "tokamax-triton"]
    out = tmp_path / "results.json"
    command = [sys.executable, ROOT / "bench" / "run.py", "--suite", "smoke", "--rounds", "2"]
    printed = subprocess.run(
        [*command, "--out", out, "--peers", *asked],
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    last = json.loads(printed.splitlines()[-1])
    assert last == json.loads(out.read_text())
    assert last["header"]["clock"].startswith("wall time")
    forward, both = last["jobs"]
    assert both["flops"] == 3.5 * forward["flops"]
    for job in (forward, both):
        rows = {row["peer"]: row for row in job["rows"]}
        assert list(rows) == asked
        for name in ("ours-xla", "jax-xla"):
            assert not rows[name]["reason"]
            assert rows[name]["ms"] > 0
            assert name in printed
        # Where JAX finds cuDNN it is the lowering that refuses, and names the primitive.
        refusal = rows["jax-cudnn"]["reason"]
        assert refusal.startswith("refused: ")
        assert "cuDNN" in refusal or "dot_product_attention_fwd" in refusal
        assert rows["mha"]["reason"] == "refused: it has no local_window_size"
        assert rows["ours-triton"]["reason"].startswith("refused: 'triton' cannot run")
