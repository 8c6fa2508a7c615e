"""The experiments of the study at equal seconds."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from study import step_times
from study.settings import Experiment, Setting

from imagenet_fast.base.errors import UserError
from imagenet_fast.config import Config

FOLDER = pathlib.Path(__file__).parent
RESULTS = FOLDER.parents[2] / "benchmarks" / FOLDER.name
TRAINING_IMAGES = 60_000
PLAIN, ALL, OWN = "plain", "mosaic", "own"
# The recipes of flagfiles in this folder.
SYSTEMS = ("page", "airbench96", "speedrun", "ffcv", ALL)
RECIPES = (*SYSTEMS, OWN)
# What the search changed in our own recipe takes no time.
_STEPS_OF = {OWN: "page"}
# CPU seconds of the training steps of their runs, and of a run with an ingredient.
SECONDS, INGREDIENT_SECONDS = (90, 180), 180
# The five ingredients of mosaic: options that add each to the plain recipe.
INGREDIENTS: dict[str, dict[str, Any]] = {
    "BlurPool": {"blur_pool": "convolutions_and_pools"},
    "size ramp": {"size_ramp": (12, 12)},
    "binary cross-entropy": {"loss": "binary_cross_entropy"},
    "EMA": {"ema_decay": 0.933, "ema_every": 5},
    "decoupled weight decay": {"decoupled_weight_decay": True, "weight_decay": 3e-3},
}
_ROUND = 10  # steps

# CPU seconds of an epoch's steps, by ``time_name``.
Times = Mapping[str, float]


def config(method: str, steps: int) -> Config:
    """Returns the configuration of a recipe, the plain one or an ingredient.

    Args:
      method: its name.
      steps: of the run, to which the recipe's times are scaled.
    """
    duration = f"{steps} steps"
    if method not in INGREDIENTS:
        return Config.from_flagfile(FOLDER / f"{method}.flags", duration=duration)
    changes = INGREDIENTS[method]
    if "size_ramp" in changes:
        changes = {**changes, "size_ramp_at": config(ALL, steps).size_ramp_at}
    return config(PLAIN, steps).replace(**changes)


def in_seconds(method: str, seconds: float, times: Times) -> Setting:
    """Returns the setting of as many steps, in tens, as take the given time.

    Raises:
      UserError: if its steps were not timed.
    """
    steps, many = 0, 1000
    for _ in range(2):  # Again with the run's own length: its sizes change at whole steps.
        rate = seconds_of(Setting(method, config(method, steps or many)), times) / (steps or many)
        steps = max(_ROUND, _ROUND * round(seconds / rate / _ROUND))
    return Setting(method, config(method, steps))


def seconds_of(setting: Setting, times: Times) -> float:
    """Returns the CPU seconds of a run's steps.

    Raises:
      UserError: if they were not timed.
    """
    options = setting.config
    epoch = TRAINING_IMAGES // options.batch_size
    ends = [until.steps(epoch, options.batch_size) for _, until in options.sizes_until]
    begin, result = 0, 0.0
    for size, end in zip(
        sizes(options), [*ends, options.duration.steps(epoch, options.batch_size)]
    ):
        name = time_name(setting.method, size)
        if name not in times:
            raise UserError(
                f"{name} was not timed: run tools/studies/step_times.py {FOLDER.name} first"
            )
        result += (end - begin) / epoch * times[name]
        begin = end
    return result


def recipes(times: Times) -> Experiment:
    """The recipes of the systems, and our own, each in several lengths."""
    settings = [in_seconds(name, seconds, times) for name in RECIPES for seconds in SECONDS]
    return Experiment("recipes", tuple(settings))


def ingredients(times: Times) -> Experiment:
    """The plain recipe, with each ingredient, and with all: mosaic."""
    names = (PLAIN, *INGREDIENTS, ALL)
    settings = [in_seconds(name, INGREDIENT_SECONDS, times) for name in names]
    return Experiment("ingredients", tuple(settings))


def timed() -> dict[str, Config]:
    """Returns the configurations to time, by :func:`time_name`: one for each image size."""
    configs = {name: config(name, 1000) for name in (*SYSTEMS, PLAIN, *INGREDIENTS)}
    return {
        time_name(name, size): options.with_image_size(size)
        for name, options in configs.items()
        for size in sizes(options)
    }


def sizes(options: Config) -> list[int]:
    """Returns the sizes of the training images."""
    return [*(size for size, _ in options.sizes_until), options.image_size]


def time_name(method: str, size: int) -> str:
    """Returns the name in ``step_times.json``; a step takes as long in any length of the run."""
    return f"{_STEPS_OF.get(method, method)}, {size} px"


def __getattr__(name: str) -> Any:
    # When they are needed: the steps must be timed before.
    if name == "EXPERIMENTS":
        times = step_times.read(RESULTS, step_times.CPU)
        return recipes(times), ingredients(times)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
