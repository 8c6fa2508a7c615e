"""Checks of a lowered training step's all-reduces against its options."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import keras

from imagenet_fast.base.keras_2 import layers_in
from imagenet_fast.config import Config
from imagenet_fast.distribute.batch_norm_groups import batch_norm_group_size
from imagenet_fast.distribute.strategy import per_replica_batch_size, tpu_coordinates
from imagenet_fast.lab.xla_compile.check import Check
from imagenet_fast.lab.xla_compile.module import Groups, Module
from imagenet_fast.training.step.classifier import Classifier
from imagenet_fast.training.step.metric_sums import NAMES

_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
# The most groups, and members of a group, that a text lists without an ellipsis.
_LISTED = 4


class _AllReduce(NamedTuple):
    """An all-reduce: type and number of elements, groups, and those of the one it follows."""

    dtype: str
    elements: int
    groups: Groups
    before: Groups = ()


def check_all_reduces(module: Module, config: Config, model: Classifier) -> list[Check]:
    """Checks the all-reduces of batch norm and of gradients.

    The expected ones are derived here from the options and the network, independently of the code
    that all-reduces.
    """
    everyone = tuple(range(model.distribute_strategy.num_replicas_in_sync))
    found = [
        _AllReduce(
            array.dtype,
            array.elements,
            ordered(instruction.groups or [everyone]),
            ordered(instruction.before),
        )
        for instruction in module.of("all-reduce")
        for array in instruction.arrays
    ]
    missing = collections.Counter(_statistics(config, model))
    rest = []
    for each in found:
        if missing[each]:
            missing[each] -= 1
        else:
            rest.append(each)
    return [
        _statistics_check(missing, collections.Counter(_statistics(config, model)), rest),
        _gradients_check(rest, config, model, everyone),
    ]


def _statistics(config: Config, model: Classifier) -> Iterator[_AllReduce]:
    """Yields the expected batch-norm all-reduces: forward and backward, consecutive replicas."""
    strategy = model.distribute_strategy
    replicas = strategy.num_replicas_in_sync
    images = per_replica_batch_size(config, strategy) // config.accumulation_steps
    size = batch_norm_group_size(config.batch_norm_batch_size, images, replicas)
    if size == 1:
        return
    groups = ordered(range(first, first + size) for first in range(0, replicas, size))
    for layer in layers_in(model):
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
            # Sums, sums of squares and the count.
            elements = 2 * math.prod(layer.moving_mean.shape) + 1
            yield from (_AllReduce("f32", elements, groups),) * 2


def _statistics_check(
    missing: collections.Counter[_AllReduce],
    expected: collections.Counter[_AllReduce],
    rest: Sequence[_AllReduce],
) -> Check:
    name = "batch-norm all-reduces"
    if not expected:
        return Check(name, "none: batch norm of each replica alone")
    groups = next(iter(expected)).groups
    present = list((expected - missing).elements())
    found = f"{_text(present)} among {groups_text(groups)}" if present else "none"
    count = sum(missing.values())
    if not count:
        return Check(name, found)
    # All-reduces of the same sizes in other groups may be in their place.
    sizes = {(each.dtype, each.elements) for each in missing.elements()}
    instead = {each.groups for each in rest if (each.dtype, each.elements) in sizes}
    wrong = f"{count:,} are missing among {groups_text(groups)}"
    if instead:
        wrong += f"; there are all-reduces of the same sizes among {_all_groups_text(instead)}"
    return Check(name, found, wrong)


def _gradients_check(
    found: Sequence[_AllReduce], config: Config, model: Classifier, everyone: tuple[int, ...]
) -> Check:
    name = "gradient all-reduces"
    if len(everyone) == 1:
        return Check(name, "none: one replica", f"{len(found)} all-reduces" if found else "")
    if config.all_reduce == "torus_2d":
        rows, columns = _torus(config, model, len(everyone))
        wrong = _wrong_orders(found, rows, columns)
        groups = f"along {groups_text(rows)} and {groups_text(columns)}, half first along each"
        ends = [each for each in found if each.before]
    else:
        others = {each.groups for each in found if each.groups != (everyone,) or each.before}
        wrong = f"there are all-reduces among {_all_groups_text(others)}" if others else ""
        groups = f"among {groups_text((everyone,))}"
        ends = list(found)
    wrong = wrong or _wrong_numbers(ends, config, model, len(everyone))
    return Check(name, f"{_text(ends)} {groups}" if ends else "none", wrong)


def _wrong_orders(found: Sequence[_AllReduce], rows: Groups, columns: Groups) -> str:
    """Returns what is not all-reduced along both axes in turn, half in each order."""
    others = {each.groups for each in found if each.groups not in (rows, columns)}
    if others:
        return f"there are all-reduces among {_all_groups_text(others)}"
    numbers: collections.Counter[tuple[Groups, Groups]] = collections.Counter()
    for each in found:
        numbers[each.before, each.groups] += each.elements
    orders = {"rows, then columns": (rows, columns), "columns, then rows": (columns, rows)}
    for order, (first, second) in orders.items():
        if numbers[(), first] != numbers[first, second]:
            return (
                f"{order}: {numbers[(), first]:,} numbers go along the first axis, but "
                f"{numbers[first, second]:,} along the second"
            )
    one, other = (numbers[axes] for axes in orders.values())
    # If a piece has odd length, its second half has one number more.
    if abs(one - other) > len(found):
        return f"{one:,} numbers go along rows first, but {other:,} along columns first"
    return ""


def _wrong_numbers(
    ends: Sequence[_AllReduce], config: Config, model: Classifier, replicas: int
) -> str:
    """Returns the types of which there are too many or too few numbers."""
    trainable = sum(math.prod(variable.shape) for variable in model.trainable_variables)
    expected = collections.Counter({_DTYPES[config.all_reduce_dtype]: trainable})
    # Metric sums are all-reduced with the gradients.
    expected["f32"] += len(NAMES)
    packed = bool(config.fusion_segments) or config.all_reduce == "torus_2d"
    halves = 2 if config.all_reduce == "torus_2d" else 1
    wrong = []
    for dtype in sorted({*expected, *(each.dtype for each in ends)}):
        sizes = [each.elements for each in ends if each.dtype == dtype]
        # Each pack is padded to a multiple of the replicas.
        most = expected[dtype] + packed * replicas * len(sizes) // halves
        if not expected[dtype] <= sum(sizes) <= most:
            wrong.append(f"{sum(sizes):,} of {dtype}, but there should be {expected[dtype]:,}")
    return ", and ".join(wrong)


def _torus(config: Config, model: Classifier, replicas: int) -> tuple[Groups, Groups]:
    """Returns the expected rows and columns of the torus."""
    places = tpu_coordinates(model.distribute_strategy)
    size = config.all_reduce_group
    rows, columns = collections.defaultdict(list), collections.defaultdict(list)
    for replica in range(replicas):
        x, y, *further = places[replica]
        row, column = (replica // size, replica % size) if size else (y, (x, *further))
        rows[row].append(replica)
        columns[column].append(replica)
    return ordered(rows.values()), ordered(columns.values())


def ordered(groups: Iterable[Iterable[int]]) -> Groups:
    """Returns groups in ascending order, which makes no difference to an all-reduce."""
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def _text(all_reduces: Sequence[_AllReduce]) -> str:
    counts: collections.Counter[str] = collections.Counter()
    numbers: collections.Counter[str] = collections.Counter()
    for each in all_reduces:
        counts[each.dtype] += 1
        numbers[each.dtype] += each.elements
    return ", ".join(
        f"{counts[dtype]:,} of {dtype} ({numbers[dtype]:,} numbers)" for dtype in counts
    )


def _all_groups_text(several: Iterable[Groups]) -> str:
    return " and ".join(groups_text(groups) for groups in sorted(several))


def groups_text(groups: Groups) -> str:
    """Returns groups of replicas as text."""
    if len(groups) == 1:
        return f"all {len(groups[0])}"
    written = [",".join(_shortened(list(map(str, group)))) for group in groups]
    return f"({' '.join(_shortened(written))})"


def _shortened(parts: list[str]) -> list[str]:
    return parts if len(parts) <= _LISTED else [*parts[: _LISTED - 2], "...", parts[-1]]
