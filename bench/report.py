"""What came of a run, for the reader: rows, figures, tables, and where they were measured."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import problems
import work
from clock import Ceilings
from problems import Metric
from rich import box
from rich.console import Group
from rich.table import Table

from pallas_flash.testing import Case


def _columns(metric: Metric, baselines: Sequence[str]) -> list[tuple[str, str, str]]:
    """What is shown of a row: its name in JSON, its heading and its form in a table.

    Some headings have two lines, for a terminal may have 80 columns.
    """
    return [
        ("ms", "ms", ".4g"),
        ("iqr_ms", "IQR", ".2g"),
        (metric.name, metric.unit.replace("/", "\n/"), f".{metric.digits + 1}f"),
        ("percent_of_matmul", "%\nmatmul", ".1f"),
        ("percent_of_copy", "%\ncopy", ".1f"),
        *((f"times_{other}", f"x\n{other}", ".2f") for other in baselines),
    ]


@dataclass(frozen=True)
class Row:
    """What came of one peer.

    Attributes:
      errors: by the results' names, relative, on the smaller problem.
      reason: why there are no times; empty where there are.
      times: the ms of one call, for each round.
      temporary_bytes, result_bytes: as in `programs.Compiled`.
    """

    peer: str
    errors: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    times: Sequence[float] = ()
    temporary_bytes: int | None = None
    result_bytes: int | None = None

    @property
    def ms(self) -> float:
        """The median; infinite without times."""
        return float(np.median(self.times)) if self.times else math.inf

    def times_as_fast_as(self, other: "Row") -> float:
        """The median over rounds, of which each saw the card in one state."""
        return float(np.median(np.divide(other.times, self.times)))

    def record(self) -> dict[str, Any]:
        """For JSON, which has no infinity: the error of a result that is not finite."""
        errors = {k: x if math.isfinite(x) else str(x) for k, x in self.errors.items()}
        return {**vars(self), "errors": errors, "times": list(self.times)}


def record(
    name: str,
    case: Case,
    with_gradients: bool,
    rows: Sequence[Row],
    baselines: Sequence[str],
    ceilings: Ceilings,
) -> dict[str, Any]:
    """A problem, its rows and what follows from them, for JSON. `times_...` above 1 is faster."""
    flops, least_bytes = work.flops(case, with_gradients), work.least_bytes(case, with_gradients)
    timed = {row.peer: row for row in rows if row.times}

    def figures(row: Row) -> dict[str, float]:
        if not row.times:
            return {}
        low, high = np.percentile(row.times, (25, 75))
        tflops, tbps = flops / row.ms / 1e9, least_bytes / row.ms / 1e9
        return {
            "ms": row.ms,
            "iqr_ms": float(high - low),
            "tflops": tflops,
            "tbps": tbps,
            "percent_of_matmul": 100 * tflops / ceilings.matmul_tflops[case.dtype],
            "percent_of_copy": 100 * tbps / ceilings.copy_tbps,
            **{
                f"times_{other}": row.times_as_fast_as(timed[other])
                for other in baselines
                if other in timed
            },
        }

    return {
        "name": name,
        "with_gradients": with_gradients,
        "flops": flops,
        "least_bytes": least_bytes,
        "share_of_pairs": work.share_of_pairs(case),
        "case": dataclasses.asdict(case),
        "rows": [row.record() | figures(row) for row in rows],
    }


def blank() -> Table:
    """A table to be filled, narrow enough for a terminal."""
    return Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)


def table(
    title: str, rows: Sequence[Mapping[str, Any]], baselines: Sequence[str], metric: Metric
) -> Group:
    """One problem's rows, in the order given; below, why some have no figures."""
    columns = _columns(metric, baselines)
    reasons = [f"{row['peer']}: {row['reason']}" for row in rows if row["reason"]]
    result = blank()
    result.add_column("peer", no_wrap=True)
    for heading in (*(heading for _, heading, _ in columns), "temp\nMB", "error"):
        result.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        cells = [format(row[name], form) if name in row else "" for name, _, form in columns]
        memory = row["temporary_bytes"]
        cells.append("" if memory is None else megabytes(memory))
        errors = [float(error) for error in row["errors"].values()]
        cells.append(f"{max(errors):.1e}" if errors else "")
        result.add_row(row["peer"], *cells)
    # A table's own title would be broken where the table ends.
    return Group(title, result, *reasons, "")


def megabytes(size: int) -> str:
    """Bytes as MB."""
    return f"{size / 1e6:,.0f}" if size >= 1e9 else f"{size / 1e6:.4g}"


def by_length(
    title: str, records: Sequence[Mapping[str, Any]], cell: Callable[[Mapping[str, Any]], str]
) -> Group:
    """One entry of each row of a series, a line for each length."""
    result = blank()
    peers = [row["peer"] for row in records[0]["rows"]]
    for heading in ("S", *peers):
        result.add_column(heading, justify="right", no_wrap=True)
    for each in records:
        # A sweep shows the fastest first, which at each length may be another.
        rows = {row["peer"]: row for row in each["rows"]}
        result.add_row(str(each["case"]["S"]), *(cell(rows[peer]) for peer in peers))
    return Group(title, result, "")


def series_tables(suite: str, records: Sequence[Mapping[str, Any]]) -> list[Group]:
    """How time and memory grow."""

    def time(row: Mapping[str, Any]) -> str:
        return f"{row['ms']:.4g}" if "ms" in row else "-"

    def memory(row: Mapping[str, Any]) -> str:
        if row["temporary_bytes"] is None:
            return "-"
        return f"{megabytes(row['result_bytes'])} + {megabytes(row['temporary_bytes'])}"

    return [
        by_length(f"{suite}: ms", records, time),
        by_length(f"{suite}: MB, results + temporaries", records, memory),
    ]


def describe(case: Case, with_gradients: bool) -> str:
    """A case's sizes, and how much work it is."""
    direction = "forward and backward" if with_gradients else "forward"
    flops = work.flops(case, with_gradients)
    moved = work.least_bytes(case, with_gradients) / 1e6
    share = work.share_of_pairs(case)
    work_done = f"{flops:.3g} FLOP, {moved:.4g} MB, {share:.2%} of all pairs"
    return f"{direction}: {problems.sizes(case)}, {work_done}"


def has_figures(found: Mapping[str, Any]) -> bool:
    """Whether anything came of a suite."""
    if "rows" in found:
        return any(row["longest"] for row in found["rows"])
    tables = found["stages"] if "stages" in found else found["jobs"]
    return any("ms" in row for each in tables for row in each["rows"])
