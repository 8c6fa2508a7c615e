"""The report of the serving benchmark: speed, latency and memory of each format."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from imagenet_fast.lab.benchmarks.report import (
    Report,
    aligned,
    cpu,
    draw_bars,
    spread_cells,
    values_of,
)
from imagenet_fast.lab.benchmarks.serving.compare import ServingResult
from imagenet_fast.lab.benchmarks.timing import Spread

_PERCENTILES = (50, 95, 99)
_HEAD = (
    *("", "images/s", "min", "max", "ms: median", "p95", "p99", "memory", "peak"),
    "same top 5 as evaluation",
)


def make_report(results: Sequence[ServingResult]) -> Report:
    """Returns the report of the results of all batch sizes."""
    first = results[0]
    lines = []
    for result in results:
        rows = [_HEAD, *(_cells(result, index) for index in range(len(result.latencies)))]
        table = aligned(rows, left=(0, len(_HEAD) - 1))
        lines += [result.comparison.title, *table, ""]
    versions = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    lines += [
        f"images/s: medians of {first.comparison.repeats} repeats; ms: percentiles of all "
        f"{len(first.latencies[0])} calls",
        "memory: MB of a process that only serves, with the runtime loaded and at its peak",
        f"on {cpu()}; {versions}",
    ]
    values = {
        "n": first.comparison.repeats,
        "parts": {f"batch {result.batch_size}": _values(result) for result in results},
    }
    return Report("\n".join(lines), values, lambda: _figure(results), first.versions)


def _cells(result: ServingResult, index: int) -> list[str]:
    agreement = result.agreements[index]
    return [
        result.comparison.names[index],
        *spread_cells(result.comparison.images_per_second(index), ",.1f"),
        *(f"{latency:.2f}" for latency in _milliseconds(result, index)),
        _megabytes(result.memory[index]),
        _megabytes(result.peak_memory[index]),
        f"{agreement.same} of {agreement.images}; probabilities to {agreement.difference:.0e}",
    ]


def _milliseconds(result: ServingResult, index: int) -> list[float]:
    """Returns the percentiles of a format's latencies."""
    return np.percentile(1e3 * np.array(result.latencies[index]), _PERCENTILES).tolist()


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f}" if count else "?"


def _values(result: ServingResult) -> dict[str, Any]:
    formats = {
        name: {
            "images_per_second": result.comparison.images_per_second(index),
            "latency_ms": dict(zip(("median", "p95", "p99"), _milliseconds(result, index))),
            "memory_bytes": result.memory[index],
            "peak_memory_bytes": result.peak_memory[index],
            "agreement": dataclasses.asdict(result.agreements[index]),
            "each_call_seconds": values_of(result.latencies[index]),
            "each_turn_cpu_seconds": values_of(result.comparison.times[index].cpu_seconds),
        }
        for index, name in enumerate(result.comparison.names)
    }
    return {"title": result.comparison.title, "images": result.comparison.images, "ways": formats}


def _figure(results: Sequence[ServingResult]) -> Figure:
    """Draws speed, latency and memory of each format, a row for each batch size."""
    figure = Figure(figsize=(9.6, 0.7 + 1.9 * len(results)), layout="constrained")
    rows = figure.subplots(len(results), 3, squeeze=False, sharey="row")
    for result, row in zip(results, rows):
        formats = range(len(result.comparison.names))
        latencies = [_milliseconds(result, index) for index in formats]
        panels = (
            [result.comparison.images_per_second(index) for index in formats],
            [Spread(median, median, p99) for median, _, p99 in latencies],
            [Spread(*[peak / 1e6] * 3) for peak in result.peak_memory],
        )
        for axes, spreads in zip(row, panels):
            draw_bars(axes, result.comparison.names, spreads, [f"C{index}" for index in formats])
            axes.margins(x=0.15)
        row[0].invert_yaxis()
        row[0].set_title(result.comparison.title, fontsize=9, loc="left")
    labels = ("images/s: median and range", "ms per call: median, to p99", "peak memory, MB")
    for axes, label in zip(rows[-1], labels):
        axes.set_xlabel(label)
    return figure
