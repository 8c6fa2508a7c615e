"""Whether a training step all-reduces what its recipe says, in the groups it says."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import tf_keras as keras

from imagenet_fast.config import Config
from imagenet_fast.distribute.batch_norm_groups import batch_norm_group_size
from imagenet_fast.distribute.strategy import per_replica_batch_size, tpu_coordinates
from imagenet_fast.training.classifier import Classifier
from imagenet_fast.training.metric_sums import NAMES
from imagenet_fast.xla_compile.check import Check
from imagenet_fast.xla_compile.module import Groups, Module

_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
# Groups, and members of one, that are written down; of more, the first and the last are.
_TOLD = 4


class _Sum(NamedTuple):
    """An all-reduce: how many numbers of which type, among whom, and after which other one."""

    dtype: str
    elements: int
    groups: Groups
    before: Groups = ()


def check_sums(module: Module, config: Config, model: Classifier) -> list[Check]:
    """Returns the all-reduces of batch norm and those of gradients, and whether they are right.

    What is right is found here from the options and the network, not asked of the code that sums.

    Args:
      module: of the training step.
      config: of the run.
      model: that takes the step.
    """
    everyone = tuple(range(model.distribute_strategy.num_replicas_in_sync))
    found = [
        _Sum(array.dtype, array.elements, ordered(own.groups or [everyone]), ordered(own.before))
        for own in module.of("all-reduce")
        for array in own.arrays
    ]
    missing = collections.Counter(_statistics(config, model))
    rest = []
    for own in found:
        if missing[own]:
            missing[own] -= 1
        else:
            rest.append(own)
    return [
        _statistics_check(missing, collections.Counter(_statistics(config, model)), rest),
        _gradients_check(rest, config, model, everyone),
    ]


def _statistics(config: Config, model: Classifier) -> Iterator[_Sum]:
    """Yields those of batch norm: each layer's forward and backward, in consecutive replicas."""
    strategy = model.distribute_strategy
    replicas = strategy.num_replicas_in_sync
    images = per_replica_batch_size(config, strategy) // config.accumulation_steps
    size = batch_norm_group_size(config.batch_norm_batch_size, images, replicas)
    if size == 1:
        return
    groups = ordered(range(first, first + size) for first in range(0, replicas, size))
    for layer in model.submodules:
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
            # Sums, sums of squares, and how many.
            own = _Sum("f32", 2 * layer.moving_mean.shape.num_elements() + 1, groups)
            yield from (own, own)


def _statistics_check(
    missing: collections.Counter[_Sum],
    expected: collections.Counter[_Sum],
    rest: Sequence[_Sum],
) -> Check:
    name = "batch-norm all-reduces"
    if not expected:
        return Check(name, "none: batch norm of each replica alone")
    groups = next(iter(expected)).groups
    there = list((expected - missing).elements())
    found = f"{_told(there)} among {groups_told(groups)}" if there else "none"
    lacking = sum(missing.values())
    if not lacking:
        return Check(name, found)
    # What may be in their place: the same numbers in other groups.
    sizes = {(own.dtype, own.elements) for own in missing.elements()}
    instead = {own.groups for own in rest if (own.dtype, own.elements) in sizes}
    wrong = f"{lacking:,} are missing among {groups_told(groups)}"
    if instead:
        wrong += f"; there are all-reduces of as many numbers among {_all_told(instead)}"
    return Check(name, found, wrong)


def _gradients_check(
    found: Sequence[_Sum], config: Config, model: Classifier, everyone: tuple[int, ...]
) -> Check:
    name = "gradient all-reduces"
    if len(everyone) == 1:
        return Check(name, "none: one replica", f"{len(found)} all-reduces" if found else "")
    if config.all_reduce == "torus_2d":
        rows, columns = _torus(config, model, len(everyone))
        wrong = _wrong_orders(found, rows, columns)
        told = f"along {groups_told(rows)} and {groups_told(columns)}, half first along each"
        ends = [own for own in found if own.before]
    else:
        others = {own.groups for own in found if own.groups != (everyone,) or own.before}
        wrong = f"there are all-reduces among {_all_told(others)}" if others else ""
        told = f"among {groups_told((everyone,))}"
        ends = list(found)
    wrong = wrong or _wrong_numbers(ends, config, model, len(everyone))
    return Check(name, f"{_told(ends)} {told}" if ends else "none", wrong)


def _wrong_orders(found: Sequence[_Sum], rows: Groups, columns: Groups) -> str:
    """Returns what is not summed along one axis and then along the other, half in each order."""
    others = {own.groups for own in found if own.groups not in (rows, columns)}
    if others:
        return f"there are all-reduces among {_all_told(others)}"
    numbers: collections.Counter[tuple[Groups, Groups]] = collections.Counter()
    for own in found:
        numbers[own.before, own.groups] += own.elements
    orders = {"rows, then columns": (rows, columns), "columns, then rows": (columns, rows)}
    for told, (first, second) in orders.items():
        if numbers[(), first] != numbers[first, second]:
            return (
                f"{told}: {numbers[(), first]:,} numbers go along the first axis, but "
                f"{numbers[first, second]:,} along the second"
            )
    one, other = (numbers[order] for order in orders.values())
    # A piece of odd length has one number more in its second half.
    if abs(one - other) > len(found):
        return f"{one:,} numbers go along rows first, but {other:,} along columns first"
    return ""


def _wrong_numbers(ends: Sequence[_Sum], config: Config, model: Classifier, replicas: int) -> str:
    """Returns of which types there are too many or too few numbers."""
    expected = collections.Counter({_DTYPES[config.all_reduce_dtype]: _trained(model)})
    # What metrics are made of is summed with the gradients.
    expected["f32"] += len(NAMES)
    packed = bool(config.fusion_segments) or config.all_reduce == "torus_2d"
    halves = 2 if config.all_reduce == "torus_2d" else 1
    wrong = []
    for dtype in sorted({*expected, *(own.dtype for own in ends)}):
        sizes = [own.elements for own in ends if own.dtype == dtype]
        # Each pack is filled up to a multiple of the replicas.
        most = expected[dtype] + packed * replicas * len(sizes) // halves
        if not expected[dtype] <= sum(sizes) <= most:
            wrong.append(f"{sum(sizes):,} of {dtype}, but there should be {expected[dtype]:,}")
    return ", and ".join(wrong)


def _trained(model: Classifier) -> int:
    return sum(variable.shape.num_elements() for variable in model.trainable_variables)


def _torus(config: Config, model: Classifier, replicas: int) -> tuple[Groups, Groups]:
    """Returns the rows and the columns in which the replicas are to sum."""
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
    """Returns groups in an order of their own: it makes no difference to a sum."""
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def _told(sums: Sequence[_Sum]) -> str:
    counts: collections.Counter[str] = collections.Counter()
    numbers: collections.Counter[str] = collections.Counter()
    for own in sums:
        counts[own.dtype] += 1
        numbers[own.dtype] += own.elements
    return ", ".join(f"{counts[own]:,} of {own} ({numbers[own]:,} numbers)" for own in counts)


def _all_told(several: Iterable[Groups]) -> str:
    return " and ".join(groups_told(groups) for groups in sorted(several))


def groups_told(groups: Groups) -> str:
    """Returns groups of replicas as people read them."""
    if len(groups) == 1:
        return f"all {len(groups[0])}"
    written = [",".join(_shortened(list(map(str, group)))) for group in groups]
    return f"({' '.join(_shortened(written))})"


def _shortened(parts: list[str]) -> list[str]:
    return parts if len(parts) <= _TOLD else [*parts[: _TOLD - 2], "...", parts[-1]]
