"""``imagenet-fast export``."""

from __future__ import annotations

import math
from typing import Any

from imagenet_fast.base.errors import UserError, require_choice
from imagenet_fast.base.files import new_path
from imagenet_fast.base.notices import say
from imagenet_fast.base.paths import is_local
from imagenet_fast.commands.evaluate import config_here
from imagenet_fast.commands.flags import CommandFlags
from imagenet_fast.distribute.quiet import import_tensorflow
from imagenet_fast.training.checkpoints.config_file import config_of_run
from imagenet_fast.training.options import CHECKPOINT_CHOICES, CHECKPOINT_HELP

_OPTIONS = (
    "model_dir",
    "model",
    "eval_image_size",
    "eval_crop_fraction",
    "eval_crop",
    "max_pixels",
)
_AUTO = "auto"


def main(arguments: list[str]) -> int:
    """Exports a checkpoint of a run, and prints the paths of the files."""
    flags = CommandFlags("export", _OPTIONS, of_run=True)
    flags.define(
        "saved_model",
        "",
        "new directory for a SavedModel that takes encoded images",
    )
    flags.define("onnx", "", "new ONNX file, for preprocessed images")
    flags.define("tflite", "", "new TFLite file, for preprocessed images")
    flags.define("checkpoint", "last", CHECKPOINT_HELP)
    flags.define(
        "top_k",
        5,
        "classes in a prediction of the SavedModel; all, with their thresholds, if images have "
        "several labels",
    )
    flags.define(
        "temperature",
        "1",
        "by which logits are divided: a number above 1 makes probabilities less certain; or auto, "
        "that with the smallest cross-entropy on the validation images (as `evaluate "
        "--fit_temperature`), which are evaluated for it",
    )
    flags.parse(arguments)
    _check_temperature(flags["temperature"])
    paths = {name: flags[name] for name in ("saved_model", "onnx", "tflite") if flags[name]}
    if not paths:
        raise UserError(
            "give --saved_model, the directory to write, or --onnx or --tflite, a file to write"
        )
    if flags["top_k"] < 1:
        raise UserError(f"top_k is {flags['top_k']}, but must be positive")
    checkpoint = flags["checkpoint"]
    require_choice("checkpoint", checkpoint, CHECKPOINT_CHOICES)

    if is_local(flags["model_dir"]):  # TensorFlow, which reads buckets, takes seconds to import.
        config_of_run(flags["model_dir"], flags.changes())
    import_tensorflow()
    from imagenet_fast.serving.convert import check_onnx_is_installed, export_onnx, export_tflite
    from imagenet_fast.serving.export import export

    config = config_of_run(flags["model_dir"], flags.changes())
    # Before the first is written.
    for name, path in paths.items():
        new_path(path, f"choose another --{name}")
    if flags["onnx"]:
        check_onnx_is_installed()
    temperature = _temperature(flags, checkpoint)
    options: dict[str, Any] = {"checkpoint": checkpoint, "temperature": temperature}
    if flags["saved_model"]:
        print(export(config, flags["saved_model"], flags["top_k"], **options))
    if flags["onnx"]:
        print(export_onnx(config, flags["onnx"], **options))
    if flags["tflite"]:
        print(export_tflite(config, flags["tflite"], **options))
    return 0


def _check_temperature(text: str) -> None:
    try:
        fits = text == _AUTO or 0 < float(text) < math.inf
    except ValueError:
        fits = False
    if not fits:
        raise UserError(f"temperature is {text!r}, but must be a positive number or {_AUTO}")


def _temperature(flags: CommandFlags, checkpoint: str) -> float:
    """Returns the temperature that is asked for, fitting it if it is ``auto``."""
    from imagenet_fast.training.evaluate import evaluate

    if flags["temperature"] != _AUTO:
        return float(flags["temperature"])
    result = evaluate(config_here(flags), checkpoint=checkpoint, fit_temperature=True)
    say(
        f"temperature {result['temperature']:.4f}: on {result['examples']} validation images, the "
        f"cross-entropy is {result['nll_at_temperature']:.4f} instead of {result['nll']:.4f}"
    )
    return result["temperature"]
