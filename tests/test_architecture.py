"""What docs/architecture.md names is there."""

import pathlib
import re

import pytest

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
