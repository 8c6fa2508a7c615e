"""Builds a compiled model from a configuration."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.keras_2 import KERAS_2, layers_in
from imagenet_fast.base.notices import say, warn_once
from imagenet_fast.base.option import option_text
from imagenet_fast.base.shared_options import SharedOptions
from imagenet_fast.config import Config
from imagenet_fast.data.class_values import BALANCED, read_class_values
from imagenet_fast.data.dataset import make_images_on_device
from imagenet_fast.data.info import DatasetInfo
from imagenet_fast.data.options import InputOptions
from imagenet_fast.distribute.all_reduce import AllReduce
from imagenet_fast.distribute.fusion import Fusion
from imagenet_fast.distribute.options import ClusterOptions
from imagenet_fast.distribute.pipeline_strategy import PipelineStrategy
from imagenet_fast.distribute.strategy import per_replica_batch_size, replicas_each, tpu_coordinates
from imagenet_fast.distribute.tpu import is_tpu
from imagenet_fast.layers import PixelNormalization
from imagenet_fast.layers.seeds import UnseededDraws, seed_states
from imagenet_fast.models import network_of
from imagenet_fast.models.custom import CustomModel, needed_arguments
from imagenet_fast.models.options import MODEL_NAMES, is_custom
from imagenet_fast.optimizers.lookahead import Lookahead
from imagenet_fast.optimizers.options import UpdateOptions
from imagenet_fast.optimizers.weight_average import WeightAverage
from imagenet_fast.pipeline_parallel.pipeline import Pipeline
from imagenet_fast.pipeline_parallel.stage_all_reduce import StageAllReduce
from imagenet_fast.training.build.fine_tune import freeze, load_initial_weights
from imagenet_fast.training.build.fusion_trials import choose_fusion
from imagenet_fast.training.build.network import (
    build_network,
    pixel_normalization,
    precision_policy,
    replicas_together,
    with_stages_for_devices,
)
from imagenet_fast.training.build.optimizer import build_optimizer
from imagenet_fast.training.build.schedule import build_schedule, warn_of_short_run
from imagenet_fast.training.build.selection import build_selection, check_selection, selected_images
from imagenet_fast.training.build.teacher import build_teacher
from imagenet_fast.training.build.whitening import whiten
from imagenet_fast.training.run import Run, make_run
from imagenet_fast.training.step.classifier import Classifier
from imagenet_fast.training.step.losses import Focus, start_at_equal_probabilities
from imagenet_fast.training.step.mix import Mixer
from imagenet_fast.training.step.rematerialization import Rematerialization

_MIRRORED = (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy)
# Strategies under which Keras 2 scales the loss (strategy_supports_loss_scaling of its
# loss_scale_optimizer.py); with Keras 3, no others have been tried.
_SCALES_LOSS = (*_MIRRORED, tf.distribute.OneDeviceStrategy)
# Fraction of the average weights at the end of a run above which it is likely to look untrained.
_KEPT_INITIAL_WEIGHTS = 0.05
# Of the moving averages of batch norm, which may be good ones of pretrained weights.
_KEPT_INITIAL_AVERAGES = 0.2


def build_model(
    config: Config,
    strategy: tf.distribute.Strategy | None = None,
    *,
    model: CustomModel | None = None,
) -> Classifier:
    """Returns the compiled model that ``config`` describes, made in its strategy's scope.

    Its weights are those of ``initial_weights``, or random: the same for the same seed under any
    strategy.

    Args:
      config: of the run.
      strategy: the strategy; None: the one that ``config`` describes.
      model: your own network instead of ``config.model``: a function from the number of classes and
        the (height, width, 3) of an image to a Keras model that returns logits, called in the
        strategy's scope and under the precision policy; the name of one, ``module:function``; or a
        functional or sequential Keras model, which is copied with its weights.

    Raises:
      UserError: if the data, the hardware, the initial weights or an option cannot be used.
    """
    if strategy is not None and not isinstance(strategy, tf.distribute.Strategy):
        raise UserError(f"{strategy!r:.60} is no strategy: give a network of your own as model=")
    return build(make_run(config, model, strategy), model)


def build(
    run: Run,
    custom: CustomModel | None = None,
    *,
    fusion: Fusion | None = None,
    restored: bool = False,
) -> Classifier:
    """Returns the compiled model of a run, as :func:`build_model`.

    Args:
      run: the run.
      custom: the user's own network, for which ``config.model`` stands; None: the one it names.
      fusion: gradient buckets chosen earlier in the run; None: those of its configuration.
      restored: whether a checkpoint will be restored, so that neither ``initial_weights`` nor
        images for whitening need to be read.

    Raises:
      UserError: as :func:`build_model`.
    """
    config, info, strategy = run.config, run.info, run.strategy
    build_schedule(config, run.steps_per_epoch)
    if len(info.labels) == 1:
        warn_once(f"there is only one class, {info.labels[0]}: every prediction will be right")
    warn_of_short_run(config, run.steps_per_epoch)
    _warn_of_unused_sizes(run)
    _warn_of_initial_weights(run)
    per_replica_batch_size(config, strategy)
    _check_loss_scaling(config, strategy)
    check_selection(run)
    classifier = _build_without_optimizer(config, info.labels, strategy, custom)
    if not network_of(classifier).trainable_variables:
        raise UserError(
            f"model {classifier.name} has nothing to train: all its layers have trainable = False, "
            "or are in a model or layer that has"
        )
    _warn_of_initial_averages(run, classifier)
    starts_trained = bool(config.initial_weights) or config.pretrained
    if starts_trained and not restored:
        say(load_initial_weights(classifier, build_classifier))
    if config.teacher:
        classifier.teacher = build_teacher(config, info.labels, strategy, build_classifier)
    with classifier.distribute_strategy.scope():
        if classifier.mixer is not None:
            _check_mixer(config)
        if config.rematerialize == "always" and config.pipeline_stages == 1:
            with precision_policy(config.precision):
                classifier.rematerialization = Rematerialization(network_of(classifier))
        classifier.class_weights = make_class_weights(config, info)
        classifier.steps_per_epoch = run.steps_per_epoch
        classifier.epochs = max(1, round(run.total_steps / run.steps_per_epoch))
        classifier.total_steps = run.total_steps
        if config.lookahead_every:
            classifier.lookahead = Lookahead(
                classifier.weights, config.lookahead_decay, config.lookahead_every, run.total_steps
            )
        optimizer = build_optimizer(config, classifier, run.steps_per_epoch)
        # Keras 3 would put a dynamic loss scale around a fixed one, and use that alone.
        classifier.compile(optimizer, **({} if KERAS_2 else {"auto_scale_loss": False}))
        classifier.selection = build_selection(run)
        if config.fusion == "auto" and fusion is None:
            fusion = _timed_fusion(config, classifier)
        classifier.all_reduce = build_all_reduce(config, classifier.pipeline, fusion)
        classifier.all_reduce.fusion.check(len(classifier.trainable_variables))
    # Reading images takes longest: all other errors come before.
    if not starts_trained and not restored:
        whiten(network_of(classifier), run)
        classifier.restart_shadow_weights()
    proxy = classifier.selection.proxy
    if proxy is not None and not restored:
        whiten(network_of(proxy.network), run)
    if config.data_on_device:
        classifier.training_images = make_images_on_device(config, "train")
    _load_validation_images(classifier, config, info)
    return classifier


def build_for_evaluation(
    run: Run, custom: CustomModel | None = None, *, labels: Sequence[str] = ()
) -> Classifier:
    """Returns the model without an optimizer, so the schedule need not fit the data.

    A pipeline for more devices than there are has fewer stages.

    Args:
      run: the run, or one on other data or devices.
      custom: as of :func:`build`.
      labels: the name of each class; none: those of the data.

    Raises:
      UserError: as :func:`build_model`.
    """
    config = with_stages_for_devices(run.config)
    classifier = _build_without_optimizer(config, labels or run.info.labels, run.strategy, custom)
    _load_validation_images(classifier, run.config, run.info)
    return classifier


def _warn_of_unused_sizes(run: Run) -> None:
    """Warns if the run ends before it trains on images of all its sizes."""
    config = run.config
    sizes = [*(size for size, _ in config.sizes_until), config.image_size][1:]
    starts = [run.steps(at) for _, at in config.sizes_until]
    unused = [f"{size}" for size, start in zip(sizes, starts) if start >= run.total_steps]
    if unused:
        name = "size_ramp_at" if config.size_ramp else "train_until"
        warn_once(
            f"the run ends before it trains on images of {' and '.join(unused)} pixels: "
            f"{name} is {option_text(getattr(config, name))}, duration {config.duration}"
        )


def _warn_of_initial_weights(run: Run) -> None:
    """Warns if the EMA of the weights, which evaluation uses, will have kept the initial ones.

    Page 2019 averages with 0.99 over 980 steps: 1 - 10 / 980.
    """
    config, total = run.config, run.total_steps
    kept = config.ema_decay**total
    if kept > _KEPT_INITIAL_WEIGHTS:
        decay = max(0.0, round(1 - 10 / total, len(f"{total}")))
        warn_once(
            f"the weights that are evaluated and exported will be {kept:.0%} the initial ones at "
            f"the end of the run, because ema_decay is {config.ema_decay:g} for {total} steps: "
            + (f"give --ema_decay={decay:g} or less, or 0" if decay else "give --ema_decay=0")
        )


def _warn_of_initial_averages(run: Run, classifier: Classifier) -> None:
    """Warns if batch norms keep their initial moving averages, which evaluation uses.

    This package's networks have ``batch_norm_momentum``, by default 0.9, which is short enough for
    all but a few steps; others have their own.
    """
    if run.config.model in MODEL_NAMES:
        return
    norms = [
        own for own in layers_in(classifier) if isinstance(own, keras.layers.BatchNormalization)
    ]
    momentum = max((norm.momentum for norm in norms if norm.trainable), default=0.0)
    kept = momentum**run.total_steps
    if kept > _KEPT_INITIAL_AVERAGES:
        warn_once(
            f"batch norm's moving averages will be {kept:.0%} the initial ones at the end of the "
            f"run, because their momentum is {momentum:g} for {run.total_steps} steps, so that "
            "evaluation may be far worse than training: give --batch_norm_momentum=0.8 or so, or "
            "train longer"
        )


def _check_loss_scaling(options: SharedOptions, strategy: tf.distribute.Strategy) -> None:
    """Checks that Keras scales the loss under a strategy, if ``precision`` needs that.

    :func:`build_classifier` refuses TPUs, on which it does not.
    """
    if options.precision != "mixed_float16" or is_tpu(strategy):
        return
    with strategy.scope():
        if not isinstance(strategy, _SCALES_LOSS) and tf.distribute.has_strategy():
            what = (
                "pipelines" if isinstance(strategy, PipelineStrategy) else type(strategy).__name__
            )
            raise UserError(
                f"precision=mixed_float16 is not for {what}, for which Keras does not scale the "
                "loss: use mixed_bfloat16, which needs no loss scale"
            )


def _build_without_optimizer(
    config: Config,
    labels: Sequence[str],
    strategy: tf.distribute.Strategy,
    custom: CustomModel | None,
) -> Classifier:
    """Returns the model without an optimizer and without images on devices."""
    keras.utils.set_random_seed(config.seed)
    with strategy.scope():
        model = build_classifier(config, labels, custom)
        model.compile()
    return model


def _load_validation_images(model: Classifier, options: InputOptions, info: DatasetInfo) -> None:
    if options.data_on_device and "validation" in info.splits:
        model.validation_images = make_images_on_device(options, "validation")


def build_classifier(
    config: Config, labels: Sequence[str], custom: CustomModel | None = None
) -> Classifier:
    """Returns the uncompiled model from uint8 [batch, image_size, image_size, 3] to logits.

    With ``train_sizes``, ``size_ramp`` or another ``eval_image_size`` it takes images of any size.

    Args:
      config: of the model.
      labels: the name of each class.
      custom: the user's own network, for which ``config.model`` stands; None: the one it names.

    Raises:
      UserError: if the strategy in scope does not support the configured batch norm, pipeline or
        precision.
    """
    if config.precision == "mixed_float16" and is_tpu(tf.distribute.get_strategy()):
        raise UserError(
            "precision=mixed_float16 is not for TPUs, on which Keras does not scale the loss: use "
            "mixed_bfloat16, which needs no loss scale"
        )
    shape = (config.input_size, config.input_size, 3)
    with precision_policy(config.precision):
        network, pipeline = build_network(config, len(labels), shape, custom)
        # The bias of a user's network is the user's.
        if config.loss != "cross_entropy" and not is_custom(config.model):
            start_at_equal_probabilities(network)
        if config.freeze_through:
            freeze(network, config.freeze_through)
        pixels = keras.Input(shape, dtype="uint8", name="pixels")
        normalize = PixelNormalization(*pixel_normalization(config), name="normalize")
        # Keras returns a list if a network of the user has one of a single output.
        (logits,) = tf.nest.flatten(network(normalize(pixels), **needed_arguments(network)))
        if logits.dtype != tf.float32:  # of a network of the user
            logits = keras.layers.Activation("linear", dtype="float32", name="float32")(logits)
        mixes = config.mixup_alpha or config.cutmix_alpha
        mixer = Mixer(config.mixup_alpha, config.cutmix_alpha, config.seed) if mixes else None
        model = Classifier(
            pixels,
            logits,
            loss=config.loss,
            label_smoothing=config.label_smoothing,
            focus=Focus.of(config),
            mixer=mixer,
            accumulation_steps=config.accumulation_steps,
            replicas_each=replicas_each(config, tf.distribute.get_strategy()),
            replicas_together=_replicas_together(config, network),
            pipeline=pipeline,
            views=config.test_time_augmentation,
            views_fraction=config.tta_fraction,
            xla=config.xla,
            unseeded_draws=_unseeded_draws(config),
            config=config,
            labels=labels,
            custom=custom,
            name=network.name,
        )
    if config.ema_decay:
        model.weight_average = WeightAverage(model.weights, config.ema_decay, config.ema_every)
    return model


def _timed_fusion(options: InputOptions, model: Classifier) -> Fusion | None:
    """Returns the gradient buckets of the fastest step; None: one replica, nothing to reduce."""
    if model.distribute_strategy.num_replicas_in_sync == 1:
        return None
    size = options.image_size
    return choose_fusion(
        model,
        lambda fusion, name: _all_reduce(options, fusion, name),
        options.fusion_bytes,
        (per_replica_batch_size(options, model.distribute_strategy), size, size, 3),
    )


def build_all_reduce(
    options: ClusterOptions, pipeline: Pipeline | None = None, fusion: Fusion | None = None
) -> AllReduce | StageAllReduce:
    """Returns the gradient all-reduce for the strategy in scope.

    Args:
      options: of the run.
      pipeline: the model's, if it has one.
      fusion: the gradient buckets; None: those of ``options``.

    Raises:
      UserError: if the replicas do not support the configured algorithm.
    """
    fusion = fusion or Fusion(options.fusion_bytes, options.fusion_segments)
    if pipeline is None:
        return _all_reduce(options, fusion, "gradients")
    return StageAllReduce(
        pipeline.devices, lambda place: _all_reduce(options, fusion, f"stage_{place}", place)
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


def _unseeded_draws(config: Config) -> UnseededDraws | None:
    """Returns what a network of the user may need."""
    if KERAS_2 or config.model in MODEL_NAMES or config.pipeline_stages > 1:
        return None
    return UnseededDraws(config.seed)


def _replicas_together(config: Config, network: keras.Model) -> int:
    """Returns ``replicas_together``, which must be 1 if layers draw random numbers.

    Raises:
      UserError: if it is not.
    """
    together = replicas_together(config)
    if together > 1 and seed_states(network):
        raise UserError(
            f"batch_norm_batch_size={config.batch_norm_batch_size} needs {together} replicas in "
            "one forward pass of a device, in which dropout would not be that of each: use a "
            f"device for each of {config.replicas[0]} replicas"
        )
    return together


def _check_mixer(options: UpdateOptions) -> None:
    strategy = tf.distribute.get_strategy()
    images = per_replica_batch_size(options, strategy) // replicas_each(options, strategy)
    if selected_images(options, images) == options.accumulation_steps:
        raise UserError(
            "mixup_alpha and cutmix_alpha mix the images of a replica's micro-batch, which here is "
            "a single image; raise batch_size or lower accumulation_steps"
        )


def make_class_weights(options: UpdateOptions, info: DatasetInfo) -> np.ndarray | None:
    """Returns the weight of each class, float64 [classes]; None: all are 1.

    ``balanced`` weights are images / (classes * images of the class), as scikit-learn's.

    Args:
      options: give ``class_weights``, and the ``model_dir`` of a run that may resume without the
        file of its weights.
      info: the data set.

    Raises:
      UserError: if the data has no manifest, or a file cannot be used.
    """
    if not options.class_weights:
        return None
    if options.class_weights != BALANCED:
        return read_class_values(
            "class_weights", options.class_weights, info.labels, options.model_dir
        )
    counts = np.array(info.splits["train"].class_counts, np.float64)
    if not counts.size:
        raise UserError(
            "class_weights=balanced needs the number of images of each class: prepare the data "
            "with `imagenet-fast prepare`, or give a file of weights"
        )
    # A class without images has no part in the loss.
    return counts.sum() / (len(counts) * np.maximum(counts, 1))
