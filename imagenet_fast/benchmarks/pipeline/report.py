"""The benchmark of pipelines as tables, a JSON file and a picture."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from imagenet_fast.base import environment
from imagenet_fast.base.files import write_results
from imagenet_fast.base.plotting import svg
from imagenet_fast.benchmarks.pipeline.compare import Limited, Memory, Timed, Traced
from imagenet_fast.benchmarks.pipeline.worker import Case
from imagenet_fast.benchmarks.report import STYLE
from imagenet_fast.benchmarks.timing import Spread
from imagenet_fast.cost_model.pipeline import ideal_bubble

Parts = Mapping[str, Sequence[Any]]

# Huang et al. 2018, table 2: throughput to that of 2 devices and 1 micro-batch, by devices and
# micro-batches: AmoebaNet-D (18, 256), whose stages are unequal, and Transformer-48.
PUBLISHED = {
    (2, 1): (1.0, 1.0),
    (4, 1): (1.13, 1.07),
    (8, 1): (1.38, 1.3),
    (2, 4): (1.07, 1.7),
    (4, 4): (1.26, 3.2),
    (8, 4): (1.72, 4.8),
    (2, 32): (1.21, 1.8),
    (4, 32): (1.84, 3.4),
    (8, 32): (3.48, 6.3),
}
_MIB = 2**20


def table(parts: Parts) -> str:
    """Returns the parts as text.

    Args:
      parts: what the functions of ``benchmarks.pipeline.PARTS`` returned, by name.
    """
    hardware = environment.hardware()
    lines = []
    for name, results in parts.items():
        title, rows = _TABLES[name]
        lines += [title, *rows(results), ""]
    return "\n".join([*lines, f"on {hardware['cpu']}, {hardware['cores']} cores"])


def write(parts: Parts, options: dict[str, Any], directory: str) -> list[str]:
    """Writes ``pipeline.txt``, ``pipeline.json`` and ``pipeline.svg``; returns their paths.

    Args:
      parts: as of :func:`table`.
      options: the benchmark's flags and their values.
      directory: where to write; made if it does not exist.

    Raises:
      UserError: if they cannot be written.
    """
    texts = {
        "pipeline.txt": table(parts) + "\n",
        "pipeline.json": _to_json(parts, options),
        "pipeline.svg": _picture(parts),
    }
    return write_results(directory, texts)


def _emulated(results: Sequence[Timed]) -> list[str]:
    base = _of(results, 2, 1).throughput
    lines = [
        "throughput to that of 2 devices and 1 micro-batch; the paper's, of AmoebaNet-D (18, 256) "
        "and Transformer-48, on TPUs",
        f"{_HEAD} {_SECONDS} {'simulated':>10} {'to it':>6} "
        f"{'bubble':>7} {'(K-1)/(M+K-1)':>14} {'throughput':>11} {'paper':>11}",
    ]
    for own in results:
        case = own.case
        published = PUBLISHED.get((case.stages, case.micro_batches))
        paper = "{:>5.2f} {:>5.2f}".format(*published) if published and _is_papers(case) else ""
        line = (
            f"{_told(case)} {_seconds(own.time)} "
            f"{own.simulated.seconds:>10.3f} {own.time.median / own.simulated.seconds:>6.3f} "
            f"{own.simulated.bubble:>7.1%} {ideal_bubble(case.stages, case.micro_batches):>14.1%} "
            f"{own.throughput / base:>11.2f} {paper:>11}"
        )
        lines.append(line.rstrip())
    return lines


def _timed(results: Sequence[Timed]) -> list[str]:
    lines = [f"{_HEAD} {_SECONDS} {'to 1':>6} {'simulated':>10}"]
    for own in results:
        # To one micro-batch of the same kind.
        base = next(other for other in results if _is_base(other.case, own.case))
        lines.append(
            f"{_told(own.case)} {_seconds(own.time)} "
            f"{own.time.median / base.time.median:>6.3f} "
            f"{own.simulated.seconds / base.simulated.seconds:>10.3f}"
        )
    return ["simulated: stages of equal work, to 1 micro-batch", *lines]


def _recomputation(results: Sequence[Timed]) -> list[str]:
    kept = next(own for own in results if own.case.rematerialize == "never")
    lines = [f"{_HEAD} {_SECONDS} {'share':>6}"]
    for own in results:
        share = 1 - kept.time.median / own.time.median
        lines.append(f"{_told(own.case)} {_seconds(own.time)} {share:>6.1%}")
    return lines


def _memory(results: Sequence[Memory]) -> list[str]:
    plain = results[0]
    lines = [
        f"{plain.blocks} equal blocks; MiB of the process that takes most; the paper's share is "
        "(N + L/K N/M) / (N L)",
        f"{_HEAD} {'before':>7} {'peak':>6} {'activations':>12} {'of plain':>9} {'paper':>7}",
    ]
    for own in results:
        published = own.case.stages and _is_papers(own.case)
        paper = f"{own.published_share:.1%}" if published else ""
        line = (
            f"{_told(own.case)} {own.before / _MIB:>7.0f} {own.peak / _MIB:>6.0f} "
            f"{own.activations / _MIB:>12.0f} {own.activations / plain.activations:>9.1%} "
            f"{paper:>7}"
        )
        lines.append(line.rstrip())
    return lines


def _limit(results: Sequence[Limited]) -> list[str]:
    limit = results[0].limit / _MIB
    lines = [f"each process may ask for {limit:.0f} MiB once it has started", _HEAD]
    for own in results:
        peaks = ", ".join(f"{peak / _MIB:.0f}" for peak in own.peaks)
        lines.append(f"{_told(own.case)}  " + (own.reason or f"trains, with {peaks} MiB"))
    return lines


def _graphs(results: Sequence[Traced]) -> list[str]:
    lines = [f"{_HEAD} {'nodes':>7} {'seconds: to trace':>18} {'first step':>11}"]
    for own in results:
        lines.append(
            f"{_told(own.case)} {own.nodes:>7,} {own.trace_seconds:>18.1f} "
            f"{own.first_seconds:>11.1f}"
        )
    return lines


_SECONDS = f"{'seconds: median':>16} {'min':>6} {'max':>6}"
_HEAD = f"{'stages':>6} {'micro-batches':>13} {'batch':>6} {'recomputed':>11} {'schedule':>9}"
# By part.
_TABLES: dict[str, tuple[str, Callable[[Sequence[Any]], list[str]]]] = {
    "emulated": ("Emulated devices, each with an equal part of the work", _emulated),
    "overlap": ("Two stages, each a process on a core of its own", _timed),
    "recomputation": (
        "Four stages on one core: the share of what is computed again",
        _recomputation,
    ),
    "memory": ("Peak memory", _memory),
    "memory_limit": ("A network that needs more memory than a process may take", _limit),
    "graphs": ("The graph of a step", _graphs),
}


def _told(case: Case) -> str:
    if not case.stages:
        return f"{'plain':>6} {'':>13} {case.batch:>6} {'':>11} {'':>9}"
    return (
        f"{case.stages:>6} {case.micro_batches:>13} {case.batch:>6} {case.rematerialize:>11} "
        f"{case.schedule:>9}"
    )


def _seconds(time: Spread) -> str:
    return f"{time.median:>16.3f} {time.min:>6.3f} {time.max:>6.3f}"


def _is_papers(case: Case) -> bool:
    """Whether it is scheduled as in the paper."""
    return case.rematerialize == "always" and case.schedule == "unrolled"


def _is_base(other: Case, case: Case) -> bool:
    """Whether one is the other's case with one micro-batch."""
    return other == case._replace(micro_batches=1, schedule="unrolled")


def _of(results: Sequence[Timed], stages: int, micro_batches: int) -> Timed:
    """Returns the one of so many, scheduled as in the paper."""
    return next(
        own for own in results if own.case[1:3] == (stages, micro_batches) and _is_papers(own.case)
    )


def _to_json(parts: Parts, options: dict[str, Any]) -> str:
    values = {
        **{name: [_values(own) for own in results] for name, results in parts.items()},
        "options": options,
        **environment.provenance(),
    }
    return json.dumps(values, indent=2) + "\n"


def _values(result: Any) -> dict[str, Any]:
    """Returns a result as JSON has it."""
    fields = (
        {own.name: getattr(result, own.name) for own in dataclasses.fields(result)}
        if dataclasses.is_dataclass(result)
        else result._asdict()
    )
    values = {**fields.pop("case")._asdict(), **fields}
    if isinstance(result, Timed):
        simulated = values.pop("simulated")
        values["seconds"] = [round(own, 6) for own in result.seconds]
        values["simulated_seconds"] = round(simulated.seconds, 6)
        values["simulated_bubble"] = round(simulated.bubble, 6)
    return values


def _picture(parts: Parts) -> str:
    """Draws the parts that are numbers; returns SVG."""
    drawn = [name for name in parts if name in _PANELS]
    with matplotlib.style.context(STYLE):
        figure = Figure(figsize=(4.6 * max(1, len(drawn)), 3.8), layout="constrained")
        for place, name in enumerate(drawn):
            axes = figure.add_subplot(1, len(drawn), place + 1)
            _PANELS[name](axes, parts[name])
            if axes.get_legend_handles_labels()[0]:
                axes.legend(frameon=False, fontsize=7)
        return svg(figure)


def _draw_emulated(axes: Axes, results: Sequence[Timed]) -> None:
    base = _of(results, 2, 1)
    counts = sorted({micro_batches for _, micro_batches in PUBLISHED})
    for color, count in enumerate(counts):
        own = [
            result
            for result in results
            if result.case.micro_batches == count
            and result.case.batch == base.case.batch
            and _is_papers(result.case)
        ]
        stages = [result.case.stages for result in own]
        axes.plot(
            stages,
            [result.throughput / base.throughput for result in own],
            "o",
            color=f"C{color}",
            label=f"{count} micro-batches, measured",
        )
        axes.plot(
            stages,
            [base.simulated.seconds / result.simulated.seconds for result in own],
            color=f"C{color}",
            linewidth=1,
        )
        paper = [(k, values[1]) for (k, m), values in sorted(PUBLISHED.items()) if m == count]
        axes.plot(*zip(*paper), "x", color=f"C{color}")
    axes.set_xlabel("devices, emulated")
    axes.set_title(
        "throughput to 2 devices and 1 micro-batch\n"
        "lines: simulated; crosses: the paper's, Transformer-48",
        fontsize=8,
        loc="left",
    )


def _draw_overlap(axes: Axes, results: Sequence[Timed]) -> None:
    for color, kept in enumerate(dict.fromkeys(own.case.rematerialize for own in results)):
        own = [
            result
            for result in results
            if result.case.rematerialize == kept and result.case.schedule == "unrolled"
        ]
        counts = [result.case.micro_batches for result in own]
        first = own[0]
        axes.plot(
            counts,
            [result.time.median / first.time.median for result in own],
            "o",
            color=f"C{color}",
            label=f"{kept} recomputed",
        )
        axes.plot(
            counts,
            [result.simulated.seconds / first.simulated.seconds for result in own],
            color=f"C{color}",
            linewidth=1,
        )
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1.1)
    axes.set_xlabel("micro-batches")
    axes.set_title(
        "time of a step on two cores, to 1 micro-batch\nlines: simulated", fontsize=8, loc="left"
    )


def _draw_memory(axes: Axes, results: Sequence[Memory]) -> None:
    plain = results[0]
    always = [own for own in results if own.case.stages and _is_papers(own.case)]
    for color, stages in enumerate(sorted({own.case.stages for own in always})):
        own = [result for result in always if result.case.stages == stages]
        counts = [result.case.micro_batches for result in own]
        axes.plot(
            counts,
            [result.activations / plain.activations for result in own],
            "o",
            color=f"C{color}",
            label=f"{stages} stage{'s' * (stages > 1)}",
        )
        axes.plot(
            counts, [result.published_share for result in own], "x", color=f"C{color}", markersize=9
        )
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1.1)
    axes.set_xlabel("micro-batches")
    axes.set_title(
        "memory of activations to the plain network's\ncrosses: N + L/K N/M", fontsize=8, loc="left"
    )


def _draw_graphs(axes: Axes, results: Sequence[Traced]) -> None:
    for schedule in dict.fromkeys(own.case.schedule for own in results):
        own = [result for result in results if result.case.schedule == schedule]
        axes.plot(
            [result.case.micro_batches for result in own],
            [result.trace_seconds + result.first_seconds for result in own],
            "o-",
            label=schedule,
        )
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("micro-batches")
    axes.set_title("seconds to trace and for the first step", fontsize=8, loc="left")


_PANELS: dict[str, Callable[[Axes, Sequence[Any]], None]] = {
    "emulated": _draw_emulated,
    "overlap": _draw_overlap,
    "memory": _draw_memory,
    "graphs": _draw_graphs,
}
