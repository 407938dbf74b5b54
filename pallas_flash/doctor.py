"""What this machine has, and which implementations are right on it: the command `doctor`.

Nothing here raises: what a broken installation throws is what the doctor is asked to tell.
"""

import dataclasses
import functools
import importlib.metadata
import itertools
import json
import math
import platform
import subprocess
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from pallas_flash import backends
from pallas_flash.api import flash_attention_with_lse, flash_decode_with_lse
from pallas_flash.spec import AttentionOutput, DecodeOperands
from pallas_flash.testing import (
    Case,
    Inputs,
    Truth,
    error,
    evaluate,
    jitted,
    jitted_forward,
    make_inputs,
    split,
)

# Another verdict is to mean another machine, not other numbers.
_SEED = 0

_PLAIN = Case(T=16, S=16)

# With a spread a row hangs on a few keys, and late rows are not small beside the first.
_GROUPED = Case(B=1, T=150, S=150, N=4, K=2, H=64, is_causal=True, spread=2.0, dtype="bfloat16")

# Two new tokens a row, the last row's its first, and keys enough for the kernels to split them.
_DECODED = dataclasses.replace(
    _GROUPED, B=3, T=2, S=320, query_offset=(318, 148, 0), key_value_seq_lengths=(320, 150, 2)
)
# The checks that ask `flash_decode` for it, and how many positions a page holds, if in pages.
DECODING: Mapping[str, int | None] = {"decoding": None, "decoding in pages": 16}

# Small, for in Pallas's interpreter the compilation of each takes seconds. Every row sees a key:
# an lse of -inf would be an error to who has set `jax_debug_infs`.
CHECKS: Mapping[str, Case] = {
    "causal grouped-query float32": dataclasses.replace(_GROUPED, dtype="float32"),
    "causal grouped-query bfloat16": _GROUPED,
    "causal grouped-query float16, T < S": dataclasses.replace(
        _GROUPED, dtype="float16", T=33, query_offset=(117,)
    ),
    "window and soft cap": Case(
        T=130, S=130, local_window_size=(40, 8), logits_soft_cap=5.0, spread=3.0, dtype="bfloat16"
    ),
    "odd lengths": Case(T=57, S=101, key_value_seq_lengths=(101, 33)),
    "bias and mask": Case(T=40, S=72, bias="NTS", mask="BTS"),
    **dict.fromkeys(DECODING, _DECODED),
}


@dataclass(frozen=True)
class Outcome:
    """What came of one check of one implementation.

    Attributes:
      verdict: "right", or "WRONG", "cannot" or "FAILED" and, after a colon, why.
      errors: `testing.error` of each output and gradient, by name; empty where there is none.
      budgets: how large each of them may be.
      forward_ms: wall time of a forward that gives the lse too, compiled before, in ms.
      both_ms: likewise, of the forward and every gradient; None where there is no gradient.
    """

    implementation: str
    check: str
    verdict: str
    errors: Mapping[str, float] = field(default_factory=dict)
    budgets: Mapping[str, float] = field(default_factory=dict)
    forward_ms: float | None = None
    both_ms: float | None = None

    @property
    def is_right(self) -> bool:
        return self.verdict == "right"

    @property
    def is_bad(self) -> bool:
        """It ran and is not right. Who refuses a call does no wrong."""
        return self.verdict.startswith(("WRONG", "FAILED"))

    def share(self, name: str) -> float:
        """A result's error as a part of its budget: right up to 1."""
        return self.errors[name] / self.budgets[name]


@dataclass(frozen=True)
class Report:
    """All that the doctor found.

    Attributes:
      environment: see `environment`.
      problem: why nothing can be checked; empty where something can.
      implementations: why each cannot run a plain call, by name; empty where it can.
      checks: in the order in which they were made.
    """

    environment: Mapping[str, str]
    problem: str = ""
    implementations: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    checks: tuple[Outcome, ...] = ()

    @property
    def ok(self) -> bool:
        """Something could run, and all that could is right."""
        return any(x.is_right for x in self.checks) and not any(x.is_bad for x in self.checks)

    @property
    def summary(self) -> str:
        """The report in a sentence."""
        if self.problem:
            return f"Nothing can be checked: {self.problem}"
        if self.ok:
            return "All that can run here is right."
        bad = sum(outcome.is_bad for outcome in self.checks)
        return f"{bad} of {len(self.checks)} checks went wrong." if bad else "Nothing can run here."

    def to_json(self) -> str:
        """The report as one JSON object; a number that JSON has no form for is a string."""
        found = dataclasses.asdict(self) | {"ok": self.ok, "summary": self.summary}
        return json.dumps(_finite(found), allow_nan=False)


def environment() -> dict[str, str]:
    """Versions, platform, driver and devices, by lower-case names, for any terminal."""
    found = {
        "pallas_flash": _version("pallas_flash"),
        "python": platform.python_version(),
        **{package: _version(package) for package in ("jax", "jaxlib", "numpy", "flax")},
        "platform": platform.platform(),
        "driver": _driver(),
        # What JAX is told to use, by JAX_PLATFORMS or otherwise.
        # pyrefly: ignore[missing-attribute]  # JAX makes its options attributes at run time.
        "jax platforms": jax.config.jax_platforms or "any",
        **_devices(),
    }
    return {name: _ascii(value) for name, value in found.items()}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package) or "unknown"
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
    # Where a package's metadata are broken it may be anything.
    except Exception as problem:
        return _told(problem)


def _driver() -> str:
    command = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        # A driver that is out of order may never answer.
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    # It may be absent, refuse, or say what is no text.
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return "unknown"
    return done.stdout.partition("\n")[0].strip() or "unknown"


def _devices() -> dict[str, str]:
    """The kinds of JAX's devices, each with how many there are of it, and their capabilities."""
    try:
        devices = jax.devices()
    # Each maker's plugin raises errors of its own.
    except Exception as problem:
        return {"device": _told(problem), "compute capability": "unknown"}
    kinds = Counter(device.device_kind for device in devices)
    capabilities = {str(getattr(device, "compute_capability", "none")) for device in devices}
    return {
        "device": ", ".join(kind if n == 1 else f"{n} x {kind}" for kind, n in kinds.items()),
        "compute capability": ", ".join(sorted(capabilities)),
    }


def _ascii(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode()


def _told(problem: Exception) -> str:
    """In one line, for any terminal, and not all of it: XLA's messages can be pages."""
    message = str(problem)
    # An assertion may say nothing, and then where it stands says the most.
    if not message and (calls := traceback.extract_tb(problem.__traceback__)):
        message = f"in {calls[-1].name}, line {calls[-1].lineno} of {calls[-1].filename}"
    text = _ascii(" ".join(f"{type(problem).__name__}: {message}".split()).removesuffix(":"))
    return text if len(text) <= 300 else f"{text[:300]}..."


def _finite(x: Any) -> Any:
    """The same tree, with a string in the place of each number that JSON has no form for."""
    if isinstance(x, Mapping):
        return {name: _finite(value) for name, value in x.items()}
    if isinstance(x, tuple):
        return [_finite(value) for value in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x


def run(as_json: bool) -> int:
    """Print what the doctor finds, as it finds it or at the end as JSON; 0 where all is right."""
    report = examine((lambda line: None) if as_json else functools.partial(print, flush=True))
    if as_json:
        print(report.to_json())
    return 0 if report.ok else 1


def examine(say: Callable[[str], None]) -> Report:
    """Look at everything. `say` gets each line as soon as it is known.

    A kernel that takes the process down with it is then the one after the last line.
    """
    found = environment()
    say("\n".join(f"{name:<20}{value}" for name, value in found.items()))
    # Arrays come from the host and go there all the time here, whatever the user's own may do.
    with jax.transfer_guard("allow"):
        try:
            places = _places()
        # As in `_devices`.
        except Exception as problem:
            report = Report(found, problem=_told(problem))
        else:
            report = _examine_all(found, places, say)
    say(f"\n{report.summary}")
    return report


def _examine_all(
    found: Mapping[str, str], places: Mapping[str, jax.Device], say: Callable[[str], None]
) -> Report:
    """Each implementation and each check of those that can run."""
    implementations, outcomes = _implementations(places)
    say(f"\n{_listed(implementations, places)}\n\n{_row(_HEADINGS)}")
    for outcome in outcomes:
        say(_row(_cells(outcome)))
    for name, check in itertools.product(implementations, CHECKS):
        if not implementations[name]:
            outcomes.append(try_check(name, check, places[name]))
            say(_row(_cells(outcomes[-1])))
    return Report(found, "", implementations, tuple(outcomes))


def _places() -> dict[str, jax.Device]:
    """Where each implementation is tried: where JAX runs things by default.

    But for Pallas's interpreter, which makes programs for any machine, and for a GPU needlessly
    slow ones.
    """
    # Asked first, for where there is none its error says the most.
    jax.devices()
    (default,) = jnp.zeros(()).devices()
    try:
        cpu = jax.devices("cpu")[0]
    except RuntimeError as problem:
        needed = "the float64 reference needs a CPU among JAX's platforms"
        raise RuntimeError(f"{needed}, as in JAX_PLATFORMS=cuda,cpu") from problem
    return {name: cpu if name == "interpret" else default for name in backends.IMPLEMENTATIONS}


def _implementations(
    places: Mapping[str, jax.Device],
) -> tuple[dict[str, tuple[str, ...]], list[Outcome]]:
    """Why each cannot run a plain call, and those for which it cannot even be asked."""
    reasons, outcomes = {}, []
    for name, place in places.items():
        try:
            reasons[name] = _refusals(name, make_inputs(_PLAIN, _SEED), place)
        # A backend is loaded here, and its loading may fail in any way.
        except Exception as problem:
            reasons[name] = (_told(problem),)
            outcomes.append(Outcome(name, "can it run", f"FAILED: {_told(problem)}"))
    return reasons, outcomes


def _refusals(name: str, inputs: Inputs, place: jax.Device, check: str = "") -> tuple[str, ...]:
    with jax.default_device(place):
        spec, operands = inputs.spec_and_operands()
        call = _decoding(check, operands._asdict()) if check in DECODING else operands
        return tuple(backends.unsupported_reasons(backends.load(name), spec, call))


def try_check(implementation: str, check: str, place: jax.Device) -> Outcome:
    """Make one of `CHECKS` on a device."""
    outcome = Outcome(implementation, check, "right")
    try:
        inputs = make_inputs(CHECKS[check], _SEED)
        if reasons := _refusals(implementation, inputs, place, check):
            return dataclasses.replace(outcome, verdict=f"cannot: {'; '.join(reasons)}")
        decodes = check in DECODING
        truth = _truth(CHECKS[check], place, not decodes)
        attention = functools.partial(_decode, check) if decodes else flash_attention_with_lse
        attention = functools.partial(attention, implementation=implementation)
        # A GPU may multiply float32 as TF32, and then the budget of one call is luck.
        with jax.default_device(place), jax.default_matmul_precision("highest"):
            results = evaluate(attention, inputs, with_gradients=not decodes)
            call = (attention, tuple(inputs.options.items()), *split(inputs))
            wrong = truth.wrong(results)
            return dataclasses.replace(
                outcome,
                verdict=f"WRONG: {'; '.join(wrong)}" if wrong else "right",
                errors={name: error(results[name], x) for name, x in truth.expected.items()},
                budgets=truth.budget,
                forward_ms=_milliseconds(jitted_forward, *call[:-1]),
                both_ms=None if decodes else _milliseconds(jitted, *call),
            )
    # Compilers and drivers raise errors of their own, and one that fails must not hide the others.
    except Exception as problem:
        return dataclasses.replace(outcome, verdict=f"FAILED: {_told(problem)}")


def _decode(check: str, *, implementation: str, **arguments: Any) -> AttentionOutput:
    """What `flash_attention_with_lse` gives, by decoding."""
    *arrays, page_table, _, _ = _decoding(check, arguments)
    return flash_decode_with_lse(*arrays, page_table=page_table, implementation=implementation)


def _decoding(check: str, arguments: Mapping[str, Any]) -> DecodeOperands:
    """The same call, from attention's arguments. Of the pages, the last stands first."""
    query, lengths = arguments["query"], arguments["key_value_seq_lengths"]
    key, value, page_table = arguments["key"], arguments["value"], None
    if page_size := DECODING[check]:
        key, value = (jnp.flip(x.reshape(-1, page_size, *x.shape[2:]), 0) for x in (key, value))
        page_table = jnp.flip(jnp.arange(len(key), dtype=jnp.int32)).reshape(len(query), -1)
    return DecodeOperands(query, key, value, lengths, page_table)


@functools.cache
def _truth(case: Case, place: jax.Device, with_gradients: bool) -> Truth:
    """Of a case, with plain attention, from which the budget comes, on the device. Kept."""
    with jax.default_device(place), jax.default_matmul_precision("highest"):
        return Truth.of(make_inputs(case, _SEED), with_gradients=with_gradients)


def _milliseconds(program: Callable[..., Any], *args: Any) -> float:
    """Wall time of a second call, for the first one may compile."""
    jax.block_until_ready(program(*args))
    start = time.perf_counter()
    jax.block_until_ready(program(*args))
    return 1e3 * (time.perf_counter() - start)


def _listed(implementations: Mapping[str, Sequence[str]], places: Mapping[str, jax.Device]) -> str:
    """A line for each that can run, and one for each reason of the others."""
    lines = []
    for name, reasons in implementations.items():
        texts = [f"cannot run: {reason}" for reason in reasons]
        texts = texts or [f"can run, tried on {places[name].device_kind}"]
        lines.extend(f"{name:<20}{text}" for text in texts)
    return "\n".join(lines)


_HEADINGS = (
    *("implementation", "check", "out", "worst gradient", "of budget"),
    *("ms", "with gradients", "verdict"),
)
_WIDTHS = (14, max(map(len, CHECKS)), 7, 14, 9, 7, 14, 0)


def _row(cells: Sequence[str]) -> str:
    """Names to the left, numbers to the right."""
    aligned = [
        format(cell, f"{'>' if 2 <= column < 7 else '<'}{width}")
        for column, (cell, width) in enumerate(zip(cells, _WIDTHS, strict=True))
    ]
    return "  ".join(aligned).rstrip()


def _cells(outcome: Outcome) -> tuple[str, ...]:
    """What stands under `_HEADINGS`: the gradient that takes most of its budget, and the most."""
    if not outcome.errors:
        return outcome.implementation, outcome.check, *[""] * 5, outcome.verdict
    gradients = [name for name in outcome.errors if name not in AttentionOutput._fields]
    worst = max(gradients, key=outcome.share, default="")
    return (
        outcome.implementation,
        outcome.check,
        f"{outcome.errors['out']:.1e}",
        worst and f"{worst} {outcome.errors[worst]:.1e}",
        f"{max(map(outcome.share, outcome.errors)):.2g}",
        f"{outcome.forward_ms:.2f}",
        "" if outcome.both_ms is None else f"{outcome.both_ms:.2f}",
        outcome.verdict,
    )
