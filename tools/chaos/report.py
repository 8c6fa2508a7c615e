"""Table, plot and file of what faults cost."""

from __future__ import annotations

import json
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

Rows = Sequence[dict[str, Any]]


def write(output_dir: pathlib.Path, rows: Rows) -> str:
    """Writes ``results.json`` and ``chaos.svg``.

    Args:
      output_dir: for the files.
      rows: of the log.

    Returns:
      A table in Markdown.
    """
    from imagenet_fast.base.environment import provenance
    from imagenet_fast.base.files import write_results

    result = {**summary(rows), **provenance()}
    write_results(
        output_dir,
        {"results.json": json.dumps(result, indent=1) + "\n", "chaos.svg": _picture(rows)},
    )
    return table(result)


def summary(rows: Rows) -> dict[str, Any]:
    """Returns numbers of all faults, of each kind, and of runs.

    Args:
      rows: of the log: faults, and runs, which have ``faults``.
    """
    faults = [row for row in rows if "fault" in row]
    runs = [row for row in rows if "faults" in row]
    kinds = sorted({row["fault"] for row in faults})
    return {
        "kinds": {
            kind: _numbers([row for row in faults if row["fault"] == kind]) for kind in kinds
        },
        "all": _numbers(faults),
        "runs": len(runs),
        "runs_by_workers": {
            str(number): sum(run["workers"] == number for run in runs)
            for number in sorted({run["workers"] for run in runs})
        },
        "problems": [
            {"run": run["run"], "problem": run["problem"]} for run in runs if run["problem"]
        ],
    }


def _numbers(faults: Rows) -> dict[str, Any]:
    lost = [row["lost"] for row in faults if "lost" in row]
    seconds = [row["seconds"] for row in faults if "seconds" in row]
    return {
        "faults": len(faults),
        "resumed": sum(row.get("outcome") == "resumed" for row in faults),
        "lost_median": statistics.median(lost) if lost else None,
        "lost_worst": max(lost, default=None),
        "seconds_median": round(statistics.median(seconds), 2) if seconds else None,
        "seconds_worst": max(seconds, default=None),
    }


def table(result: dict[str, Any]) -> str:
    """Returns a Markdown table of a summary."""
    lines = [
        "| fault | faults | processes started again | steps lost: median, worst "
        "| seconds to the next step: median, worst |",
        "| --- | --- | --- | --- | --- |",
    ]
    for kind, numbers in {**result["kinds"], "all": result["all"]}.items():
        lost, seconds = (
            f"{numbers[f'{name}_median']}, {numbers[f'{name}_worst']}"
            for name in ("lost", "seconds")
        )
        lines.append(
            f"| {kind} | {numbers['faults']} | {numbers['resumed']} | {lost} | {seconds} |"
        )
    runs = ", ".join(f"{n} of {w} workers" for w, n in result["runs_by_workers"].items())
    lines += [
        "",
        f"Runs: {runs}; ended otherwise than an undisturbed one: {len(result['problems'])}",
    ]
    lines += [f"- run {problem['run']}: {problem['problem']}" for problem in result["problems"]]
    return "\n".join(lines)


def _picture(rows: Rows) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    from imagenet_fast.base.plotting import PLOT_STYLE, svg

    kinds = sorted({row["fault"] for row in rows if "fault" in row}, reverse=True)
    with matplotlib.style.context(PLOT_STYLE):
        figure = Figure(figsize=(8, 0.8 + 0.3 * len(kinds)), layout="constrained")
        panels = {"lost": "steps lost", "seconds": "seconds to the next step"}
        for place, (name, label) in enumerate(panels.items(), start=1):
            axes = figure.add_subplot(1, 2, place)
            for height, kind in enumerate(kinds):
                values = [row[name] for row in rows if row.get("fault") == kind and name in row]
                axes.plot(values, [height] * len(values), "|", color="#475467", alpha=0.5)
                if values:
                    axes.plot(statistics.median(values), height, "o", color="#c2410c", markersize=4)
            axes.set_yticks(range(len(kinds)), kinds if place == 1 else [""] * len(kinds))
            axes.set_xlabel(label)
            axes.set_xlim(left=0)
        return svg(figure)
