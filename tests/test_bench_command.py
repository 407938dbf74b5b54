"""The bench as a command: without a GPU, and asked for what there is not."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import base
import command_line
import footprint
import jax
import machine
import peers
import problems
import publish
import pytest

ROOT = Path(__file__).parent.parent
COMMAND = [sys.executable, ROOT / "bench" / "run.py"]
ON_CPU = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


def run(*arguments: object) -> str:
    command = [*COMMAND, *map(str, arguments)]
    done = subprocess.run(command, env=ON_CPU, capture_output=True, text=True, check=True)
    return done.stdout


def test_a_suite_on_a_cpu(tmp_path):
    asked = ["ours-xla", "ours-triton", "jax-xla", "jax-cudnn", "mha", "tokamax-triton", "triton"]
    out = tmp_path / "results"
    printed = run("--suite", "smoke", "--rounds", 2, "--out", out, "--peers", *asked)
    last = json.loads(printed.splitlines()[-1])
    written = json.loads((out / "smoke.json").read_text())
    assert written == {"header": last["header"], **last["suites"]["smoke"]}
    assert {path.name for path in out.iterdir()} == {
        "smoke.json",
        "smoke-forward.png",
        "smoke-backward.png",
    }
    assert last["header"]["clock"].startswith("wall time")
    forward, both = written["jobs"]
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


def test_a_series_beside_another_revision(tmp_path):
    printed = run(
        *("--suite", "origin", "--case", "s64", "--rounds", 1, "--wall", "--out", tmp_path),
        *("--peers", "jax-xla", "three-steps", "--base", "HEAD"),
    )
    (job,) = json.loads((tmp_path / "origin.json").read_text())["jobs"]
    plain, steps, other = job["rows"]
    assert plain["times_jax-xla"] == 1.0
    assert steps["temporary_bytes"] >= 4 * 2 * 16 * 64 * 64
    # It is there, and says what it misses.
    assert other["peer"] == "base"
    assert other["reason"].startswith("refused: 'triton' cannot run")
    assert "origin: MB, results + temporaries" in printed
    assert {path.name for path in tmp_path.glob("*.png")} == {"origin-ms.png", "origin-mb.png"}


def test_how_memory_grows(seed):
    asked = [peers.PEERS[name] for name in ("three-steps", "ours-xla", "mha")]
    found = footprint.measure(asked, 1024, footprint.card_bytes(), seed, lambda: None)
    rows = {(row.peer, row.with_gradients): row for row in found}
    plain, ours = rows["three-steps", False], rows["ours-xla", False]
    # Sixteen times for four times the length, and four times; XLA for a GPU has more beside the
    # matrices of the shortest, and makes it twelve.
    least = 11.5 if jax.default_backend() == "gpu" else 15.5
    assert plain.temporary_bytes[1024] > least * plain.temporary_bytes[256]
    assert ours.temporary_bytes[1024] < 4.4 * ours.temporary_bytes[256]
    assert ours.longest == 1024 >= plain.longest
    # All of this takes a CPU less than the work that a call may be.
    assert all(row.ran == row.longest for row in found)
    assert rows["mha", True].reason == "refused: it has no grouped queries"


def test_the_tables_of_memory():
    sizes = {256: 512, 1024: 0, 4096: 2_000_000_000}
    found = [
        footprint.Footprint("a", False, sizes, longest=4096, ran=1024),
        footprint.Footprint(
            "b", True, {256: 25_112, 2048: 100}, 2048, 256, "stopped at S 4096: no"
        ),
    ]
    (_, by_length, *_), (_, reach, *below) = (
        group.renderables for group in footprint.tables(found)
    )
    assert [column.header for column in by_length.columns] == ["S", "a\nforward", "b\nboth"]
    cells = [list(column.cells) for column in by_length.columns]
    assert cells[0] == ["256", "1024", "2048", "4096"]
    assert cells[1] == ["0.000512", "0", "", "2,000"]
    # Passed over, and too long.
    assert cells[2] == ["0.02511", "", "0.0001", "-"]
    rows = list(zip(*(column.cells for column in reach.columns), strict=True))
    assert rows == [("a", "forward", "4096", "1024"), ("b", "both", "2048", "256")]
    assert below[0] == "b, both: stopped at S 4096: no"


@pytest.mark.parametrize("with_gradients", [False, True])
def test_what_does_not_fit_is_not_said_to(with_gradients, seed):
    """To the byte: arguments, results and temporaries together."""
    plain = peers.PEERS["three-steps"]
    program = plain.compile(footprint.problem(256), with_gradients, False)
    # A forward reads no cotangent.
    arguments = 2 * 256 * 64 * (8 + 2 + 2 + 8 * with_gradients)
    enough = arguments + program.result_bytes + program.temporary_bytes
    for limit, longest in ((enough, 256), (enough - 1, 0)):
        found = footprint.measure([plain], 256, limit, seed, lambda: None)[with_gradients]
        assert found.longest == longest
        assert found.reason == ("" if longest else "refused: S 256 does not fit")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "headlines"], "argument --suite: invalid choice: 'headlines'"),
        (["--peers", "cudnn"], "argument --peers: invalid choice: 'cudnn'"),
        (["--base", "no-such-revision"], "argument --base: no revision of this project"),
        (["--base=--help"], "argument --base: no revision of this project"),
        (["--out", "/proc/no/folder"], "argument --out: cannot write into '/proc/no/folder'"),
        (["--out", __file__], "argument --out: cannot write into"),
        (["--case", "h63"], "argument --case: no problem of headline has 'h63' in its name"),
        (["--out", ""], "argument --out: expected a folder, got ''"),
        (["--rounds", "0"], "argument --rounds: invalid number from 1 to 10000 value: '0'"),
        (["--rounds", "10001"], "argument --rounds: invalid number from 1 to 10000 value"),
        (["--seed", "x"], "argument --seed: invalid number from 0 to 2^32 - 1 value: 'x'"),
        (["--seed", "-1"], "argument --seed: "),
        (["--seed", str(2**32)], "argument --seed: invalid number from 0 to 2^32 - 1 value"),
        (["--sweep", "forwards"], "argument --sweep: invalid choice: 'forwards'"),
        (["--suite", "memory", "--sweep", "forward"], "argument --sweep: it compares times"),
        (["--quik"], "unrecognized arguments: --quik"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_bad_arguments_end_in_one_sentence(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        command_line.parse(arguments, None)
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_another_revision_has_modules_of_its_own(tmp_path):
    """However late they are imported: by their full names, which are not the present one's."""
    peer = base.load(base.resolve("HEAD"), tmp_path)
    is_refused = pytest.raises(NotImplementedError, match="'triton' cannot run")
    with contextlib.nullcontext() if jax.default_backend() == "gpu" else is_refused:
        peer.compile(problems.SUITES["smoke"].cases["smoke"], True, False)
    (folder,) = tmp_path.glob("pallas_flash_*")
    loaded = [name for name in sys.modules if name.startswith(folder.name)]
    assert f"{folder.name}.backends.triton" in loaded
    for path in folder.rglob("*.py"):
        assert "pallas_flash." not in path.read_text().replace(folder.name, "")


def test_a_case_is_one_of_suite_memory_too():
    args = command_line.parse(["--suite", "smoke", "memory", "--case", "smoke"], None)
    assert command_line.names(args) == [("smoke", "smoke")]


def test_an_error_that_ends_suite_memory_is_told(seed):
    """It need not be one of memory."""
    plain = peers.PEERS["three-steps"]

    def compile(case, with_gradients, is_tuned):
        if case.S > 256:
            raise ValueError("no such length")
        return plain.compile(case, with_gradients, is_tuned)

    peer = peers.Peer("peer", compile)
    found, _ = footprint.measure([peer], 1024, 10**12, seed, lambda: None)
    assert (found.longest, found.ran) == (256, 256)
    assert found.reason == "stopped at S 512: no such length"


def test_who_is_named_twice_is_asked_once():
    args = command_line.parse(["--suite", "smoke", "smoke", "--peers", "jax-xla", "jax-xla"], None)
    (forward, both) = command_line.jobs(args, [])
    assert [len(job.rivals) for job in (forward, both)] == [1, 1]


def test_without_a_figure_it_does_not_end_well():
    command = [*COMMAND, "--suite", "smoke", "--rounds", "1", "--peers", "mha"]
    done = subprocess.run(command, env=ON_CPU, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "run.py: no peer got a figure: the tables say why\n"
    assert json.loads(done.stdout.splitlines()[-1])["suites"]


def test_the_package_beside_it_is_timed(tmp_path):
    """And not another one that Python would find."""
    other = tmp_path / "pallas_flash"
    other.mkdir()
    (other / "__init__.py").write_text("raise SystemExit('another package')")
    command = [*COMMAND, "--suite", "nothing"]
    environment = ON_CPU | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert "invalid choice: 'nothing'" in done.stderr


def test_no_git_no_revision(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(machine, "_ROOT", tmp_path)
    with pytest.raises(SystemExit) as ended:
        command_line.parse(["--base", "HEAD"], None)
    assert ended.value.code == 2
    assert "there is no git repository here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (None, "expected a file of headline, models, decode, whole-model, origin, memory"),
        ('{"header": {}, "jo', "headline.json: run.py did not write it: JSONDecodeError"),
        ("{}", "headline.json: run.py did not write it: KeyError"),
        ("[1]", "headline.json: run.py did not write it: TypeError"),
        ('{"rows": [{"longest": 256}]}', "headline.json: it is of another suite"),
        ('{"jobs": [{"rows": [{"peer": "ours-triton"}]}]}', "headline.json: no peer has a figure"),
    ],
    ids=["nothing", "half", "empty", "a list", "another suite", "no figures"],
)
def test_what_is_no_result_is_not_published(written, message, tmp_path, capsys):
    before = (ROOT / "README.md").read_text()
    (tmp_path / "notes.json").write_text("{}")
    if written is not None:
        (tmp_path / "headline.json").write_text(written)
    with pytest.raises(SystemExit) as ended:
        publish.main([str(tmp_path)])
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
    assert (ROOT / "README.md").read_text() == before


def refuted(suite: str, *peers: str) -> publish.Record:
    """A suite's results as if these peers had been wrong."""
    found = publish.load(publish.RESULTS)[suite]
    for job in found["jobs"]:
        for row in job["rows"]:
            if row["peer"] in peers:
                row.update(times=[], reason="wrong: out: error 1, budget 0")
                for figure in ("ms", "tflops", "times_jax-cudnn"):
                    row.pop(figure, None)
    return found


def test_a_wrong_peer_is_published_as_wrong():
    text = publish.text({"headline": refuted("headline", "ours-triton")}, publish.RESULTS)
    assert "\nours-triton at h64 is wrong: out: error 1, budget 0.\n" in text
    # What it is compared with keeps its column.
    (line,) = (line for line in text.splitlines() if line.startswith("| h64"))
    heading = next(line for line in text.splitlines() if line.startswith("| headline"))
    assert "| ours-triton |" not in heading
    assert line.endswith("| - / - |")


@pytest.mark.parametrize("name", ["headline", "decode"])
def test_dashes_are_explained_where_there_are_any(name):
    text = publish.text({name: publish.load(publish.RESULTS)[name]}, publish.RESULTS)
    assert (" dash is a refusal; " in text) == (" - |" in text)


@pytest.mark.parametrize(
    ("peers", "sentence"),
    [
        (["flash-1"], True),
        (["ours-triton"], False),
        (["jax-xla", "three-steps", "flash-1"], False),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_what_a_wrong_peer_leaves_of_a_series(peers, sentence):
    text = publish.text({"origin": refuted("origin", *peers)}, publish.RESULTS)
    (line,) = (line for line in text.splitlines() if line.startswith("| 2048 |"))
    assert line.count(" - ") == len(peers)
    assert ("\nAt 2048 ours-triton is 1.35 times as fast as jax-xla, " in text) == sentence
    assert "fast as flash-1" not in text


def test_every_peer_of_a_suite_is_in_the_list():
    for suite in problems.SUITES.values():
        assert set(suite.peers) <= set(peers.PEERS)


def test_the_readme_shows_the_results():
    """Its tables are what the command makes of the files, to the letter."""
    readme = (ROOT / "README.md").read_text()
    assert (
        publish.rewritten(readme, publish.text(publish.load(publish.RESULTS), publish.RESULTS))
        == readme
    )
