"""Image classifiers of KerasHub from preset folders, which others may have made.

A folder is read as data: its configuration names one of KerasHub's own backbones and its arguments,
its weights are arrays.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import keras

from imagenet_fast.base.errors import UserError, choices_hint, first_line, how_to_install
from imagenet_fast.base.outside import read_bounded, read_json
from imagenet_fast.base.paths import Path, is_local, to_path
from imagenet_fast.models.applications import Normalization, one_process_downloads
from imagenet_fast.models.hdf5 import read_hdf5
from imagenet_fast.models.keras_file import set_all_weights, weights_of_at_most

_CONFIG = "config.json"
PRESET_WEIGHTS = "model.weights.h5"
_LARGEST_WEIGHTS = 2**34
# Arguments that are this run's, not the preset's.
_OURS = frozenset(["name", "trainable", "dtype", "image_shape"])
_NOT_OF_HEAD = frozenset(["backbone", "preprocessor", "num_classes", "activation", "head_dtype"])


def preset_folder(preset: str, download: bool = False) -> Path:
    """Returns the folder of a preset: a folder, or one of KerasHub's, which it may ``download``.

    Raises:
        UserError: if there is none.
    """
    if not is_local(preset):
        raise UserError(f"keras_hub:{preset}: a preset's folder must be on this machine")
    if to_path(preset, _CONFIG).is_file():
        return to_path(preset)
    presets = _library().models.ImageClassifier.presets
    if preset not in presets:
        hint = "" if "/" in preset else choices_hint(preset, sorted(presets))
        raise UserError(
            f"keras_hub:{preset} is neither a preset of KerasHub nor a folder with {_CONFIG}{hint}"
        )
    handle = presets[preset]["kaggle_handle"].removeprefix("kaggle://")
    cache = os.environ.get("KAGGLEHUB_CACHE") or "~/.cache/kagglehub"
    folder = to_path(os.path.expanduser(cache), "models", handle)  # noqa: PTH111
    if (folder / _CONFIG).is_file():
        return folder
    if not download:
        raise UserError(
            f"the preset keras_hub:{preset} is not in {folder}: put its files there, or train with "
            "--pretrained, which downloads it, or with keras_hub:FOLDER, where you have it"
        )
    import kagglehub

    try:
        with one_process_downloads():
            return to_path(kagglehub.model_download(handle))
    except Exception as error:  # of any of its libraries
        raise UserError(
            f"pretrained: the preset keras_hub:{preset} cannot be downloaded from kaggle.com, "
            f"{handle} ({type(error).__name__}: {first_line(error)}): put its files into {folder}, "
            "or give keras_hub:FOLDER, where you have them"
        ) from None


def build_preset(
    folder: Path, num_classes: int, image_shape: tuple[int | None, int | None, int]
) -> keras.Model:
    """Makes a preset's image classifier, with random weights.

    Args:
        folder: of the preset.
        num_classes: number of logits.
        image_shape: of an image; None: any size.

    Raises:
        UserError: if it is no image classifier of KerasHub.
    """
    with contextlib.ExitStack() as stack:
        # Its arguments may claim any size; larger images need more position embeddings.
        if (folder / PRESET_WEIGHTS).is_file():
            stack.enter_context(weights_of_at_most(2 * (folder / PRESET_WEIGHTS).stat().st_size))
        backbone, kind = _backbone(folder, image_shape)
    accepted = inspect.signature(kind).parameters.keys() - _NOT_OF_HEAD
    head = {}
    if (folder / "task.json").is_file():
        task = _read(folder, "task.json")
        if task["class_name"] == kind.__name__:
            head = {key: value for key, value in task["config"].items() if key in accepted}
            head = {key: head[key] for key in head.keys() - _OURS}
    # Its own class would have methods and attributes that the network does not need.
    head = _plain(folder, head)
    try:
        task = kind(backbone, num_classes=num_classes, head_dtype="float32", **head)
    except Exception as error:  # for wrong arguments, of any class
        raise UserError(
            f"{folder / 'task.json'}: {kind.__name__} cannot be made with {head}: "
            f"{first_line(error)}"
        ) from None
    return keras.Model(task.inputs[0], task.outputs[0], name=backbone.name)


def preset_normalization(folder: Path) -> Normalization | None:
    """Returns the normalization of a preset's image converter; None: it has none.

    Raises:
        UserError: if it cannot be read.
    """
    config = _converter(folder)
    if config is None:
        return None
    scale: Any = config.get("scale")
    offset: Any = config.get("offset")
    try:
        if "variance" in config and "mean" in config:  # as before KerasHub 0.18
            stds = [math.sqrt(own) for own in config["variance"]]
            scale = [scale / own for own in stds]
            offset = [-mean / own for mean, own in zip(config["mean"], stds)]
        scales = _of_colors(1.0 if scale is None else scale)
        offsets = _of_colors(0.0 if offset is None else offset)
        means = tuple(-own / factor for own, factor in zip(offsets, scales))
        return Normalization(_of_colors([*means]), _of_colors([1 / own for own in scales]))
    except (ArithmeticError, TypeError, ValueError) as error:
        raise UserError(f"{folder} has a damaged image converter: {error}") from None


def preset_image_size(folder: Path) -> int | None:
    """Returns the size of a preset's images; None: it has none.

    Raises:
        UserError: if it cannot be read.
    """
    size = (_converter(folder) or {}).get("image_size")
    return size[0] if isinstance(size, list) and size and isinstance(size[0], int) else None


def preset_weights(folder: Path) -> list[Any]:
    """Returns the weights of a preset without its head.

    Raises:
        UserError: if there are none, or they are of another network.
    """
    path = folder / PRESET_WEIGHTS
    if not path.is_file():
        raise UserError(f"{folder} has no weights: there is no {path}")
    try:
        content = read_bounded(path, _LARGEST_WEIGHTS)
        with weights_of_at_most(len(content)):
            backbone, _ = _backbone(folder, None)
        set_all_weights(backbone, read_hdf5(content))
    except (KeyError, OSError, ValueError) as error:
        raise UserError(
            f"{path} does not hold the weights of {_CONFIG}: {first_line(error)}"
        ) from None
    return backbone.weights


def _library() -> ModuleType:
    try:
        import keras_hub
    except ImportError as error:
        raise UserError(
            f"keras_hub: needs KerasHub: {how_to_install('keras-hub')} ({first_line(error)})"
        ) from None
    return keras_hub


def _backbone(
    folder: Path, image_shape: tuple[int | None, int | None, int] | None
) -> tuple[keras.Model, Any]:
    """Returns a preset's backbone, and the class of classifiers with it.

    Args:
        folder: of the preset.
        image_shape: of an image; None: the preset's.
    """
    library = _library()
    kinds = {own.backbone_cls.__name__: own for own in _classifiers(library)}
    config = _read(folder, _CONFIG)
    name = config["class_name"]
    if name not in kinds:
        raise UserError(
            f"{folder / _CONFIG} describes {name[:100]!r}, but must describe a backbone of an "
            f"image classifier of KerasHub{choices_hint(name[:100], sorted(kinds))}"
        )
    kind = kinds[name].backbone_cls
    arguments = {key: own for key, own in config["config"].items() if key not in _OURS}
    shape = image_shape or config["config"].get("image_shape")
    arguments = _plain(folder, arguments)
    try:
        if shape is not None:
            arguments["image_shape"] = tuple(shape)
        return kind(**arguments), kinds[name]
    except Exception as error:  # for wrong arguments, of any class
        raise UserError(
            f"{folder}: {name} cannot be made with image_shape={shape}: {first_line(error)}"
        ) from None


def _classifiers(library: ModuleType) -> Iterator[Any]:
    """Yields KerasHub's classes of image classifiers."""
    waiting = [library.models.ImageClassifier]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if kind.backbone_cls is not None and kind.__module__.startswith("keras_hub."):
            yield kind


def _read(folder: Path, name: str) -> dict[str, Any]:
    """Returns what a configuration file names: a class, and its arguments."""
    path = folder / name
    try:
        config = read_json(path, dict[str, Any])
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {first_line(error)}") from None
    if not isinstance(config.get("class_name"), str) or not isinstance(config.get("config"), dict):
        raise UserError(f"{path} does not describe a network of KerasHub")
    return config


def _plain(folder: Path, arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns arguments that name neither classes nor functions."""
    for key, value in arguments.items():
        if _has_dict(value):
            raise UserError(
                f"{folder}: {key} is described by classes, but only numbers, texts and lists are "
                "allowed. If you trust the folder, give --model=module:function, a function that "
                "calls keras_hub's from_preset"
            )
    return arguments


def _has_dict(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(map(_has_dict, value)))


def _converter(folder: Path) -> dict[str, Any] | None:
    """Returns the arguments of a preset's image converter; None: it has none."""
    if (folder / "image_converter.json").is_file():
        return _read(folder, "image_converter.json")["config"]
    if (folder / "preprocessor.json").is_file():
        inner = _read(folder, "preprocessor.json")["config"].get("image_converter")
        if isinstance(inner, dict) and isinstance(inner.get("config"), dict):
            return inner["config"]
    return None


def _of_colors(value: Any) -> tuple[float, ...]:
    values = value if isinstance(value, list) else [value] * 3
    numbers = all(isinstance(own, (int, float)) and math.isfinite(own) for own in values)
    if len(values) != 3 or not numbers:
        raise ValueError(f"{value!r} is not a number, or one for each color")
    return tuple(map(float, values))
