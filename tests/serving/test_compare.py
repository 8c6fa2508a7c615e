"""Figures of exported files come from running them."""

import json
import pathlib
import shutil
import time

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from imagenet_fast import UserError, commands
from imagenet_fast.serving import compare
from imagenet_fast.serving.compare import compare_files
from imagenet_fast.serving.convert import export_onnx
from imagenet_fast.serving.runtimes import onnx as load_onnx
from imagenet_fast.training.step.calibration import interval


@pytest.fixture(scope="module")
def file(config, trained, tmp_path_factory):
    return export_onnx(trained, tmp_path_factory.mktemp("file") / "model.onnx")


def test_figures_are_those_of_each_file(config, file, evaluated, validation, tmp_path):
    """A file whose classes are shifted by one is wrong where the other is right."""
    model = onnx.load(file)
    (head,) = (each for each in model.graph.initializer if list(each.dims) == [64, 10])
    shifted = np.roll(numpy_helper.to_array(head), 1, axis=1)
    head.CopyFrom(numpy_helper.from_array(shifted, head.name))
    other = tmp_path / "shifted.onnx"
    onnx.save(model, other)
    results = compare_files(config, {"onnx": file, "onnx_shifted": str(other)})
    labels = np.array(validation[1])
    top1 = (evaluated.argmax(1) == labels).mean()
    assert results["onnx"]["top1"] == pytest.approx(top1)
    assert results["onnx"]["top1_interval"] == interval(top1, 359)
    # Biases are not shifted, so that it is not just the labels.
    scores = load_onnx(str(other), 1)(np.concatenate(list(pixels_of(config))))
    assert results["onnx_shifted"]["top1"] == pytest.approx((scores.argmax(1) == labels).mean())
    assert results["onnx_shifted"]["top1"] < 0.3 < top1
    for path, result in zip((file, other), results.values()):
        assert result["bytes"] == pathlib.Path(path).stat().st_size
        assert (result["images"], result["path"]) == (359, str(path))


def pixels_of(config):
    return (pixels for pixels, _ in compare.prepared_images(config, "validation"))


def test_latency_is_of_single_images_on_one_thread(config, monkeypatch):
    """The median of 100, without the first 10, of each file in turn."""
    calls = []

    def load(path, threads):
        def predict(pixels):
            calls.append((path, threads, len(pixels)))
            slow = len(calls) < 40 and len(pixels) == 1
            time.sleep((0.02 if slow else 0.001) * (2 if path == "slow" else 1))
            return np.eye(10)[: len(pixels)] if len(pixels) < 10 else np.ones([len(pixels), 10])

        return predict

    monkeypatch.setattr(compare, "_LOAD", {"onnx": load, "tflite": load})
    files = {"onnx": "fast", "tflite": "slow"}
    seconds = compare._seconds(files, np.zeros([3, 16, 16, 3], np.uint8))
    assert [len(values) for values in seconds.values()] == [100, 100]
    assert calls == [("fast", 1, 1), ("slow", 1, 1)] * 110
    assert 0.001 <= np.median(seconds["onnx"]) < np.median(seconds["tflite"])


def test_missing_validation_images(config, file, digits, tmp_path):
    shutil.copytree(digits, tmp_path / "data", ignore=shutil.ignore_patterns("validation*"))
    (tmp_path / "data" / "manifest.json").unlink()
    config = config.replace(data_dir=str(tmp_path / "data"), num_classes=10)
    with pytest.raises(UserError, match="has no validation images: give another --data_dir"):
        compare_files(config, {"onnx": file})


def test_command_without_the_data_writes_nothing(config, tmp_path, capfd):
    flags = [f"--model_dir={config.model_dir}", f"--onnx={tmp_path / 'x.onnx'}"]
    compared = [f"--data_dir={tmp_path / 'none'}", f"--compare={tmp_path / 'x.json'}"]
    assert commands.run(["export", *flags, *compared]) == 2
    assert "none does not exist" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def test_command(config, tmp_path, capfd):
    """Files in float32 are compared, too, but not kept."""
    path, table = tmp_path / "small.tflite", tmp_path / "deep" / "table.json"
    flags = [f"--model_dir={config.model_dir}", f"--tflite_int8={path}", f"--compare={table}"]
    numbers = ["--calibration_images=40", "--compare_images=50"]
    assert commands.run(["export", *flags, *numbers]) == 0
    written, _, head, before, after, about, last = capfd.readouterr().out.splitlines()
    assert (written, last) == (str(path), str(table))
    assert head.split() == ["top-1", "95%", "interval", "bytes", "ms", "an", "image"]
    results = json.loads(table.read_text())["files"]
    for line, name, title in (
        (before, "tflite", "tflite_float32"),
        (after, "tflite_int8", "tflite_int8"),
    ):
        result = results[name]
        cells = line.split()
        assert cells[:2] == [title, f"{result['top1']:.2%}"]
        assert cells[-2:] == [f"{result['bytes']:,}", f"{result['ms']:.3f}"]
    assert results["tflite_int8"]["bytes"] == path.stat().st_size < results["tflite"]["bytes"] / 2
    assert "on 50 validation images" in about
    assert sorted(each.name for each in tmp_path.iterdir()) == ["deep", "small.tflite"]
