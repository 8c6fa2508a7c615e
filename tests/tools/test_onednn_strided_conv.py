"""The gradient of a strided 1x1 convolution, in the forms that are correct."""

import importlib.util
import pathlib
import re

import pytest

PATH = pathlib.Path(__file__).parents[2] / "tools" / "onednn_strided_conv.py"
spec = importlib.util.spec_from_file_location("onednn_strided_conv", PATH)
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in tool.FORMS if name != "strided convolution"])
def test_correct_forms(name):
    assert re.fullmatch(r"correct, to \de-0[678]", tool.outcome(name))
