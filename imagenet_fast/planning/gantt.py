"""When the stages of a pipeline work on a batch, as a picture."""

from __future__ import annotations

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from imagenet_fast.base.plotting import FILE_STYLE, SENTINELS, svg
from imagenet_fast.cost_model.pipeline import Simulation

# By the kind of an interval, the names of colors.
_COLORS = {"forward": "validation", "recompute": "rate", "backward": "train"}
# A number is written into what takes at least this share of the batch's time.
_WIDE = 0.018


def gantt(simulation: Simulation, title: str, unit: str, scale: float = 1.0) -> str:
    """Returns the work of each device along the time as an SVG file.

    Args:
      simulation: of a batch.
      title: written above.
      unit: of the time's axis.
      scale: of what the simulation counts in, in this unit.
    """
    with matplotlib.style.context(FILE_STYLE):
        figure = Figure(figsize=(9.0, 1.3 + 0.3 * simulation.stages), layout="constrained")
        axes = figure.add_subplot()
        _draw(axes, simulation, scale)
        axes.set_yticks(range(simulation.stages))
        axes.set_ylabel("stage")
        axes.set_xlabel(unit)
        axes.set_xlim(0, simulation.seconds * scale)
        axes.set_ylim(-0.55, simulation.stages - 0.45)
        color = SENTINELS["muted"]
        figure.suptitle(title, x=0.01, ha="left", fontsize=9, color=color)
        kinds = [kind for kind in _COLORS if any(own.kind == kind for own in simulation.intervals)]
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
    for own in simulation.intervals:
        span = (own.begin * scale, (own.end - own.begin) * scale)
        color = SENTINELS[_COLORS[own.kind]]
        axes.broken_barh([span], (own.stage - 0.42, 0.84), color=color, edgecolor="white", lw=0.3)
        if own.end - own.begin >= _WIDE * simulation.seconds:
            axes.text(
                span[0] + span[1] / 2,
                own.stage,
                str(own.micro_batch),
                ha="center",
                va="center",
                size=7,
                color="white",
            )
