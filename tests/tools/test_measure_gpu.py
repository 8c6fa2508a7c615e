"""The script of a GPU's measurements: programs that fail, no time left, and the table."""

import importlib.util
import json
import pathlib
import sys

import pytest

PATH = pathlib.Path(__file__).parents[2] / "tools" / "gpu" / "measure.py"
spec = importlib.util.spec_from_file_location("measure_gpu", PATH)
tool = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = tool  # dataclasses look it up
spec.loader.exec_module(tool)

SPEED = "import json; print('text'); print(json.dumps({'images_per_second': 5000.4}))"


def program(name, code, **environment):
    return tool.Measurement(name, (sys.executable, "-c", code), tool._last_line, environment)


@pytest.fixture
def main(tmp_path, monkeypatch):
    """main(programs, *flags) measures these; returns the exit status and the names of all lines."""

    def main(programs, *flags):
        monkeypatch.setattr(tool, "measurements", lambda given: iter(programs))
        folders = ["--data_dir=a", "--digits_dir=b", f"--output_dir={tmp_path}"]
        status = tool.main([*folders, *flags])
        path = tmp_path / "results.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return status, [json.loads(line)["name"] for line in lines]

    return main


def test_what_failed_is_measured_again(main, tmp_path):
    """And what worked is not; the others go on."""
    fails = program("b", "raise SystemExit('no GPU')")
    assert main([program("a", SPEED), fails, program("c", SPEED)]) == (1, ["a", "b", "c"])
    line = json.loads((tmp_path / "results.jsonl").read_text().splitlines()[1])
    assert (line["rc"], line["error"]) == (1, "no GPU\n")
    assert main([program("a", fails), program("b", SPEED)]) == (0, ["a", "b", "c", "b"])
    table = (tmp_path / "tables.md").read_text()
    assert table.count("| 1 | 5,000 |") == 3


def test_no_time_left(main, capsys):
    assert main([program("a", SPEED)], "--minutes=0.4") == (0, [])
    assert "a: no time left" in capsys.readouterr().out


def test_a_program_that_hangs():
    line = tool.measure(program("a", "import time; time.sleep(60)"), seconds=0.5)
    assert line == {"name": "a", "rc": 124, "seconds": 0.5}


def test_only_some(main):
    assert main([program("aa", SPEED), program("b", SPEED)], "--only=a")[1] == ["aa"]


def test_the_table_has_medians_and_ranges():
    runs = [
        {"name": f"recipe/{n}", "rc": 0, "seconds": 10.0 * n, "images_per_second": 1e3 * n}
        for n in (3, 1, 2)
    ]
    speeds = {"images_per_second": 7, "rows_images_per_second": [5, 6, 9]}
    lines = [
        *runs,
        {"name": "recipe/4", "rc": 1, "seconds": 1.0},
        {"name": "resnet50 x", "rc": 0, "seconds": 4, "top1": 0.5, **speeds},
        {"name": "again", "rc": 0, "seconds": 2, "tensors": 9, "differ": 1, "relative": 1e-7},
    ]
    assert tool.table(lines).splitlines()[2:] == [
        "| recipe | 3 | 2,000 (1,000 to 3,000) |  |  | 20.0 (10.0 to 30.0) |  |",
        "| resnet50 x | 1 | 6 | 50.00 |  | 4.0 |  |",
        "| again | 1 |  |  |  | 2.0 | 1 of 9 tensors differ, by 1.0e-07 |",
    ]
