"""Selection of images by their loss: what fits a run, and the network that selects."""

from __future__ import annotations

import functools

import keras
import tensorflow as tf

from imagenet_fast import models
from imagenet_fast.base.errors import UserError
from imagenet_fast.config import Config
from imagenet_fast.distribute.strategy import per_replica_batch_size, replicas_each
from imagenet_fast.layers import PixelNormalization
from imagenet_fast.optimizers.options import OptimizerOptions
from imagenet_fast.training.build.network import precision_policy
from imagenet_fast.training.build.optimizer import build_optimizer
from imagenet_fast.training.run import Run
from imagenet_fast.training.step.losses import Focus, image_losses, start_at_equal_probabilities
from imagenet_fast.training.step.micro_batches import rounded_part
from imagenet_fast.training.step.selection import Proxy, Selection

_MIRRORED = (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy)


def check_selection(run: Run) -> None:
    """Checks that a run can select images by their loss as configured.

    Raises:
      UserError: if it cannot.
    """
    config, strategy = run.config, run.strategy
    if config.select_by_loss == 1:
        return
    each = replicas_each(config, strategy)
    images = per_replica_batch_size(config, strategy) // each
    selected = selected_images(config, images)
    if selected % config.accumulation_steps:
        raise UserError(
            f"select_by_loss={config.select_by_loss:g} selects {selected} of a replica's {images} "
            f"images, which accumulation_steps={config.accumulation_steps} does not divide"
        )
    if config.batch_norm_batch_size:
        raise UserError(
            "select_by_loss does not work with batch_norm_batch_size, because the network sees "
            "batches of two sizes: drop one of them"
        )
    replicas = each * strategy.num_replicas_in_sync
    if config.proxy_model and replicas > 1:
        raise UserError(
            f"proxy_model is for one device, but there are {replicas} "
            "replicas: without it, the network itself selects images"
        )
    # Their replicas, even a single one, cannot update weights in some steps only.
    if config.proxy_model and isinstance(strategy, _MIRRORED):
        raise UserError(
            "proxy_model is for strategy=one_device, not for MirroredStrategy with one replica"
        )


def selected_images(options: OptimizerOptions, images: int) -> int:
    """Returns the number of a replica's images in a step that it trains on."""
    return rounded_part(images, options.select_by_loss)


def build_selection(run: Run) -> Selection:
    """Returns what chooses the images of a step, as configured; in the strategy's scope."""
    config, proxy = run.config, None
    if config.proxy_model:
        model, every = build_proxy_network(config, run.info.num_classes), config.proxy_every
        losses = functools.partial(
            image_losses,
            loss=config.loss,
            label_smoothing=config.label_smoothing,
            focus=Focus.of(config),
        )
        optimizer = build_optimizer(config, model, run.steps_per_epoch, every=every)
        proxy = Proxy(model, optimizer, losses, every)
    return Selection(config.select_by_loss, proxy)


def build_proxy_network(config: Config, classes: int) -> keras.Model:
    """Returns ``proxy_model``, from uint8 [batch, image_size, image_size, 3] to logits."""
    shape = (config.input_size, config.input_size, 3)
    options: dict[str, float] = {
        "batch_norm_momentum": config.batch_norm_momentum,
        "batch_norm_epsilon": config.batch_norm_epsilon,
    }
    if config.proxy_width:
        options["width"] = config.proxy_width
    with precision_policy(config.precision):
        network = models.build(config.proxy_model, classes, shape, **options)
        if config.loss != "cross_entropy":
            start_at_equal_probabilities(network)
        pixels = keras.Input(shape, dtype="uint8", name="pixels")
        normalize = PixelNormalization(config.pixel_mean, config.pixel_std, name="normalize")
        return keras.Model(pixels, network(normalize(pixels)), name="proxy")
