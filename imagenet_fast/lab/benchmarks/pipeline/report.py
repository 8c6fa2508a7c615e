"""The report of the pipeline benchmark: a table for each part, and plots of most of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from imagenet_fast.base.terminal import aligned
from imagenet_fast.lab.benchmarks.pipeline.compare import (
    GraphSize,
    LimitedRun,
    MemoryUse,
    ScheduleEstimate,
    StepTimes,
    estimates,
)
from imagenet_fast.lab.benchmarks.pipeline.worker import Case
from imagenet_fast.lab.benchmarks.report import Report, cpu, spread_cells, values_of
from imagenet_fast.lab.planning.cost_model.pipeline import ideal_bubble

# Huang et al. 2018, table 2: throughput relative to 2 devices and 1 micro-batch, by devices and
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


def make_report(parts: Mapping[str, Sequence[Any]]) -> Report:
    """Returns the report of results of functions in ``compare.PARTS``, by their names."""
    lines = []
    for name, results in parts.items():
        title, table = _TABLES[name]
        lines += [title, *table(results), ""]
    values = {name: [_values(result) for result in results] for name, results in parts.items()}
    return Report("\n".join([*lines, f"on {cpu()}"]), values, lambda: _figure(parts))


def _emulated(results: Sequence[StepTimes]) -> list[str]:
    base = _find(results, 2, 1).throughput
    rows = [[*_TIME_HEAD, "simulated", "to it", "bubble", "(K-1)/(M+K-1)", "throughput", "paper"]]
    for result in results:
        case = result.case
        published = PUBLISHED.get((case.stages, case.micro_batches))
        rows.append(
            [
                *_time_cells(result),
                f"{result.simulated.seconds:.3f}",
                f"{result.time.median / result.simulated.seconds:.3f}",
                f"{result.simulated.bubble:.1%}",
                f"{ideal_bubble(case.devices, case.micro_batches):.1%}",
                f"{result.throughput / base:.2f}",
                "{:.2f} {:>5.2f}".format(*published) if published and _as_in_paper(case) else "",
            ]
        )
    return [
        "throughput: relative to 2 devices and 1 micro-batch; paper: AmoebaNet-D (18, 256) and "
        "Transformer-48 on TPUs",
        *aligned(rows, left=()),
    ]


def _estimates(results: Sequence[ScheduleEstimate]) -> list[str]:
    rows = [["devices", "micro-batches", "schedule", *_SCHEDULE_HEAD]]
    for result in results:
        rows.append(
            [str(result.devices), str(result.micro_batches), result.schedule, *_estimated(result)]
        )
    return aligned(rows, left=(2,))


def _schedules(results: Sequence[StepTimes]) -> list[str]:
    theory = {tuple(result[:3]): result for result in estimates()}
    rows = [[*_TIME_HEAD, "to simulated", "bubble", *_SCHEDULE_HEAD]]
    for result in results:
        case, simulation = result.case, result.simulated
        rows.append(
            [
                *_time_cells(result),
                f"{result.time.median / simulation.seconds:.3f}",
                f"{_bubble(result):.1%}",
                *_estimated(theory[case.schedule, case.devices, case.micro_batches]),
            ]
        )
    return aligned(rows, left=())


def _bubble(result: StepTimes) -> float:
    """Returns the measured fraction of the devices' time in which they are idle."""
    work = result.simulated.seconds * (1 - result.simulated.bubble)
    return 1 - work / result.time.median


def _estimated(result: ScheduleEstimate) -> list[str]:
    return [
        f"{result.bubble:.1%}",
        f"{result.ideal_bubble:.1%}",
        f"{result.stored:g}",
        f"{result.ideal_stored:g}",
    ]


def _overlap(results: Sequence[StepTimes]) -> list[str]:
    rows = [[*_TIME_HEAD, "to 1", "simulated"]]
    for result in results:
        case = result.case._replace(micro_batches=1, schedule="gpipe")
        base = next(other for other in results if other.case == case)
        rows.append(
            [
                *_time_cells(result),
                f"{result.time.median / base.time.median:.3f}",
                f"{result.simulated.seconds / base.simulated.seconds:.3f}",
            ]
        )
    return [
        "to 1: relative to 1 micro-batch; simulated: the same, with stages of equal work",
        *aligned(rows, left=()),
    ]


def _recomputation(results: Sequence[StepTimes]) -> list[str]:
    kept = next(result for result in results if result.case.rematerialize == "never")
    rows = [[*_TIME_HEAD, "fraction"]]
    for result in results:
        rows.append([*_time_cells(result), f"{1 - kept.time.median / result.time.median:.1%}"])
    return aligned(rows, left=())


def _memory(results: Sequence[MemoryUse]) -> list[str]:
    plain = results[0]
    rows = [[*_CASE_HEAD, "before", "peak", "activations", "of plain", "paper"]]
    for result in results:
        published = result.case.stages and _as_in_paper(result.case)
        rows.append(
            [
                *_case_cells(result.case),
                *(f"{size / _MIB:.0f}" for size in (result.before, result.peak)),
                f"{result.activations / _MIB:.0f}",
                f"{result.activations / plain.activations:.1%}",
                f"{result.published_fraction:.1%}" if published else "",
            ]
        )
    return [
        f"{plain.blocks} equal blocks; MiB of the process with the most; paper: "
        "(N + L/K N/M) / (N L)",
        *aligned(rows, left=()),
    ]


def _limit(results: Sequence[LimitedRun]) -> list[str]:
    rows = [[*_CASE_HEAD, ""]]
    for result in results:
        peaks = ", ".join(f"{peak / _MIB:.0f}" for peak in result.peaks)
        rows.append([*_case_cells(result.case), result.reason or f"trains, with {peaks} MiB"])
    limit = results[0].limit / _MIB
    return [
        f"each process may allocate {limit:.0f} MiB after its start",
        *aligned(rows, left=(len(_CASE_HEAD),)),
    ]


def _graphs(results: Sequence[GraphSize]) -> list[str]:
    rows = [[*_CASE_HEAD, "nodes", "seconds to trace", "first step"]]
    for result in results:
        seconds = (f"{value:.1f}" for value in (result.trace_seconds, result.first_seconds))
        rows.append([*_case_cells(result.case), f"{result.nodes:,}", *seconds])
    return aligned(rows, left=())


_CASE_HEAD = ("stages", "micro-batches", "batch", "recomputed", "schedule")
_TIME_HEAD = (*_CASE_HEAD, "seconds: median", "min", "max")
# The title and the function that makes the table of each part.
_SCHEDULE_HEAD = ("simulated bubble", "paper", "simulated stored", "paper")
_TABLES: dict[str, tuple[str, Callable[[Sequence[Any]], list[str]]]] = {
    "estimates": (
        "Equal stages, stored activations: bubbles, and micro-batches stored on a device",
        _estimates,
    ),
    "schedules": ("All schedules on emulated devices, with stored activations", _schedules),
    "emulated": ("Emulated devices with equal work", _emulated),
    "overlap": ("Two stages, each in a process on its own core", _overlap),
    "recomputation": (
        "Four stages on one core: the fraction of time that recomputation takes",
        _recomputation,
    ),
    "memory": ("Peak memory", _memory),
    "memory_limit": ("A network that needs more memory than a process may have", _limit),
    "graphs": ("The graph of a step", _graphs),
}


def _case_cells(case: Case) -> list[str]:
    if not case.stages:
        return ["plain", "", str(case.batch), "", ""]
    return list(map(str, (case[1], case[2], case.batch, case.rematerialize, case.schedule)))


def _time_cells(result: StepTimes) -> list[str]:
    return [*_case_cells(result.case), *spread_cells(result.time, ".3f")]


def _as_in_paper(case: Case) -> bool:
    """Whether the schedule and recomputation are those of Huang et al. 2018."""
    return case.rematerialize == "always" and case.schedule == "gpipe"


def _find(results: Sequence[StepTimes], stages: int, micro_batches: int) -> StepTimes:
    """Returns the result of these numbers with the paper's schedule."""
    return next(
        result
        for result in results
        if result.case[1:3] == (stages, micro_batches) and _as_in_paper(result.case)
    )


def _values(result: Any) -> dict[str, Any]:
    """Returns a result as JSON values, with the case's fields among its own."""
    values = result._asdict()
    if "case" in values:
        values = {**values.pop("case")._asdict(), **values}
    if isinstance(result, StepTimes):
        simulated = values.pop("simulated")
        values["seconds"] = values_of(result.seconds)
        values["simulated_seconds"] = round(simulated.seconds, 6)
        values["simulated_bubble"] = round(simulated.bubble, 6)
    return values


def _figure(parts: Mapping[str, Sequence[Any]]) -> Figure:
    drawn = [name for name in parts if name in _PANELS]
    figure = Figure(figsize=(4.6 * max(1, len(drawn)), 3.8), layout="constrained")
    for place, name in enumerate(drawn):
        axes = figure.add_subplot(1, len(drawn), place + 1)
        _PANELS[name](axes, parts[name])
        axes.legend(frameon=False, fontsize=7)
    return figure


def _draw_emulated(axes: Axes, results: Sequence[StepTimes]) -> None:
    base = _find(results, 2, 1)
    for color, count in enumerate(sorted({micro_batches for _, micro_batches in PUBLISHED})):
        shown = [
            result
            for result in results
            if result.case.micro_batches == count
            and result.case.batch == base.case.batch
            and _as_in_paper(result.case)
        ]
        _draw_series(
            axes,
            color,
            f"{count} micro-batches, measured",
            [result.case.stages for result in shown],
            [result.throughput / base.throughput for result in shown],
            [base.simulated.seconds / result.simulated.seconds for result in shown],
        )
        paper = [(k, values[1]) for (k, m), values in sorted(PUBLISHED.items()) if m == count]
        axes.plot(*zip(*paper), "x", color=f"C{color}")
    axes.set_xlabel("emulated devices")
    _set_title(
        axes,
        "throughput relative to 2 devices and 1 micro-batch\n"
        "lines: simulated; crosses: paper, Transformer-48",
    )


def _draw_schedules(axes: Axes, results: Sequence[StepTimes]) -> None:
    groups = list(dict.fromkeys((r.case.devices, r.case.micro_batches) for r in results))
    for color, schedule in enumerate(dict.fromkeys(result.case.schedule for result in results)):
        shown = [result for result in results if result.case.schedule == schedule]
        places = [
            groups.index((result.case.devices, result.case.micro_batches)) + 0.2 * (color - 1)
            for result in shown
        ]
        axes.bar(places, [_bubble(result) for result in shown], width=0.18, label=schedule)
        axes.plot(places, [result.simulated.bubble for result in shown], "k_", markersize=7)
    axes.set_xticks(range(len(groups)), [f"{devices} / {count}" for devices, count in groups])
    axes.set_xlabel("devices / micro-batches")
    _set_title(axes, "bubble, measured on emulated devices\nblack lines: simulated")


def _draw_overlap(axes: Axes, results: Sequence[StepTimes]) -> None:
    for color, kept in enumerate(dict.fromkeys(result.case.rematerialize for result in results)):
        first, *others = [
            result
            for result in results
            if result.case.rematerialize == kept and result.case.schedule == "gpipe"
        ]
        _draw_series(
            axes,
            color,
            f"{kept} recomputed",
            [result.case.micro_batches for result in (first, *others)],
            [result.time.median / first.time.median for result in (first, *others)],
            [result.simulated.seconds / first.simulated.seconds for result in (first, *others)],
        )
    _set_micro_batches_axis(axes, top=1.1)
    _set_title(axes, "step time on two cores relative to 1 micro-batch\nlines: simulated")


def _draw_memory(axes: Axes, results: Sequence[MemoryUse]) -> None:
    plain = results[0]
    always = [result for result in results if result.case.stages and _as_in_paper(result.case)]
    for color, stages in enumerate(sorted({result.case.stages for result in always})):
        shown = [result for result in always if result.case.stages == stages]
        counts = [result.case.micro_batches for result in shown]
        measured = [result.activations / plain.activations for result in shown]
        label = f"{stages} stage{'s' * (stages > 1)}"
        axes.plot(counts, measured, "o", color=f"C{color}", label=label)
        published = [result.published_fraction for result in shown]
        axes.plot(counts, published, "x", color=f"C{color}", markersize=9)
    _set_micro_batches_axis(axes, top=1.1)
    _set_title(axes, "activation memory relative to the plain network\ncrosses: N + L/K N/M")


def _draw_graphs(axes: Axes, results: Sequence[GraphSize]) -> None:
    for schedule in dict.fromkeys(result.case.schedule for result in results):
        shown = [result for result in results if result.case.schedule == schedule]
        axes.plot(
            [result.case.micro_batches for result in shown],
            [result.trace_seconds + result.first_seconds for result in shown],
            "o-",
            label=schedule,
        )
    _set_micro_batches_axis(axes)
    _set_title(axes, "seconds to trace and for the first step")


def _draw_series(
    axes: Axes,
    color: int,
    label: str,
    places: Sequence[int],
    measured: Sequence[float],
    simulated: Sequence[float],
) -> None:
    """Draws measurements as dots and their simulation as a line."""
    axes.plot(places, measured, "o", color=f"C{color}", label=label)
    axes.plot(places, simulated, color=f"C{color}", linewidth=1)


def _set_micro_batches_axis(axes: Axes, top: float | None = None) -> None:
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0, top=top)
    axes.set_xlabel("micro-batches")


def _set_title(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=8, loc="left")


_PANELS: dict[str, Callable[[Axes, Sequence[Any]], None]] = {
    "emulated": _draw_emulated,
    "schedules": _draw_schedules,
    "overlap": _draw_overlap,
    "memory": _draw_memory,
    "graphs": _draw_graphs,
}
