"""Plans with the memory of a compiled step."""

import json

import pytest

from imagenet_fast import Config, UserError
from imagenet_fast.lab.planning.compiled_memory import read_compiled_memory
from imagenet_fast.lab.planning.run import Hardware

CONFIG = Config(synthetic=True, num_classes=1000, batch_size=2048, precision="mixed_float16")
VALUES = {
    "topology": {"name": "v100:1x8", "usable": 13 * 2**30},
    "program": {"peak": 10 * 2**30},
    "batch": 256,
    "failure": "",
    "options": {
        "model": "resnet50",
        "image_size": 224,
        "accumulation_steps": 1,
        "precision": "mixed_float16",
        "optimizer": "sgd",
        "batch_norm_batch_size": 0,
    },
    "packages": {"jax": "0.10.2", "jax-cuda12-pjrt": "0.10.2"},
}


def read(tmp_path, config=CONFIG, hardware=None, **changes):
    path = tmp_path / "compile.json"
    path.write_text(json.dumps({**VALUES, **changes}))
    return read_compiled_memory(tmp_path, config, hardware or Hardware("v100", 8))


def test_memory(tmp_path):
    found = read(tmp_path)
    assert (found.peak, found.usable) == (10 * 2**30, 13 * 2**30)
    assert found.compiler == "jax-cuda12-pjrt 0.10.2"
    # As many images for each of more chips are the same step.
    more = read(tmp_path, CONFIG.replace(batch_size=65_536), Hardware("v100", 256))
    assert more == found


def test_memory_of_the_largest_images(tmp_path):
    config = CONFIG.replace(image_size=160, train_sizes=(224,), train_until=("3 epochs",))
    assert read(tmp_path, config) == read(tmp_path)
    with pytest.raises(UserError, match="image_size is 224, here 256"):
        read(tmp_path, config.replace(train_sizes=(256,)))


def test_memory_of_a_tpu(tmp_path):
    topology = {"name": "v3:2x2", "usable": 0}
    packages = {"jax": "0.10.2", "libtpu": "0.0.51"}
    found = read(tmp_path, hardware=Hardware("tpu-v3", 4), topology=topology, packages=packages)
    assert (found.usable, found.compiler) == (16 * 2**30, "libtpu 0.0.51")


@pytest.mark.parametrize(
    ("config", "hardware", "message"),
    [
        (CONFIG.replace(batch_size=1024), None, "a replica has 256 images, here 128"),
        (CONFIG, Hardware("h100", 8), "it is for v100, here for h100"),
        (CONFIG, Hardware("v100", 16), "a replica has 256 images, here 128"),
        (CONFIG.replace(precision="float32"), None, "precision is mixed_float16, here float32"),
        (CONFIG.replace(model="resnet18"), None, "model is resnet50, here resnet18"),
        (CONFIG.replace(accumulation_steps=2), None, "accumulation_steps is 1, here 2"),
        (CONFIG.replace(batch_norm_batch_size=64), None, "batch_norm_batch_size is 0, here 64"),
        # Which files of earlier versions do not tell.
        (CONFIG.replace(stem="small"), None, "stem, here small, is not in it: compile again"),
        (CONFIG.replace(ema_decay=0.9), None, "ema_decay, here 0.9, is not in it"),
    ],
)
def test_other_steps(tmp_path, config, hardware, message):
    with pytest.raises(UserError, match=f"is for another step: {message}"):
        read(tmp_path, config, hardware)


def test_steps_that_did_not_compile(tmp_path):
    with pytest.raises(UserError, match="the step did not compile: out of memory"):
        read(tmp_path, program=None, failure="out of memory")


def test_another_number_of_classes(tmp_path):
    options = {**VALUES["options"], "num_classes": 10}
    with pytest.raises(UserError, match="num_classes is 10, here 1000"):
        read(tmp_path, options=options)


@pytest.mark.parametrize(
    "changes", [{"packages": {}}, {"topology": {"name": "v100:1x8"}}, {"program": {"peak": "much"}}]
)
def test_damaged_files(tmp_path, changes):
    with pytest.raises(UserError, match="not a result of imagenet-fast compile --output_dir"):
        read(tmp_path, **changes)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"program": 1, "topology": 2, "options": 3}'])
def test_other_files(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(UserError, match="not a result of imagenet-fast compile --output_dir"):
        read_compiled_memory(path, CONFIG, Hardware("v100", 8))


def test_no_file(tmp_path):
    with pytest.raises(UserError, match="not a result of imagenet-fast compile"):
        read_compiled_memory(tmp_path / "none", CONFIG, Hardware("v100", 8))
