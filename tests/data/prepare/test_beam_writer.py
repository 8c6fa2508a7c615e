"""Shards that Apache Beam's local runner makes."""

import itertools
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from beam_job import Noise
from fake_gcs import FakeGcs
from PIL import Image

from imagenet_fast import commands
from imagenet_fast.base.errors import UserError
from imagenet_fast.data.manifest import JOURNAL, read_manifest
from imagenet_fast.data.prepare.job import prepare
from imagenet_fast.data.prepare.sources import Item, Source, open_source

pytest.importorskip("apache_beam")  # `tools/test.sh beam` has it
TESTS = pathlib.Path(__file__).parents[2]
TWICE = "--direct_runner_bundle_repeat=1"
PROCESSES = "--direct_num_workers=2 --direct_running_mode=multi_processing"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """JPEGs and PNGs of two classes in three splits, of which some are damaged."""
    root = tmp_path_factory.mktemp("images") / "mixed"
    generator = np.random.default_rng(0)
    for split, count in {"train": 40, "validation": 12, "test": 8}.items():
        for number, name in itertools.product(range(count // 2), ("ant", "bee")):
            path = root / split / name / f"{number:02d}.{('jpg', 'png')[number % 2]}"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(generator.integers(0, 256, (30, 40, 3), "uint8")).save(path)
            if number % 5 == 3:
                path.write_bytes(path.read_bytes()[:200])
    return root


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """What is written without Beam."""
    directory = tmp_path_factory.mktemp("local") / "data"
    prepare(Noise(), directory, progress=False)
    return contents(directory)


@pytest.mark.parametrize("options", ["", TWICE])
def test_arrays_become_the_bytes_of_the_local_way(local, tmp_path, capsys, options):
    prepare(Noise(), tmp_path / "beam", runner="beam", pipeline_options=options)
    assert contents(tmp_path / "beam") == local
    assert read_manifest(tmp_path / "beam").splits["train"].examples == 60
    # The bar shows all images; those that TWICE repeats are counted again.
    assert options == TWICE or "72/72" in capsys.readouterr().err


def test_a_damaged_shard_is_written_again(local, tmp_path):
    for name, content in local.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "train-00003-of-00008").write_bytes(b"")
    prepare(Noise(), tmp_path, progress=False, runner="beam")
    assert contents(tmp_path) == local


def command(folders, directory, *options):
    return [
        *("prepare", "--source=folders", f"--source_path={folders}", f"--data_dir={directory}"),
        *("--nojpeg_index", "--train_shards=12", *options),
    ]


@pytest.fixture
def start():
    """Starts Python in a process of its own."""
    processes = []

    def run(*arguments, **environment):
        paths = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
        processes.append(
            subprocess.Popen(
                [sys.executable, *map(str, arguments)],
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": paths, **environment},
            )
        )
        return processes[-1]

    yield run
    for process in processes:
        process.kill()
        process.wait()
        process.stderr.close()


def workers(launcher):
    """Returns the processes that Beam started for one of them; a shell is between them."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"IMAGENET_FAST_BEAM_LAUNCHER={launcher}\0".encode() in path.read_bytes():
                pid = int(path.parent.name)
                found += [pid] * ((path.parent / "comm").read_text().startswith("python"))
        except OSError:
            continue
    return found


def wait_until(condition):
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
@pytest.mark.parametrize("victim", ["worker", pytest.param("launcher", marks=pytest.mark.long)])
def test_a_killed_process_leaves_a_run_that_resumes(start, local, tmp_path, victim):
    directory = tmp_path / "beam"
    process = start("-c", "import beam_job; beam_job.main()", directory, PROCESSES, SECONDS="0.3")
    wait_until(lambda: process.poll() is not None or list(directory.glob(".*.done")))
    assert process.poll() is None, process.communicate()
    os.kill(workers(process.pid)[0] if victim == "worker" else process.pid, signal.SIGKILL)
    _, errors = process.communicate()
    wait_until(lambda: not workers(process.pid))
    if victim == "worker":
        assert process.returncode == 1
        assert "Apache Beam has failed, perhaps because a worker was killed" in errors
        assert "rerun the command to resume" in errors and "Traceback" not in errors
    times = {path.name: path.stat().st_mtime_ns for path in directory.glob("*-of-*")}
    done = {path.name[1 : -len(".done")] for path in directory.glob(".*.done")}
    assert 0 < len(done) < 12
    prepare(Noise(), directory, progress=False, runner="beam")
    assert contents(directory) == local
    assert all((directory / file).stat().st_mtime_ns == times[file] for file in done)


@pytest.mark.slow
def test_from_a_bucket_to_a_bucket(folders, start, tmp_path):
    assert commands.run(command(folders, tmp_path / "local")) == 0
    with FakeGcs(tmp_path) as service:
        service.buckets = {"data": {}}
        service.put_folder(folders, "data", "mixed")
        arguments = command("gs://data/mixed", "gs://data/made", "--runner=beam")
        process = start("-m", "imagenet_fast", *arguments, **service.environment)
        _, errors = process.communicate()
        assert process.returncode == 0, errors
        assert service.files("data", "made") == contents(tmp_path / "local")


def test_too_many_bad_images(folders, tmp_path):
    source = open_source("folders", folders)
    with pytest.raises(UserError, match=r"more than 2 images \(max_bad_images\) cannot be used"):
        prepare(source, tmp_path, max_bad_images=2, progress=False, runner="beam")
    assert (tmp_path / JOURNAL).exists()


class Mislabelled(Source):
    def __init__(self):
        super().__init__("toy", "toy", ["a", "b"], {"train": 10}, "")
        self.opening = Mislabelled

    def read(self, split, index):
        return Item(np.zeros((4, 4), np.uint8), 2 * index, f"{index}.png")


class Changing(Mislabelled):
    def __init__(self, fingerprint="then"):
        super().__init__()
        self._fingerprint = fingerprint
        self.opening = changed


def changed():
    return Changing("now")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (Mislabelled, r"toy: \d.png in train has the label \d+, outside 0..1"),
        (Changing, "toy: holds other images for a worker than where prepare was started: give .*"),
    ],
)
def test_what_is_wrong_at_a_worker(tmp_path, source, reason):
    with pytest.raises(UserError, match=f"^{reason}$"):
        prepare(source(), tmp_path, progress=False, runner="beam")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--direct_num_worker=2", "Apache Beam has no --direct_num_worker; did you mean"),
        ("--direct_num_workers=two", "argument --direct_num_workers: invalid int value: 'two'"),
        ("--direct_running_mode=fast", "argument --direct_running_mode: invalid choice: 'fast'"),
        ("--=1", "pipeline_options: '--=1' is not one of Apache Beam's"),
        ("--help", "pipeline_options: '--help' is not one of Apache Beam's"),
        ("--runner=NoRunner", "pipeline_options: Unexpected pipeline runner: NoRunner"),
        ("direct_num_workers=2", "options are written --name=value"),
        ("--direct_num_workers='2", "No closing quotation"),
    ],
)
def test_options_that_beam_does_not_have(folders, tmp_path, capsys, options, reason):
    arguments = command(folders, tmp_path / "data", "--runner=beam")
    assert commands.run([*arguments, f"--pipeline_options={options}"]) == 2
    errors = capsys.readouterr().err
    assert reason in errors and "Traceback" not in errors and "usage:" not in errors
    assert not (tmp_path / "data").exists()
