"""What docs/architecture.md names is there."""

import pathlib
import re
import traceback

import pytest

from imagenet_fast.commands import run
from imagenet_fast.optimizers import SGD

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PARTS = re.findall(r"`([\w/]+\.(?:py|cc))`|`((?:\w+\.)?\w+)` in `([\w/]+\.py)`", PAGE)
FILES = sorted({file or other for file, _, other in PARTS})
FUNCTIONS = sorted({(file, name) for _, name, file in PARTS if name})


@pytest.mark.parametrize("name", FILES)
def test_files(name):
    assert list((ROOT / "imagenet_fast").glob(f"**/{name}")), name


@pytest.mark.parametrize(("file", "name"), FUNCTIONS)
def test_functions(file, name):
    code = (ROOT / "imagenet_fast" / file).read_text()
    kind, _, function = name.rpartition(".")
    assert f"def {function}(" in code
    assert not kind or f"class {kind}" in code


def test_the_page_was_read():
    assert len(FILES) > 20
    assert ("training/program.py", "Program.take") in FUNCTIONS


def test_a_step_calls_the_functions_of_the_table_in_its_order(tmp_path, monkeypatch):
    stacks = []

    def apply(*args, **kwargs):
        stacks.append([(frame.filename, frame.name) for frame in traceback.extract_stack()])
        return own(*args, **kwargs)

    own = SGD._apply
    monkeypatch.setattr(SGD, "_apply", apply)
    flags = ["synthetic=true", "num_classes=10", "model=resnet8", "image_size=16"]
    flags += ["train_crop=none", "batch_size=32", "strategy=one_device", "duration=2 steps"]
    flags += ["warmup=0 steps", "decay_at=1 steps", "tensorboard=false", "examine=false"]
    flags += [f"model_dir={tmp_path}"]
    assert run(["train", *(f"--{flag}" for flag in flags)]) == 0
    table = PAGE.partition("| 1 |")[2].partition("\n\n")[0]
    names = re.findall(r"^(?:\| \d )?\| `(?:\w+\.)?(\w+)`", "| 1 |" + table, re.M)
    package = str(ROOT / "imagenet_fast")
    called = iter([name for file, name in stacks[0] if file.startswith(package)])
    assert len(names) == 9 and all(name in called for name in names), names
