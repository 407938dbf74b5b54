"""Train a small decoder on a text, byte by byte, its attention computed by `pallas_flash`.

python examples/train.py
python examples/train.py --text FILE --plot loss.png
python examples/train.py --compare --plot curves.png  # beside jax.nn.dot_product_attention
"""

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import jax
import jax_attention
import numpy as np
from corpus import Corpus
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from training import DTYPES, TrainConfig, Training, write

import pallas_flash
from pallas_flash.terminal import Parser, printing, refusal

PROGRAM = "train.py"

# How far the losses of two attentions may lie apart, in float32.
TOLERANCE = 1e-3


def train(training: Training, title: str, console: Console) -> np.ndarray:
    """Run it to its end and report as it goes; the losses [steps]."""
    config = training.config
    losses = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=config.steps)
        start = time.perf_counter()
        for step, loss in enumerate(training.run(), start=1):
            losses.append(loss)
            progress.advance(task)
            # Ten times or so, for whoever reads a loss waits for it.
            if step not in (1, config.steps) and step % math.ceil(config.steps / 10):
                continue
            value = float(loss)
            rate = step * config.batch * config.length / (time.perf_counter() - start)
            console.print(
                f"{title}, step {step} of {config.steps}: loss {value:.4f}, {rate:,.0f} tokens/s"
            )
            if not math.isfinite(value):
                sys.exit(f"{PROGRAM}: the loss is {value} at step {step}")
    return np.array(losses)


def compare(losses: np.ndarray, others: np.ndarray, console: Console) -> bool:
    """Print how far two curves lie apart; whether that is within `TOLERANCE`."""
    differences = np.abs(losses - others)
    worst = int(np.argmax(differences))
    # Not so where it is NaN.
    passed = bool(differences[worst] <= TOLERANCE)
    console.print(
        f"compare {'passed' if passed else 'FAILED'}: over {losses.size} steps the losses differ "
        f"by at most {differences[worst]:.1e}, at step {worst + 1} (limit {TOLERANCE:.0e})"
    )
    return passed


def draw(curves: Mapping[str, np.ndarray], entropy: float) -> Figure:
    """The losses by step; of two curves, which may hide each other, the difference below."""
    figure = Figure(figsize=(8, 4.5 if len(curves) == 1 else 7), layout="constrained")
    axes = figure.subplots(len(curves), squeeze=False, sharex=True)[:, 0]
    for (title, losses), style in zip(curves.items(), ("-", "--"), strict=False):
        axes[0].plot(np.arange(1, losses.size + 1), losses, style, label=title)
    axes[0].axhline(entropy, color="gray", linestyle=":", label="entropy of byte frequencies")
    axes[0].set_ylabel("loss, nats a byte")
    axes[0].legend()
    if len(curves) == 2:
        first, second = curves.values()
        axes[1].semilogy(np.arange(1, first.size + 1), np.abs(first - second), ".")
        axes[1].axhline(TOLERANCE, color="gray", linestyle=":", label="limit")
        axes[1].set_ylabel("difference, where not 0")
        axes[1].legend()
    axes[-1].set_xlabel("step")
    return figure


def sample(training: Training, corpus: Corpus) -> str:
    """How the text starts, and after a bar how the decoder goes on, together T bytes or so."""
    half = max(1, training.config.length // 2)
    prompt = corpus.data[:half]
    key = jax.random.key(training.config.seed)
    written = write(training.model, prompt.astype(np.int32), key, count=half)
    texts = [
        bytes(x).decode(errors="replace") for x in (prompt, np.asarray(written).astype(np.uint8))
    ]
    # Bytes that move a terminal's cursor or ring its bell may come, too.
    return "|".join(
        "".join(x if x.isprintable() or x in "\n\t" else "\N{REPLACEMENT CHARACTER}" for x in text)
        for text in texts
    )


def picture(text: str) -> Path:
    """A file that a plot can be written to, as is seen before the training and not after it."""
    path = Path(text)
    known = Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        expected = f"a name that ends in one of {', '.join(known)}"
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: it is a folder")
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as problem:
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: {problem.strerror}") from None
    return path


def make_parser() -> Parser:
    """The command line."""
    parser = Parser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = TrainConfig()
    add = parser.add_argument
    add("--steps", type=int, default=default.steps, help="of the optimizer (%(default)s)")
    add("--batch", type=int, default=default.batch, help="stretches of text in each (%(default)s)")
    add("--length", type=int, default=default.length, help="bytes in a stretch (%(default)s)")
    add("--seed", type=int, default=default.seed, help="of parameters and batches (%(default)s)")
    add("--dtype", choices=DTYPES, default=default.dtype, help="of the computation (%(default)s)")
    add(
        "--implementation",
        choices=pallas_flash.IMPLEMENTATIONS,
        help="what computes the attention (default: the library chooses)",
    )
    add("--text", type=Path, metavar="FILE", help="what to learn (default: Python's own help)")
    add("--plot", type=picture, metavar="FILE", help="write a picture of the loss")
    add(
        "--compare",
        action="store_true",
        help="train by jax.nn.dot_product_attention too; exit with 1 unless the losses agree "
        f"within {TOLERANCE:.0e}",
    )
    return parser


def run(config: TrainConfig, corpus: Corpus, arguments: argparse.Namespace) -> bool:
    """Train as the command line says; False if a comparison failed."""
    console = Console(markup=False, emoji=False, highlight=False, soft_wrap=True)
    entropy = corpus.entropy
    console.print(
        f"{corpus.name}: {corpus.data.size:,} bytes, entropy of their frequencies "
        f"{entropy:.4f} nats a byte"
    )
    training = Training(config, corpus)
    size = sum(x.size for x in jax.tree.leaves(training.model))
    title = f"flash attention ({config.implementation})"
    console.print(f"decoder of {size:,} parameters, {config.dtype}, {title}")
    losses = train(training, title, console)
    curves, passed = {title: losses}, True
    if arguments.compare:
        title = "jax.nn.dot_product_attention"
        other = Training(
            replace(config, implementation=None),
            corpus,
            attention_fn=jax_attention.attention,
            decode_fn=jax_attention.decode,
        )
        curves[title] = train(other, title, console)
        passed = compare(losses, curves[title], console)
    if arguments.plot is not None:
        draw(curves, entropy).savefig(arguments.plot, dpi=150)
        console.print(f"plot: {arguments.plot}")
    console.print(sample(training, corpus))
    return passed


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.compare and arguments.dtype != "float32":
        parser.error(f"argument --compare: its limit is one of float32, got {arguments.dtype}")
    try:
        config = TrainConfig(
            steps=arguments.steps,
            batch=arguments.batch,
            length=arguments.length,
            seed=arguments.seed,
            dtype=arguments.dtype,
            implementation=arguments.implementation,
        )
        corpus = Corpus.of_python() if arguments.text is None else Corpus.read(arguments.text)
        corpus.require(config.length)
        config = config.resolved()
    except ValueError as error:
        parser.error(str(error))
    except NotImplementedError as error:
        parser.error(refusal(error))
    # Full float32 products, where a GPU would otherwise shorten them.
    with jax.default_matmul_precision("highest"), printing(PROGRAM):
        passed = run(config, corpus, arguments)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
