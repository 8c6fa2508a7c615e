"""The experiments of the large-batch study."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

from study.settings import PLAIN, Experiment, Setting

from imagenet_fast.base.durations import Duration
from imagenet_fast.config import Config

_BASE = pathlib.Path(__file__).parent / "base.flags"

# (learning rate, epochs of warmup), the best of the searches in benchmarks/large_batch/tuning; for
# LARS at 2048, values between those of 1024 and 4096; for other batches, those of 4096.
_LARS_TUNED = {1024: (28.0, 0.86), 2048: (17.0, 0.75), 4096: (10.4, 0.65), 8192: (10.4, 0.65)}
_SGD_TUNED = dict.fromkeys((2048, 4096, 8192), (2.1, 2.33))

# Kinds of settings; training.py has a function for each.
CONSTANT_WARMUP, HALF_PRECISION_LARS, POOL5 = "constant_warmup", "half_precision_lars", "pool5"


@functools.lru_cache(maxsize=1)
def _base() -> Config:
    return Config.from_flagfile(_BASE)


def _sgd(batch: int, **changes: Any) -> Config:
    """The small batch's learning rate, scaled linearly, with gradual warmup: Goyal et al. 2017."""
    return _base().replace(batch_size=batch, **changes)


def _tuned(batch: int, rate: float, warmup: float, **changes: Any) -> Config:
    """A learning rate tuned for the batch, with the schedule of LARS' recipes."""
    return _base().replace(
        batch_size=batch,
        learning_rate=rate,
        rate_scaling="none",
        warmup=Duration(warmup, "epochs"),
        warmup_start=0.0,
        schedule="polynomial",
        end_learning_rate=1e-4,
        **changes,
    )


def _lars(batch: int, **changes: Any) -> Config:
    rate, warmup = _LARS_TUNED[batch]
    options = {"optimizer": "lars", "nesterov": False, "weight_decay_on": "weights", **changes}
    return _tuned(batch, rate, warmup, **options)


_NO_WARMUP = {"warmup": Duration(0, "epochs")}


def scaling() -> Experiment:
    """(a) to (e): error against batch size. Goyal et al. Table 1 and Figure 3; You et al."""
    methods = (
        ("gradual warmup", (32, 128, 512, 1024, 2048, 4096, 8192), _sgd, {}, PLAIN),
        ("no warmup", (512, 1024, 2048, 4096, 8192), _sgd, _NO_WARMUP, PLAIN),
        ("constant warmup", (1024, 4096), _sgd, {}, CONSTANT_WARMUP),
        ("square-root rate", (4096,), _sgd, {"rate_scaling": "sqrt"}, PLAIN),
        ("fixed rate", (4096,), _sgd, {"rate_scaling": "none"}, PLAIN),
        ("LARS", tuple(_LARS_TUNED), _lars, {}, PLAIN),
    )
    settings = [
        Setting(method, make(batch, **changes), kind)
        for method, batches, make, changes, kind in methods
        for batch in batches
    ]
    settings += [
        Setting("SGD, tuned", _tuned(batch, rate, warmup))
        for batch, (rate, warmup) in _SGD_TUNED.items()
    ]
    return Experiment("scaling", tuple(settings))


def zero_gamma() -> Experiment:
    """(f): the last gamma of each block at 0 or 1. Goyal et al. Table 2b."""
    return Experiment(
        "zero_gamma",
        tuple(
            Setting(f"gamma {1 - on:.1f}", _sgd(batch, zero_gamma=bool(on)))
            for on in (1, 0)
            for batch in (1024, 4096)
        ),
    )


def weight_decay() -> Experiment:
    """(g): weight decay on all variables or on weights only. Jia et al. 2018."""
    makers = (("SGD", _sgd, (128, 4096)), ("LARS", _lars, (4096,)))
    return Experiment(
        "weight_decay",
        tuple(
            Setting(f"{name}, {label}", make(batch, weight_decay_on=on))
            for name, make, batches in makers
            for label, on in (("decay on weights", "weights"), ("decay on all", "all"))
            for batch in batches
        ),
    )


def half_precision() -> Experiment:
    """(i): LARS in float16 against float32. Jia et al. 2018."""
    return Experiment(
        "half_precision",
        (
            Setting("LARS in float32", _lars(4096)),
            Setting("LARS in float16", _lars(4096), HALF_PRECISION_LARS),
        ),
    )


def pool5() -> Experiment:
    """(h): AlexNet with and without batch norm after pool5. Jia et al. 2018."""
    config = _base().replace(
        model="alexnet_bn",
        image_size=64,
        batch_size=128,
        learning_rate=0.02,
        learning_rate_batch=128,
        duration=Duration(24000, "examples"),
        warmup=Duration(20, "steps"),
        warmup_start=0.0,
        schedule="polynomial",
    )
    return Experiment(
        "pool5",
        tuple(
            Setting(label, config.replace(batch_norm_after_pool5=on), POOL5)
            for label, on in (("batch norm after pool5", True), ("none after pool5", False))
        ),
    )


EXPERIMENTS = (scaling(), zero_gamma(), weight_decay(), half_precision(), pool5())
