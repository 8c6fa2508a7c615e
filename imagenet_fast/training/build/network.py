"""The network that a configuration describes, in pipeline stages or whole."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf

from imagenet_fast import models
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.keras_2 import name_of
from imagenet_fast.base.notices import warn_once
from imagenet_fast.config import Config
from imagenet_fast.distribute.batch_norm_groups import batch_norm_group_size, ghost_batch_size
from imagenet_fast.distribute.pipeline_strategy import PipelineStrategy
from imagenet_fast.distribute.strategy import devices_of, per_replica_batch_size, replicas_each
from imagenet_fast.distribute.tpu import compiles_all_reduces
from imagenet_fast.distribute.workers import workers_of
from imagenet_fast.layers.seeds import draw_by_replica
from imagenet_fast.models.batch_norm import replacing_batch_norm
from imagenet_fast.models.custom import (
    CustomModel,
    ImageShape,
    build_custom,
    expects_bytes,
    keras_batch_norms,
    layers_in_float16,
    set_batch_norms,
)
from imagenet_fast.models.graph import is_functional
from imagenet_fast.models.libraries import build_by_name, own_normalization, trained_on
from imagenet_fast.models.options import is_custom, library_of
from imagenet_fast.pipeline_parallel.balance import balance_for
from imagenet_fast.pipeline_parallel.in_stages import build_in_stages
from imagenet_fast.pipeline_parallel.pipeline import Pipeline, require_keras_3
from imagenet_fast.pipeline_parallel.placement import available_devices, stage_devices

_FOR_BYTES = "give --pixel_mean=0,0,0 --pixel_std=1,1,1"


@contextlib.contextmanager
def precision_policy(policy: str) -> Iterator[None]:
    """Sets Keras' mixed-precision policy, for layers made inside."""
    before = keras.mixed_precision.global_policy()
    keras.mixed_precision.set_global_policy(policy)
    try:
        yield
    finally:
        keras.mixed_precision.set_global_policy(before)


def build_network(
    config: Config, classes: int, shape: ImageShape, custom: CustomModel | None = None
) -> tuple[keras.Model, Pipeline | None]:
    """Returns the network from normalized pixels to logits and, if configured, its pipeline.

    To be called in the strategy's scope.

    The images are of ``shape`` (height, width, channels); None: any.

    Raises:
      UserError: if the devices do not support the configured pipeline or batch norm, or the user's
        network cannot be used.
    """
    make = _maker(config, classes, shape, custom)
    if config.pipeline_stages == 1:
        return make(), None
    check_pipeline(config)
    if config.pipeline_servers and tf.distribute.get_strategy().num_replicas_in_sync > 1:
        raise UserError("pipeline_servers is for one worker: of several, each has its own devices")
    each = config.pipeline_stages_per_device
    devices = stage_devices(
        config.pipeline_stages // each, config.pipeline_servers, on_cpus=bool(config.logical_cpus)
    )
    micro_batches = config.accumulation_steps * replicas_each(config, tf.distribute.get_strategy())
    choose_balance = functools.partial(
        balance_for,
        inputs=tf.TensorSpec((None, *shape), keras.mixed_precision.global_policy().compute_dtype),
        stages=config.pipeline_stages,
        devices=len(devices),
        batch_size=config.batch_size,
        micro_batches=micro_batches,
        schedule=config.pipeline_schedule,
        rematerialize=config.rematerialize,
    )
    network, blocks, balance = build_in_stages(
        make, devices * each, config.pipeline_balance or choose_balance
    )
    pipeline = Pipeline(
        blocks,
        devices,
        num_stages=config.pipeline_stages,
        balance=balance,
        num_micro_batches=micro_batches,
        rematerialize=config.rematerialize,
        schedule=config.pipeline_schedule,
    )
    return network, pipeline


def with_stages_for_devices(config: Config) -> Config:
    """Returns the configuration of an evaluation, whose pipeline fits the devices that there are.

    With fewer devices than the run was trained on, each has one stage, and one device has the whole
    network. To be called after the strategy is made.

    Raises:
      UserError: if a stage server cannot be reached.
    """
    stages = config.pipeline_stages
    if stages == 1:
        return config
    needed = stages // config.pipeline_stages_per_device
    count = len(available_devices(config.pipeline_servers, on_cpus=bool(config.logical_cpus)))
    if count >= needed:
        return config
    warn_once(
        f"pipeline_stages={stages} needs {needed} devices, but there "
        + (f"are {count}, which get a stage each" if count > 1 else "is one, which gets all layers")
    )
    return config.replace(
        pipeline_stages=count,
        pipeline_schedule="gpipe",
        pipeline_stages_per_device=1,
        pipeline_balance=(),
    )


def _maker(
    config: Config, classes: int, shape: ImageShape, custom: CustomModel | None
) -> Callable[[], keras.Model]:
    """Returns the function that makes the network."""
    if library_of(config.model):
        custom = functools.partial(build_by_name, config.model, download=config.pretrained)
    if is_custom(config.model) or library_of(config.model):
        return functools.partial(_build_custom, config, classes, shape, custom)
    names = models.option_names(config.model)
    return functools.partial(
        models.build,
        config.model,
        classes,
        shape,
        **_batch_norm_arguments(config),
        **{name: value for name, value in vars(config).items() if name in names},
    )


def _build_custom(
    config: Config, classes: int, shape: ImageShape, custom: CustomModel | None
) -> keras.Model:
    if isinstance(custom, keras.Model) and workers_of(tf.distribute.get_strategy()) is not None:
        raise UserError(
            "a model with weights may differ between workers: give a function that makes it"
        )
    norm = None
    if config.fused_batch_norm:
        norm = replacing_batch_norm(**_batch_norm_arguments(config))
    network = build_custom(config.model, custom, classes, shape, norm)
    left = keras_batch_norms(network)
    if config.batch_norm_batch_size and left:
        raise UserError(
            f"batch_norm_batch_size={config.batch_norm_batch_size} does not reach "
            f"{len(left)} batch norms of model {network.name}, such as {left[0].name}: make them "
            "with imagenet_fast.layers.GhostBatchNormalization or GroupedBatchNormalization, or "
            "leave the option out"
        )
    set_named_batch_norms(config, network)
    half = layers_in_float16(network)
    if half and config.precision != "mixed_float16":
        warn_once(
            f"model {network.name} has layers in float16, such as {half[0].name}, but "
            f"precision={config.precision} does not scale the loss, so that their gradients may "
            "become 0: give --precision=mixed_float16"
        )
    _check_dtypes(config, network)
    draw_by_replica(network)
    if library_of(config.model):
        _tell_of_image_size(config)
        return network
    inputs = network.inputs if is_functional(network) else []
    dtypes = [tf.as_dtype(tensor.dtype) for tensor in inputs]
    if config.normalizes_pixels and any(dtype.is_integer for dtype in dtypes):
        raise UserError(
            f"model {network.name} takes {dtypes[0].name}, but its input is normalized "
            f"pixels: {_FOR_BYTES}, for pixels in 0..255, or let it take floats"
        )
    if config.normalizes_pixels and expects_bytes(network):
        warn_once(
            f"model {network.name} has a Rescaling layer for pixels in 0..255, but its input is "
            f"normalized pixels: {_FOR_BYTES}, or leave out the layer"
        )
    return network


def _tell_of_image_size(config: Config) -> None:
    """Says on which images a network of a library was trained, if they have another size."""
    size = trained_on(config.model)
    if size and size != config.image_size:
        warn_once(
            f"{config.model} was trained on images of {size} pixels, this run's have "
            f"{config.image_size}"
        )


def pixel_normalization(config: Config) -> tuple[Sequence[float], Sequence[float]]:
    """Returns the mean and standard deviation of pixels in 0..255 that a network's inputs have.

    Raises:
      UserError: if there is no such network.
    """
    if library_of(config.model) and config.normalization == "auto":
        own = own_normalization(config.model)
        if own is not None:
            return own.mean, own.std
        warn_once(
            f"{config.model} does not say how its pixels are normalized: they are by pixel_mean "
            "and pixel_std"
        )
    return config.pixel_mean, config.pixel_std


def set_named_batch_norms(config: Config, network: keras.Model) -> None:
    """Gives batch norms of a user's network the momentum and epsilon that are not the defaults."""
    defaults = Config()
    for name in ("momentum", "epsilon"):
        value = getattr(config, f"batch_norm_{name}")
        if value != getattr(defaults, f"batch_norm_{name}"):
            set_batch_norms(network, name, value)


def _check_dtypes(config: Config, network: keras.Model) -> None:
    """Checks that gradients can be summed over devices and micro-batches, which is in float32."""
    odd = [own for own in network.trainable_variables if tf.as_dtype(own.dtype) != tf.float32]
    strategy = tf.distribute.get_strategy()
    replicas = strategy.num_replicas_in_sync * replicas_each(config, strategy)
    if odd and (replicas > 1 or config.accumulation_steps > 1):
        raise UserError(
            f"model {network.name} has weights in {tf.as_dtype(odd[0].dtype).name}, such as "
            f"{name_of(odd[0])}, whose gradients can neither be accumulated nor summed over "
            "devices: make its layers in float32, mixed_bfloat16 or mixed_float16"
        )


def check_pipeline(config: Config) -> None:
    """Checks that there can be pipelines, and no option contradicts one.

    Raises:
      UserError: if one does.
    """
    require_keras_3()
    for name, given in (
        ("xla", config.xla),
        ("train_sizes", config.train_sizes),
        ("size_ramp", config.size_ramp),
        ("eval_image_size", config.input_size is None),
        ("select_by_loss", config.select_by_loss < 1),
    ):
        if given:
            raise UserError(f"pipeline_stages does not work with {name}: drop one of them")


def replicas_together(config: Config) -> int:
    """Returns the logical replicas of a device that it normalizes in one forward pass.

    Under the strategy in scope, for batch norm over groups of logical replicas.

    Raises:
      UserError: if the replicas cannot be split into such groups, or the devices carry parts of
        them.
    """
    each = replicas_each(config, tf.distribute.get_strategy())
    group = _group_size(config)
    if each % group and group % each:
        raise UserError(
            f"batch_norm_batch_size={config.batch_norm_batch_size} needs groups of {group} "
            f"replicas, of which each device would carry {each}: use a number of devices with "
            "which one of the two divides the other"
        )
    together = min(each, group)
    if together > 1 and config.accumulation_steps > 1:
        raise UserError(
            f"batch_norm_batch_size={config.batch_norm_batch_size} needs groups of {group} "
            f"replicas, which with accumulation_steps={config.accumulation_steps} need a device "
            "for each replica"
        )
    return together


def _group_size(config: Config) -> int:
    """Returns the logical replicas in a batch-norm group."""
    if not config.batch_norm_batch_size:
        return 1
    strategy = tf.distribute.get_strategy()
    each = replicas_each(config, strategy)
    return batch_norm_group_size(
        config.batch_norm_batch_size, _images(config), each * strategy.num_replicas_in_sync
    )


def _images(config: Config) -> int:
    """Returns the images of a logical replica's micro-batch."""
    strategy = tf.distribute.get_strategy()
    parts = replicas_each(config, strategy) * config.accumulation_steps
    return per_replica_batch_size(config, strategy) // parts


def _batch_norm_arguments(config: Config) -> dict[str, int]:
    """Returns the batch-norm groups, as arguments of a model."""
    if not config.batch_norm_batch_size:
        return {}
    images = _images(config)
    return {
        "batch_norm_group_size": _batch_norm_group_size(config, images),
        "replicas_together": replicas_together(config),
        "ghost_batch_size": ghost_batch_size(config.batch_norm_batch_size, images),
    }


def _batch_norm_group_size(config: Config, images: int) -> int:
    """Returns the strategy's replicas in a batch-norm group, under the strategy in scope."""
    strategy = tf.distribute.get_strategy()
    size = _group_size(config) // replicas_together(config)
    if size == 1 or compiles_all_reduces(strategy):
        return size
    groups = f"batch_norm_batch_size={config.batch_norm_batch_size} needs groups of {size} replicas"
    if isinstance(strategy, PipelineStrategy):
        raise UserError(
            f"{groups}, which pipelines do not support: use at most {images}, the images of a "
            "micro-batch, or larger micro-batches"
        )
    if config.xla:
        raise UserError(f"{groups}, which XLA can compile on TPUs only; leave out xla")
    # In the loop over micro-batches, replicas of one process would not find each other.
    if config.accumulation_steps > 1 and len(devices_of(strategy)) > 1:
        raise UserError(
            f"{groups}, which in one process does not work with "
            f"accumulation_steps={config.accumulation_steps}; use 1, or a worker process for each "
            "replica"
        )
    return size
