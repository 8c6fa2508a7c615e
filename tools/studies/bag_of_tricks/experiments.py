"""The experiments of the bag-of-tricks study."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from study.settings import Experiment, Setting

from imagenet_fast.config import Config

_BASE = pathlib.Path(__file__).with_name("base.flags")
FULL, FROZEN = "all tricks", "frozen scale"
UNFROZEN = f"{FULL} but {FROZEN}"
# The numbers of epochs of each, by the channels of the first convolution.
EPOCHS = {
    8: {FULL: (4, 6, 8, 10, 12, 14), UNFROZEN: (8, 10)},
    16: {FULL: (6, 8, 10, 12), UNFROZEN: (8, 10)},
}


@dataclasses.dataclass(frozen=True)
class Step:
    """A row of the published table.

    Attributes:
      name: of the trick in tables.
      epochs: published.
      seconds: published, to 94% on CIFAR-10 on a V100.
      changes: options that change from the step before; the learning-rate schedule follows from
        ``epochs`` unless it is among them.
      undone: options that remove the trick from the whole recipe; None: it cannot be removed.
    """

    name: str
    epochs: int
    seconds: float | None
    changes: dict[str, Any]
    undone: dict[str, Any] | None = None


# In the published order. Page changes the learning rate with the trick that permits it.
STEPS = (
    Step("baseline", 24, 75, {}),
    Step(
        "data on the device",
        24,
        70,
        {"data_on_device": True, "augment_in_groups": True, "cache": "none"},
    ),
    Step(
        "pool before batch norm",
        25,
        64,
        {"pool_order": "conv_pool_bn_relu"},
        {"pool_order": "conv_bn_relu_pool"},
    ),
    Step("label smoothing", 23, 59, {"label_smoothing": 0.2}, {"label_smoothing": 0.0}),
    Step("CELU", 20, 52, {"activation": "celu", "celu_alpha": 0.075}, {"activation": "relu"}),
    Step(
        "ghost batch norm",
        18,
        46,
        {"batch_norm_batch_size": 32, "learning_rate": 0.6},
        {"batch_norm_batch_size": 0},
    ),
    Step(
        FROZEN,
        17,
        43,
        {
            "batch_norm_scale": False,
            "celu_alpha": 0.3,
            "logits_scale": 1 / 16,
            "bias_rate_factor": 64.0,
        },
        {
            "batch_norm_scale": True,
            "celu_alpha": 0.075,
            "logits_scale": 0.0,
            "bias_rate_factor": 1.0,
        },
    ),
    Step(
        "patch whitening",
        14,
        36,
        {"whitening": True, "learning_rate": 1.0, "cutout": 5},
        {"whitening": False},
    ),
    Step("weight average", 13, 34, {"ema_decay": 0.99, "ema_every": 5}, {"ema_decay": 0.0}),
    Step(
        "flip in evaluation",
        13,
        None,
        {"test_time_augmentation": "flip"},
        {"test_time_augmentation": "none"},
    ),
    Step("no cutout", 10, 26, {"cutout": 0}, {"cutout": 5}),
)


def ladder() -> Experiment:
    """The tricks one after another, each with all before it, in the published epochs."""
    config = Config.from_flagfile(_BASE)
    settings = []
    for step in STEPS:
        config = scheduled(config.replace(**step.changes), step.epochs)
        settings.append(Setting(step.name, config))
    return Experiment("ladder", tuple(settings))


def whole_recipe() -> Config:
    """Returns the configuration with all tricks, in the published epochs."""
    return ladder().settings[-1].config


def recipes() -> dict[str, Config]:
    """Returns the configurations that are trained in fewer epochs than the baseline."""
    whole = whole_recipe()
    return {FULL: whole, UNFROZEN: whole.replace(**_undone(FROZEN))}


def _undone(trick: str) -> dict[str, Any]:
    (changes,) = (step.undone for step in STEPS if step.name == trick)
    return changes


def fewer_epochs(width: int) -> Experiment:
    """The baseline, and the tricks in fewer epochs: how many reach its accuracy."""
    settings = [Setting(STEPS[0].name, ladder().settings[0].config.replace(width=width))]
    for name, config in recipes().items():
        config = config.replace(width=width)
        settings += [Setting(name, scheduled(config, epochs)) for epochs in EPOCHS[width][name]]
    return Experiment(f"epochs_{width}", tuple(settings))


def timed() -> dict[str, Config]:
    """Returns the configurations to time, by their names in ``step_times.json``.

    Each has one name: a configuration in several tables is timed once.
    """
    configs = {setting.method: setting.config for setting in ladder().settings}
    shown = {STEPS[0].name: configs[STEPS[0].name], **recipes()}
    for width in EPOCHS:
        for name, config in shown.items():
            config = config.replace(width=width)
            if config not in configs.values():
                configs[f"{name}, {width}"] = config
        configs[f"{FULL}, {width}, float32"] = in_float32(whole_recipe().replace(width=width))
    return configs


def in_float32(config: Config) -> Config:
    """Returns the configuration in float32; all others are in bfloat16."""
    return config.replace(precision="float32")


def ablation() -> Experiment:
    """All tricks but one, in the epochs published for all tricks."""
    whole = whole_recipe()
    settings = [Setting(FULL, whole)]
    for step in STEPS:
        if step.undone is not None:
            settings.append(Setting(step.name, whole.replace(**step.undone)))
    return Experiment("ablation", tuple(settings))


def frozen_scale() -> Experiment:
    """All tricks but one of the four parts of the frozen scale."""
    whole = whole_recipe()
    parts = _undone(FROZEN).items()
    settings = [Setting(f"{name}={value}", whole.replace(**{name: value})) for name, value in parts]
    return Experiment("frozen_scale", (Setting(FULL, whole), *settings))


def precisions() -> Experiment:
    """All tricks, in bfloat16 and in float32."""
    whole = whole_recipe()
    settings = (Setting("mixed_bfloat16", whole), Setting("float32", in_float32(whole)))
    return Experiment("precisions", settings)


def scheduled(config: Config, epochs: int) -> Config:
    """Returns the configuration with Page's learning-rate schedule for a number of epochs.

    The learning rate rises in the first 5 epochs, with label smoothing in the first fifth of the
    run, and falls until the end; with weight averaging to a tenth, two epochs before the end.
    """
    warmup = epochs / 5 if config.label_smoothing else 5
    end, last = (epochs - 2, 0.1) if config.ema_decay else (epochs, 0.0)
    return config.replace(
        duration=f"{epochs} epochs",
        knots_at=["0 epochs", f"{warmup:g} epochs", f"{end} epochs"],
        knots=[0.0, 1.0, last],
    )


EXPERIMENTS = (*map(fewer_epochs, EPOCHS), ablation(), frozen_scale(), precisions(), ladder())
