"""What the command line asks for, refused in one sentence before anything is measured."""

import argparse
import importlib.util
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path

import base
import peers
import problems
from jobs import Job
from peers import Peer

from pallas_flash.terminal import Parser

MEMORY = "memory"

_SWEEP_PEERS = (peers.OURS, peers.CUDNN)


def rounds(text: str) -> int:
    """More would never end."""
    number = int(text)
    if not 1 <= number <= 10_000:
        raise ValueError
    return number


def seed(text: str) -> int:
    """What both NumPy and JAX take."""
    number = int(text)
    if not 0 <= number < 2**32:
        raise ValueError
    return number


# What argparse calls them in its message.
rounds.__name__ = "number from 1 to 10000"
seed.__name__ = "number from 0 to 2^32 - 1"


def folder(text: str) -> Path:
    """Made, and seen to take files."""
    # As a variable that is not set gives it; to `Path` it is the folder where one stands.
    if not text:
        raise argparse.ArgumentTypeError("expected a folder, got ''")
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as problem:
        raise argparse.ArgumentTypeError(
            f"cannot write into {text!r}: {problem.strerror}"
        ) from None
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("plots need matplotlib: pip install '.[bench]'")
    return path


def _commit(text: str) -> str:
    try:
        return base.resolve(text)
    except ValueError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None


def parse(arguments: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    """The command line; exits with 2 and a sentence where it asks for what there is not."""
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    suites = (*problems.SUITES, MEMORY)
    add(
        "--suite",
        nargs="+",
        choices=suites,
        default=["headline"],
        metavar="SUITE",
        help=f"of {', '.join(suites)}",
    )
    add("--case", default="", metavar="TEXT", help="only problems with this in their name")
    add(
        "--peers",
        nargs="+",
        choices=peers.PEERS,
        metavar="PEER",
        help=f"of {', '.join(peers.PEERS)}; by default what fits the suite",
    )
    add("--base", type=_commit, metavar="REV", help="this project at another revision, beside it")
    add("--sweep", choices=peers.SWEEPS, help="try configs of this kernel of ours, fastest first")
    add("--rounds", type=rounds, help="how often each is timed: 10, with --quick 3")
    add("--quick", action="store_true", help="two problems a suite, few peers, short rounds")
    add("--wall", action="store_true", help="wall time, even where device time is to be had")
    add("--seed", type=seed, default=secrets.randbits(31), help="of all arrays; random by default")
    add("--out", type=folder, metavar="FOLDER", help="write a JSON file for each suite, and plots")
    args = parser.parse_args(arguments)
    if args.sweep and MEMORY in args.suite:
        parser.error("argument --sweep: it compares times, and suite memory has none")
    args.rounds = args.rounds or (3 if args.quick else 10)
    if not names(args):
        parser.error(
            f"argument --case: no problem of {' '.join(args.suite)} has {args.case!r} in its name"
        )
    return args


def names(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Suites and names of the problems that are asked for; one for suite memory."""
    chosen = []
    for suite in dict.fromkeys(args.suite):
        cases = [MEMORY] if suite == MEMORY else problems.SUITES[suite].cases
        found = [(suite, name) for name in cases if args.case in name]
        chosen += found[: 2 if args.quick else None]
    return chosen


def jobs(args: argparse.Namespace, beside: Sequence[Peer]) -> list[Job]:
    """The tables of times that are asked for, in order, with peers that no list has."""
    result = []
    for suite_name, name in names(args):
        if suite_name == MEMORY:
            continue
        suite = problems.SUITES[suite_name]
        case, directions = suite.cases[name], suite.directions
        usual = peers.QUICK if args.quick else peers.DEFAULT
        rivals = _rivals(args, suite.peers or (args.sweep and _SWEEP_PEERS) or usual, beside)
        if args.sweep:
            sweep = peers.SWEEPS[args.sweep]
            rivals += sweep.peers(case)
            directions = (sweep.with_gradients,)
        baselines = (*suite.baselines, *(peer.name for peer in beside))
        result += [Job(suite_name, name, case, both, rivals, baselines) for both in directions]
    return result


def memory_peers(args: argparse.Namespace, beside: Sequence[Peer]) -> list[Peer]:
    """Who is asked how much memory it takes; nobody where that suite is not asked for."""
    if (MEMORY, MEMORY) not in names(args):
        return []
    return _rivals(args, peers.QUICK, beside)


def _rivals(args: argparse.Namespace, default: Sequence[str], beside: Sequence[Peer]) -> list[Peer]:
    # Each once, however often it is named.
    return [*(peers.PEERS[name] for name in dict.fromkeys(args.peers or default)), *beside]
