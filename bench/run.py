"""Time attention, forward and with its gradients, against the peers that are installed.

python bench/run.py --quick
python bench/run.py --suite headline origin memory --out results
python bench/run.py --suite models --base HEAD~3
python bench/run.py --case h64 --sweep forward

Each peer is compared with a float64 reference before it is timed, and shows its errors instead of
figures where they are too large. The last line of the output is a JSON object with everything.
"""

import argparse
import dataclasses
import importlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# What is timed is the package beside this file, whichever else is installed.
sys.path.insert(0, str(Path(__file__).parent.parent))

import base
import command_line
import footprint
import jax
import machine
import problems
import report
from clock import Ceilings, Clock, device_clock, measure_ceilings, wall_clock
from jobs import Bench, Job, prepare, reason_of
from peers import Peer
from rich.console import Console
from rich.progress import Progress

from pallas_flash import terminal

# Long enough for the card to come down to the clock that its power allows: in 20 ms rounds some
# peers were seen a sixth faster than they are for longer.
_ROUND_MS, _QUICK_ROUND_MS = 250.0, 50.0

# Where a call would take minutes, the length says nothing that a shorter one does not.
_LONGEST, _QUICK_LONGEST = 2**26, 2**14


def clock_of(args: argparse.Namespace) -> Clock:
    """Device time if it is to be had and no other was asked for."""
    round_ms = _QUICK_ROUND_MS if args.quick else _ROUND_MS
    if args.wall:
        return wall_clock(round_ms, "as asked")
    if jax.default_backend() != "gpu":
        return wall_clock(round_ms, "no GPU")
    return device_clock(round_ms)


def run_jobs(
    jobs: Sequence[Job],
    bench: Bench,
    ceilings: Ceilings,
    console: Console,
    fastest_first: bool,
) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Each job and its record, shown as soon as it is there."""
    steps = sum(len(job.rivals) + bench.rounds for job in jobs)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("compiling", total=steps)
        ready = prepare(jobs, bench.seed, lambda: progress.advance(task))
        for job, rivals in zip(jobs, ready, strict=True):
            progress.update(task, description=job.name)
            rows = bench.run(job, rivals, lambda: progress.advance(task))
            if fastest_first:
                rows.sort(key=lambda row: row.ms)
            record = report.record(
                job.name, job.case, job.with_gradients, rows, job.baselines, ceilings
            )
            title = f"{job.name}, {report.describe(job.case, job.with_gradients)}"
            metric = problems.SUITES[job.suite].metric
            console.print(report.table(title, record["rows"], job.baselines, metric))
            yield job, record


def run_footprint(
    args: argparse.Namespace, rivals: Sequence[Peer], console: Console
) -> dict[str, Any]:
    """Suite memory, shown."""
    limit = footprint.card_bytes()
    longest = _QUICK_LONGEST if args.quick else _LONGEST
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("memory", total=2 * len(rivals))
        found = footprint.measure(rivals, longest, limit, args.seed, lambda: progress.advance(task))
    for shown in footprint.tables(found):
        console.print(shown)
    return footprint.record(found, limit)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the command line asks for."""
    args = command_line.parse(arguments, __doc__)
    try:
        jax.devices()
    # Each maker's plugin raises errors of its own.
    except Exception as problem:
        sys.exit(f"run.py: {reason_of('JAX finds no device', problem)}")
    with terminal.printing("run.py"), tempfile.TemporaryDirectory() as folder:
        base_peers = [] if args.base is None else [base.load(args.base, Path(folder))]
        run(args, base_peers)


def run(args: argparse.Namespace, base_peers: Sequence[Peer]) -> None:
    """Everything but the loading of another revision."""
    todo = command_line.jobs(args, base_peers)
    clock = clock_of(args)
    dtypes = sorted({job.case.dtype for job in todo})
    ceilings = measure_ceilings(clock, dtypes, args.rounds)
    header = {
        **machine.describe(),
        "clock": clock.name,
        "rounds": args.rounds,
        "seed": args.seed,
        **dataclasses.asdict(ceilings),
    }
    if args.base is not None:
        header["base"] = args.base
    # XLA's messages have brackets that rich would take for its own.
    console = Console(markup=False, highlight=False)
    # A narrower terminal breaks a long line, where rich would leave out digits.
    console.width = max(console.width, 120) if console.is_terminal else 170
    for name, value in header.items():
        console.print(f"{name}: {value}")
    suites: dict[str, Any] = {}

    def keep() -> None:
        """After each table, for the sake of a run that is stopped."""
        if args.out is not None:
            for name, found in suites.items():
                path = args.out / f"{name}.json"
                text = json.dumps({"header": header, **found}, allow_nan=False)
                try:
                    path.write_text(text)
                except OSError as problem:
                    sys.exit(f"run.py: cannot write {path}: {problem.strerror}")

    bench = Bench(clock, args.rounds, args.seed)
    for job, record in run_jobs(todo, bench, ceilings, console, bool(args.sweep)):
        suites.setdefault(job.suite, {"jobs": []})["jobs"].append(record)
        keep()
    for name in suites:
        if problems.SUITES[name].is_series:
            for shown in report.series_tables(name, suites[name]["jobs"]):
                console.print(shown)
    if rivals := command_line.memory_peers(args, base_peers):
        suites[command_line.MEMORY] = run_footprint(args, rivals, console)
        keep()
    if args.out is not None:
        plots = importlib.import_module("plots")
        for name, found in suites.items():
            plots.draw(name, found, args.out)
    print(json.dumps({"header": header, "suites": suites}, allow_nan=False))
    if not any(report.has_figures(found) for found in suites.values()):
        sys.exit("run.py: no peer got a figure: the tables say why")


if __name__ == "__main__":
    main()
