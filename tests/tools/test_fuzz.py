"""Readers of damaged files, and the fuzzer, which finds what is wrong."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

needs_atheris = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="needs atheris"
)
FOLDER = pathlib.Path(__file__).parents[2] / "tools" / "fuzz"
sys.path.insert(0, str(FOLDER))
try:
    import targets
finally:
    sys.path.remove(str(FOLDER))


# Damages each reader's files a hundred times, and prints its name. TensorFlow takes half a second
# to begin with a shard.
DAMAGE = """
import contextlib, pathlib, random, resource, struct, sys
sys.path.insert(0, sys.argv[1])
import targets
from imagenet_fast.base.errors import UserError

def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

def damaged(data):
    data = bytearray(data)
    for _ in range(numbers.choice((1, 1, 2, 8))):
        place = numbers.randrange(len(data) or 1)
        data[place : numbers.choice((place, place + 1, place + 1, None))] = numbers.randbytes(1)
    return bytes(data)

for name, (make, read, mutate) in targets.TARGETS.items():
    folder = pathlib.Path(sys.argv[2], name)
    folder.mkdir()
    contents = list(make(folder))
    numbers = random.Random(name)
    for number in range(-len(contents), 10 if name == "shard" else 100):
        data = contents[number % len(contents)]
        if number == 0:
            first = peak_mb()
        if number >= 0:
            with contextlib.suppress(ValueError, RecursionError, struct.error):
                data = mutate(data, numbers) if mutate and number % 2 else damaged(data)
        try:
            read(folder, data)
        except UserError:
            pass
        except OSError as error:
            assert error.filename, (name, data)
        except Exception as error:
            raise AssertionError((name, data)) from error
    assert peak_mb() < first + 1000, name
    print(name)
"""


def test_readers_hold(run_python, tmp_path):
    """In a process of its own, which a library that reads may crash."""
    finished = run_python(["-c", DAMAGE, FOLDER, tmp_path])
    assert finished.stdout.split() == list(targets.TARGETS)


@needs_atheris
@pytest.mark.long
def test_readers_hold_for_a_second(tmp_path):
    command = [sys.executable, str(FOLDER), "--seconds=1", "--seed=7", f"--output_dir={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True)
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


@needs_atheris
@pytest.mark.parametrize(
    "fault",
    [
        "raise KeyError(data)",
        "import os; os.abort()",
        "bytearray(2**31)[::4096] = b'x' * 2**19",
        "sum(range(10**8))",
    ],
)
def test_faults_are_found(tmp_path, fault):
    status, row = fuzz_a_reader(tmp_path, fault)
    assert status == 1 and row["findings"] and (tmp_path / "found" / "broken.txt").exists()


@needs_atheris
@pytest.mark.long
def test_an_input_that_waits_is_no_finding(tmp_path):
    status, row = fuzz_a_reader(tmp_path, "import time; time.sleep(11)")
    assert status == 0 and row["findings"] == []


def fuzz_a_reader(tmp_path, fault):
    """Returns the fuzzer's status, and its row on a reader with the fault."""
    folder = tmp_path / "fuzz"
    folder.mkdir()
    (folder / "target.py").write_text((FOLDER / "target.py").read_text())
    main = (FOLDER / "__main__.py").read_text()
    limit = "_CPU_SECONDS_OF_AN_INPUT = "
    assert f"{limit}20\n" in main
    (folder / "__main__.py").write_text(main.replace(f"{limit}20\n", f"{limit}1\n"))
    (folder / "targets.py").write_text(BROKEN.format(fault=fault))
    output = tmp_path / "found"
    command = [sys.executable, str(folder), "--seconds=5", f"--output_dir={output}"]
    done = subprocess.run(command, capture_output=True, text=True)
    (row,) = map(json.loads, (output / "log.jsonl").read_text().splitlines())
    return done.returncode, row
