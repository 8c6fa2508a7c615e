"""The teacher of a run that distils: the network of another run, with its weights."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.paths import to_path
from imagenet_fast.config import Config
from imagenet_fast.distribute.consistency import check_consistent
from imagenet_fast.distribute.one_call import assign_everywhere
from imagenet_fast.models import network_of
from imagenet_fast.models.custom import use_restored_statistics
from imagenet_fast.training.build.fine_tune import is_floating, read_run, run_in
from imagenet_fast.training.checkpoints.config_file import CONFIG_FILE
from imagenet_fast.training.checkpoints.model_dir import read_labels
from imagenet_fast.training.step.classifier import Classifier
from imagenet_fast.training.step.distillation import Teacher


def build_teacher(
    config: Config,
    labels: Sequence[str],
    strategy: tf.distribute.Strategy,
    rebuild: Callable[[Config, Sequence[str]], Classifier],
) -> Teacher:
    """Returns the network and (moving-average) weights of the last checkpoint of ``teacher``.

    To be called outside the strategy's scope.

    Raises:
      UserError: if it is no run, its network is code, it has other classes or another loss, or
        workers read other weights.
    """
    path = to_path(config.teacher)
    if not (path / CONFIG_FILE).is_file():
        raise UserError(
            f"teacher: {path} holds no training run: give the model_dir of one; exported models "
            "and .keras files do not say how they were trained"
            if path.exists()
            else f"teacher: {path} does not exist: train that run first"
        )
    run = run_in(path, "teacher")
    _check_classes(path, read_labels(str(path)), labels)
    if run.loss != config.loss:
        raise UserError(
            f"teacher: the run in {path} was trained with --loss={run.loss}, but its logits are "
            f"taken for those of a softmax: give one with --loss={config.loss}"
        )
    arrays, _ = read_run(run, rebuild)
    alone = run.on_one_device().replace(
        precision=config.precision, ema_decay=0.0, lookahead_every=0
    )
    with strategy.scope():
        model = rebuild(alone, labels)
        network = network_of(model)
        weights = filter(is_floating, network.weights)
        assign_everywhere(list(weights), [value for _, value in arrays])
        use_restored_statistics(network)
    checksum = zlib.crc32(b"".join(value.tobytes() for _, value in arrays))
    check_consistent(
        strategy,
        "the teacher",
        f"weights of checksum {checksum}",
        f"--teacher={path} must be a directory that all workers share, in which no run trains",
    )
    name = f"{run.model} of {path}"
    return Teacher(model, config.distillation_temperature, name, checksum)


def _check_classes(path: object, theirs: Sequence[str], labels: Sequence[str]) -> None:
    if tuple(theirs) == tuple(labels):
        return
    if len(theirs) != len(labels):
        reason = f"{len(theirs)} classes, but the data have {len(labels)}"
    else:
        number = next(n for n, pair in enumerate(zip(theirs, labels)) if pair[0] != pair[1])
        reason = f"{theirs[number]!r} as class {number}, which is {labels[number]!r} in the data"
    raise UserError(
        f"teacher: the run in {path} has {reason}: give one that was trained on the same classes"
    )
