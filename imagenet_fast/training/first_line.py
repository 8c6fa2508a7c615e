"""The first line of a run: model, data, devices, batch and steps."""

from __future__ import annotations

import numpy as np

from imagenet_fast.data.info import DatasetInfo
from imagenet_fast.distribute.batch_norm_groups import images_together
from imagenet_fast.distribute.devices import RunDevices, run_devices
from imagenet_fast.distribute.strategy import devices_of, replicas_each
from imagenet_fast.pipeline_parallel.pipeline import Pipeline
from imagenet_fast.training.run import Run
from imagenet_fast.training.step.classifier import Classifier


def first_line_of(run: Run, model: Classifier, first_step: int) -> str:
    """Returns a one-line summary of a run, for its start."""
    config, info, strategy = run.config, run.info, run.strategy
    replicas, parts = run.replicas, config.accumulation_steps
    each = replicas_each(config, strategy)
    return (
        f"{config.model} on {info.name} ({info.splits['train'].examples} training images, "
        f"{info.num_classes} classes), {model_devices(model)}, "
        f"{config.precision}; batch {config.batch_size} = {replicas} x "
        f"{config.batch_size // replicas}"
        + (f" in {parts} micro-batches" if parts > 1 else "")
        + (f", {each} on each device" if each > 1 else "")
        + _stages(model.pipeline)
        + _batch_norm(run)
        + f"; {run.total_steps} steps of {run.steps_per_epoch} an epoch"
        + (f", from step {first_step}" if first_step else "")
        + image_memory(run)
        + _class_weights(model, info)
        + (f"; classes sampled: {config.sampling}" if config.sampling else "")
        + (f"; teacher: {model.teacher.name}" if model.teacher else "")
    )


def model_devices(model: Classifier) -> RunDevices:
    """Returns the devices that compute."""
    strategy, pipeline = model.distribute_strategy, model.pipeline
    return run_devices(strategy, devices_of(strategy) if pipeline is None else pipeline.devices)


def device_count(model: Classifier) -> int:
    """Returns the number of devices that compute, of all workers."""
    per_replica = 1 if model.pipeline is None else len(model.pipeline.devices)
    return model.distribute_strategy.num_replicas_in_sync * per_replica


def _class_weights(model: Classifier, info: DatasetInfo) -> str:
    """Returns the lowest and highest weight of a class, if there are weights."""
    if model.class_weights is None:
        return ""
    low, high = (int(find(model.class_weights)) for find in (np.argmin, np.argmax))
    return "; class weights from " + " to ".join(
        f"{model.class_weights[n]:.3g} ({info.labels[n]})" for n in (low, high)
    )


def batch_norm_images(run: Run) -> int:
    """Returns the number of images in a batch-norm group."""
    config = run.config
    at_once = config.batch_size // (run.replicas * config.accumulation_steps)
    return images_together(config.batch_norm_batch_size, at_once, run.replicas)


def image_memory(run: Run) -> str:
    """Returns, as text, the memory of images on each device or in each host's shuffle buffer.

    With a cache, the buffer holds only indices.
    """
    options, info = run.config, run.info
    if options.data_on_device:
        sizes = {"train": options.image_size}
        pixels = sum(
            split.examples * sizes.get(name, options.evaluation_image_size) ** 2
            for name, split in info.splits.items()
        )
        return f"; {3 * pixels / 1e6:.0f} MB of images on each device"
    split = info.splits["train"]
    if not split.bytes or options.cache != "none":
        return ""
    images = min(options.shuffle_buffer, split.examples)
    return f"; up to {images * split.bytes / split.examples / 1e6:.0f} MB in the shuffle buffer"


def _stages(pipeline: Pipeline | None) -> str:
    if pipeline is None:
        return ""
    balance = [len(stage.blocks) for stage in pipeline.stages]
    return f" through {len(balance)} stages of {', '.join(map(str, balance))} blocks"


def _batch_norm(run: Run) -> str:
    requested, images = run.config.batch_norm_batch_size, batch_norm_images(run)
    if not requested:
        return ""
    return f", batch norm of {images} images" + f" ({requested} requested)" * (requested != images)
