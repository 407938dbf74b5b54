"""How much memory attention takes, and how long a sequence fits."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
import problems
import work
from jobs import Job, judge_one, prepare, reason_of
from peers import Peer
from programs import Compiled
from report import Row, blank, megabytes
from rich.console import Group

from pallas_flash.testing import Case

_SHORTEST = 2**8

# What a call may take that only shows that it runs: some seconds on a GPU, one on a CPU.
_GPU_FLOPS, _CPU_FLOPS = 2e15, 1e10

PROBLEM = "B1 N8 K2 H64 causal bfloat16"


def problem(length: int) -> Case:
    """`PROBLEM` at a length."""
    return Case(B=1, T=length, S=length, N=8, K=2, H=64, dtype="bfloat16", is_causal=True)


@dataclass(frozen=True)
class Footprint:
    """What came of one peer.

    Attributes:
      temporary_bytes: by length, what it allocates beyond arguments and results, by XLA's account.
      longest: the greatest length, of powers of two, at which arguments, results and temporaries
        fit the card together, by that account; 0 for none.
      ran: the greatest length at which it was run, of those that do not take too long.
      reason: why there is nothing of this, or the error that it ends with; empty where memory is
        what ends it, or nothing does.
    """

    peer: str
    with_gradients: bool
    temporary_bytes: Mapping[int, int] = field(default_factory=dict)
    longest: int = 0
    ran: int = 0
    reason: str = ""


def card_bytes() -> int:
    """What JAX may take of the device's memory."""
    device = jax.devices()[0]
    stats = device.memory_stats()
    if stats is not None:
        return stats["bytes_limit"]
    if device.platform != "cpu":
        raise RuntimeError(f"JAX does not say how much memory {device.device_kind} has")
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def measure(
    peers: Sequence[Peer], longest: int, limit: int, seed: int, step: Callable[[], None]
) -> list[Footprint]:
    """Of each peer, forward and with gradients, up to a length. `step` follows each of the two."""
    jobs = [
        Job("memory", "memory", problem(_SHORTEST), with_gradients, [peer])
        for with_gradients in (False, True)
        for peer in peers
    ]
    # No figure of what is wrong: at the shortest length it is judged.
    judged = [
        judge_one(job, ready, seed)
        for job, (ready,) in zip(jobs, prepare(jobs, seed, lambda: None), strict=True)
    ]
    with ThreadPoolExecutor() as pool:
        grown = pool.map(
            lambda job, ready: ({}, "") if ready.timed is None else _grow(job, longest, limit),
            jobs,
            judged,
        )
        results = []
        for job, ready, (programs, stopped) in zip(jobs, judged, grown, strict=True):
            row = dataclasses.replace(ready.row, reason=ready.row.reason or stopped)
            results.append(_footprint(job, row, programs, seed))
            step()
    return results


def _grow(job: Job, longest: int, limit: int) -> tuple[dict[int, Compiled], str]:
    """Programs by length that fit: four times the length before, and at the end twice.

    And the last error on the way, in words; empty without one.
    """
    (peer,) = job.rivals
    programs: dict[int, Compiled] = {}
    stopped = ""
    length = _SHORTEST // 4
    for factor in (4, 2):
        while _SHORTEST <= (longer := factor * length) <= longest:
            try:
                compiled = _fitting(peer, longer, job.with_gradients, limit)
            # XLA finds out that a problem is too large in more than one way, and others in theirs.
            # The row shows it, for it may be something else.
            except Exception as error:
                stopped = reason_of(f"stopped at S {longer}", error)
                break
            if compiled is None:
                break
            programs[longer] = compiled
            length = longer
    return programs, stopped


def _fitting(peer: Peer, length: int, with_gradients: bool, limit: int) -> Compiled | None:
    """The program for a length, if it and its arrays fit."""
    case = problem(length)
    arguments = problems.argument_bytes(case, with_gradients)
    # Before XLA sets out to find room for them.
    if arguments > limit:
        return None
    compiled = peer.compile(case, with_gradients, False)
    if compiled.temporary_bytes is None or compiled.result_bytes is None:
        return None
    taken = arguments + compiled.temporary_bytes + compiled.result_bytes
    return compiled if taken <= limit else None


def _footprint(job: Job, row: Row, programs: Mapping[int, Compiled], seed: int) -> Footprint:
    (peer,) = job.rivals
    most_flops = _GPU_FLOPS if jax.default_backend() == "gpu" else _CPU_FLOPS
    ran, reason = 0, row.reason
    for length in sorted(programs, reverse=True):
        case = problem(length)
        if work.flops(case, job.with_gradients) > most_flops:
            continue
        try:
            jax.block_until_ready(programs[length].call(*problems.draw(case, seed)[0]))
        # The account leaves out what the program's code takes, and gaps between arrays.
        except RuntimeError as error:
            reason = reason_of(f"not run at S {length}", error)
            continue
        ran = length
        break
    if not programs and not reason:
        unknown, too_large = "XLA has no account of its memory", f"S {_SHORTEST} does not fit"
        reason = f"refused: {unknown if row.temporary_bytes is None else too_large}"
    temporary = {length: compiled.temporary_bytes or 0 for length, compiled in programs.items()}
    return Footprint(
        peer.name, job.with_gradients, temporary, max(programs, default=0), ran, reason
    )


def tables(footprints: Sequence[Footprint]) -> list[Group]:
    """Temporaries at each length, and how far each goes."""
    by_length = blank()
    by_length.add_column("S", justify="right")
    reasons = [
        f"{each.peer}, {_direction(each)}: {each.reason}" for each in footprints if each.reason
    ]
    reach = blank()
    reach.add_column("peer")
    reach.add_column("direction")
    reach.add_column("longest", justify="right")
    reach.add_column("ran", justify="right")
    for each in footprints:
        by_length.add_column(f"{each.peer}\n{_direction(each)}", justify="right")
        reach.add_row(each.peer, _direction(each), str(each.longest), str(each.ran))
    for length in sorted({length for each in footprints for length in each.temporary_bytes}):
        cells = [
            megabytes(each.temporary_bytes[length])
            if length in each.temporary_bytes
            # Too long for it, or passed over.
            else "-" * (length > each.longest)
            for each in footprints
        ]
        by_length.add_row(str(length), *cells)
    return [
        Group(f"memory: temporaries in MB, {PROBLEM}", by_length, ""),
        Group("memory: how long a sequence fits", reach, *reasons, ""),
    ]


def _direction(footprint: Footprint) -> str:
    return "both" if footprint.with_gradients else "forward"


def record(footprints: Sequence[Footprint], limit: int) -> dict[str, Any]:
    """The same for JSON."""
    rows = [vars(each) for each in footprints]
    return {"problem": PROBLEM, "card_bytes": limit, "rows": rows}
