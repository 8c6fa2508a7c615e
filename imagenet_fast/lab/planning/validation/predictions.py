"""The cost model's predictions of published training times."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib.style
from matplotlib.figure import Figure
from tqdm import tqdm

from imagenet_fast.base import environment
from imagenet_fast.base.plotting import FILE_STYLE, SENTINELS, svg
from imagenet_fast.config import Config
from imagenet_fast.data.steps import steps_by_size
from imagenet_fast.lab.planning.cost_model.accelerators import (
    ACCELERATORS,
    Accelerator,
    accelerator,
)
from imagenet_fast.lab.planning.cost_model.compute import Efficiency, StepWork
from imagenet_fast.lab.planning.cost_model.fusion import best_segments
from imagenet_fast.lab.planning.cost_model.step_time import ChipCluster, StepTime, step_time
from imagenet_fast.lab.planning.step_costs import Block, block_seconds, count_blocks, count_step
from imagenet_fast.lab.planning.validation.published import (
    ROWS,
    STACKS,
    assumed_constants,
    fitted_constants,
    linear_scaling,
    rows_of_chip,
    stack_for,
)
from imagenet_fast.lab.planning.validation.results import (
    IMAGENET,
    NETWORK_GBITS,
    DataParallel,
    Options,
    Pipelined,
    PublishedResult,
)
from imagenet_fast.pipeline_parallel.partition import bounds
from imagenet_fast.pipeline_parallel.schedules import tasks
from imagenet_fast.pipeline_parallel.simulation import BlockCost, simulate

_LINKS = (
    "peak FLOP/s, memory bandwidth and links as published by the manufacturers; "
    f"{NETWORK_GBITS:g} Gbit/s for each host of 8 GPUs, but 50 for Goyal et al., who publish it"
)
# Momentum only.
_SLOTS = 1
# Larger relative errors are listed with their reasons.
_LARGE_ERROR = 0.25


class Prediction(NamedTuple):
    """The cost model's prediction of a published number.

    Attributes:
      row: the published number.
      value: the prediction, in the same unit.
      linear: the baseline, see
        :func:`~imagenet_fast.lab.planning.validation.published.linear_scaling`; None if there is
        none.
    """

    row: PublishedResult
    value: float
    linear: float | None = None

    @property
    def error(self) -> float:
        """The relative error."""
        return self.value / self.row.value - 1

    @property
    def linear_error(self) -> float | None:
        """The baseline's relative error."""
        return None if self.linear is None else self.linear / self.row.value - 1


class Cut(NamedTuple):
    """The published and the best segments of a run's gradients.

    Attributes:
      name: of the run.
      published: the gradients after which a new segment began.
      best: the same for the cost model's best segments, of the same number.
      waited: seconds of all-reduce after the backward pass, with the published segments.
      waited_best: the same with the best segments.
      step: seconds of the step with the published segments.
    """

    name: str
    published: tuple[int, ...]
    best: tuple[int, ...]
    waited: float
    waited_best: float
    step: float

    def __str__(self) -> str:
        cuts = ["|".join(map(str, segments)) for segments in (self.published, self.best)]
        return (
            f"{self.name}: published after {cuts[0]}, {1e3 * self.waited:.1f} ms exposed; best "
            f"after {cuts[1]}, {1e3 * self.waited_best:.1f} ms: "
            f"{(self.waited - self.waited_best) / self.step:.2%} of the step's "
            f"{1e3 * self.step:.0f} ms"
        )


class Scaling(NamedTuple):
    """The scaling efficiency of a run with and without its communication optimizations.

    Attributes:
      name: of the run.
      published: throughput per chip, relative to one chip alone.
      predicted: the cost model's prediction.
      flat: with one ring over all chips instead of a hierarchical all-reduce.
      unfused: with one all-reduce per gradient instead of segments.
      neither: without both optimizations.
    """

    name: str
    published: float
    predicted: float
    flat: float
    unfused: float
    neither: float

    def __str__(self) -> str:
        return (
            f"{self.name}: published {self.published:.2f}, predicted {self.predicted:.3f}; flat "
            f"ring {self.flat:.3f}, one all-reduce per gradient {self.unfused:.3f}, both "
            f"{self.neither:.3f}"
        )


@dataclasses.dataclass(frozen=True)
class Validation:
    """The predictions of all published numbers.

    Attributes:
      predictions: one for each number.
      cuts: for runs with published segments.
      scalings: for those of them with a published scaling.
    """

    predictions: tuple[Prediction, ...]
    cuts: tuple[Cut, ...] = ()
    scalings: tuple[Scaling, ...] = ()

    @property
    def tested(self) -> list[Prediction]:
        """The predictions to which no constant was fitted."""
        return [prediction for prediction in self.predictions if not prediction.row.fits]

    @property
    def median_error(self) -> float:
        """The median absolute relative error of tested predictions."""
        return statistics.median(abs(prediction.error) for prediction in self.tested)

    @property
    def compared(self) -> list[Prediction]:
        """Tested predictions with a baseline."""
        return [prediction for prediction in self.tested if prediction.linear is not None]

    @property
    def median_errors_beside_linear(self) -> tuple[float, float]:
        """The median absolute relative errors of the model and the baseline, where both exist."""
        pairs = [
            (abs(prediction.error), abs(prediction.linear_error))
            for prediction in self.compared
            if prediction.linear_error is not None
        ]
        model, linear = zip(*pairs) if pairs else ((0.0,), (0.0,))
        return statistics.median(model), statistics.median(linear)

    @property
    def missed(self) -> list[Prediction]:
        """Tested predictions with a large error."""
        return [prediction for prediction in self.tested if abs(prediction.error) > _LARGE_ERROR]

    def table(self) -> str:
        """Returns the validation as text."""
        width = max(len(prediction.row.name) for prediction in self.predictions)
        model, linear = self.median_errors_beside_linear
        lines = [
            f"{'':{width}}   {'published':>12} {'predicted':>12} {'':9} {'error':>7} "
            f"{'linear':>12} {'error':>7}",
            "linear: the smallest published run of the network on the same system, times the ratio "
            "of chips",
            "",
        ]
        for source, group in itertools.groupby(
            self.predictions, lambda prediction: prediction.row.source
        ):
            lines += [source, *(f"  {_line(prediction, width)}" for prediction in group), ""]
        lines += [
            f"{len(self.tested)} numbers that no constant was fitted to: median error "
            f"{self.median_error:.1%}, {len(self.missed)} over {_LARGE_ERROR:.0%}:",
            *(
                f"  {prediction.row.name} ({prediction.error:+.0%}): {prediction.row.why}"
                for prediction in self.missed
            ),
            f"of these, {len(self.compared)} have a smaller published run of the same network and "
            f"system: median error {model:.1%}, linear scaling {linear:.1%}",
            "",
            "segments of gradients",
            *(f"  {cut}" for cut in self.cuts),
            "",
            "scaling without communication optimizations",
            *(f"  {scaling}" for scaling in self.scalings),
            "",
            "constants fitted to the rows marked so",
            *(f"  {name:25} {fitted_constants(stack)}" for name, stack in STACKS.items()),
            "",
            "constants assumed",
            *(f"  {line}" for line in assumed_constants(_LINKS)),
            "",
            "chips without a published row, whose constants are those of similar ones",
            *(
                f"  {chip.title:25} {', '.join(sorted(_stacks_of(chip)))}"
                for chip in ACCELERATORS.values()
                if not rows_of_chip(chip.name)
            ),
        ]
        return "\n".join(lines)

    def files(self) -> dict[str, str]:
        """Returns the contents of the files to write, by name."""
        return {
            "validation.txt": self.table() + "\n",
            "validation.json": self.json(),
            "validation.svg": self.picture(),
        }

    def json(self) -> str:
        """Returns the validation as JSON."""
        rows = [
            {
                "name": prediction.row.name,
                "source": prediction.row.source,
                "unit": prediction.row.unit,
                "published": prediction.row.value,
                "predicted": prediction.value,
                "error": prediction.error,
                "linear": prediction.linear,
                "linear_error": prediction.linear_error,
                "fitted": prediction.row.fits,
                "constants": prediction.row.stack,
                "why": prediction.row.why,
            }
            for prediction in self.predictions
        ]
        model, linear = self.median_errors_beside_linear
        values = {
            "median_error": self.median_error,
            "tested": len(self.tested),
            "compared": len(self.compared),
            "median_error_of_compared": model,
            "median_error_of_linear": linear,
            "chips_without_row": [name for name in ACCELERATORS if not rows_of_chip(name)],
            "missed": [prediction.row.name for prediction in self.missed],
            "rows": rows,
            "cuts": [cut._asdict() for cut in self.cuts],
            "scalings": [scaling._asdict() for scaling in self.scalings],
            "constants": {name: dataclasses.asdict(stack) for name, stack in STACKS.items()},
            **environment.provenance(),
        }
        return json.dumps(values, indent=2) + "\n"

    def picture(self) -> str:
        """Returns a plot of the ratios of predicted to published numbers as SVG."""
        with matplotlib.style.context(FILE_STYLE):
            figure = Figure(figsize=(8.0, 0.6 + 0.17 * len(self.predictions)), layout="constrained")
            axes = figure.add_subplot()
            for place, prediction in enumerate(reversed(self.predictions)):
                kind = "muted" if prediction.row.fits else "validation"
                if prediction.linear_error is not None and not prediction.row.fits:
                    axes.plot(1 + prediction.linear_error, place, "|", color=SENTINELS["train"])
                axes.plot(1 + prediction.error, place, "o", color=SENTINELS[kind], ms=4)
            axes.axvline(1, color=SENTINELS["muted"], lw=0.9)
            axes.axvspan(1 - _LARGE_ERROR, 1 + _LARGE_ERROR, color=SENTINELS["grid"], alpha=0.5)
            names = [prediction.row.name for prediction in reversed(self.predictions)]
            axes.set_yticks(range(len(names)), names, fontsize=7)
            axes.set_ylim(-0.7, len(names) - 0.3)
            axes.set_xlabel(
                "predicted / published; grey: a constant was fitted to it; bars: linear scaling"
            )
            return svg(figure)


def _line(prediction: Prediction, width: int) -> str:
    row, value, _ = prediction
    error = "fitted" if row.fits else f"{prediction.error:+.1%}"
    line = f"{row.name:{width}} {row.value:>12,.5g} {value:>12,.5g} {row.unit:9} {error:>7}"
    if prediction.linear_error is None:
        return line
    return f"{line} {prediction.linear:>12,.5g} {prediction.linear_error:>+7.1%}"


def _stacks_of(chip: Accelerator) -> set[str]:
    return {stack_for(chip.name, precision) for precision in chip.flops}


def validate(
    rows: Sequence[PublishedResult] = ROWS, stacks: Mapping[str, Efficiency] = STACKS
) -> Validation:
    """Predicts published numbers by each software stack's constants."""
    predictions = []
    for row in tqdm(rows, "predicting", unit=" rows", dynamic_ncols=True, disable=None):
        speed, to = (
            images_per_second(run, stacks[row.stack]) if run else 1.0 for run in (row.run, row.to)
        )
        predictions.append(Prediction(row, row.in_unit(speed, to), linear_scaling(row, rows)))
    segmented = [
        prediction
        for prediction in predictions
        if isinstance(prediction.row.run, DataParallel) and prediction.row.run.segments
    ]
    # The published segments are those of 1,024 GPUs.
    cuts = [cut_of(row, stacks[row.stack]) for row, *_ in segmented if row.run.chips == 1024]
    scalings = [
        scaling_of(prediction, stacks[prediction.row.stack])
        for prediction in segmented
        if prediction.row.unit == "scaling"
    ]
    return Validation(tuple(predictions), tuple(cuts), tuple(scalings))


def cut_of(row: PublishedResult, efficiency: Efficiency) -> Cut:
    """Compares a run's segments of gradients with the best ones."""
    run = row.run
    assert isinstance(run, DataParallel) and run.segments
    cluster, step = _cluster(run), _counted(_key(run.network), _images(run))
    published = _step_time(run, efficiency)
    sizes = [run.gradient_bytes * gradient.elements for gradient in step.gradients]
    ready, cost = published.compute.gradients_ready, cluster.all_reduce_cost(run.all_reduce)
    best = best_segments(ready, sizes, cost, len(run.segments) + 1)
    exposed = _step_time(dataclasses.replace(run, segments=best), efficiency).exposed
    return Cut(row.name, run.segments, best, published.exposed, exposed, published.total)


def scaling_of(prediction: Prediction, efficiency: Efficiency) -> Scaling:
    """Predicts a run's scaling without its communication optimizations, from that with them."""
    row = prediction.row
    run = row.run
    assert isinstance(run, DataParallel) and row.to
    to = images_per_second(row.to, efficiency)
    gradients = len(_counted(_key(run.network), _images(run)).gradients)
    alone = tuple(range(1, gradients))

    def scaled(**changes: Any) -> float:
        return row.in_unit(images_per_second(dataclasses.replace(run, **changes), efficiency), to)

    return Scaling(
        name=row.name,
        published=row.value,
        predicted=prediction.value,
        flat=scaled(all_reduce="flat"),
        unfused=scaled(segments=alone),
        neither=scaled(all_reduce="flat", segments=alone),
    )


def fitted(stack: str, rows: Sequence[PublishedResult] = ROWS) -> Efficiency:
    """Fits a software stack's constants to its rows with ``fits``.

    ``matrix`` is fitted to the first of these rows, and ``half_rows`` to the second, if there is
    one.

    ``rows`` may be of any stack.
    """
    first, *second = [row for row in rows if row.stack == stack and row.fits]
    start = dataclasses.replace(STACKS[stack], half_rows=0.0)

    def with_half_rows(half_rows: float) -> Efficiency:
        def too_slow(matrix: float) -> bool:
            efficiency = dataclasses.replace(start, half_rows=half_rows, matrix=matrix)
            return images_per_second(first.run, efficiency) < first.images_per_second

        matrix = _bisect(too_slow, 0.01, 3.0)
        return dataclasses.replace(start, half_rows=half_rows, matrix=matrix)

    if not second:
        return with_half_rows(STACKS[stack].half_rows)

    def too_fast(half_rows: float) -> bool:
        speed = images_per_second(second[0].run, with_half_rows(half_rows))
        return speed > second[0].images_per_second

    return with_half_rows(_bisect(too_fast, 0.0, 1e5))


def _bisect(below: Callable[[float], bool], low: float, high: float) -> float:
    """Returns where ``below`` becomes false, to four digits."""
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return (low + high) / 2


def images_per_second(run: DataParallel | Pipelined, efficiency: Efficiency) -> float:
    """Predicts the throughput of a run by its software's efficiency."""
    if isinstance(run, Pipelined):
        return _pipeline_throughput(run, efficiency)
    config = _config({**run.network, "batch_size": run.batch})
    if not config.sizes_until:
        return run.batch / _step_time(run, efficiency).total
    # Images of several sizes: the mean of all steps.
    per_epoch = IMAGENET // run.batch
    steps = config.duration.steps(per_epoch, run.batch)
    fixed = {k: v for k, v in run.network.items() if k not in ("size_ramp", "size_ramp_at")}
    seconds = sum(
        count
        * _step_time(
            dataclasses.replace(run, network={**fixed, "image_size": size}), efficiency
        ).total
        for size, count in steps_by_size(config, per_epoch, steps).items()
    )
    return steps * run.batch / seconds


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


def _pipeline_throughput(run: Pipelined, efficiency: Efficiency) -> float:
    """Predicts the throughput of one pipeline, including the transfers between stages."""
    chip = accelerator(run.accelerator)
    counted = _counted_blocks(_key(run.network), math.ceil(run.batch / run.micro_batches))
    blocks = block_seconds(counted, _config(run.network).precision, chip, efficiency)
    *balance, _ = run.balance or by_cumulative_work(blocks, run.stages)
    balance.append(len(blocks) - sum(balance))
    stages = [
        functools.reduce(BlockCost.followed_by, blocks[first:end])
        for first, end in bounds(balance, len(blocks), run.stages)
    ]
    simulation = simulate(
        tasks("gpipe", run.stages, run.micro_batches),
        [stage.forward for stage in stages],
        [stage.backward for stage in stages],
        transfer=[stage.output_bytes / chip.link for stage in stages[:-1]],
        rematerialize=run.rematerialize,
    )
    return run.batch / simulation.seconds


def by_cumulative_work(blocks: Sequence[BlockCost], stages: int) -> list[int]:
    """Returns the balance of lingvo's GPipe, which assigns blocks to K stages by cumulative work.

    Its code assigns a block to stage ``min(int(K * fraction), K - 1)``, where ``fraction`` is the
    fraction of all work up to and including the block.
    """
    total = sum(block.work for block in blocks)
    counts = [0] * stages
    done = 0.0
    for block in blocks:
        done += block.work
        counts[min(int(stages * done / total), stages - 1)] += 1
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
