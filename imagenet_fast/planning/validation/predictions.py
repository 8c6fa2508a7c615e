"""The cost model's predictions of published training times."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib.style
from matplotlib.figure import Figure
from tqdm import tqdm

from imagenet_fast.base import environment
from imagenet_fast.base.plotting import FILE_STYLE, SENTINELS, svg
from imagenet_fast.config import Config
from imagenet_fast.cost_model.accelerators import accelerator
from imagenet_fast.cost_model.compute import Efficiency, StepWork
from imagenet_fast.cost_model.fusion import best_segments
from imagenet_fast.cost_model.pipeline import BlockCost, simulate
from imagenet_fast.cost_model.step_time import ChipCluster, StepTime, step_time
from imagenet_fast.pipeline_parallel.orders import tasks
from imagenet_fast.pipeline_parallel.partition import bounds
from imagenet_fast.planning.step_costs import Block, block_seconds, count_blocks, count_step
from imagenet_fast.planning.validation.published import (
    ROWS,
    STACKS,
    DataParallel,
    Options,
    Pipelined,
    PublishedResult,
)

# Momentum alone.
_SLOTS = 1
# An error above it is told with its reason.
_TOO_MUCH = 0.25


class Prediction(NamedTuple):
    """What our model says of a published number.

    Attributes:
      row: the number.
      value: in its unit.
    """

    row: PublishedResult
    value: float

    @property
    def error(self) -> float:
        """By how much of the published number it is too much."""
        return self.value / self.row.value - 1


class Cut(NamedTuple):
    """Where gradients are cut into segments, and how long is waited for their sums.

    Attributes:
      name: of the run.
      published: after which gradients a new segment began.
      best: what our model finds best of as many segments.
      waited: seconds with the published ones, after the backward pass.
      waited_best: with the best ones.
      step: seconds of the step with the published ones.
    """

    name: str
    published: tuple[int, ...]
    best: tuple[int, ...]
    waited: float
    waited_best: float
    step: float

    def __str__(self) -> str:
        cuts = ["|".join(map(str, own)) for own in (self.published, self.best)]
        return (
            f"{self.name}: published after {cuts[0]}, waits {1e3 * self.waited:.1f} ms; best after "
            f"{cuts[1]}, {1e3 * self.waited_best:.1f} ms: "
            f"{(self.waited - self.waited_best) / self.step:.2%} of the step's "
            f"{1e3 * self.step:.0f} ms are lost"
        )


class Scaling(NamedTuple):
    """How a run scales, and would with less done for its sums.

    Attributes:
      name: of the run.
      published: images a second of each chip, to those of one that trains alone.
      predicted: the same by our model.
      flat: with one ring over all chips instead of hierarchical sums.
      unfused: with a sum for each gradient instead of segments.
      neither: without both.
    """

    name: str
    published: float
    predicted: float
    flat: float
    unfused: float
    neither: float

    def __str__(self) -> str:
        return (
            f"{self.name}: published {self.published:.2f}, predicted {self.predicted:.3f}; in a "
            f"flat ring {self.flat:.3f}, each gradient alone {self.unfused:.3f}, both "
            f"{self.neither:.3f}"
        )


@dataclasses.dataclass(frozen=True)
class Validation:
    """What our model says of all published numbers.

    Attributes:
      predictions: of them.
      cuts: of gradients, in runs that were published with theirs.
      scalings: of those of them that were published with how they scale.
    """

    predictions: tuple[Prediction, ...]
    cuts: tuple[Cut, ...] = ()
    scalings: tuple[Scaling, ...] = ()

    @property
    def tested(self) -> list[Prediction]:
        """Those to which no constant was fitted."""
        return [own for own in self.predictions if not own.row.fits]

    @property
    def median_error(self) -> float:
        """Of the size of the errors of those."""
        return statistics.median(abs(own.error) for own in self.tested)

    @property
    def missed(self) -> list[Prediction]:
        """Those with too great an error."""
        return [own for own in self.tested if abs(own.error) > _TOO_MUCH]

    def table(self) -> str:
        """Returns all of it as text."""
        width = max(len(own.row.name) for own in self.predictions)
        lines = []
        for source, group in itertools.groupby(self.predictions, lambda own: own.row.source):
            lines += [source, *(f"  {_line(own, width)}" for own in group), ""]
        lines += [
            f"{len(self.tested)} numbers to which nothing was fitted: median error "
            f"{self.median_error:.1%}, {len(self.missed)} over {_TOO_MUCH:.0%}:",
            *(f"  {own.row.name} ({own.error:+.0%}): {own.row.why}" for own in self.missed),
            "",
            "segments of gradients",
            *(f"  {own}" for own in self.cuts),
            "",
            "scaling with less done for sums",
            *(f"  {own}" for own in self.scalings),
            "",
            f"constants, each fitted to the rows marked so; of the memory's bandwidth, all reach "
            f"{next(iter(STACKS.values())).memory:.0%}",
        ]
        lines += [f"  {name:25} {_constants(own)}" for name, own in STACKS.items()]
        return "\n".join(lines)

    def files(self) -> dict[str, str]:
        """Returns the text of each file to keep, by its name."""
        return {
            "validation.txt": self.table() + "\n",
            "validation.json": self.json(),
            "validation.svg": self.picture(),
        }

    def json(self) -> str:
        """Returns all of it for machines."""
        rows = [
            {
                "name": own.row.name,
                "source": own.row.source,
                "unit": own.row.unit,
                "published": own.row.value,
                "predicted": own.value,
                "error": own.error,
                "fitted": own.row.fits,
                "constants": own.row.stack,
                "why": own.row.why,
            }
            for own in self.predictions
        ]
        values = {
            "median_error": self.median_error,
            "tested": len(self.tested),
            "missed": [own.row.name for own in self.missed],
            "rows": rows,
            "cuts": [own._asdict() for own in self.cuts],
            "scalings": [own._asdict() for own in self.scalings],
            "constants": {name: dataclasses.asdict(own) for name, own in STACKS.items()},
            **environment.provenance(),
        }
        return json.dumps(values, indent=2) + "\n"

    def picture(self) -> str:
        """Returns the ratios of predicted to published as SVG."""
        with matplotlib.style.context(FILE_STYLE):
            figure = Figure(figsize=(8.0, 0.6 + 0.17 * len(self.predictions)), layout="constrained")
            axes = figure.add_subplot()
            for place, own in enumerate(reversed(self.predictions)):
                kind = "muted" if own.row.fits else "validation"
                axes.plot(1 + own.error, place, "o", color=SENTINELS[kind], ms=4)
            axes.axvline(1, color=SENTINELS["muted"], lw=0.9)
            axes.axvspan(1 - _TOO_MUCH, 1 + _TOO_MUCH, color=SENTINELS["grid"], alpha=0.5)
            names = [own.row.name for own in reversed(self.predictions)]
            axes.set_yticks(range(len(names)), names, fontsize=7)
            axes.set_ylim(-0.7, len(names) - 0.3)
            axes.set_xlabel("predicted to published; grey: what a constant was fitted to")
            return svg(figure)


def _line(own: Prediction, width: int) -> str:
    row = own.row
    told = "fitted" if row.fits else f"{own.error:+.1%}"
    return f"{row.name:{width}} {row.value:>12,.5g} {own.value:>12,.5g} {row.unit:9} {told:>7}"


def _constants(own: Efficiency) -> str:
    rows = f", half of it with {own.half_rows:,.0f} rows" if own.half_rows else ""
    fused = "; fused" if own.fuses else ""
    return f"{own.matrix:.1%} of the peak in matrices{rows}{fused}"


def validate(
    rows: Sequence[PublishedResult] = ROWS, stacks: Mapping[str, Efficiency] = STACKS
) -> Validation:
    """Returns the predictions of published numbers.

    Args:
      rows: which.
      stacks: the constants of each software.
    """
    found = []
    for row in tqdm(rows, "predicting", unit=" rows", dynamic_ncols=True, disable=None):
        own, to = (
            images_per_second(run, stacks[row.stack]) if run else 1.0 for run in (row.run, row.to)
        )
        found.append(Prediction(row, row.told(own, to)))
    segmented = [own for own in found if _has_segments(own.row)]
    # Segments were published of 1,024 GPUs.
    cuts = [
        cut_of(own.row, stacks[own.row.stack]) for own in segmented if own.row.run.chips == 1024
    ]
    scalings = [
        scaling_of(own, stacks[own.row.stack]) for own in segmented if own.row.unit == "scaling"
    ]
    return Validation(tuple(found), tuple(cuts), tuple(scalings))


def _has_segments(row: PublishedResult) -> bool:
    return isinstance(row.run, DataParallel) and bool(row.run.segments)


def cut_of(row: PublishedResult, efficiency: Efficiency) -> Cut:
    """Returns how good a run's segments of gradients are.

    Args:
      row: of the run.
      efficiency: of its software.
    """
    run = row.run
    assert isinstance(run, DataParallel) and run.segments
    cluster, step = _cluster(run), _counted(_key(run.network), _images(run))
    published = _step_time(run, efficiency)
    sizes = [run.gradient_bytes * own.elements for own in step.gradients]
    count = len(run.segments) + 1
    known, cost = published.compute.known, cluster.sum_cost(run.all_reduce)
    best = best_segments(known, sizes, cost, count)
    found = _step_time(dataclasses.replace(run, segments=best), efficiency)
    return Cut(row.name, run.segments, best, published.exposed, found.exposed, published.total)


def scaling_of(prediction: Prediction, efficiency: Efficiency) -> Scaling:
    """Returns how a run would scale with less done for its sums.

    Args:
      prediction: of how it scales.
      efficiency: of its software.
    """
    row = prediction.row
    run = row.run
    assert isinstance(run, DataParallel) and row.to
    to = images_per_second(row.to, efficiency)
    gradients = len(_counted(_key(run.network), _images(run)).gradients)
    alone = tuple(range(1, gradients))

    def scaled(**changes: Any) -> float:
        return row.told(images_per_second(dataclasses.replace(run, **changes), efficiency), to)

    return Scaling(
        name=row.name,
        published=row.value,
        predicted=prediction.value,
        flat=scaled(all_reduce="flat"),
        unfused=scaled(segments=alone),
        neither=scaled(all_reduce="flat", segments=alone),
    )


def fitted(stack: str, rows: Sequence[PublishedResult] = ROWS) -> Efficiency:
    """Returns a software's constants with which its rows that say so are met.

    The fraction of the peak that matrix operations reach is fitted to the first of them, and the
    rows with which they reach half of that to the second, if there are two.

    Args:
      stack: its name.
      rows: among which its own are.
    """
    first, *second = [own for own in rows if own.stack == stack and own.fits]
    start = dataclasses.replace(STACKS[stack], half_rows=0.0)

    def with_half_rows(half_rows: float) -> Efficiency:
        own = dataclasses.replace(start, half_rows=half_rows)

        def too_slow(matrix: float) -> bool:
            found = dataclasses.replace(own, matrix=matrix)
            return images_per_second(first.run, found) < first.images_per_second

        return dataclasses.replace(own, matrix=_bisected(too_slow, 0.01, 3.0))

    if not second:
        return with_half_rows(STACKS[stack].half_rows)

    def too_fast(half_rows: float) -> bool:
        found = images_per_second(second[0].run, with_half_rows(half_rows))
        return found > second[0].images_per_second

    return with_half_rows(_bisected(too_fast, 0.0, 1e5))


def _bisected(below: Callable[[float], bool], low: float, high: float) -> float:
    """Returns where ``below`` becomes false, to four digits."""
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return (low + high) / 2


def images_per_second(run: DataParallel | Pipelined, efficiency: Efficiency) -> float:
    """Returns the throughput of a run.

    Args:
      run: of what, and where.
      efficiency: of its software.
    """
    if isinstance(run, Pipelined):
        return _through_pipeline(run, efficiency)
    return run.batch / _step_time(run, efficiency).total


def _cluster(run: DataParallel) -> ChipCluster:
    return ChipCluster.of(run.accelerator, run.chips, run.network_gbits)


def _images(run: DataParallel) -> int:
    """Returns the images of a replica."""
    return run.batch // _cluster(run).replicas


def _step_time(run: DataParallel, efficiency: Efficiency) -> StepTime:
    return step_time(
        _counted(_key(run.network), _images(run)),
        _cluster(run),
        efficiency,
        algorithm=run.all_reduce,
        gradient_bytes=run.gradient_bytes,
        segments=run.segments,
        batch_norm_group=max(1, run.batch_norm_batch // _images(run)),
    )


def _through_pipeline(run: Pipelined, efficiency: Efficiency) -> float:
    """The throughput of one pipeline, whose stages send each other what a link takes."""
    chip = accelerator(run.accelerator)
    counted = _counted_blocks(_key(run.network), run.batch // run.micro_batches)
    blocks = block_seconds(counted, _config(run.network).precision, chip, efficiency)
    *balance, _ = run.balance or by_cumulative_work(blocks, run.stages)
    balance.append(len(blocks) - sum(balance))
    stages = [
        functools.reduce(BlockCost.followed_by, blocks[first:end])
        for first, end in bounds(balance, len(blocks), run.stages)
    ]
    simulation = simulate(
        tasks("unrolled", run.stages, run.micro_batches),
        [own.forward for own in stages],
        [own.backward for own in stages],
        transfer=[own.output_bytes / chip.link for own in stages[:-1]],
        rematerialize=run.rematerialize,
    )
    return run.batch / simulation.seconds


def by_cumulative_work(blocks: Sequence[BlockCost], stages: int) -> list[int]:
    """Returns the balance of lingvo's GPipe: a block's stage is where the work before it ends.

    Its code gives block i to stage ``min(int(K * share), K - 1)``, of the fraction of the work that
    is done after it.

    Args:
      blocks: with their costs.
      stages: how many.
    """
    whole = sum(own.work for own in blocks)
    counts = [0] * stages
    done = 0.0
    for own in blocks:
        done += own.work
        counts[min(int(stages * done / whole), stages - 1)] += 1
    return counts


@functools.cache
def _counted(network: tuple[tuple[str, object], ...], images: int) -> StepWork:
    return count_step(_config(dict(network)), images, 1, _SLOTS)


@functools.cache
def _counted_blocks(network: tuple[tuple[str, object], ...], images: int) -> list[Block]:
    return count_blocks(_config(dict(network)), images)


def _key(network: Options) -> tuple[tuple[str, object], ...]:
    return tuple(sorted(network.items()))


def _config(network: Options) -> Config:
    return Config(**{"synthetic": True, "num_classes": 1000, **network})
