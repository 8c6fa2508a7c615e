"""A run's options, data, devices and numbers of steps, which everything else is made from."""

from __future__ import annotations

import dataclasses
import functools
import math

import tensorflow as tf

from imagenet_fast.base.durations import Duration
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.keras_check import check_keras
from imagenet_fast.config import Config
from imagenet_fast.data.info import DatasetInfo, read_info
from imagenet_fast.data.steps import input_pipelines, steps_per_epoch
from imagenet_fast.distribute.strategy import make_strategy, per_replica_batch_size, replicas_each
from imagenet_fast.distribute.workers import is_chief
from imagenet_fast.models.custom import CustomModel, name_of
from imagenet_fast.models.options import is_custom
from imagenet_fast.optimizers.options import ONE_LABEL
from imagenet_fast.training.options import MULTI_LABEL_METRICS
from imagenet_fast.training.schedule_steps import total_steps


@dataclasses.dataclass(frozen=True)
class Run:
    """A run's options, data and devices, and what follows from them; made once, passed down.

    Attributes:
      config: the options, of training with the number of logical replicas.
      info: of the data.
      strategy: of the devices.
    """

    config: Config
    info: DatasetInfo
    strategy: tf.distribute.Strategy

    def __post_init__(self) -> None:
        """Checks that Keras can train with TensorFlow."""
        check_keras()

    @property
    def replicas(self) -> int:
        """The number of logical replicas."""
        return self.config.replicas[0]

    @functools.cached_property
    def chief(self) -> bool:
        """Whether this process writes the files of the run."""
        return is_chief(self.strategy)

    @functools.cached_property
    def steps_per_epoch(self) -> int:
        """Weight updates in an epoch.

        Raises:
          UserError: if there is not a single full batch.
        """
        return steps_per_epoch(self.info, self.config)

    @functools.cached_property
    def total_steps(self) -> int:
        """Weight updates of the whole run.

        Raises:
          UserError: if there are none.
        """
        return total_steps(self.config, self.steps_per_epoch)

    def steps(self, duration: Duration) -> int:
        """Returns the weight updates of a duration."""
        return duration.steps(self.steps_per_epoch, self.config.batch_size)

    def examples(self, split: str) -> int:
        """Returns the images of a split; 0: there is no such split."""
        found = self.info.splits.get(split)
        return found.examples if found else 0


def make_run(
    config: Config, model: CustomModel | None = None, strategy: tf.distribute.Strategy | None = None
) -> Run:
    """Returns a run, after reading what its data has and finding its devices.

    Args:
      config: of the run.
      model: the user's own network, which the run's configuration then records.
      strategy: of the devices; None: the one that ``config`` describes.

    Raises:
      UserError: if the data or the devices cannot be used.
    """
    config, info = with_model(config, model), read_info(config)
    check_number_of_labels(config, info)
    strategy = strategy or make_strategy(config)
    return Run(with_replicas(config, strategy), info, strategy)


def with_replicas(config: Config, strategy: tf.distribute.Strategy) -> Config:
    """Returns the configuration with logical replicas, by default those of the devices.

    Raises:
      UserError: if the devices cannot carry equally many, or the batch cannot be split evenly.
    """
    per_replica_batch_size(config, strategy)
    if len(config.replicas) == 2:
        return config
    replicas = replicas_each(config, strategy) * strategy.num_replicas_in_sync
    hosts = math.gcd(replicas, input_pipelines(strategy)) if replicas > 1 else 1
    return config.replace(replicas=(replicas, hosts))


def with_model(config: Config, model: CustomModel | None) -> Config:
    """Returns the configuration that records the user's own network, if one is given.

    Options of the package's networks return to their defaults.

    Raises:
      UserError: if the configuration gives weights, which would be lost.
    """
    if model is None:
        return config
    name = name_of(model)
    if config.initial_weights and is_custom(name):
        raise UserError(
            f"initial_weights={config.initial_weights} is not for a network of your own: load the "
            "weights in the function that makes it, or give a model that has them"
        )
    return config.replace(model=name)


def check_number_of_labels(config: Config, info: DatasetInfo) -> None:
    """Checks the options that depend on how many labels an image has.

    Raises:
      UserError: if one does not fit.
    """
    if info.multi_label and config.loss == "cross_entropy":
        raise UserError(f"{info.name}: {ONE_LABEL}")
    several = config.best_metric in MULTI_LABEL_METRICS
    if config.best_metric not in ("auto", "loss") and several != info.multi_label:
        labels, metrics = ("several labels", "map, f1_micro, f1_macro")
        if not info.multi_label:
            labels, metrics = ("one label", "top1, top5")
        raise UserError(
            f"best_metric={config.best_metric}, but images of {info.name} have {labels}: give one "
            f"of {metrics}, loss"
        )
