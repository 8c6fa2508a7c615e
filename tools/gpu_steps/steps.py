"""The training steps that are exported: one replica's part of recipes, as one GPU's step."""

from __future__ import annotations

from typing import Any

from imagenet_fast.config import Config

GPU = "h100:1x1"
_CIFAR = {"num_classes": 10, "data_on_device": False, "alternating_flip": False}


def _step(recipe: str = "", **changes: Any) -> Config:
    """Returns the options of a step of the largest images, on synthetic data."""
    config = Config.from_flagfile(recipe) if recipe else Config(model="resnet50")
    config = config.replace(
        strategy="tpu", xla=False, synthetic=True, **{"num_classes": 1000, **changes}
    )
    return config.replace(image_size=config.largest_image_size)


STEPS = {
    "resnet50_float16": _step(precision="mixed_float16", batch_size=256),
    "resnet50_bfloat16": _step(precision="mixed_bfloat16", batch_size=256),
    "resnet50_float32": _step(precision="float32", batch_size=256),
    "mlperf_3k": _step("mlperf_3k", batch_size=400),
    "ffcv_rn50_16": _step("ffcv_rn50_16", batch_size=512),
    "ffcv_rn18_16": _step("ffcv_rn18_16", batch_size=1024),
    "mosaic_mild": _step("mosaic_mild", batch_size=256),
    "myrtle_cifar10": _step("myrtle_cifar10", **{**_CIFAR, "augment_in_groups": False}),
    "airbench_cifar10": _step("airbench_cifar10", **_CIFAR),
    "speedrun_cifar10": _step("speedrun_cifar10", **_CIFAR),
    "airbench96_cifar10": _step("airbench96_cifar10", **_CIFAR),
}

# Those of which a small step is compared with the processor's.
COMPARED = (
    *("resnet50_float16", "mlperf_3k", "ffcv_rn18_16", "mosaic_mild"),
    *("myrtle_cifar10", "speedrun_cifar10", "airbench96_cifar10"),
)


def small(config: Config) -> Config:
    """Returns a step of fewer and smaller images, without warmup."""
    changes: dict[str, Any] = {
        "size_ramp": (),
        "size_ramp_at": (),
        "train_sizes": (),
        "train_until": (),
    }
    if config.schedule != "piecewise_linear":
        changes["warmup"] = "0 steps"
    return config.replace(batch_size=32, image_size=min(64, config.image_size), **changes)
