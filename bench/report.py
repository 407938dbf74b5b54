"""What came of a run, for the reader: rows, tables, and where they were measured."""

import importlib.metadata
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np
from rich.table import Table

# A figure's name in JSON, its heading and its form in a table.
_COLUMNS = (
    ("ms", "ms", ".3f"),
    ("iqr_ms", "IQR", ".3f"),
    ("tflops", "TFLOP/s", ".1f"),
    ("times_cudnn", "x cuDNN", ".2f"),
    ("percent_of_matmul", "% matmul", ".1f"),
)


@dataclass(frozen=True)
class Row:
    """What came of one peer.

    Attributes:
      errors: by the results' names, relative, on the reduced problem.
      reason: why there are no times; empty where there are.
      times: the ms of one call, for each round.
    """

    peer: str
    errors: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    times: Sequence[float] = ()

    @property
    def ms(self) -> float:
        """The median; infinite without times."""
        return float(np.median(self.times)) if self.times else np.inf

    def figures(self, flops: float, cudnn_ms: float, matmul_tflops: float) -> dict[str, float]:
        """What follows from the times; empty without. `times_cudnn` above 1 is faster."""
        if not self.times:
            return {}
        low, high = np.percentile(self.times, (25, 75))
        tflops = flops / self.ms / 1e9
        return {
            "ms": self.ms,
            "iqr_ms": float(high - low),
            "tflops": tflops,
            "percent_of_matmul": 100 * tflops / matmul_tflops,
            **({"times_cudnn": cudnn_ms / self.ms} if np.isfinite(cudnn_ms) else {}),
        }


def table(title: str, rows: Sequence[Row], figures: Sequence[Mapping[str, float]]) -> Table:
    """One problem's rows, in the order given."""
    result = Table(title=title, title_justify="left")
    result.add_column("peer", no_wrap=True)
    for heading in (*(heading for _, heading, _ in _COLUMNS), "error"):
        result.add_column(heading, justify="right", no_wrap=True)
    result.add_column("no figures because")
    for row, known in zip(rows, figures, strict=True):
        cells = [format(known[name], form) if name in known else "" for name, _, form in _COLUMNS]
        error = f"{max(row.errors.values()):.1e}" if row.errors else ""
        result.add_row(row.peer, *cells, error, row.reason)
    return result


def describe_machine() -> dict[str, str]:
    """Where this was measured, and what was."""
    driver = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "card": jax.devices()[0].device_kind,
        "driver": driver.partition("\n")[0],
        "python": platform.python_version(),
        "jax": jax.__version__,
        "pallas_flash": _version(),
        "commit": _output_of("git", "describe", "--always", "--dirty", "--abbrev=12"),
    }


def _output_of(*command: str) -> str:
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (FileNotFoundError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def _version() -> str:
    try:
        return importlib.metadata.version("pallas-flash")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
