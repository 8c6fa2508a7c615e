"""Gantt charts of pipeline schedules."""

from __future__ import annotations

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from imagenet_fast.base.plotting import FILE_STYLE, SENTINELS, svg
from imagenet_fast.pipeline_parallel.simulation import Simulation

# The colour of each kind of interval.
_COLORS = {"forward": "validation", "recompute": "rate", "backward": "train"}
# The shortest interval with a label, as a fraction of the batch's time.
_LABELED = 0.018


def gantt(simulation: Simulation, title: str, unit: str, scale: float = 1.0) -> str:
    """Returns a chart of each device's work over time as an SVG file.

    Of several stages on a device, later ones are paler.

    ``scale`` is the factor from the simulation's unit of time to the time axis' ``unit``.
    """
    with matplotlib.style.context(FILE_STYLE):
        figure = Figure(figsize=(9.0, 1.3 + 0.3 * simulation.devices), layout="constrained")
        axes = figure.add_subplot()
        _draw(axes, simulation, scale)
        axes.set_yticks(range(simulation.devices))
        stages = 1 + max(interval.stage for interval in simulation.intervals)
        axes.set_ylabel("stage" if stages == simulation.devices else "device")
        axes.set_xlabel(unit)
        axes.set_xlim(0, simulation.seconds * scale)
        axes.set_ylim(-0.55, simulation.devices - 0.45)
        color = SENTINELS["muted"]
        figure.suptitle(title, x=0.01, ha="left", fontsize=9, color=color)
        drawn = {interval.kind for interval in simulation.intervals}
        kinds = [kind for kind in _COLORS if kind in drawn]
        figure.legend(
            handles=[Patch(color=SENTINELS[_COLORS[kind]], label=kind) for kind in kinds],
            loc="outside lower left",
            ncols=len(kinds),
            frameon=False,
            fontsize=9,
            labelcolor=color,
        )
        return svg(figure)


def _draw(axes: Axes, simulation: Simulation, scale: float) -> None:
    for stage, micro_batch, kind, begin, end in simulation.intervals:
        place, device = divmod(stage, simulation.devices)
        span, color = (begin * scale, (end - begin) * scale), SENTINELS[_COLORS[kind]]
        axes.broken_barh(
            [span],
            (device - 0.42, 0.84),
            color=color,
            edgecolor="white",
            lw=0.3,
            alpha=max(0.4, 1 - 0.35 * place),
        )
        if end - begin >= _LABELED * simulation.seconds:
            axes.text(
                span[0] + span[1] / 2,
                device,
                str(micro_batch),
                ha="center",
                va="center",
                size=7,
                color="white",
            )
