"""The comparison of training with and without pipelines."""

import importlib.util
import json
import pathlib
import sys

import pytest

from imagenet_fast.base.errors import UserError
from imagenet_fast.config import Config

ROOT = pathlib.Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("tool", ROOT / "tools" / "pipeline_curves.py")
tool = importlib.util.module_from_spec(spec)
sys.modules["tool"] = tool
spec.loader.exec_module(tool)


@pytest.fixture
def curves():
    plain = tool.Curve({20: 2.0, 40: 1.0}, {40: 0.5})
    other = tool.Curve({20: 2.0, 40: 1.01}, {40: 0.51})
    return {"a network": {"no pipeline": plain, "2 stages": other}}


def test_table_and_files(curves):
    rows = tool.table(curves).splitlines()
    assert rows[2] == "| a network, no pipeline |  | 50.00% |"
    assert rows[3] == "| a network, 2 stages | 1.0e-02 | 51.00% |"
    made = tool.files(curves, 3)
    values = json.loads(made["curves.json"])
    assert values["curves"]["a network"]["2 stages"]["losses"] == {"20": 2.0, "40": 1.01}
    assert "--duration=3 epochs" in values["options"]
    assert "a network" in made["curves.svg"]


def test_runs_of_other_steps_are_not_compared(curves):
    with pytest.raises(UserError, match="have different steps"):
        tool.Curve({20: 2.0}, {}).difference(curves["a network"]["no pipeline"])


@pytest.mark.parametrize("network", tool.NETWORKS)
def test_options_are_those_of_training(network):
    flags = [*tool.NETWORKS[network], *tool._OPTIONS]
    names = {flag.lstrip("-").partition("=")[0] for flag in flags}
    known = set(Config.__dataclass_fields__)
    assert {name.removeprefix("no") if name not in known else name for name in names} <= known


def test_a_command_is_killed_once(tmp_path):
    """As soon as its output says so; if the output exists, it is not started."""
    file = tmp_path / "lines"
    program = f"f = open({str(file)!r}, 'a'); f.write('x'); f.close(); import time; time.sleep(60)"
    command = [sys.executable, "-c", program]
    for _ in range(2):
        tool.run_until(command, file.exists)
        assert file.read_text() == "x"
    with pytest.raises(UserError, match="failed with status 3"):
        tool.run_until([sys.executable, "-c", "raise SystemExit(3)"], lambda: False)
