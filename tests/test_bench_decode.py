"""The bench's suite of decoding: its peers are right or refuse, and what it shows is bytes."""

import functools
import io
import types

import command_line
import jobs
import judge
import peers
import plots
import problems
import publish
import pytest
import run
import work
from clock import Ceilings
from jobs import Job, Ready
from report import Row
from rich.console import Console

from pallas_flash.testing import Case

SUITE = problems.SUITES["decode"]
CASES = SUITE.cases
DECODERS = ("ours-decode", "ours-paged", "pallas-decode")


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_valid_keys_and_values(name):
    valid = {
        "b1": 32768,
        "b16": 16 * 8192,
        "b64": 64 * 4096,
        "ragged": sum(CASES["ragged"].key_value_seq_lengths),
        "multi-query": 131072,
        "step": 4096,
    }[name]
    heads, key_heads, head_dim = (8, 1, 256) if name == "multi-query" else (32, 8, 128)
    # A key and a value of each key head; a query and an output of each head; 2 bytes an entry.
    caches = valid * 2 * key_heads * head_dim * 2
    rows = CASES[name].B * 2 * heads * head_dim * 2
    least = work.least_bytes(CASES[name], with_gradients=False)
    assert least == caches + rows
    # What the title says is of keys and values is nearly that.
    assert least < 1.01 * caches


@pytest.mark.parametrize("page_size", [None, 64])
@pytest.mark.parametrize("name", ["b1", "ragged"])
def test_what_decodes_is_right(name, page_size, seed):
    case = problems.judged(CASES[name])
    assert case.T == 1
    compile = peers.given_lengths(functools.partial(peers.decoding, "xla", page_size))
    program = compile(case, False, False)
    _, wrong = judge.judge(program.call(*judge.arguments(case, seed)), case, seed)
    assert not wrong


@pytest.mark.parametrize("name", DECODERS)
def test_what_decodes_refuses_what_is_not_decoding(name, seed):
    peer = peers.PEERS[name]
    prefill = Case(T=2, S=64, dtype="bfloat16")
    ((ready,),) = jobs.prepare([Job("suite", "job", prefill, False, [peer])], seed, lambda: None)
    assert ready == Ready(Row(name, reason="refused: it decodes one query a row, not 2"))
    asked = frozenset({"is_causal", "key_value_seq_lengths", "local_window_size"})
    assert peer.missing(asked, True) == "is_causal, local_window_size, backward"
    assert name not in peers.DEFAULT


def test_pages_that_do_not_fill_a_row_are_refused():
    with pytest.raises(TypeError, match="reshape"):
        peers.given_lengths(functools.partial(peers.decoding, "xla", 64))(
            Case(T=1, S=96, dtype="bfloat16"), False, False
        )


def test_a_sweep_of_the_kernel_that_decodes():
    backends = peers.decode_backends(CASES["b1"])
    cuts = [backend.decode_config for backend in backends.values()]
    # Four blocks of 128 keys and values of 128 entries are 256 KB, and a program has 227.
    assert {(cut.tile.block_k, cut.tile.num_stages) for cut in cuts} == {
        *((block_k, stages) for block_k in (32, 64) for stages in (3, 4)),
        (128, 3),
    }
    assert {cut.splits for cut in cuts} == {1, 2, 4, 8, 16, 32}
    assert len(set(cuts)) == len(cuts) == 5 * 2 * 6
    args = command_line.parse(["--suite", "decode", "--case", "b1", "--sweep", "decode"], None)
    jobs_asked = command_line.jobs(args, [])
    assert [job.with_gradients for job in jobs_asked] == [False, False]
    for job in jobs_asked:
        assert [peer.name for peer in job.rivals] == [*SUITE.peers, *backends]
        assert not job.rivals[-1].has_gradients


# Milliseconds of a peer in two rounds, and a peer that is refused.
TIMES = {"ours-decode": (0.25, 0.25), "ours-triton": (1.0, 1.0), "jax-cudnn": (0.5, 0.5)}
REFUSED = "pallas-decode"


@pytest.fixture
def printed_and_found(monkeypatch):
    """What the terminal shows of stand-ins' times, and what a file would have."""
    rows = [Row(name, times=times) for name, times in TIMES.items()]
    rows.append(Row(REFUSED, reason="refused: no"))
    bench = types.SimpleNamespace(rounds=1, seed=0, run=lambda job, rivals, step: list(rows))
    monkeypatch.setattr(run, "prepare", lambda jobs, seed, step: [[] for _ in jobs])
    todo = [
        Job("decode", name, CASES[name], False, [], SUITE.baselines) for name in ("b64", "ragged")
    ]
    console = Console(file=io.StringIO(), width=200)
    ceilings = Ceilings({"bfloat16": 700.0}, 4.3)
    made = [record for _, record in run.run_jobs(todo, bench, ceilings, console, False)]
    header = publish.load(publish.RESULTS)["headline"]["header"]
    return console.file.getvalue(), {"header": header, "jobs": made}


def test_a_terminal_shows_bytes_a_second(printed_and_found):
    printed, _ = printed_and_found
    assert "TFLOP" not in printed
    rate = work.least_bytes(CASES["b64"], False) / 0.25e-3 / 1e12
    (shown, *_) = (line.split() for line in printed.splitlines() if line.startswith("ours-decode"))
    assert float(shown[3]) == pytest.approx(rate, abs=5e-4)
    assert shown[-1] == "2.00"


def test_bytes_a_second_are_published(printed_and_found, tmp_path):
    _, found = printed_and_found
    plots.draw("decode", found, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["decode-forward.png"]
    text = publish.text({"decode": found}, tmp_path)
    title, *rest = text.splitlines()
    assert title.startswith("TB/s of valid keys and values, queries and outputs, forward. ")
    assert f"{REFUSED} has no figure at all." in rest
    assert "| decode | ours-decode | ours-triton | jax-cudnn | ours-decode x jax-cudnn |" in text
    rates = [work.least_bytes(CASES["b64"], False) / ms / 1e9 for ms, _ in TIMES.values()]
    cells = " | ".join([*(f"{rate:.2f}" for rate in rates), "2.00", "0.50"])
    assert f"\n| b64: B64 T1 S4096 N32 K8 H128 bfloat16 | {cells} |\n" in text
    lengths = CASES["ragged"].key_value_seq_lengths
    sizes = f"H128 lengths {min(lengths)} to {max(lengths)} bfloat16"
    assert f"| ragged: B64 T1 S8192 N32 K8 {sizes} |" in text
    assert "decode-forward.png" in text
