"""The all-reduce benchmark as a table, a JSON file and a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import matplotlib.style
from matplotlib.figure import Figure

from imagenet_fast.base import environment
from imagenet_fast.base.files import write_results
from imagenet_fast.base.plotting import svg
from imagenet_fast.benchmarks.all_reduce.compare import Result, expected_bytes
from imagenet_fast.benchmarks.report import STYLE
from imagenet_fast.benchmarks.timing import Spread

_HEAD = ("ms: median", "min", "max", "to builtin", "model's ms", "MB sent", "by the algorithm")


def table(results: Sequence[Result], replicas: int, group: int) -> str:
    """Returns the results as text, case by case, each way's time by that of the fastest builtin.

    Args:
      results: of one run of the benchmark.
      replicas: that summed.
      group: replicas in a group of the algorithms that have groups.
    """
    width = max(len(str(result.way)) for result in results)
    lines = [f"{replicas} replicas; groups of {group}; n = {len(results[0].times.seconds)}"]
    for case in dict.fromkeys(result.case for result in results):
        own = [result for result in results if result.case == case]
        lines += ["", f"{case.name}: {case.bytes / 1e6:.4g} MB in {len(case.shapes)} tensors"]
        lines.append(f"{'':{width}}  " + "  ".join(f"{name:>16}" for name in _HEAD))
        for result in own:
            cells = _cells(result, own, replicas, group)
            lines.append(f"{result.way!s:{width}}  " + "  ".join(f"{cell:>16}" for cell in cells))
    lines += [
        "",
        "MB sent: by this worker's network interfaces, all that it sends; no algorithm can do with",
        f"less than {2 * (replicas - 1) / replicas:.4g} times the data, on average over workers",
    ]
    return "\n".join(lines)


def _cells(result: Result, own: Sequence[Result], replicas: int, group: int) -> list[str]:
    time = Spread.of(result.times.seconds)
    ratio = _ratio_to_builtin(result, own)
    expected = expected_bytes(result, replicas, group)
    predicted, sent = result.predicted_seconds, result.sent_bytes
    return [
        f"{1e3 * time.median:.1f}",
        f"{1e3 * time.min:.1f}",
        f"{1e3 * time.max:.1f}",
        "" if ratio is None else f"{ratio.median:.3f}",
        "" if predicted is None else f"{1e3 * predicted:.1f}",
        "" if sent is None else f"{sent / 1e6:.4g}",
        "" if expected is None else f"{expected / 1e6:.4g}",
    ]


def _ratio_to_builtin(result: Result, own: Sequence[Result]) -> Spread | None:
    """Returns the time by that of the fastest builtin way, turn by turn."""
    builtin = [other for other in own if other.way.algorithm == "builtin"]
    if not builtin:
        return None
    best = min(builtin, key=lambda other: Spread.of(other.times.seconds).median)
    pairs = zip(result.times.seconds, best.times.seconds)
    return Spread.of([one / other for one, other in pairs])


def write(
    results: Sequence[Result],
    replicas: int,
    group: int,
    options: dict[str, Any],
    directory: str,
    name: str,
) -> list[str]:
    """Writes ``NAME.txt``, ``NAME.json`` and ``NAME.svg``; returns their paths.

    Args:
      results: of one run of the benchmark.
      replicas: that summed.
      group: replicas in a group of the algorithms that have groups.
      options: the benchmark's flags and their values.
      directory: where to write; made if it does not exist.
      name: of the files, without suffix.

    Raises:
      UserError: if they cannot be written.
    """
    texts = {
        f"{name}.txt": table(results, replicas, group) + "\n",
        f"{name}.json": _to_json(results, replicas, group, options),
        f"{name}.svg": _picture(results),
    }
    return write_results(directory, texts)


def _to_json(results: Sequence[Result], replicas: int, group: int, options: dict[str, Any]) -> str:
    values = {
        "replicas": replicas,
        "group": group,
        "n": len(results[0].times.seconds),
        "results": [
            {
                "case": result.case.name,
                "bytes": result.case.bytes,
                "tensors": len(result.case.shapes),
                "algorithm": result.way.algorithm,
                "fusion_bytes": result.way.fusion_bytes,
                "dtype": result.way.dtype,
                "seconds": vars(Spread.of(result.times.seconds)),
                "each_seconds": [round(value, 6) for value in result.times.seconds],
                "predicted_seconds": result.predicted_seconds,
                "sent_bytes": result.sent_bytes,
                "expected_bytes": expected_bytes(result, replicas, group),
            }
            for result in results
        ],
        "options": options,
        **environment.provenance(),
    }
    return json.dumps(values, indent=2) + "\n"


def _picture(results: Sequence[Result]) -> str:
    """Draws the median of each way for each case, with its range, and the model's; returns SVG."""
    cases = list(dict.fromkeys(result.case for result in results))
    ways = list(dict.fromkeys(result.way for result in results))
    with matplotlib.style.context(STYLE):
        figure = Figure(
            figsize=(1.2 + 2.6 * len(cases), 3.2 + 0.2 * len(ways)), layout="constrained"
        )
        panels = figure.subplots(1, len(cases), squeeze=False)[0]
        for axes, case in zip(panels, cases):
            own = [result for result in results if result.case == case]
            for place, result in enumerate(own):
                time = Spread.of(result.times.seconds)
                axes.bar(
                    place,
                    1e3 * time.median,
                    yerr=[[1e3 * (time.median - time.min)], [1e3 * (time.max - time.median)]],
                    color=f"C{ways.index(result.way)}",
                    label=str(result.way),
                    capsize=3,
                )
                if result.predicted_seconds is not None:
                    axes.plot(place, 1e3 * result.predicted_seconds, "_k", markersize=14)
            axes.set_xticks([])
            axes.set_title(case.name, fontsize=9)
        panels[0].set_ylabel("milliseconds; line: the model's")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", frameon=False)
        return svg(figure)
