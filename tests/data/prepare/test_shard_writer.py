"""Shards that several processes write."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image

from imagenet_fast.data.manifest import JOURNAL
from imagenet_fast.data.prepare.job import prepare
from imagenet_fast.data.prepare.sources import open_source

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, threads write"),
]

# Prepares, and prints the numbers of the processes that read images; each image takes a while.
PREPARE = """
import os, sys, time
from imagenet_fast.base.errors import UserError
from imagenet_fast.data.prepare.job import prepare
from imagenet_fast.data.prepare.sources import open_source

source = open_source("folders", sys.argv[1])
read, told = source.read, set()

def tell(split, index):
    if os.getpid() not in told:
        told.add(os.getpid())
        os.write(1, b"%d\\n" % os.getpid())
    time.sleep(float(sys.argv[3]))
    return read(split, index)

source.read = tell
try:
    prepare(source, sys.argv[2], threads=3, progress=False, max_bad_images=5)
except UserError as error:
    sys.exit(str(error))
"""


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    for number in range(90):
        path = root / "abc"[number % 3] / f"{number:02d}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (16, 20, 3), "uint8")).save(path)
    return root


@pytest.fixture
def start(images):
    processes = []

    def run(directory, seconds):
        command = [sys.executable, "-c", PREPARE, str(images), str(directory), str(seconds)]
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True))
        return processes[-1]

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture(scope="module")
def whole(images, tmp_path_factory):
    """What one thread writes."""
    directory = tmp_path_factory.mktemp("whole") / "data"
    prepare(open_source("folders", images), directory, threads=1, progress=False)
    return contents(directory)


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_several_processes_write_the_bytes_of_one_thread(run_python, images, whole, tmp_path):
    program = PREPARE + "print(-os.getpid())"
    finished = run_python(["-c", program, images, tmp_path / "data", 0.002])
    *workers, parent = map(int, finished.stdout.split())
    assert len(set(workers)) == 3 and -parent not in workers
    assert contents(tmp_path / "data") == whole


@pytest.mark.parametrize("victim", ["worker", pytest.param("parent", marks=pytest.mark.long)])
def test_a_killed_process_leaves_a_run_that_resumes(
    start, run_python, images, whole, tmp_path, victim
):
    directory = tmp_path / "data"
    process = start(directory, 0.02)
    workers = [int(process.stdout.readline()) for _ in range(3)]
    wait_until(lambda: (directory / JOURNAL).read_bytes().count(b"\n") > 2)
    os.kill(workers[0] if victim == "worker" else process.pid, signal.SIGKILL)
    _, errors = process.communicate()
    if victim == "worker":
        assert process.returncode == 1
        assert "a process that writes shards was killed" in errors and "Traceback" not in errors
    wait_until(lambda: not any(map(is_running, workers)))
    lines = (directory / JOURNAL).read_text().splitlines()[1:]
    times = {
        name: (directory / name).stat().st_mtime_ns
        for name in (json.loads(line)["shard"]["file"] for line in lines)
    }
    assert len(times) > 1
    run_python(["-c", PREPARE, images, directory, 0])
    assert contents(directory) == whole
    assert {name: (directory / name).stat().st_mtime_ns for name in times} == times


@pytest.mark.long
def test_ctrl_c_ends_all(start, run_python, images, whole, tmp_path):
    process = start(tmp_path / "data", 0.02)
    workers = [int(process.stdout.readline()) for _ in range(3)]
    for pid in (*workers, process.pid):  # as a terminal does
        os.kill(pid, signal.SIGINT)
    _, errors = process.communicate()
    assert "KeyboardInterrupt" in errors and errors.count("Traceback") == 1
    assert not any(map(is_running, workers))
    run_python(["-c", PREPARE, images, tmp_path / "data", 0])
    assert contents(tmp_path / "data") == whole


def test_too_many_bad_images_stop_all(run_python, images, tmp_path):
    folder = tmp_path / "bad"
    for path in sorted(images.rglob("*.png")):
        copy = folder / path.relative_to(images)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes()[: None if int(path.stem) % 5 else 40])
    finished = run_python(["-c", PREPARE, folder, tmp_path / "data", 0.005], check=False)
    assert finished.returncode == 1
    assert "more than 5 images (max_bad_images) cannot be used, such as" in finished.stderr
    assert "Traceback" not in finished.stderr


LARGE = """
import os, sys, time
from imagenet_fast.data import images
from imagenet_fast.data.prepare import shard_maker
from imagenet_fast.data.prepare.job import prepare
from imagenet_fast.data.prepare.sources import open_source

images._MUCH_MEMORY, shard_maker._LARGE_FILE = map(int, sys.argv[3:])
convert = images.to_grey_or_rgb

def tell(image):
    os.write(1, b"<")
    time.sleep(0.01)
    os.write(1, b">")
    return convert(image)

images.to_grey_or_rgb = tell
prepare(open_source("folders", sys.argv[1]), sys.argv[2], threads=3, progress=False)
"""


@pytest.mark.parametrize("limits", [(0, 2**26), (2**28, 0)], ids=["pixels", "file"])
def test_one_process_at_a_time_converts_large_images(run_python, images, whole, tmp_path, limits):
    done = run_python(["-c", LARGE, images, tmp_path, *limits])
    assert done.stdout == 90 * "<>"
    assert contents(tmp_path) == whole
