"""Of a small network on scikit-learn's digits; each format in a process of its own."""

import json
import pathlib

import numpy as np
import pytest

from imagenet_fast import Config, UserError, build_model
from imagenet_fast.commands import run
from imagenet_fast.lab.benchmarks.serving import compare as serving
from imagenet_fast.lab.benchmarks.serving import worker as serving_worker
from imagenet_fast.lab.benchmarks.serving.compare import Agreement, ServingResult, compare_serving
from imagenet_fast.lab.benchmarks.serving.report import make_report
from imagenet_fast.lab.benchmarks.timing import Comparison, Times
from imagenet_fast.training.checkpoints.checkpoint import Checkpoints
from imagenet_fast.training.checkpoints.model_dir import claim_model_dir

COUNTS = {"images": 7, "calls": 2, "threads": 1, "warmup": 1, "repeats": 2}


@pytest.fixture(scope="module")
def config(digits, tmp_path_factory):
    """A run with an untrained network whose predictions are confident."""
    config = Config(
        data_dir=digits,
        model_dir=str(tmp_path_factory.mktemp("serving") / "run"),
        model="resnet8",
        image_size=16,
        train_crop="none",
        batch_size=32,
        zero_gamma=False,
        strategy="one_device",
    )
    model = build_model(config)
    kernel = model.trainable_variables[-2]
    kernel.assign(kernel * 100)
    claim_model_dir(config, model.labels)
    Checkpoints(model, config).save(0, {"step": 0})
    return config


@pytest.fixture
def part():
    """Distinct numbers."""
    times = (Times((0.2, 0.4, 0.8), (0.2, 0.4, 0.8)), Times((0.1, 0.1, 0.1), (0.3, 0.3, 0.3)))
    return ServingResult(
        batch_size=4,
        comparison=Comparison("a model, batch 4", (), ("one", "other"), times, images=8),
        latencies=((0.1, 0.1, 0.2, 0.2, 0.4, 0.4), (0.05,) * 6),
        memory=(600_000_000, 0),
        peak_memory=(700_000_000, 0),
        agreements=(Agreement(1000, 1000, 2e-7), Agreement(1000, 998, 3e-3)),
        versions={"tensorflow": "2.21.0"},
    )


@pytest.mark.long
def test_each_format_answers_as_evaluation_does(config):
    (served,) = compare_serving(config, [3], **COUNTS)
    assert served.batch_size == 3
    assert served.comparison.names == tuple(serving.FORMATS.values())
    assert served.comparison.images == 6
    assert set(served.versions) == {"tensorflow", "onnxruntime", "ai-edge-litert"}
    for index, agreement in enumerate(served.agreements):
        assert (agreement.images, agreement.same) == (7, 7)
        assert 0 <= agreement.difference < 1e-5
        latencies = served.latencies[index]
        assert len(latencies) == 4
        seconds = served.comparison.times[index].seconds
        assert seconds == pytest.approx([sum(latencies[:2]), sum(latencies[2:])])
        assert 10e6 < served.memory[index] < served.peak_memory[index]
    # Nothing but the runtime is loaded.
    assert max(served.memory[2:]) < min(served.memory[:2]) / 2


def test_answers_that_differ_are_counted():
    class Stub:
        def __init__(self):
            self.answer = {"versions": {}, "memory": 1}

        def ask(self, line):
            assert line == "3"
            return {
                "seconds": [0.1],
                "cpu_seconds": 0.1,
                "classes": [[1, 2], [2, 1], [0, 1]],
                "probabilities": [[0.7, 0.2], [0.5, 0.4], [0.9, 0.1]],
                "peak_memory": 5,
            }

    server = serving._Server(Stub())
    classes = np.array([[1, 2], [1, 2], [0, 1]])
    probabilities = np.array([[0.7, 0.2], [0.5, 0.4], [0.8, 0.1]])
    agreement = server.agreement(classes, probabilities)
    assert (agreement.images, agreement.same) == (3, 2)
    assert agreement.difference == pytest.approx(0.1)
    assert server.peak_memory == 5
    assert server.latencies == []


def test_top_classes():
    probabilities = np.array([[0.1, 0.0, 0.3, 0.05, 0.2, 0.3], [0, 0, 0, 0, 0, 1]], np.float32)
    classes, shares = serving_worker.top_classes(probabilities)
    assert classes.tolist() == [[2, 5, 4, 0, 3], [5, 0, 1, 2, 3]]
    np.testing.assert_array_equal(shares[0], np.float32([0.3, 0.3, 0.2, 0.1, 0.05]))


def test_images_come_in_batches(tmp_path):
    np.save(tmp_path / serving_worker.PIXELS, np.arange(5, dtype=np.uint8)[:, np.newaxis])
    seen = []

    def answer(batch):
        seen.append(batch.ravel().tolist())
        return np.eye(6)[batch.ravel()]

    result = serving_worker._serve(
        answer, serving_worker.read_pixels, str(tmp_path), [0, 1, 2, 3, 4, 0, 1], 3
    )
    assert seen == [[0, 1, 2], [3, 4, 0], [1]]
    assert len(result["seconds"]) == 3
    assert [best[0] for best in result["classes"]] == [0, 1, 2, 3, 4, 0, 1]


@pytest.mark.long
def test_a_runtime_that_is_not_installed(config, tmp_path):
    """The message names the command that installs it."""
    job = {"runtime": "none", "path": "", "images": "", "count": 1, "batch_size": 1, "threads": 1}
    message = r"TFLite, pixels failed under .*pip install -e '\.\[serving\]'"
    with (
        pytest.raises(UserError, match=message),
        serving._start("tflite", job),
    ):
        pass


def test_no_images_to_answer(config):
    synthetic = config.replace(synthetic=True, data_dir="", num_classes=10)
    with pytest.raises(UserError, match="has no validation images: give another --data"):
        compare_serving(synthetic, [1], **COUNTS)


# --- Report -----------------------------------------------------------------------------------


def test_table(part):
    lines = make_report([part]).text.splitlines()
    assert lines[0] == "a model, batch 4"
    one, other = (line.split() for line in lines[2:4])
    assert one[:7] == ["one", "20.0", "10.0", "40.0", "200.00", "400.00", "400.00"]
    assert one[7:] == ["600", "700", "1000", "of", "1000;", "probabilities", "to", "2e-07"]
    assert other[:4] == ["other", "80.0", "80.0", "80.0"]
    assert other[7:12] == ["?", "?", "998", "of", "1000;"]
    assert "medians of 3 repeats; ms: percentiles of all 6 calls" in lines[-3]
    assert lines[-1].endswith("tensorflow 2.21.0")


def test_files(part, tmp_path):
    paths = make_report([part, part]).write({"images": 8}, str(tmp_path / "new"), "serving")
    assert [pathlib.Path(path).name for path in paths] == [
        "serving.txt",
        "serving.json",
        "serving.svg",
    ]
    values = json.loads((tmp_path / "new" / "serving.json").read_text())
    way = values["parts"]["batch 4"]["ways"]["one"]
    assert way["latency_ms"]["median"] == pytest.approx(200)
    assert way["agreement"] == {"images": 1000, "same": 1000, "difference": 2e-7}
    assert values["options"] == {"images": 8}
    assert values["versions"]["tensorflow"] == "2.21.0"
    picture = (tmp_path / "new" / "serving.svg").read_text()
    assert picture.startswith("<?xml")
    make_report([part, part]).write({}, str(tmp_path), "serving")
    assert (tmp_path / "serving.svg").read_text() == picture


# --- The command ------------------------------------------------------------------------------


def test_command(config, part, tmp_path, monkeypatch, capfd):
    def compare(found, batch_sizes, **counts):
        assert found == config.replace(data_dir="other")
        assert batch_sizes == [2, 8]
        assert counts == {"images": 5, "calls": 3, "threads": 1, "repeats": 10, "warmup": 4}
        return [part]

    monkeypatch.setattr(serving, "compare_serving", compare)
    flags = ["--batch_sizes=2,8", "--images=5", "--calls=3", "--threads=1"]
    flags += ["--warmup=4", "--data_dir=other"]
    flags += [f"--model_dir={config.model_dir}", f"--output_dir={tmp_path}"]
    assert run(["benchmark", "serving", *flags]) == 0
    assert capfd.readouterr().out.splitlines()[-3:] == [
        f"{tmp_path}/serving.{suffix}" for suffix in ("txt", "json", "svg")
    ]
    options = json.loads((tmp_path / "serving.json").read_text())["options"]
    assert options["batch_sizes"] == "2,8"
    assert options["model_dir"] == config.model_dir


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--batch_sizes=0", "batch_sizes is '0', but must be positive numbers"),
        ("--batch_sizes=", "batch_sizes is '', but must be positive numbers"),
        ("--batch_sizes=a", "batch_sizes is 'a', but must be whole numbers"),
        ("--threads=-1", "threads is -1, but must not be negative"),
        ("--calls=0", "calls is 0, but must be positive"),
        ("--repeats=2", "no model: give --model_dir"),
    ],
)
def test_mistakes(flag, message, capfd):
    assert run(["benchmark", "serving", flag]) == 2
    assert message in capfd.readouterr().err


def test_the_worker_imports_no_runtime(run_python):
    code = "import sys, imagenet_fast.lab.benchmarks.serving.worker; print(*sys.modules)"
    modules = run_python(["-c", code], fresh=True).stdout.split()
    assert not {"tensorflow", "onnxruntime", "ai_edge_litert"} & set(modules)
