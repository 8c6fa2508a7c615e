"""Fuzzing of an exported model."""

import importlib.util
import io
import pathlib
import struct
import zlib

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from small_config import SMALL

from imagenet_fast import build_model, export

TOOL = pathlib.Path(__file__).parents[2] / "tools" / "serve_mutants.py"


def load():
    spec = importlib.util.spec_from_file_location("serve_mutants", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = load()


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("mutants") / "model"
    export(build_model(SMALL.replace(num_classes=4, zero_gamma=False)), directory)
    signatures = tf.saved_model.load(str(directory)).signatures

    def classify(images):
        answers = signatures["serving_default"](images=tf.constant(images))
        return {name: value.numpy() for name, value in answers.items()}

    return classify


@pytest.mark.long
def test_every_mutant_gets_an_answer(answer):
    outcomes = tool.serve_mutants(answer, 400, seed=1)
    assert sum(map(sum, (counts.values() for counts in outcomes.values()))) == 400
    assert len(outcomes) == 8 and all(sum(counts.values()) == 50 for counts in outcomes.values())
    # Some are still valid images, and some errors name the cause.
    assert 5 < outcomes["JPEG"][""] < 45
    assert outcomes["GIF"]["GIF cannot be decoded: convert it to a baseline JPEG or to PNG"] > 40


@pytest.mark.long
def test_a_good_image_with_another_answer_is_noticed(answer):
    def careless(images):
        answers = answer(images)
        if len(images) > 5:
            answers["probabilities"] = answers["probabilities"] + np.float32(1e-3)
        return answers

    with pytest.raises(AssertionError):
        tool.serve_mutants(careless, 16)


def test_mutants_are_the_same_each_time_and_mutated():
    first, again = (list(tool.mutants(100)) for _ in range(2))
    assert first == again
    whole = {data for _, data in tool.originals()}
    assert sum(data in whole for _, data in first) < 5
    assert len({data for _, data in first}) > 90


def test_checksums_are_corrected():
    file = io.BytesIO()
    Image.new("RGB", (5, 5), "red").save(file, "PNG")
    png = file.getvalue()
    assert tool.with_correct_checksums(png) == png
    wider = png[:19] + b"\x09" + png[20:]
    mended = tool.with_correct_checksums(wider)
    assert struct.unpack(">I", mended[29:33])[0] == zlib.crc32(wider[12:29])
    assert Image.open(io.BytesIO(mended)).size == (9, 5)
    for length in range(len(png)):
        assert len(tool.with_correct_checksums(png[:length])) == length
