"""A suite's figures as pictures."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import problems
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from problems import Metric

Record = Mapping[str, Any]


def draw(suite: str, found: Record, folder: Path) -> None:
    """Write the plots of what a suite's JSON file has."""
    if "jobs" not in found:
        _memory(found["rows"], folder / f"{suite}-mb.png")
    elif problems.SUITES[suite].is_series:
        _series(found["jobs"], folder / f"{suite}-ms.png", "ms", lambda row: row.get("ms"))
        _series(
            found["jobs"], folder / f"{suite}-mb.png", "MB, results and temporaries", _megabytes
        )
    else:
        for with_gradients, ending in ((False, "forward"), (True, "backward")):
            jobs = [job for job in found["jobs"] if job["with_gradients"] == with_gradients]
            if jobs:
                _bars(jobs, problems.SUITES[suite].metric, folder / f"{suite}-{ending}.png")


def _megabytes(row: Record) -> float | None:
    memory = row["temporary_bytes"]
    return None if memory is None else (memory + row["result_bytes"]) / 1e6


def _figure(width: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(axis="y", alpha=0.3)
    return figure, axes


def _lines(axes: Axes, label: str, points: Mapping[int, float | None]) -> None:
    known = {length: y for length, y in points.items() if y is not None}
    # Smaller and more broken the later, so that one line does not hide another.
    place = len(axes.lines)
    style = ("-", "--", "-.", ":")[place % 4]
    size = max(3, 8 - place)
    axes.plot(list(known), list(known.values()), style, marker="o", markersize=size, label=label)


def _series(
    jobs: Sequence[Record], path: Path, label: str, figure_of: Callable[[Record], float | None]
) -> None:
    """One line for each peer over the length, both axes logarithmic."""
    figure, axes = _figure(8)
    for peer in [row["peer"] for row in jobs[0]["rows"]]:
        rows = {job["case"]["S"]: row for job in jobs for row in job["rows"] if row["peer"] == peer}
        _lines(axes, peer, {length: figure_of(row) for length, row in rows.items()})
    axes.set_yscale("log")
    _finish(figure, axes, path, label)


def _memory(rows: Sequence[Record], path: Path) -> None:
    """Temporaries over the length; those who need none stand at the bottom."""
    figure, axes = _figure(8)
    for row in rows:
        direction = "both" if row["with_gradients"] else "forward"
        points = {int(length): x / 1e6 for length, x in row["temporary_bytes"].items()}
        _lines(axes, f"{row['peer']}, {direction}", dict(points))
    # A kilobyte and what is less go down to 0 in a straight line.
    axes.set_yscale("symlog", linthresh=1e-3)
    axes.set_ylim(bottom=0)
    _finish(figure, axes, path, "MB, temporaries")


def _finish(figure: Figure, axes: Axes, path: Path, label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlabel("S")
    axes.set_ylabel(label)
    figure.legend(loc="outside right upper")
    figure.savefig(path, dpi=150)


def _bars(jobs: Sequence[Record], metric: Metric, path: Path) -> None:
    """A group of bars for each problem, a colour for each peer with a figure in one."""
    speeds = {
        peer: [
            row.get(metric.name, 0.0) for job in jobs for row in job["rows"] if row["peer"] == peer
        ]
        for peer in dict.fromkeys(row["peer"] for job in jobs for row in job["rows"])
    }
    speeds = {peer: known for peer, known in speeds.items() if any(known)}
    figure, axes = _figure(3 + 1.4 * len(jobs))
    width = 0.85 / max(1, len(speeds))
    for place, (peer, known) in enumerate(speeds.items()):
        axes.bar(np.arange(len(jobs)) + place * width, known, width, label=peer)
    axes.set_xticks(np.arange(len(jobs)) + 0.4, [job["name"] for job in jobs], rotation=20)
    axes.set_ylabel(metric.title)
    figure.legend(loc="outside right upper")
    figure.savefig(path, dpi=150)
