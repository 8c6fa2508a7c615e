"""Builds a compiled model from a configuration."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence

import tensorflow as tf
import tf_keras as keras

from imagenet_fast import models
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.shared_options import SharedOptions
from imagenet_fast.config import Config
from imagenet_fast.data.info import DatasetInfo, read_info
from imagenet_fast.data.options import DataOptions
from imagenet_fast.data.pipeline import make_images_on_device, steps_per_epoch
from imagenet_fast.distribute.all_reduce import AllReduce
from imagenet_fast.distribute.batch_norm_groups import batch_norm_group_size, ghost_batch_size
from imagenet_fast.distribute.fusion import Fusion
from imagenet_fast.distribute.options import ClusterOptions
from imagenet_fast.distribute.pipeline_strategy import PipelineStrategy
from imagenet_fast.distribute.strategy import (
    devices_of,
    make_strategy,
    per_replica_batch_size,
    tpu_coordinates,
)
from imagenet_fast.distribute.tpu import compiles_all_reduces, is_tpu
from imagenet_fast.layers import PixelNormalization
from imagenet_fast.models import network_of
from imagenet_fast.models.options import ModelOptions
from imagenet_fast.pipeline_parallel.balance import balance_for
from imagenet_fast.pipeline_parallel.in_stages import build_in_stages
from imagenet_fast.pipeline_parallel.pipeline import Pipeline
from imagenet_fast.pipeline_parallel.placement import stage_devices
from imagenet_fast.pipeline_parallel.stage_all_reduce import StageAllReduce
from imagenet_fast.training.build_optimizer import build_optimizer
from imagenet_fast.training.classifier import Classifier
from imagenet_fast.training.fine_tune import freeze, load_initial_weights
from imagenet_fast.training.fusion_trials import choose_fusion
from imagenet_fast.training.mix import Mixer
from imagenet_fast.training.schedule import build_schedule, warn_of_late_decays
from imagenet_fast.training.whitening import whiten

# Under these Keras scales the loss (strategy_supports_loss_scaling, loss_scale_optimizer.py).
_SCALES_LOSS = (
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.OneDeviceStrategy,
)

# Options that only some models have.
_MODEL_OPTIONS = (
    "stem",
    "stride_on_1x1",
    "zero_gamma",
    "batch_norm_momentum",
    "batch_norm_epsilon",
    "dropout",
    "batch_norm_after_pool5",
    "batch_norm_scale",
    "width",
    "pool_order",
    "activation",
    "celu_alpha",
    "logits_scale",
    "whitening",
    "identity_init",
    "normal_cells",
    "cell_filters",
)


def build_model(
    config: Config,
    strategy: tf.distribute.Strategy | None = None,
    *,
    fusion: Fusion | None = None,
    restored: bool = False,
) -> Classifier:
    """Returns the model that ``config`` describes, compiled, made in its strategy's scope.

    The same seed gives the same weights, whatever the strategy; or they begin as
    ``initial_weights`` says.

    Args:
      config: of the run.
      strategy: in whose scope it is made; None: the one that ``config`` asks for.
      fusion: gradient buckets chosen earlier in the run; None: as ``config`` says.
      restored: whether a checkpoint will be restored: then ``initial_weights`` and the images for
        whitening are not read.

    Raises:
      UserError: if the data, the hardware, the initial weights or the model's options cannot be
        used.
    """
    info = read_info(config)
    build_schedule(config, steps_per_epoch(info, config))
    warn_of_late_decays(config, steps_per_epoch(info, config))
    strategy = strategy or make_strategy(config)
    per_replica_batch_size(config, strategy)
    _check_loss_scaling(config, strategy)
    model = _build_without_images(config, info, strategy)
    if config.initial_weights and not restored:
        print(load_initial_weights(model, build_classifier), file=sys.stderr, flush=True)
    with model.distribute_strategy.scope():
        if model.mixer is not None:
            _check_partners(config)
        model.steps_per_epoch = steps_per_epoch(info, config)
        updates = config.duration.steps(model.steps_per_epoch, config.batch_size)
        model.epochs = max(1, round(updates / model.steps_per_epoch))
        model.total_steps = updates
        if config.lookahead_every:
            model.look_ahead(config.lookahead_decay, config.lookahead_every, updates)
        model.compile(optimizer=build_optimizer(config, model))
        if config.fusion == "auto" and fusion is None:
            fusion = _timed_fusion(config, model)
        model.all_reduce = build_all_reduce(config, model.pipeline, fusion)
        model.all_reduce.fusion.check(len(model.trainable_variables))
    # Images are read last, when nothing else can be wrong.
    if not config.initial_weights and not restored:
        whiten(network_of(model), config, info)
        model.restart_copies()
    if config.data_on_device:
        model.training_images = make_images_on_device(config, "train")
    _hold_validation_images(model, config, info)
    return model


def build_for_evaluation(config: Config) -> Classifier:
    """Returns the same model without an optimizer: its schedule needs no data to fit.

    Raises:
      UserError: as :func:`build_model`.
    """
    info = read_info(config)
    model = _build_without_images(config, info, make_strategy(config))
    _hold_validation_images(model, config, info)
    return model


def _check_loss_scaling(options: SharedOptions, strategy: tf.distribute.Strategy) -> None:
    """Checks that Keras scales the loss under a strategy, if it is to be scaled.

    TPUs, on which it does not, are :func:`build_classifier`'s to refuse.
    """
    if options.precision != "mixed_float16" or is_tpu(strategy):
        return
    with strategy.scope():
        if not isinstance(strategy, _SCALES_LOSS) and tf.distribute.has_strategy():
            what = (
                "pipelines" if isinstance(strategy, PipelineStrategy) else type(strategy).__name__
            )
            raise UserError(
                f"precision=mixed_float16 is not for {what}, with which Keras scales no loss: use "
                "mixed_bfloat16, which needs no scale"
            )


def _build_without_images(
    config: Config, info: DatasetInfo, strategy: tf.distribute.Strategy
) -> Classifier:
    """Returns the model without an optimizer, and without what devices hold of the data."""
    keras.utils.set_random_seed(config.seed)
    with strategy.scope():
        model = build_classifier(config, info.labels)
        model.compile()
    return model


def _hold_validation_images(model: Classifier, config: Config, info: DatasetInfo) -> None:
    if config.data_on_device and "validation" in info.splits:
        model.validation_images = make_images_on_device(config, "validation")


def build_classifier(config: Config, labels: Sequence[str]) -> Classifier:
    """Returns the model, not compiled, from uint8 [batch, image_size, image_size, 3] to logits.

    With ``train_sizes`` it takes images of any size.

    Args:
      config: of the model.
      labels: the name of each class.

    Raises:
      UserError: if the replicas of the strategy in scope cannot share batch norm as configured, or
        do not compute in its precision.
    """
    if config.precision == "mixed_float16" and is_tpu(tf.distribute.get_strategy()):
        raise UserError(
            "precision=mixed_float16 is not for TPUs, on which Keras scales no loss: use "
            "mixed_bfloat16, which needs no scale"
        )
    size = None if config.train_sizes else config.image_size
    shape = (size, size, 3)
    with precision_policy(config.precision):
        network, pipeline = _network(config, len(labels), shape)
        if config.freeze_through:
            freeze(network, config.freeze_through)
        pixels = keras.Input(shape, dtype="uint8", name="pixels")
        normalized = PixelNormalization(config.pixel_mean, config.pixel_std, name="normalize")
        model = Classifier(
            pixels,
            network(normalized(pixels)),
            label_smoothing=config.label_smoothing,
            mixer=_mixer(config),
            accumulation_steps=config.accumulation_steps,
            pipeline=pipeline,
            views=config.test_time_augmentation,
            xla=config.xla,
            config=config,
            labels=labels,
            name=config.model,
        )
    if config.ema_decay:
        model.keep_weight_average(config.ema_decay, config.ema_every)
    return model


def _network(
    config: Config, classes: int, shape: tuple[int | None, int | None, int]
) -> tuple[keras.Model, Pipeline | None]:
    """Returns the network and, if there is to be one, the pipeline of its blocks."""
    make = functools.partial(
        models.build,
        config.model,
        classes,
        shape,
        **_batch_norm_parts(config),
        **_model_options(config),
    )
    if config.pipeline_stages == 1:
        return make(), None
    check_pipeline(config)
    if config.pipeline_servers and tf.distribute.get_strategy().num_replicas_in_sync > 1:
        raise UserError("pipeline_servers is for one worker: of several, each has its own devices")
    each = config.pipeline_stages_per_device
    devices = stage_devices(
        config.pipeline_stages // each, config.pipeline_servers, on_cpus=bool(config.logical_cpus)
    )
    inputs = tf.TensorSpec((None, *shape), keras.mixed_precision.global_policy().compute_dtype)
    choose_balance = functools.partial(
        balance_for,
        inputs=inputs,
        stages=config.pipeline_stages,
        devices=len(devices),
        batch_size=config.batch_size,
        micro_batches=config.accumulation_steps,
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
        num_micro_batches=config.accumulation_steps,
        rematerialize=config.rematerialize,
        schedule=config.pipeline_schedule,
    )
    return network, pipeline


def check_pipeline(config: Config) -> None:
    """Checks that no option is given that does not work with pipelines.

    Raises:
      UserError: if there is.
    """
    for name, given in (("xla", config.xla), ("train_sizes", bool(config.train_sizes))):
        if given:
            raise UserError(f"pipeline_stages does not work with {name}: drop one of them")


def _timed_fusion(config: Config, model: Classifier) -> Fusion | None:
    """Returns the gradient buckets of the fastest step; None: one replica, nothing to reduce."""
    if model.distribute_strategy.num_replicas_in_sync == 1:
        return None
    size = config.image_size
    return choose_fusion(
        model,
        lambda fusion, name: _all_reduce(config, fusion, name),
        config.fusion_bytes,
        (per_replica_batch_size(config, model.distribute_strategy), size, size, 3),
    )


def build_all_reduce(
    options: ClusterOptions, pipeline: Pipeline | None = None, fusion: Fusion | None = None
) -> AllReduce | StageAllReduce:
    """Returns the gradient all-reduce, under the strategy in scope.

    Args:
      options: of the run.
      pipeline: of the model, if it has one.
      fusion: the gradient buckets; None: those of ``options``.

    Raises:
      UserError: if the replicas do not support the configured algorithm.
    """
    fusion = fusion or Fusion(options.fusion_bytes, options.fusion_segments)
    if pipeline is None:
        return _all_reduce(options, fusion, "gradients")
    return StageAllReduce(
        pipeline.devices,
        lambda place: _all_reduce(options, fusion, f"stage_{place}", place),
    )


def _all_reduce(options: ClusterOptions, fusion: Fusion, name: str, place: int = 0) -> AllReduce:
    return AllReduce(
        algorithm=options.all_reduce,
        group_size=options.all_reduce_group,
        fusion=fusion,
        dtype=options.all_reduce_dtype,
        topology=tpu_coordinates(tf.distribute.get_strategy()),
        name=name,
        place=place,
    )


def _mixer(options: DataOptions) -> Mixer | None:
    if not options.mixup_alpha and not options.cutmix_alpha:
        return None
    return Mixer(options.mixup_alpha, options.cutmix_alpha, options.seed)


def _check_partners(config: SharedOptions) -> None:
    images = per_replica_batch_size(config, tf.distribute.get_strategy())
    if images == config.accumulation_steps:
        raise UserError(
            "mixup_alpha and cutmix_alpha mix the images of a replica's micro-batch, but here that "
            "is a single image; raise batch_size or lower accumulation_steps"
        )


def _batch_norm_parts(config: Config) -> dict[str, int]:
    """Returns the batch-norm groups, as options of a model."""
    if not config.batch_norm_batch_size:  # any batch will do
        return {"batch_norm_group_size": 1, "ghost_batch_size": 0}
    strategy = tf.distribute.get_strategy()
    images = per_replica_batch_size(config, strategy) // config.accumulation_steps
    return {
        "batch_norm_group_size": _batch_norm_group_size(config, images),
        "ghost_batch_size": ghost_batch_size(config.batch_norm_batch_size, images),
    }


def _batch_norm_group_size(config: Config, images: int) -> int:
    """Returns the replicas of the strategy in scope that take batch statistics together."""
    strategy = tf.distribute.get_strategy()
    size = batch_norm_group_size(
        config.batch_norm_batch_size, images, strategy.num_replicas_in_sync
    )
    if size == 1 or compiles_all_reduces(strategy):
        return size
    groups = f"batch_norm_batch_size={config.batch_norm_batch_size} is {size} replicas together"
    if isinstance(strategy, PipelineStrategy):
        raise UserError(
            f"{groups}, which pipelines do not sum over: use at most {images}, the images of a "
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


def _model_options(options: ModelOptions) -> dict[str, object]:
    """Returns the options that the model has; others have their defaults, which Config checks."""
    has = models.option_names(options.model)
    return {name: getattr(options, name) for name in _MODEL_OPTIONS if name in has}


@contextlib.contextmanager
def precision_policy(policy: str) -> Iterator[None]:
    """Layers made inside use the mixed-precision policy of this name."""
    before = keras.mixed_precision.global_policy()
    keras.mixed_precision.set_global_policy(policy)
    try:
        yield
    finally:
        keras.mixed_precision.set_global_policy(before)
