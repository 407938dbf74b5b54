"""The bench: its gate, its clocks, and what it makes of times."""

import dataclasses
import functools
import io
import json
import sys
import types

import jax
import jobs
import judge
import numpy as np
import peers
import problems
import pytest
import report
import run
import work
from clock import Ceilings, Clock, device_clock, measure_ceilings, wall_clock
from jobs import Job, Ready
from peers import Peer
from programs import Compiled
from report import Row
from rich.console import Console

from pallas_flash import flash_attention
from pallas_flash.testing import Case

PROBLEMS = {name: case for suite in problems.SUITES.values() for name, case in suite.cases.items()}

SMALL = Case(B=2, T=64, S=64, N=4, K=2, H=16, dtype="bfloat16")
OPTIONS = {
    "causal window": {"local_window_size": (9, 3), "is_causal": True},
    "cap": {"logits_soft_cap": 50.0},
    "lengths": {"key_value_seq_lengths": (3, 41)},
}

ours = functools.partial(flash_attention, implementation="xla")


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_judged_problem_keeps_what_it_is_about(name):
    case = PROBLEMS[name]
    reduced = problems.judged(case)
    assert problems.options(reduced).keys() == problems.options(case).keys()
    for kept in ("H", "Hv", "dtype"):
        assert getattr(reduced, kept) == getattr(case, kept)
    assert reduced.N // reduced.K == case.N // case.K
    assert (reduced.T == 1) == (case.T == 1)
    assert max(reduced.T, reduced.S) <= 1024
    # Odd lengths stay odd.
    assert reduced.S % 16 == 0 or case.S % 16 != 0
    if case.local_window_size or case.key_value_seq_lengths:
        open_case = dataclasses.replace(reduced, local_window_size=None, key_value_seq_lengths=None)
        assert work.visible_pairs(reduced) < 0.8 * work.visible_pairs(open_case)


def test_sets_outgrow_the_cache_and_differ(seed):
    case = dataclasses.replace(SMALL, B=4, T=2048, S=2048, N=8, K=8, H=128)
    sets = problems.draw(case, seed)
    # What a forward reads of them.
    sizes = [sum(x.nbytes for x in jax.tree.leaves(arguments[:2])) for arguments in sets]
    assert sum(sizes[:-1]) < 2**28 <= sum(sizes)
    first, second = (jax.tree.leaves(arguments) for arguments in sets[:2])
    for x, other in zip(first, second, strict=True):
        assert np.count_nonzero(np.asarray(x)) > 0.99 * x.size
        assert not np.array_equal(x, other)


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


CEILINGS = Ceilings({"bfloat16": 1.0}, 1.0)


def row_of(attention, case: Case, with_gradients: bool, seed: int) -> Row:
    peer = Peer("peer", peers.traced(lambda: attention))
    job = Job("suite", "job", case, with_gradients, [peer])
    ((ready,),) = jobs.prepare([job], seed, lambda: None)
    bench = jobs.Bench(wall_clock(1.0, "test"), rounds=1, seed=seed)
    (row,) = bench.run(job, [ready], lambda: None)
    return row


@pytest.mark.parametrize("options", OPTIONS)
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
    record = report.record("job", SMALL, False, [row], (), CEILINGS)
    assert "ms" not in record["rows"][0]
    # Not with an infinite error in it.
    json.dumps(record, allow_nan=False)


def test_a_long_row_counts_as_much_as_a_short_one(seed):
    case = problems.judged(PROBLEMS["causal"])
    out = late_rows_too_large(**judge.arguments(case, seed)[0], is_causal=True)
    _, wrong = judge.judge({"out": out}, case, seed)
    assert wrong


def test_a_peer_with_one_wrong_gradient_gets_figures_for_its_forward_alone(seed):
    assert row_of(wrong_key_gradient, SMALL, False, seed).times
    row = row_of(wrong_key_gradient, SMALL, True, seed)
    assert not row.times
    assert row.reason.startswith("wrong: dkey: error")
    assert ";" not in row.reason


@pytest.mark.parametrize("options", OPTIONS)
def test_a_peer_that_ignores_an_option_gets_none(options, seed):
    row = row_of(deaf, dataclasses.replace(SMALL, **OPTIONS[options]), False, seed)
    assert row.reason.startswith("wrong: out: error")


def test_a_peer_is_refused_what_it_has_not(seed):
    job = Job(
        "suite",
        "job",
        dataclasses.replace(SMALL, logits_soft_cap=3.0),
        True,
        [Peer("peer", peers.traced(lambda: ours), frozenset(), has_gradients=False)],
    )
    ((ready,),) = jobs.prepare([job], seed, lambda: None)
    assert ready == Ready(Row("peer", reason="refused: it has no logits_soft_cap, backward"))


def unruly(query, key, value):
    raise AssertionError("what others may raise")


def not_installed():
    raise ImportError("No module named 'peer'")


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (not_installed, "absent: No module named 'peer'"),
        (lambda: unruly, "refused: what others may raise"),
    ],
    ids=["absent", "raises"],
)
def test_a_peer_without_figures_says_why(load, reason, seed):
    job = Job("suite", "job", SMALL, False, [Peer("peer", peers.traced(load))])
    ((ready,),) = jobs.prepare([job], seed, lambda: None)
    assert ready == Ready(Row("peer", reason=reason))


def test_too_large_a_problem_costs_its_own_row_alone(seed):
    """As it is found out when it is run, by a card that has not the memory."""

    def explode(*arguments):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    job = Job(
        "suite", "job", SMALL, False, [Peer(name, peers.traced(lambda: ours)) for name in "ab"]
    )
    ((first, second),) = jobs.prepare([job], seed, lambda: None)
    first = dataclasses.replace(first, timed=Compiled(explode))
    bench = jobs.Bench(wall_clock(1.0, "test"), rounds=1, seed=seed)
    rows = bench.run(job, [first, second], lambda: None)
    assert rows[0].reason == "refused: RESOURCE_EXHAUSTED: out of memory"
    assert not rows[0].times
    assert rows[1].times


def test_figures():
    row = Row("peer", times=(2.0, 1.0, 4.0, 3.0, 5.0), temporary_bytes=7, result_bytes=9)
    other = Row("other", times=(4.0, 2.0, 8.0, 6.0, 5.0))
    ceilings = Ceilings({"bfloat16": 2.0, "float32": 1.0}, 4.0)
    record = report.record("job", SMALL, False, [row, other], ("other", "absent"), ceilings)
    flops, least_bytes = record["flops"], record["least_bytes"]
    found, base = record["rows"]
    assert (found["ms"], found["iqr_ms"]) == (3.0, 2.0)
    # Round by round: the card was in one state for both.
    assert (found["times_other"], base["times_other"]) == (2.0, 1.0)
    assert "times_absent" not in found
    assert found["tflops"] == pytest.approx(flops / 3e-3 / 1e12)
    assert found["tbps"] == pytest.approx(least_bytes / 3e-3 / 1e12)
    assert found["percent_of_matmul"] == pytest.approx(100 * found["tflops"] / 2.0)
    assert found["percent_of_copy"] == pytest.approx(100 * found["tbps"] / 4.0)
    assert (found["temporary_bytes"], found["result_bytes"]) == (7, 9)


def test_ceilings():
    """Of a product of square matrices and a copy of floats, said to take 1 ms each."""
    size, copied = (8192, 2**28) if jax.default_backend() == "gpu" else (512, 2**21)
    clock = Clock("test", lambda function, sets, calls: 1.0, round_ms=1.0)
    ceilings = measure_ceilings(clock, ["float32", "bfloat16"], rounds=1)
    tflops = 2 * size**3 / 1e-3 / 1e12
    assert ceilings.matmul_tflops == pytest.approx({"float32": tflops, "bfloat16": tflops})
    assert ceilings.copy_tbps == pytest.approx(2 * 4 * copied / 1e-3 / 1e12)


def test_a_round_is_long_and_comes_after_another():
    timed = []

    def time(function, sets, calls):
        timed.append(calls)
        return 0.25

    clock = Clock("test", time, round_ms=10.0)
    assert clock.calls(lambda: None, [()]) == 40
    assert timed == [1, 40]


def test_rounds_take_their_turns_in_any_order():
    order = []
    clock = Clock("test", lambda function, sets, calls: order.append(function) or 1.0, 1.0)
    names = "abcdefgh"
    rounds = 20
    times = clock.rounds({name: (name, 1) for name in names}, [()], rounds, lambda: None)
    assert times == {name: [1.0] * rounds for name in names}
    turns = ["".join(order[8 * r : 8 * r + 8]) for r in range(rounds)]
    assert {"".join(sorted(turn)) for turn in turns} == {names}
    # Of 8! orders.
    assert len(set(turns)) > 1


def replace_profiler(monkeypatch, kernels):
    """Which needs packages that JAX itself does not, and a GPU."""
    cupti = types.SimpleNamespace(_cupti_init=list, _cupti_get_timings=kernels)
    library = types.SimpleNamespace(_mosaic_gpu_ext=cupti)
    module = types.SimpleNamespace(mosaic_gpu_lib=library)
    monkeypatch.setitem(sys.modules, "jax.experimental.mosaic.gpu.profiler", module)


def test_device_time_is_the_sum_of_kernels_by_call(monkeypatch):
    replace_profiler(monkeypatch, lambda finalize: [("a", 1.0), ("b", 2.0), ("b", 3.0), ("a", 4.0)])
    clock = device_clock(round_ms=1.0)
    assert clock.name.startswith("device time")
    sets = [(np.ones(3, np.float32),)]
    assert clock.time(jax.jit(lambda x: x), sets, 2) == 5.0


def test_calls_take_the_sets_in_turn():
    seen = []
    wall_clock(1.0, "test").time(seen.append, [("a",), ("b",), ("c",)], 5)
    assert seen == ["a", "b", "c", "a", "b"]


def test_without_a_profiler_the_clock_is_the_wall(monkeypatch):
    replace_profiler(monkeypatch, lambda finalize: [])
    assert device_clock(round_ms=1.0).name.startswith("wall time")
    monkeypatch.setitem(sys.modules, "jax.experimental.mosaic.gpu.profiler", None)
    assert device_clock(round_ms=1.0).name.startswith("wall time")


@pytest.mark.parametrize("kernel", peers.GRIDS)
def test_a_sweep_changes_one_kernel(kernel):
    swept = [backend.configs for backend in peers.sweep_backends(kernel, SMALL).values()]
    assert [getattr(configs, kernel) for configs in swept] == list(peers.GRIDS[kernel])
    assert len(set(swept)) == len(swept)
    others = [dataclasses.replace(configs, **{kernel: None}) for configs in swept]
    assert len(set(others)) == 1


def test_what_fails_beside_others_is_tried_again_alone(seed):
    tries = []

    def compile_second_time(case, with_gradients, is_tuned):
        tries.append(with_gradients)
        if len(tries) == 1:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return Compiled(lambda *arguments: None)

    def never(case, with_gradients, is_tuned):
        raise jax.errors.JaxRuntimeError("INTERNAL: no")

    job = Job("suite", "job", SMALL, False, [Peer("a", compile_second_time), Peer("b", never)])
    ((first, second),) = jobs.prepare([job], seed, lambda: None)
    assert first.timed is not None
    assert second == Ready(Row("b", reason="refused: INTERNAL: no"))


def test_what_is_timed_is_tuned_and_what_is_judged_need_not_be(seed):
    asked = []

    def compile(case, with_gradients, is_tuned):
        asked.append((case, with_gradients, is_tuned))
        return Compiled(lambda *arguments: None)

    job = Job("suite", "job", PROBLEMS["full"], True, [Peer("peer", compile)])
    jobs.prepare([job], seed, lambda: None)
    assert asked == [(job.case, True, True), (problems.judged(job.case), True, False)]


def test_a_sweep_shows_the_fastest_first_and_a_series_each_under_its_name(monkeypatch):
    seconds = {"s64": (2.0, 1.0), "s128": (3.0, 4.0)}
    cases = problems.SUITES["origin"].cases
    todo = [Job("origin", name, cases[name], False, []) for name in seconds]

    def rows_of(job, rivals, step):
        return [Row(peer, times=(x,)) for peer, x in zip("ab", seconds[job.name], strict=True)]

    bench = types.SimpleNamespace(rounds=1, seed=0, run=rows_of)
    monkeypatch.setattr(run, "prepare", lambda jobs, seed, step: [[] for _ in jobs])
    console = Console(file=io.StringIO(), width=200)
    ceilings = Ceilings({"float32": 1.0}, 1.0)
    made = list(run.run_jobs(todo, bench, ceilings, console, fastest_first=True))
    assert [[row["peer"] for row in record["rows"]] for _, record in made] == [
        ["b", "a"],
        ["a", "b"],
    ]
    times, _ = report.series_tables("origin", [record for _, record in made])
    (_, table, *_) = times.renderables
    columns = {str(column.header): list(column.cells) for column in table.columns}
    assert columns == {"S": ["64", "128"], "b": ["1", "4"], "a": ["2", "3"]}
