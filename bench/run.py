"""Time attention, forward and with its gradients, against the peers that are installed.

python bench/run.py --quick
python bench/run.py --suite headline masks --out results.json
python bench/run.py --case h64 --sweep forward

Each peer is compared with a float64 reference before it is timed, and shows its errors instead of
figures where they are too large. The last line of the output is a JSON object with everything.
"""

import argparse
import dataclasses
import json
import math
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import peers
import problems
from clock import Clock, Program, device_clock, matmul_tflops, wall_clock
from judge import judge, program, reference
from peers import CUDNN, OURS, Peer
from problems import Arguments
from report import Row, describe_machine, table
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pallas_flash.testing import Case

_SWEEP_PEERS = [OURS, CUDNN]
_QUICK_PEERS = [OURS, CUDNN, "jax-xla"]
_DEFAULT_PEERS = [name for name in peers.PEERS if name != "ours-xla"]


@dataclass(frozen=True)
class Job:
    """One table: a problem, forward alone or with its gradients, and who computes it."""

    name: str
    case: Case
    with_gradients: bool
    rivals: Sequence[Peer]

    @property
    def flops(self) -> float:
        return problems.flops(self.case, self.with_gradients)

    @property
    def title(self) -> str:
        direction = "forward and backward" if self.with_gradients else "forward"
        # Sixteen lengths are no name.
        sizes = dataclasses.replace(self.case, key_value_seq_lengths=None).id
        share = problems.share_of_work(self.case)
        return f"{self.name}, {direction}: {sizes}, {self.flops:.3g} FLOP, {share:.2%} of all pairs"


@dataclass(frozen=True)
class Bench:
    """How jobs are done: the clock, how many rounds, the seed of all arrays."""

    clock: Clock
    rounds: int
    seed: int

    def run(self, job: Job, step: Callable[[], None]) -> list[Row]:
        """A row for each rival, timed in turns. `step` follows each preparation and each round."""
        arguments = problems.draw(job.case, self.seed)
        rows: dict[str, Row] = {}
        functions: dict[str, Program] = {}
        # The reference is made here, for threads not to make one each.
        reference(job.case, self.seed)
        # Most of a run is compilation, which takes one core.
        with ThreadPoolExecutor() as pool:
            prepared = pool.map(lambda peer: self._prepare(peer, job, arguments), job.rivals)
            for peer, (row, function) in zip(job.rivals, prepared, strict=True):
                rows[peer.name] = row
                if function is not None:
                    functions[peer.name] = function
                step()
        try:
            ready = {
                name: (function, self.clock.calls(function, arguments))
                for name, function in functions.items()
            }
            times = self.clock.rounds(ready, arguments, self.rounds, step)
        # A profiler that fails in a late round must not cost what other jobs gave.
        except RuntimeError as problem:
            times = {}
            for name in functions:
                rows[name] = dataclasses.replace(rows[name], reason=_reason("not timed", problem))
        return [dataclasses.replace(row, times=times.get(name, ())) for name, row in rows.items()]

    def _prepare(self, peer: Peer, job: Job, arguments: Arguments) -> tuple[Row, Program | None]:
        """Judge and compile: the row so far, and where all is well what to time."""
        asked = problems.options(job.case).keys() | arguments[1].keys()
        if unknown := sorted(asked - peer.options):
            return Row(peer.name, reason=f"refused: it has no {', '.join(unknown)}"), None
        errors: Mapping[str, float] = {}
        try:
            attention = peer.load()
            errors, wrong = judge(attention, job.case, job.with_gradients, self.seed)
            if wrong:
                return Row(peer.name, errors, f"wrong: {'; '.join(wrong)}"), None
            function = program(attention, job.case, job.with_gradients)
            return Row(peer.name, errors), function.lower(*arguments).compile()
        except ImportError as problem:
            reason = _reason("absent", problem)
        # What JAX and XLA raise, at compilation and at run time, is a RuntimeError, and so is a
        # NotImplementedError.
        except (ValueError, RuntimeError) as problem:
            reason = _reason("refused", problem)
        return Row(peer.name, errors, reason), None


def _reason(kind: str, problem: Exception) -> str:
    """On one line and not all of it: XLA's messages can be pages."""
    text = " ".join(str(problem).split())
    return f"{kind}: {text[:400]}{'...' if len(text) > 400 else ''}"


def jobs(args: argparse.Namespace) -> list[Job]:
    """What the command line asks for, in order."""
    cases = {name: case for suite in args.suite for name, case in problems.SUITES[suite].items()}
    chosen = [name for name in cases if args.case in name][: 2 if args.quick else None]
    default = _SWEEP_PEERS if args.sweep else _QUICK_PEERS if args.quick else _DEFAULT_PEERS
    rivals = [peers.PEERS[name] for name in args.peers or default]
    if args.sweep is None:
        return [
            Job(name, cases[name], with_gradients, rivals)
            for name in chosen
            for with_gradients in (False, True)
        ]
    # A forward kernel is best seen without a backward, and the others have no part without one.
    with_gradients = args.sweep != "forward"
    return [
        Job(name, cases[name], with_gradients, rivals + peers.sweep(args.sweep, cases[name]))
        for name in chosen
    ]


def report(job: Job, rows: Sequence[Row], peak: float) -> tuple[Table, dict[str, Any]]:
    """A job's table, and the same for JSON."""
    cudnn_ms = next((row.ms for row in rows if row.peer == CUDNN), math.inf)
    figures = [row.figures(job.flops, cudnn_ms, peak) for row in rows]
    record = {
        "name": job.name,
        "with_gradients": job.with_gradients,
        "flops": job.flops,
        "share_of_pairs": problems.share_of_work(job.case),
        "case": dataclasses.asdict(job.case),
        "rows": [
            dataclasses.asdict(row) | {"errors": _finite(row.errors)} | known
            for row, known in zip(rows, figures, strict=True)
        ],
    }
    return table(job.title, rows, figures), record


def _finite(errors: Mapping[str, float]) -> dict[str, float | str]:
    """JSON has no infinity, which is the error of a result that is not finite."""
    return {name: error if math.isfinite(error) else str(error) for name, error in errors.items()}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--suite", nargs="+", choices=problems.SUITES, default=["headline"])
    add("--case", default="", metavar="TEXT", help="only problems with this in their name")
    add(
        "--peers",
        nargs="+",
        choices=peers.PEERS,
        metavar="PEER",
        help=f"of {', '.join(peers.PEERS)}; all but ours-xla by default",
    )
    add("--sweep", choices=peers.GRIDS, help="try configs of this kernel of ours, fastest first")
    add("--rounds", type=int, help="how often each is timed: 10, with --quick 3")
    add("--quick", action="store_true", help="two problems, three peers, short rounds: a minute")
    add("--wall", action="store_true", help="wall time, even where device time is to be had")
    add("--seed", type=int, default=secrets.randbits(31), help="of all arrays; random by default")
    add(
        "--out",
        type=Path,
        metavar="FILE",
        help="write the JSON object here too, anew with each table",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the command line asks for."""
    args = parse(arguments)
    todo = jobs(args)
    if not todo:
        sys.exit(f"--case: no problem of {' '.join(args.suite)} has {args.case!r} in its name")
    rounds = args.rounds or (3 if args.quick else 10)
    # Long enough for the card to come down to the clock that its power allows: in 20 ms rounds some
    # peers were seen a sixth faster than they are for longer.
    round_ms = 50.0 if args.quick else 250.0
    if args.wall:
        clock = wall_clock(round_ms, "as asked")
    elif jax.default_backend() != "gpu":
        clock = wall_clock(round_ms, "no GPU")
    else:
        clock = device_clock(round_ms)
    bench = Bench(clock, rounds, args.seed)
    peak = matmul_tflops(clock, rounds)
    measured = {"clock": clock.name, "matmul_tflops": peak, "rounds": rounds, "seed": args.seed}
    everything = {"header": describe_machine() | measured, "jobs": []}
    # XLA's messages have brackets that rich would take for its own.
    console = Console(width=None if sys.stdout.isatty() else 160, markup=False, highlight=False)
    for name, value in everything["header"].items():
        console.print(f"{name}: {value}")
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=sum(len(job.rivals) + rounds for job in todo))
        for job in todo:
            progress.update(task, description=job.name)
            rows = bench.run(job, lambda: progress.advance(task))
            if args.sweep:
                rows.sort(key=lambda row: row.ms)
            shown, record = report(job, rows, peak)
            console.print(shown)
            everything["jobs"].append(record)
            # After each table, for the sake of a run that is stopped.
            if args.out is not None:
                args.out.write_text(json.dumps(everything, allow_nan=False))
    print(json.dumps(everything, allow_nan=False))


if __name__ == "__main__":
    main()
