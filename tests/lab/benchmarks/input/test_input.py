"""On scikit-learn's digits; other pipelines by stand-ins, and once themselves."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.commands import run
from imagenet_fast.config import Config
from imagenet_fast.data.dataset import distributed_dataset
from imagenet_fast.data.prepare.add_index import add_index
from imagenet_fast.lab.benchmarks.input.compare import InputBenchmark
from imagenet_fast.lab.benchmarks.input.peers import start_peers
from imagenet_fast.lab.benchmarks.input.report import make_report
from imagenet_fast.lab.benchmarks.input.stages import make_bounds, make_stages
from imagenet_fast.lab.benchmarks.input.variants import OPTIMIZATIONS, VARIANTS, make_variant
from imagenet_fast.lab.benchmarks.timing import Comparison, Times

ROOT = pathlib.Path(__file__).parents[4]


@pytest.fixture(scope="module")
def config(digits):
    return Config(data_dir=digits, image_size=8, batch_size=16, data_threads=2, seed=3)


@pytest.fixture(scope="module")
def indexed(config, tmp_path_factory, native_ops):
    """The configuration of digits with JPEG indexes."""
    directory = tmp_path_factory.mktemp("data") / "indexed"
    shutil.copytree(config.data_dir, directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("imagenet_fast.data.jpeg.index.LEAST_PIXELS", 1)
        add_index(directory, progress=False)
    return config.replace(data_dir=str(directory))


@pytest.fixture
def environment(tmp_path):
    """environment(text) creates a directory whose bin/python runs a Python program."""

    def make(text):
        (tmp_path / "bin").mkdir()
        (tmp_path / "program.py").write_text(text)
        python = tmp_path / "bin" / "python"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path}/program.py"\n')
        python.chmod(0o755)
        return str(tmp_path)

    return make


def first(dataset):
    return next(iter(dataset))


def test_jobs_of_the_peers(config, environment):
    """All get the same images and batches, as shards or as files in one folder per class."""
    program = """
import json, os, pathlib, sys
os.setpgid(0, 0)
job = json.loads(sys.stdin.readline())
files = sorted(pathlib.Path(job.get("directory", "/nowhere")).glob("*/*.jpg"))
job["files"] = [str(path.relative_to(job["directory"])) for path in files]
print(json.dumps(job), flush=True)
sys.stdin.readline()
"""
    directory = environment(program)
    names = ("plain", "model_garden", "pytorch", "dali", "ffcv", "ffcv_raw")
    with start_peers(config, dict.fromkeys(names, directory), 40) as workers:
        jobs = {name: worker.answer for name, worker in workers.items()}
    assert [job["pipeline"] for job in jobs.values()] == list(names)
    assert {job["batch_size"] for job in jobs.values()} == {16}
    assert jobs["plain"]["paths"] == jobs["model_garden"]["paths"]
    assert len(jobs["plain"]["paths"]) > 1
    assert all(pathlib.Path(path).is_absolute() for path in jobs["plain"]["paths"])
    assert jobs["plain"]["shuffle_buffer"] == config.shuffle_buffer
    assert jobs["model_garden"]["classes"] == 10
    of_files = [job for job in jobs.values() if "directory" in job]
    assert len(of_files) == 4
    assert {job["threads"] for job in of_files} == {2}
    files = jobs["pytorch"]["files"]
    assert all(job["files"] == files for job in of_files)
    assert len(files) == 40
    assert {name.split("/")[0] for name in files} <= {f"{label:05d}" for label in range(10)}
    assert not pathlib.Path(jobs["pytorch"]["directory"]).exists()


def test_a_missing_environment(config, tmp_path):
    wanted = {"model_garden": str(tmp_path)}
    with (
        pytest.raises(UserError, match=r"Model Garden failed under .*input_peers.sh DIRECTORY mod"),
        start_peers(config, wanted, 16),
    ):
        pass


@pytest.mark.long
def test_own_and_plain_in_processes(config):
    benchmark = InputBenchmark(config, {}, images=40, warmup=1, repeats=2)
    comparison = benchmark.peers()
    assert comparison.names == ("imagenet_fast", "plain tf.data")
    assert comparison.images == 32
    assert comparison.notes[1] == f"plain tf.data: tensorflow {tf.__version__}"
    for times in comparison.times:
        assert len(times.seconds) == 2
        assert min(times.seconds) > 0
        assert min(times.cpu_seconds) > 0


@pytest.mark.slow
@pytest.mark.long
def test_real_peers(config, tmp_path):
    """In environments made by the tool, which needs pip's packages."""
    made = subprocess.run(
        [ROOT / "tools" / "input_peers.sh", tmp_path, "model_garden"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHON": sys.executable},
    )
    flags = dict(line.removeprefix("--").split("=") for line in made.stdout.splitlines())
    assert flags == {"model_garden": str(tmp_path / "model_garden")}
    benchmark = InputBenchmark(config, flags, images=32, warmup=1, repeats=1)
    peers = benchmark.peers()
    assert peers.names[-1] == "Model Garden"
    assert peers.notes[2].startswith("Model Garden: tf-models-official 2.")
    assert min(peers.times[-1].seconds) > 0


def test_an_unknown_peer_of_the_tool(tmp_path):
    tool = ROOT / "tools" / "input_peers.sh"
    finished = subprocess.run(
        [tool, tmp_path, "mxnet"], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 1
    assert "unknown pipeline mxnet: must be model_garden" in finished.stderr


# --- Pipelines of this process ----------------------------------------------------------------


def test_variants():
    count = len(OPTIMIZATIONS)
    # All, none, all but one, and one alone, which an index cannot be.
    assert len(VARIANTS) == len(set(VARIANTS.values())) == 2 * count + 1
    assert VARIANTS["all but cache"] == tuple(OPTIMIZATIONS)[1:]
    assert VARIANTS["all but index"] == tuple(OPTIMIZATIONS)[:-1]
    assert VARIANTS["cache alone"] == ("cache",)
    assert VARIANTS["none"] == ()


@pytest.fixture(scope="module")
def training_batch(config):
    return first(distributed_dataset(config, "train"))


@pytest.mark.long
@pytest.mark.parametrize("enabled", VARIANTS.values(), ids=VARIANTS)
def test_each_variant_returns_the_same_batches(config, training_batch, enabled):
    """Digits are grey, so that crops decode to the same pixels with any optimization."""
    for own, other in zip(training_batch, first(make_variant(config, enabled))):
        np.testing.assert_array_equal(own.numpy(), other.numpy())


@pytest.fixture(scope="module")
def stage_datasets(config):
    return make_stages(config)


@pytest.fixture(scope="module")
def stages(stage_datasets):
    """The first batch of each stage, by name."""
    return {name: first(stage) for name, stage in stage_datasets.items()}


def test_stages(stages):
    images, labels, _ = stages["transfer"]
    assert len(stages["read"][0]) == 16
    np.testing.assert_array_equal(stages["parse"], labels)
    assert stages["draw crops"].shape == (16, 4)
    np.testing.assert_array_equal(stages["batch"][0], images)
    # Of digits, some crops have a border that is as bright when flipped.
    differ = stages["decode and resize"].numpy() != images[:, 0, 0, 0].numpy()
    assert 0 < np.sum(differ.any(-1)) < 16
    assert list(stages)[-1] == "transfer"


@pytest.mark.long
def test_without_a_flip_resizing_is_last(config):
    plain = make_stages(config.replace(flip=False))
    images, *_ = first(plain["batch"])
    np.testing.assert_array_equal(first(plain["decode and resize"]), images[:, 0, 0, 0])


def test_bounds(config, stage_datasets):
    """They repeatedly make or decode training's crops, or decode whole images."""
    bounds = make_bounds(config, 2)
    made, fused, whole = (list(bounds[name].take(4)) for name in bounds)
    names = ("draw crops", "decode and resize")
    of_stages = [list(stage_datasets[name].take(2)) for name in names]
    for index, (corners, sizes) in enumerate(zip(made, fused)):
        of_stages = [
            list(stage_datasets[name].take(2))[index % 2]
            for name in ("draw crops", "decode and resize")
        ]
        boxes, expected = (part.numpy() for part in of_stages)
        np.testing.assert_array_equal(corners, expected)
        np.testing.assert_array_equal(sizes, 3 * boxes[:, 2] * boxes[:, 3])
    assert {int(size) for batch in whole for size in batch} == {32 * 32 * 3}


# In the default run, parts of stand-ins are timed, below.
@pytest.mark.long
@pytest.mark.parametrize(
    ("part", "names"),
    [
        (
            "bounds",
            (
                "imagenet_fast",
                "crops made alone",
                "fused decode and crop alone",
                "whole decode alone",
            ),
        ),
        ("cached", ("cache=decoded", "cache=none")),
        ("index", ("with", "without")),
    ],
)
def test_parts(indexed, part, names):
    benchmark = InputBenchmark(indexed, {}, images=16, warmup=1, repeats=2)
    comparison = getattr(benchmark, part)()
    assert comparison.names == names
    assert comparison.images == 16
    assert all(len(times.seconds) == 2 for times in comparison.times)


@pytest.mark.long
def test_evaluation_is_timed_from_its_first_batch_on(indexed):
    comparison = InputBenchmark(indexed, {}, images=16, warmup=1, repeats=2).evaluation()
    assert comparison.names == ("with", "without")
    assert comparison.images == 16 * (-(-359 // 16) - 1)
    assert all(min(times.seconds) > 0 for times in comparison.times)


@pytest.mark.long
def test_evaluation_of_one_batch_is_refused(indexed):
    benchmark = InputBenchmark(indexed.replace(batch_size=360), {}, images=1, warmup=0, repeats=1)
    with pytest.raises(UserError, match="two batches: give a smaller --batch_size"):
        benchmark.evaluation()


@pytest.mark.parametrize("part", [pytest.param("index", marks=pytest.mark.long), "evaluation"])
def test_without_indexes_there_is_nothing_to_compare(config, indexed, part):
    """The digits are too small for `prepare` to index them."""
    benchmark = InputBenchmark(config, {}, images=400, warmup=0, repeats=1)
    text = {"index": "400 train", "evaluation": "359 validation"}[part]
    with pytest.raises(UserError, match=f"no JPEG .* first {text} images, .* prepare --add_index "):
        getattr(benchmark, part)()
    off = InputBenchmark(indexed.replace(jpeg_index=False), {}, images=16, warmup=0, repeats=1)
    with pytest.raises(UserError, match="leave out --nojpeg_index"):
        getattr(off, part)()


def test_indexes_are_an_optimization_of_fused_decoding(config, monkeypatch):
    class EnoughError(Exception):
        pass

    def records(info, options, refer):
        raise EnoughError(options.jpeg_index, refer)

    name = "imagenet_fast.lab.benchmarks.input.variants.training_records"
    monkeypatch.setattr(name, records)
    needed = ("fused", "batched", "native", "index")
    for without in (None, *needed):
        with pytest.raises(EnoughError) as used:
            make_variant(config, [name for name in needed if name != without])
        assert used.value.args == (without is None, without in (None, "index"))


def test_a_sample_takes_whole_batches_of_a_new_iterator(config, monkeypatch):
    """After untimed batches."""
    taken = []

    def batches():
        taken.append(0)
        while True:
            taken[-1] += 1
            yield

    class Batches:
        def __iter__(self):
            return batches()

    monkeypatch.setattr(
        "imagenet_fast.lab.benchmarks.input.compare.make_stages",
        lambda _: {"a": Batches(), "b": Batches()},
    )
    comparison = InputBenchmark(config, {}, images=60, warmup=1, repeats=2).stages()
    assert taken == [2 * 2 + 4 + 3] * 6
    assert comparison.images == 48
    assert comparison.names == ("a", "b")


def test_the_ablation_has_numbers_of_threads(config, monkeypatch):
    made = []

    def make(config, on):
        made.append((config.data_threads, tuple(on)))
        return tf.data.Dataset.range(1).repeat()

    monkeypatch.setattr("imagenet_fast.lab.benchmarks.input.compare.make_variant", make)
    benchmark = InputBenchmark(config.replace(data_threads=6), {}, images=16, warmup=1, repeats=1)
    comparison = benchmark.ablation()
    assert comparison.names[-2:] == ("all, 2 threads", "all, 4 threads")
    assert made[-2:] == [(2, tuple(OPTIMIZATIONS)), (4, tuple(OPTIMIZATIONS))]
    assert comparison.notes == ("Threads: 6. The batches' consumer does nothing else.",)


# --- Reports and the command ------------------------------------------------------------------

PARTS = {
    "peers": Comparison(
        "Peers",
        ("a note",),
        ("imagenet_fast", "other"),
        (Times((0.5, 1.0, 1.0), (1.0, 1.0, 1.0)), Times((2.0, 2.0, 4.0), (3.0, 3.0, 3.0))),
        1000,
    ),
    "stages": Comparison(
        "Stages",
        (),
        ("read", "parse", "decode"),
        tuple(Times((seconds,) * 3, (seconds,) * 3) for seconds in (0.1, 0.3, 0.9)),
        1000,
    ),
}


def row(text, name):
    (line,) = [line for line in text.splitlines() if line.split("  ")[0] == name]
    return line.split()[len(name.split()) :]


def test_the_table():
    text = make_report(PARTS, cores=2, consumes=0).text
    assert row(text, "imagenet_fast") == ["1,000", "1,000", "2,000", "1,000"]
    assert row(text, "other")[:4] == ["500", "250", "500", "3,000"]
    assert row(text, "other")[4:] == ["4x", "(2", "to", "4)", "3x", "(3", "to", "3)"]
    assert [row(text, name)[-1] for name in ("read", "parse", "decode")] == ["100", "200", "600"]
    assert "a note" in text
    assert text.endswith("imagenet_fast makes 1,000 images/s on 2 cores: 500 per core")


def test_what_accelerators_need():
    text = make_report(PARTS, cores=2, consumes=2600).text
    assert text.endswith(
        "the accelerators consume 2,600 images/s, 2.6 times that: they need 6 such cores, or 3 "
        "such hosts for each of theirs"
    )
    text = make_report({"stages": PARTS["stages"]}, cores=2, consumes=2600).text
    assert "images/s on 2 cores" not in text


def test_files(tmp_path):
    paths = make_report(PARTS, 2, 0).write({"images": 1000}, str(tmp_path), "input")
    assert [pathlib.Path(path).name for path in paths] == ["input.txt", "input.json", "input.svg"]
    values = json.loads((tmp_path / "input.json").read_text())
    assert values["n"] == 3
    assert values["options"] == {"images": 1000}
    assert values["hardware"]["cores"]
    other = values["parts"]["peers"]["ways"]["other"]
    assert other["images_per_second"]["median"] == 500
    assert other["cpu_microseconds_per_image"]["max"] == 3000
    assert other["each_seconds"] == [2, 2, 4]
    assert (tmp_path / "input.svg").read_text().count("<svg") == 1


@pytest.fixture
def asked(monkeypatch):
    """Replaces the benchmark, and returns its calls."""
    asked = []

    class Answers:
        def __init__(self, config, environments, **counts):
            asked.append((config, environments, counts))

        def __getattr__(self, name):
            asked.append(name)
            return lambda: PARTS["peers"]

    monkeypatch.setattr("imagenet_fast.lab.benchmarks.input.compare.InputBenchmark", Answers)
    return asked


def test_defaults_of_the_command(asked, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["benchmark", "input", "--data_dir=somewhere"]) == 0
    (config, environments, counts), *parts = asked
    assert (config.data_dir, config.image_size, config.batch_size) == ("somewhere", 224, 64)
    assert environments == {}
    assert counts == {"images": 2000, "repeats": 5, "warmup": 1}
    assert parts == ["peers", "bounds", "stages", "ablation"]
    assert "imagenet_fast makes 1,000 images/s" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_flags_of_the_command(asked, capsys, tmp_path):
    flags = ["--data_dir=somewhere", "--compare=cached,peers", "--nojpeg_index", "--images=64"]
    flags += ["--pytorch=there", "--image_size=128", "--consumes=5000", f"--output_dir={tmp_path}"]
    assert run(["benchmark", "input", *flags]) == 0
    (config, environments, counts), *parts = asked
    assert not config.jpeg_index
    assert config.image_size == 128
    assert environments == {"pytorch": "there"}
    assert counts["images"] == 64
    assert parts == ["cached", "peers"]
    assert "the accelerators consume 5,000 images/s" in capsys.readouterr().out
    options = json.loads((tmp_path / "input.json").read_text())["options"]
    assert options["jpeg_index"] is False
    assert options["compare"] == "cached,peers"


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--compare=peer", "there is no part 'peer'; did you mean 'peers'?"),
        ("--compare=", "compare is empty: choose from peers, bounds"),
        ("--images=0", "images is 0, but must be positive"),
        ("--resize_method=slow", "resize_method='slow' does not exist"),
        ("--torch=x", "there is no flag --torch; did you mean --pytorch"),
    ],
)
def test_mistakes(asked, capsys, flag, message):
    assert run(["benchmark", "input", flag]) == 2
    assert message in capsys.readouterr().err
    assert not asked


def test_no_data(capsys, tmp_path):
    assert run(["benchmark", "input", f"--data_dir={tmp_path}/none", "--compare=stages"]) == 2
    assert "none does not exist" in capsys.readouterr().err
