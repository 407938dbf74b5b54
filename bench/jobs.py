"""Tables to be made: who computes what, made ready, judged, and timed."""

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import judge
import problems
from clock import Clock
from peers import Peer
from programs import Compiled
from report import Row

from pallas_flash.testing import Case


@dataclass(frozen=True)
class Job:
    """One table: a problem, forward alone or with its gradients, and who computes it."""

    suite: str
    name: str
    case: Case
    with_gradients: bool
    rivals: Sequence[Peer]
    baselines: Sequence[str] = ()


@dataclass(frozen=True)
class Ready:
    """A peer's programs for a job, compiled; or only a row that says why there are none."""

    row: Row
    timed: Compiled | None = None
    judged: Compiled | None = None


def prepare(jobs: Sequence[Job], seed: int, step: Callable[[], None]) -> list[list[Ready]]:
    """What each job's rivals will run. `step` follows each.

    Most of a run is compilation, which takes one core: all of it is done here, side by side, and
    before anything is timed.
    """
    with ThreadPoolExecutor() as pool:
        # First, and each once: XLA times kernels as it compiles, and nothing else should run then.
        judged = {problems.judged(job.case) for job in jobs}
        list(pool.map(lambda case: judge.reference(case, seed), judged))

        asked = [(job, peer) for job in jobs for peer in job.rivals]

        def compile_one(pair: tuple[Job, Peer]) -> Ready | None:
            try:
                return _compile(*pair)
            except jax.errors.JaxRuntimeError:
                return None
            finally:
                step()

        ready = list(pool.map(compile_one, asked))
    # XLA tries kernels as it compiles, for which several at a time may have too little memory.
    again = iter(
        _compile_alone(*pair) if found is None else found
        for pair, found in zip(asked, ready, strict=True)
    )
    return [[next(again) for _ in job.rivals] for job in jobs]


def _compile_alone(job: Job, peer: Peer) -> Ready:
    try:
        return _compile(job, peer)
    except jax.errors.JaxRuntimeError as problem:
        return Ready(Row(peer.name, reason=reason_of("refused", problem)))


def _compile(job: Job, peer: Peer) -> Ready:
    """Raises what XLA does where it fails; a peer that is not there or refuses is a row."""
    if missing := peer.missing(problems.asked(job.case), job.with_gradients):
        return Ready(Row(peer.name, reason=f"refused: it has no {missing}"))
    try:
        # First what is shown, so that a refusal is of that.
        timed = peer.compile(job.case, job.with_gradients, True)
        judged = peer.compile(problems.judged(job.case), job.with_gradients, False)
    except ImportError as problem:
        return Ready(Row(peer.name, reason=reason_of("absent", problem)))
    except jax.errors.JaxRuntimeError:
        raise
    # Others' code refuses with whatever it likes. The row shows it.
    except Exception as problem:
        return Ready(Row(peer.name, reason=reason_of("refused", problem)))
    memory = {"temporary_bytes": timed.temporary_bytes, "result_bytes": timed.result_bytes}
    return Ready(Row(peer.name, **memory), timed, judged)


def judge_one(job: Job, ready: Ready, seed: int) -> Ready:
    """With its errors; and where they are too large, or it does not run, without programs."""
    if ready.judged is None:
        return ready
    case = problems.judged(job.case)
    try:
        errors, wrong = judge.judge(ready.judged.call(*judge.arguments(case, seed)), case, seed)
    # As above: this is where others' code runs for the first time.
    except Exception as problem:
        return Ready(dataclasses.replace(ready.row, reason=reason_of("refused", problem)))
    row = dataclasses.replace(ready.row, errors=errors)
    if wrong:
        return Ready(dataclasses.replace(row, reason=f"wrong: {'; '.join(wrong)}"))
    return Ready(row, ready.timed)


@dataclass(frozen=True)
class Bench:
    """How jobs are done: the clock, how many rounds, the seed of all arrays."""

    clock: Clock
    rounds: int
    seed: int

    def run(self, job: Job, rivals: Sequence[Ready], step: Callable[[], None]) -> list[Row]:
        """A row for each rival: judged, and those that are right timed in turns.

        `step` follows each round.
        """
        rows: dict[str, Row] = {}
        calls = {}
        judged = [judge_one(job, ready, self.seed) for ready in rivals]
        sets = problems.draw(job.case, self.seed)
        for ready in judged:
            rows[ready.row.peer] = ready.row
            if ready.timed is None:
                continue
            try:
                count = self.clock.calls(ready.timed.call, sets)
                calls[ready.row.peer] = (ready.timed.call, count)
            # What a problem of this size needs may be more than the card has.
            except RuntimeError as problem:
                reason = reason_of("refused", problem)
                rows[ready.row.peer] = dataclasses.replace(ready.row, reason=reason)
        try:
            times = self.clock.rounds(calls, sets, self.rounds, step)
        # A profiler that fails in a late round must not cost what other jobs gave.
        except RuntimeError as problem:
            times = {}
            for name in calls:
                rows[name] = dataclasses.replace(rows[name], reason=reason_of("not timed", problem))
        return [dataclasses.replace(row, times=times.get(name, ())) for name, row in rows.items()]


def reason_of(kind: str, problem: Exception) -> str:
    """On one line and not all of it: XLA's messages can be pages."""
    text = " ".join(str(problem).split()) or type(problem).__name__
    return f"{kind}: {text[:400]}{'...' if len(text) > 400 else ''}"
