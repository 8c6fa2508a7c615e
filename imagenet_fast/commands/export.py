"""``imagenet-fast export``."""

from __future__ import annotations

import json
import math
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

from imagenet_fast.base import environment
from imagenet_fast.base.errors import UserError, require_choice
from imagenet_fast.base.files import new_path, write_results
from imagenet_fast.base.notices import say
from imagenet_fast.base.paths import is_local
from imagenet_fast.base.terminal import aligned
from imagenet_fast.commands.evaluate import config_here
from imagenet_fast.commands.flags import CommandFlags
from imagenet_fast.distribute.quiet import import_tensorflow
from imagenet_fast.training.checkpoints.config_file import config_of_run
from imagenet_fast.training.options import CHECKPOINT_CHOICES, CHECKPOINT_HELP, METRICS

_OPTIONS = (
    *("model_dir", "model", "data_dir"),
    *("eval_image_size", "eval_crop_fraction", "eval_crop", "max_pixels"),
)
_AUTO = "auto"
# The precision of each file, and the flag's help. Names begin with the format.
_FILES = {
    "onnx": ("float32", "new ONNX file, for preprocessed images"),
    "onnx_int8": ("int8", "new ONNX file in int8"),
    "tflite": ("float32", "new TFLite file, for preprocessed images"),
    "tflite_float16": ("float16", "new TFLite file with weights in float16"),
    "tflite_int8": ("int8", "new TFLite file in int8"),
}
# The smallest value of each number.
_LEAST = {"top_k": 1, "calibration_images": 1, "compare_images": 0, "opset": 0}


def main(arguments: list[str]) -> int:
    """Exports a checkpoint of a run, and prints the paths of the files."""
    flags = CommandFlags("export", _OPTIONS, of_run=True)
    flags.define("saved_model", "", "new directory for a SavedModel that takes encoded images")
    for name, (_, text) in _FILES.items():
        flags.define(name, "", text)
    flags.define(
        "calibration_images",
        512,
        "training images, prepared as in evaluation, whose activations give int8 its scales; they "
        "are from --data_dir, by default the run's",
    )
    flags.define("opset", 0, "version of the ONNX operations; 0: tf2onnx' default, 15")
    flags.define(
        "compare",
        "",
        "new JSON file: run the exported ONNX and TFLite files, and those in float32, on the "
        "validation images, and compare accuracy, size and latency, also in a table",
    )
    flags.define("compare_images", 0, "validation images for --compare; 0: all")
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
    paths = {name: flags[name] for name in ("saved_model", *_FILES) if flags[name]}
    files = {name: path for name, path in paths.items() if name in _FILES}
    _check(flags, paths, files)
    checkpoint = flags["checkpoint"]
    require_choice("checkpoint", checkpoint, CHECKPOINT_CHOICES)

    if is_local(flags["model_dir"]):  # TensorFlow, which reads buckets, takes seconds to import.
        config_of_run(flags["model_dir"], flags.changes())
    import_tensorflow()
    from imagenet_fast.serving import convert
    from imagenet_fast.serving.compare import class_numbers
    from imagenet_fast.serving.export import export
    from imagenet_fast.serving.quantize import calibration_images

    config = config_of_run(flags["model_dir"], flags.changes())
    opset, calibration = flags["opset"] or None, None
    # Before the first is written.
    for name, path in {**paths, "compare": flags["compare"]}.items():
        if path:
            new_path(path, f"choose another --{name}")
    for name in files:
        if name.startswith("onnx"):
            convert.check_onnx(opset, _FILES[name][0])
    if flags["compare"] or "tflite_int8" in files:
        convert.check_installed("onnxruntime", "ai_edge_litert")
    if flags["compare"]:
        class_numbers(config_here(flags))  # which fails without the data
    if any("int8" in name for name in files):
        calibration = calibration_images(config_here(flags), flags["calibration_images"])
    temperature = _temperature(flags, checkpoint)
    options: dict[str, Any] = {"checkpoint": checkpoint, "temperature": temperature}

    def write(name: str, path: str) -> str:
        more = {"precision": _FILES[name][0], "calibration": calibration, **options}
        if name.startswith("onnx"):
            return convert.export_onnx(config, path, opset=opset, **more)
        return convert.export_tflite(config, path, **more)

    if flags["saved_model"]:
        print(export(config, flags["saved_model"], flags["top_k"], **options))
    for name, path in files.items():
        print(write(name, path))
    if flags["compare"]:
        with tempfile.TemporaryDirectory(prefix="imagenet_fast_") as directory:
            for kind in {name.partition("_")[0] for name in files} - set(files):
                files[kind] = write(kind, f"{directory}/{kind}")
            _compare(flags, {name: files[name] for name in _FILES if name in files})
    return 0


def _check(flags: CommandFlags, paths: Mapping[str, str], files: Mapping[str, str]) -> None:
    """Checks numbers, and that there are files to write and to compare."""
    if not paths:
        names = ", --".join(_FILES)
        raise UserError(f"give --saved_model, the directory to write, or a file: --{names}")
    given = [*paths.values(), *filter(None, [flags["compare"]])]
    absolute = [pathlib.Path(path).resolve() for path in given]
    if len(set(absolute)) < len(given):
        twice = max(absolute, key=absolute.count)
        raise UserError(f"give each file a name of its own, not {given[absolute.index(twice)]}")
    for name, least in _LEAST.items():
        if flags[name] < least:
            rule = "be positive" if least else "not be negative"
            raise UserError(f"{name} is {flags[name]}, but must {rule}")
    if flags["opset"] and not any(name.startswith("onnx") for name in files):
        raise UserError("opset is of ONNX files: give --onnx or --onnx_int8, too")
    if flags["compare"] and not (files and all(map(is_local, files.values()))):
        raise UserError("compare runs ONNX and TFLite files of this machine: give --tflite, too")


def _compare(flags: CommandFlags, files: Mapping[str, str]) -> None:
    """Prints the table of ``--compare``, and writes its file."""
    from imagenet_fast.lab.benchmarks.report import cpu
    from imagenet_fast.serving.compare import compare_files
    from imagenet_fast.training.report import formats

    results = compare_files(config_here(flags), files, flags["compare_images"])
    first = next(iter(results.values()))
    metrics = [name for name in METRICS if name in first]
    rows = [["", *(METRICS[name] for name in metrics), "95% interval", "bytes", "ms an image"]]
    for name, result in results.items():
        interval = formats.interval(result.get("top1_interval")) or formats.MISSING
        values = [*(formats.percent(result[metric]) for metric in metrics), interval]
        title = name if "_" in name else f"{name}_float32"
        rows.append([title, *values, f"{result['bytes']:,}", f"{result['ms']:.3f}"])
    print("", *aligned(rows), sep="\n")
    print(f"on {first['images']} validation images; ms: of one image, on one thread of {cpu()}")
    path = pathlib.Path(flags["compare"])
    text = json.dumps({"files": results, **environment.provenance()}, indent=2) + "\n"
    print(*write_results(path.parent, {path.name: text}))


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
