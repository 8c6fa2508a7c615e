"""The report of the all-reduce benchmark: measured and predicted times, and bytes sent."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from imagenet_fast.base.terminal import aligned
from imagenet_fast.lab.benchmarks.all_reduce.compare import Result, expected_bytes
from imagenet_fast.lab.benchmarks.report import Report, spread_cells, values_of
from imagenet_fast.lab.benchmarks.timing import Spread

_HEAD = ("", "ms: median", "min", "max", "to builtin", "predicted ms", "MB sent", "MB expected")


def make_report(results: Sequence[Result], replicas: int, group: int) -> Report:
    """Returns the report of one run of the benchmark.

    The table compares each method's time with that of the fastest builtin one.
    """
    lines = [f"{replicas} replicas; groups of {group}; n = {len(results[0].times.seconds)}"]
    for case in dict.fromkeys(result.case for result in results):
        same_case = [result for result in results if result.case == case]
        lines += [
            "",
            f"{case.name}: {case.bytes / 1e6:.4g} MB in "
            f"{len(case.shapes)} tensor{'s' * (len(case.shapes) > 1)}",
        ]
        lines += aligned(
            [_HEAD, *(_cells(result, same_case, replicas, group) for result in same_case)]
        )
    lines += [
        "",
        "MB sent: by all of this worker's network interfaces; MB expected: by the algorithm, of "
        "the busiest worker.",
        f"No algorithm sends less than {2 * (replicas - 1) / replicas:.4g} times the data, "
        "averaged over workers.",
    ]
    values = {
        "replicas": replicas,
        "group": group,
        "n": len(results[0].times.seconds),
        "results": [
            {
                "case": result.case.name,
                "bytes": result.case.bytes,
                "tensors": len(result.case.shapes),
                "algorithm": result.method.algorithm,
                "fusion_bytes": result.method.fusion_bytes,
                "dtype": result.method.dtype,
                "seconds": Spread.of(result.times.seconds),
                "each_seconds": values_of(result.times.seconds),
                "predicted_seconds": result.predicted_seconds,
                "sent_bytes": result.sent_bytes,
                "expected_bytes": expected_bytes(result, replicas, group),
            }
            for result in results
        ],
    }
    return Report("\n".join(lines), values, lambda: _figure(results))


def _cells(result: Result, same_case: Sequence[Result], replicas: int, group: int) -> list[str]:
    ratio = _ratio_to_builtin(result, same_case)
    expected = expected_bytes(result, replicas, group)
    predicted, sent = result.predicted_seconds, result.sent_bytes
    return [
        str(result.method),
        *spread_cells(_milliseconds(result), ".1f"),
        "" if ratio is None else f"{ratio.median:.3f}",
        "" if predicted is None else f"{1e3 * predicted:.1f}",
        "" if sent is None else f"{sent / 1e6:.4g}",
        "" if expected is None else f"{expected / 1e6:.4g}",
    ]


def _milliseconds(result: Result) -> Spread:
    return Spread.of([1e3 * seconds for seconds in result.times.seconds])


def _ratio_to_builtin(result: Result, same_case: Sequence[Result]) -> Spread | None:
    """Returns the time divided by the fastest builtin method's, repeat by repeat."""
    builtin = [other for other in same_case if other.method.algorithm == "builtin"]
    if not builtin:
        return None
    best = min(builtin, key=lambda other: _milliseconds(other).median)
    pairs = zip(result.times.seconds, best.times.seconds)
    return Spread.of([one / other for one, other in pairs])


def _figure(results: Sequence[Result]) -> Figure:
    """Draws each method's median time with its range, and the prediction as a line."""
    cases = list(dict.fromkeys(result.case for result in results))
    methods = list(dict.fromkeys(result.method for result in results))
    size = (1.2 + 2.6 * len(cases), 3.2 + 0.2 * len(methods))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, len(cases), squeeze=False)[0]
    for axes, case in zip(panels, cases):
        for place, result in enumerate(result for result in results if result.case == case):
            time = _milliseconds(result)
            axes.bar(
                place,
                time.median,
                yerr=[[time.median - time.min], [time.max - time.median]],
                color=f"C{methods.index(result.method)}",
                label=str(result.method),
                capsize=3,
            )
            if result.predicted_seconds is not None:
                axes.plot(place, 1e3 * result.predicted_seconds, "_k", markersize=14)
        axes.set_xticks([])
        axes.set_title(case.name, fontsize=9)
    panels[0].set_ylabel("milliseconds; line: predicted")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", frameon=False)
    return figure
