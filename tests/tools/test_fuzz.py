"""The fuzzer of readers: some seconds of each, and that it finds what is wrong."""

import json
import pathlib
import subprocess
import sys

import pytest

atheris = pytest.importorskip("atheris")
FOLDER = pathlib.Path(__file__).parents[2] / "tools" / "fuzz"
sys.path.insert(0, str(FOLDER))
try:
    import targets
finally:
    sys.path.remove(str(FOLDER))


def fuzz(output, *arguments):
    command = [sys.executable, str(FOLDER), *arguments, f"--output_dir={output}"]
    return subprocess.run(command, capture_output=True, text=True)


def test_readers_hold_for_a_second(tmp_path):
    done = fuzz(tmp_path, "--seconds=1", "--seed=7")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = list(map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines()))
    assert [row["reader"] for row in rows] == list(targets.TARGETS)
    for row in rows:
        assert row["inputs"] > 1 and row["findings"] == []
        assert row["peak_mb"] < row["first_mb"] + 1000


BROKEN = """
def make(folder):
    return [b"good"]

def read(folder, data):
    if data != b"good":
        {fault}

TARGETS = {{"broken": (make, read, None)}}
"""


@pytest.mark.parametrize(
    "fault",
    ["raise KeyError(data)", "import os; os.abort()", "bytearray(2**31)[::4096] = b'x' * 2**19"],
)
def test_faults_are_found(tmp_path, fault):
    folder = tmp_path / "fuzz"
    folder.mkdir()
    for file in ("__main__.py", "target.py"):
        (folder / file).write_text((FOLDER / file).read_text())
    (folder / "targets.py").write_text(BROKEN.format(fault=fault))
    output = tmp_path / "found"
    command = [sys.executable, str(folder), "--seconds=5", f"--output_dir={output}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    (row,) = map(json.loads, (output / "log.jsonl").read_text().splitlines())
    assert row["findings"] and (output / "broken.txt").exists()
