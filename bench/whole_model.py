"""Time a decoder of Qwen3-8B's shape with this library's attention and with JAX's own.

python bench/whole_model.py --out bench/results/h200
python bench/whole_model.py --small  # a few layers of few features, as a CPU runs them

A prefill, a step of training and a step of decoding, with random parameters, which all attentions
share. Times are wall time of queued calls; what is wrong on a small decoder gets none.
"""

import argparse
import dataclasses
import json
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# As in run.py; the decoder is an example.
_ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(_ROOT), str(_ROOT / "examples")]

import command_line
import jax
import jax.numpy as jnp
import machine
import numpy as np
import report
import stages
from clock import Clock, wall_clock
from decoder import DecoderConfig
from jobs import reason_of
from report import Row
from rich.console import Console, Group
from stages import Arrays, Attention, Stage, ToDecoder

from pallas_flash import terminal

_ROUND_MS = 1000.0

# Whose errors set the budget.
_PLAIN = "jax-xla"

# On which attentions are judged: long enough for several blocks of queries and keys.
_JUDGED_LENGTH = 384


class Runner:
    """What a stage's programs run on, in turns: one copy of all that is large."""

    def __init__(self, inputs: Callable[[], tuple[Arrays, Arrays]]) -> None:
        self._inputs = inputs
        self.fill()

    def fill(self) -> None:
        """Make it anew: a program that failed may have used up what it was given."""
        self.constants = self.carried = None
        self.constants, self.carried = self._inputs()

    def call(self, program: Callable[..., tuple[Arrays, Arrays]]) -> Callable[[], Arrays]:
        """The program as a function without arguments, whose next call goes on from this one."""

        def function() -> Arrays:
            self.carried, result = program(self.constants, self.carried)
            return self.carried, result

        return function


def judged(
    stage: Stage, config: DecoderConfig, found: Mapping[str, Attention], seed: int
) -> dict[str, Row]:
    """A row for each attention, with its error on a small decoder, and a reason where it is wrong.

    The error of the answer, by its root mean square, against that of float32 products throughout;
    at most twice that of `jax.nn` in the same dtype, and one rounding step.
    """
    small = dataclasses.replace(stages.reduced(config), is_scanned=stage.is_scanned)
    stage = dataclasses.replace(stage, batch=2, length=_JUDGED_LENGTH)
    constants, carried = stage.inputs(small, stages.parameters(small, seed), seed)

    def exact(x: jax.Array) -> jax.Array:
        return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x

    def answer(config: DecoderConfig, attention: Attention, *inputs: Arrays) -> np.ndarray:
        to_decoder = ToDecoder(config, attention)
        run = jax.jit(lambda constants, carried: stage.answer(to_decoder, constants, carried))
        leaves = jax.tree.leaves(run(*inputs))
        return np.concatenate([np.asarray(x, np.float32).ravel() for x in leaves])

    exact_attention = dataclasses.replace(small.attention, dtype="float32", param_dtype="float32")
    with jax.default_matmul_precision("highest"):
        expected = answer(
            dataclasses.replace(small, attention=exact_attention),
            found[_PLAIN],
            *jax.tree.map(exact, (constants, carried)),
        )

    def error(attention: Attention) -> float:
        got = answer(small, attention, constants, carried)
        return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))

    errors, rows = {}, {}
    for name, attention in found.items():
        try:
            errors[name] = error(attention)
        # Others' code refuses with whatever it likes. The row shows it.
        except Exception as problem:
            rows[name] = Row(name, reason=reason_of("refused", problem))
    budget = 2 * errors[_PLAIN] + float(jnp.finfo(small.attention.dtype).eps)
    for name, off in errors.items():
        wrong = "" if off <= budget else f"wrong: error {off:.3g}, budget {budget:.3g}"
        rows[name] = Row(name, errors={"answer": off}, reason=wrong)
    return {name: rows[name] for name in found}


def compiled(
    stage: Stage, config: DecoderConfig, attention: Attention, seed: int
) -> jax.stages.Compiled:
    """The stage's program."""

    def inputs() -> tuple[Arrays, Arrays]:
        return stage.inputs(config, stages.parameters(config, seed), seed)

    to_decoder = ToDecoder(config, attention)
    step = jax.jit(
        lambda constants, carried: stage.step(to_decoder, constants, carried), donate_argnums=1
    )
    return step.lower(*jax.eval_shape(inputs)).compile()


def measure(
    stage: Stage,
    config: DecoderConfig,
    found: Mapping[str, Attention],
    clock: Clock,
    rounds: int,
    seed: int,
) -> list[Row]:
    """A row for each attention."""
    config = dataclasses.replace(config, is_scanned=stage.is_scanned)
    # Only a gradient has a forward to keep of.
    found = {k: x for k, x in found.items() if x.policy is None or isinstance(stage, stages.Train)}
    rows = judged(stage, config, found, seed)
    right = {name: found[name] for name, row in rows.items() if not row.reason}
    with ThreadPoolExecutor() as pool:
        futures = {
            name: pool.submit(compiled, stage, config, attention, seed)
            for name, attention in right.items()
        }
    runner = Runner(lambda: stage.inputs(config, stages.parameters(config, seed), seed))
    calls = {}
    for name, future in futures.items():
        try:
            program = future.result()
            function = runner.call(program)
            calls[name] = (function, clock.calls(function, [()]))
        # XLA's own, of a program that it cannot make or that does not fit.
        except jax.errors.JaxRuntimeError as problem:
            rows[name] = dataclasses.replace(rows[name], reason=reason_of("refused", problem))
            runner.fill()
            continue
        if (memory := program.memory_analysis()) is not None:
            rows[name] = dataclasses.replace(rows[name], temporary_bytes=memory.temp_size_in_bytes)
    times = clock.rounds(calls, [()], rounds, lambda: None)
    return [dataclasses.replace(row, times=times.get(name, ())) for name, row in rows.items()]


def record(stage: Stage, rows: Sequence[Row]) -> dict[str, Any]:
    """For JSON. `times_...` above 1 is faster."""
    timed = {row.peer: row for row in rows if row.times}

    def figures(row: Row) -> dict[str, float]:
        if not row.times:
            return {}
        return {
            "ms": row.ms,
            "tokens_per_second": 1e3 * stage.tokens / row.ms,
            **{
                f"times_{name}": row.times_as_fast_as(other)
                for name, other in timed.items()
                if name.startswith("jax-")
            },
        }

    return {
        "name": stage.name,
        "batch": stage.batch,
        "length": stage.length,
        "tokens": stage.tokens,
        "rows": [row.record() | figures(row) for row in rows],
    }


def table(found: Mapping[str, Any]) -> Group:
    """One stage's rows; below, why some have no figures."""
    result = report.blank()
    for heading in ("attention", "ms", "tokens/s", "x jax-cudnn", "x jax-xla", "temp MB", "error"):
        result.add_column(heading, justify="right", no_wrap=True)
    forms = [("ms", ".4g"), ("tokens_per_second", ",.0f")]
    forms += [("times_jax-cudnn", ".3f"), ("times_jax-xla", ".3f")]
    for row in found["rows"]:
        cells = [format(row[name], form) if name in row else "" for name, form in forms]
        memory = row["temporary_bytes"]
        cells.append("" if memory is None else report.megabytes(memory))
        cells += [f"{float(error):.1e}" for error in row["errors"].values()]
        result.add_row(row["peer"], *cells)
    reasons = [f"{row['peer']}: {row['reason']}" for row in found["rows"] if row["reason"]]
    title = f"{found['name']}: batch {found['batch']}, length {found['length']}"
    return Group(title, result, *reasons, "")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = terminal.Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [stage.name.split()[0] for stage in stages.STAGES]
    parser.add_argument(
        "--stage",
        nargs="+",
        choices=names,
        default=names,
        metavar="STAGE",
        help=f"of {', '.join(names)}",
    )
    parser.add_argument("--small", action="store_true", help="a decoder that a CPU can run")
    parser.add_argument("--rounds", type=command_line.rounds, default=5, help="5 by default")
    parser.add_argument(
        "--seed", type=command_line.seed, default=secrets.randbits(31), help="random by default"
    )
    parser.add_argument(
        "--out", type=command_line.folder, metavar="FOLDER", help="write whole-model.json"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the command line asks for."""
    args = parse(arguments)
    with terminal.printing("whole_model.py"):
        run(args)


def run(args: argparse.Namespace) -> None:
    """Measure, show and keep."""
    is_gpu = jax.default_backend() == "gpu"
    config = stages.shape_of_qwen3_8b()
    clock = wall_clock(_ROUND_MS, "steps follow each other")
    if args.small:
        config = stages.reduced(config)
        clock = wall_clock(1.0, "small")
    found = stages.attentions("triton" if is_gpu else "xla")
    header = {
        **machine.describe(),
        "clock": clock.name,
        "rounds": args.rounds,
        "seed": args.seed,
        "decoder": "small" if args.small else "Qwen3-8B",
    }
    console = Console(markup=False, highlight=False)
    console.width = max(console.width, 120)
    for name, value in header.items():
        console.print(f"{name}: {value}")
    records = []
    for stage in stages.STAGES:
        if stage.name.split()[0] not in args.stage:
            continue
        if args.small:
            stage = dataclasses.replace(stage, batch=2, length=64)
        rows = measure(stage, config, found, clock, args.rounds, args.seed)
        records.append(record(stage, rows))
        console.print(table(records[-1]))
        if args.out is not None:
            text = json.dumps({"header": header, "stages": records}, allow_nan=False)
            (args.out / "whole-model.json").write_text(text)
    print(json.dumps({"header": header, "stages": records}, allow_nan=False))
    if not any("ms" in row for found in records for row in found["rows"]):
        sys.exit("whole_model.py: no attention got a figure: the tables say why")


if __name__ == "__main__":
    main()
