"""Draw the plots of a run's JSON files and make the README's tables from them.

python bench/publish.py [FOLDER]
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

# As in run.py.
sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import plots
import problems
import report
from peers import CUDNN

from pallas_flash.terminal import Parser

_ROOT = Path(__file__).parent.parent
_README = _ROOT / "README.md"
RESULTS = _ROOT / "bench" / "results" / "h200"

_BEGIN = "<!-- From here to the end mark `python bench/publish.py` writes. -->"
_END = "<!-- End mark. -->"

Record = Mapping[str, Any]


def load(folder: Path) -> dict[str, Record]:
    """What a folder has of the suites that are published; raises ValueError where it is no use."""
    found = {}
    for name in _PARTS:
        path = folder / f"{name}.json"
        if not path.is_file():
            continue
        try:
            found[name] = json.loads(path.read_text())
            is_any = report.has_figures(found[name])
        # It may be no text, no JSON, or other JSON.
        except (ValueError, KeyError, TypeError) as problem:
            raise ValueError(f"{path}: run.py did not write it: {problem!r}") from None
        if not is_any:
            raise ValueError(f"{path}: no peer has a figure")
        if _KINDS.get(name, "jobs") not in found[name]:
            raise ValueError(f"{path}: it is of another suite")
    if not found:
        raise ValueError(f"{folder}: expected a file of {', '.join(_PARTS)}, as run.py writes them")
    return found


def text(found: Mapping[str, Record], folder: Path) -> str:
    """All tables of a folder's suites, with its plots."""
    return "\n\n".join(_PARTS[name](suite, folder) for name, suite in found.items())


def speeds(suite: Record, folder: Path, name: str) -> str:
    """What a suite's metric says of each peer in each direction, a line for each problem."""
    metric = problems.SUITES[name].metric
    jobs: dict[str, list[Record]] = {}
    for job in suite["jobs"]:
        jobs.setdefault(job["name"], []).append(job)
    asked = dict.fromkeys(row["peer"] for job in suite["jobs"] for row in job["rows"])
    ours = [peer for peer in asked if peer.startswith("ours-")]
    shown = [peer for peer in asked if any("ms" in _row(job, peer) for job in suite["jobs"])]

    def both(directions: Sequence[Record], peer: str, figure: str, form: str) -> str:
        known = [_row(job, peer).get(figure) for job in directions]
        return " / ".join("-" if x is None else format(x, form) for x in known)

    lines = [
        [
            f"{problem}: {_sizes(directions[0]['case'])}",
            *(both(directions, peer, metric.name, f".{metric.digits}f") for peer in shown),
            *(both(directions, peer, f"times_{CUDNN}", ".2f") for peer in ours),
        ]
        for problem, directions in jobs.items()
    ]
    heading = [name, *shown, *(f"{peer} x {CUDNN}" for peer in ours)]
    # Once for each, and for what went wrong each time: a dash alone would hide it.
    notes = dict.fromkeys(
        f"{row['peer']} is {row['reason']}."
        if row["reason"].startswith("absent")
        else f"{row['peer']} at {job['name']} is {row['reason']}."
        for job in suite["jobs"]
        for row in job["rows"]
        if row["reason"].startswith(("absent", "wrong", "not timed"))
    )
    timed = dict.fromkeys(
        "forward and backward" if job["with_gradients"] else "forward" for job in suite["jobs"]
    )
    about = f"{metric.title}, {' / '.join(timed)}. {_about(suite['header'])}"
    hidden = [f"{peer} has no figure at all." for peer in asked if peer not in shown]
    refused = []
    if any(row["reason"].startswith("refused") for job in suite["jobs"] for row in job["rows"]):
        dash = "Every other dash" if notes else "Every dash"
        refused = [f"{dash} is a refusal; reasons are in {name}.json."]
    table = "\n".join([about, *notes, *hidden, *refused, "", *_table(heading, lines)])
    return table + _plots(folder, name)


def series(suite: Record, folder: Path) -> str:
    """Milliseconds and megabytes of each peer, a line for each length."""
    jobs = suite["jobs"]
    peers = [row["peer"] for row in jobs[0]["rows"]]

    def times(row: Record) -> str:
        return f"{row['ms']:.3g}" if "ms" in row else "-"

    cells: Sequence[Callable[[Record], str]] = (times, _megabytes)
    lines = [
        [str(job["case"]["S"]), *(cell(_row(job, peer)) for cell in cells for peer in peers)]
        for job in jobs
    ]
    heading = ["S", *(f"{peer} ms" for peer in peers), *(f"{peer} MB" for peer in peers)]
    about = (
        f"{_sizes(jobs[0]['case'], without='S')} at growing lengths, forward: ms, and MB allocated "
        f"beyond arguments and results. {_about(suite['header'])}"
    )
    table = "\n".join([about, *_compared(jobs, peers), "", *_table(heading, lines)])
    return table + _plots(folder, "origin")


def _compared(jobs: Sequence[Record], peers: Sequence[str]) -> list[str]:
    """The last of the peers beside the others at one length, in a sentence."""
    job = next((job for job in jobs if job["case"]["S"] == 2048), None)
    if job is None or "ms" not in _row(job, peers[-1]):
        return []
    *others, ours = (_row(job, peer) for peer in peers)
    ratios = [
        f"{np.median(np.divide(row['times'], ours['times'])):.2f} times as fast as {row['peer']}"
        for row in others
        if "ms" in row
    ]
    return [f"At 2048 {ours['peer']} is {', '.join(ratios)}."] if ratios else []


def _megabytes(row: Record) -> str:
    return "-" if row["temporary_bytes"] is None else report.megabytes(row["temporary_bytes"])


def memory(suite: Record, folder: Path) -> str:
    """How long a sequence fits."""
    lines = [
        [
            row["peer"],
            "forward and backward" if row["with_gradients"] else "forward",
            f"{row['longest']:,}",
            f"{row['ran']:,}",
        ]
        for row in suite["rows"]
        if row["longest"]
    ]
    about = (
        f"The longest sequence, of powers of two, that fits {suite['card_bytes'] / 1e9:.0f} GB by "
        f"XLA's account ({suite['problem']}), and the longest of these that was run to see it. "
        f"{_where(suite['header'])}."
    )
    table = "\n".join([about, "", *_table(["", "", "fits", "ran"], lines)])
    return table + _plots(folder, "memory")


def whole_model(suite: Record, folder: Path) -> str:
    """Times of a whole decoder by whose attention it has, a line for each stage."""
    stages = suite["stages"]
    peers = list(dict.fromkeys(row["peer"] for stage in stages for row in stage["rows"]))

    def figure(stage: Record, peer: str, name: str, form: str) -> str:
        x = _row(stage, peer).get(name)
        return "-" if x is None else format(x, form)

    lines = [
        [
            f"{stage['name']}: batch {stage['batch']}, length {stage['length']}",
            *(figure(stage, peer, "ms", ".4g") for peer in peers),
            *(figure(stage, peers[0], name, form) for name, form in _COMPARED.items()),
        ]
        for stage in stages
    ]
    reasons = [
        f"{row['peer']} at {stage['name']}: {row['reason']}."
        for stage in stages
        for row in stage["rows"]
        if row["reason"]
    ]
    about = (
        f"A decoder of {suite['header']['decoder']}'s shape, bfloat16, ms; in a training step each "
        f"layer is computed anew for its gradient, -kept without the forward of its attention. "
        f"{_where(suite['header'])}."
    )
    compared = [
        f"{peers[0]} {name.replace('times_', 'x ').replace('_', ' ')}" for name in _COMPARED
    ]
    return "\n".join([about, *reasons, "", *_table(["", *peers, *compared], lines)])


# What is shown of the first attention beside all milliseconds.
_COMPARED = {"tokens_per_second": ",.0f", "times_jax-cudnn": ".2f", "times_jax-xla": ".2f"}


def _row(job: Record, peer: str) -> Record:
    return next((row for row in job["rows"] if row["peer"] == peer), {})


def _sizes(case: Record, without: str = "") -> str:
    """Such as "B2 S8192 N16 K16 H128 causal bfloat16"."""
    names = ("B", "T", "S", "N", "K", "H") if case["T"] != case["S"] else ("B", "S", "N", "K", "H")
    parts = [f"{name}{case[name]}" for name in names if name != without]
    if case["Hv"] is not None:
        parts.append(f"Hv{case['Hv']}")
    if case["is_causal"]:
        parts.append("causal")
    if case["local_window_size"] is not None:
        parts.append(f"window {tuple(case['local_window_size'])}")
    if lengths := case["key_value_seq_lengths"]:
        parts.append(f"lengths {min(lengths)} to {max(lengths)}")
    if case["logits_soft_cap"] is not None:
        parts.append(f"cap {case['logits_soft_cap']:g}")
    return " ".join([*parts, case["dtype"]])


def _where(header: Record) -> str:
    return (
        f"{header['card']}, JAX {header['jax']}, driver {header['driver']}, {header['date']}, "
        f"commit {header['commit']}"
    )


def _about(header: Record) -> str:
    matmul = ", ".join(
        f"{x:.0f} TFLOP/s in {dtype}" for dtype, x in header["matmul_tflops"].items()
    )
    return (
        f"{_where(header)}; in the same run a large matrix product reached {matmul} and a copy "
        f"{header['copy_tbps']:.2f} TB/s."
    )


def _table(heading: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    rows = [heading, ["---"] * len(heading), *lines]
    return ["| " + " | ".join(cells) + " |" for cells in rows]


def _plots(folder: Path, suite: str) -> str:
    paths = [Path(os.path.relpath(path, _ROOT)) for path in sorted(folder.glob(f"{suite}-*.png"))]
    return "".join(f"\n\n![{path.stem}]({path.as_posix()})" for path in paths)


def rewritten(readme: str, tables: str) -> str:
    """The README with these tables between its marks."""
    pattern = re.compile(f"{re.escape(_BEGIN)}.*{re.escape(_END)}", re.DOTALL)
    if len(pattern.findall(readme)) != 1:
        raise ValueError(f"README.md: expected {_BEGIN!r} and {_END!r} in it, once each")
    return pattern.sub(lambda _: f"{_BEGIN}\n\n{tables}\n\n{_END}", readme)


_PARTS: Mapping[str, Callable[[Record, Path], str]] = {
    "headline": partial(speeds, name="headline"),
    "models": partial(speeds, name="models"),
    "decode": partial(speeds, name="decode"),
    "whole-model": whole_model,
    "origin": series,
    "memory": memory,
}

# What only the suite of a name has, where it is not "jobs".
_KINDS = {"memory": "rows", "whole-model": "stages"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Publish one folder, if there is anything in it."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=RESULTS,
        help="of what run.py wrote; by default the H200's",
    )
    folder = parser.parse_args(arguments).folder.resolve()
    try:
        found = load(folder)
    except ValueError as problem:
        parser.error(str(problem))
    for name, suite in found.items():
        if name != "whole-model":
            plots.draw(name, suite, folder)
    _README.write_text(rewritten(_README.read_text(), text(found, folder)))


if __name__ == "__main__":
    main()
