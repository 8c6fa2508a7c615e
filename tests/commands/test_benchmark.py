import json
import pathlib

import pytest

from imagenet_fast.commands import benchmark, run
from imagenet_fast.lab.benchmarks import resnet9, step
from imagenet_fast.lab.benchmarks.optimizer import compare as optimizer
from imagenet_fast.lab.benchmarks.pipeline import compare as pipeline
from imagenet_fast.lab.benchmarks.pipeline.compare import LimitedRun, StepTimes, simulated
from imagenet_fast.lab.benchmarks.pipeline.worker import Case
from imagenet_fast.lab.benchmarks.timing import Comparison, Times

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def calls(monkeypatch):
    """Replaces the benchmarks, and returns their calls."""
    calls = []

    def compare_steps(config, **counts):
        calls.append((config, counts))
        times = (Times((1.0,), (1.0,)), Times((2.0,), (4.0,)))
        return Comparison("a title", ("a note",), ("ours", "theirs"), times, 16)

    def compare_optimizers(model, **options):
        calls.append((model, options))
        times = tuple(Times((value,), (value,)) for value in (1.0, 2.0, 4.0))
        return Comparison("a title", ("a note",), ("LARS", "SGD", "Model Garden LARS"), times)

    monkeypatch.setattr(step, "compare_steps", compare_steps)
    monkeypatch.setattr(resnet9, "compare_resnet9", compare_steps)
    monkeypatch.setattr(optimizer, "compare_optimizers", compare_optimizers)
    return calls


def test_defaults(calls, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["benchmark", "step"]) == 0
    ((config, counts),) = calls
    assert (config.model, config.batch_size, config.image_size) == ("resnet50", 16, 224)
    assert config.stride_on_1x1
    assert config.weight_decay == 1e-4
    assert counts == {"network": "", "repeats": 10, "warmup": 2, "steps": 1}
    assert "theirs   0.500 (" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_network_of_keras_applications(calls, tmp_path):
    flags = ["--network=MobileNetV3Small", "--xla", f"--output_dir={tmp_path}"]
    assert run(["benchmark", "step", *flags]) == 0
    ((config, counts),) = calls
    assert config.xla and counts["network"] == "MobileNetV3Small"
    assert (tmp_path / "mobilenetv3small_float32_xla.json").exists()


def test_flags_and_files(calls, capsys, tmp_path):
    flags = ["--model=resnet101", "--precision=mixed_bfloat16", "--batch_size=8", "--repeats=3"]
    flags += [
        "--nostride_on_1x1",
        "--image_size=96",
        "--weight_decay=0",
        f"--output_dir={tmp_path}",
    ]
    assert run(["benchmark", "step", *flags]) == 0
    ((config, counts),) = calls
    assert (config.precision, config.batch_size, config.image_size) == ("mixed_bfloat16", 8, 96)
    assert not config.stride_on_1x1
    assert config.weight_decay == 0
    assert counts["repeats"] == 3
    options = json.loads((tmp_path / "resnet101_mixed_bfloat16.json").read_text())["options"]
    assert options["stride_on_1x1"] is False
    assert options["repeats"] == 3
    assert str(tmp_path / "resnet101_mixed_bfloat16.svg") in capsys.readouterr().out


def test_defaults_of_the_resnet9_benchmark(calls, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert run(["benchmark", "resnet9"]) == 0
    ((config, counts),) = calls
    assert (config.model, config.batch_size, config.image_size) == ("resnet9", 512, 32)
    assert config.whitening and config.data_on_device and config.ema_every == 5
    assert (config.width, config.precision, config.xla) == (16, "float32", False)
    assert config.data_dir == ""
    assert counts == {"repeats": 9, "warmup": 2, "steps": 5}
    assert "theirs   0.500 (" in capsys.readouterr().out


def test_flags_and_files_of_the_resnet9_benchmark(calls, capsys, tmp_path):
    recipe = str(ROOT / "imagenet_fast" / "flags" / "myrtle_cifar10_baseline.flags")
    flags = [f"--recipe={recipe}", "--width=0", "--precision=mixed_bfloat16", "--xla"]
    flags += ["--data_dir=somewhere", "--steps=2", f"--output_dir={tmp_path}"]
    assert run(["benchmark", "resnet9", *flags]) == 0
    ((config, counts),) = calls
    assert (config.width, config.precision, config.xla) == (0, "mixed_bfloat16", True)
    assert (config.data_dir, config.activation) == ("somewhere", "auto")
    assert counts["steps"] == 2
    options = json.loads((tmp_path / "width64_mixed_bfloat16_xla.json").read_text())["options"]
    assert options == {
        "recipe": recipe,
        "data_dir": "somewhere",
        "width": 0,
        "precision": "mixed_bfloat16",
        "xla": True,
        "repeats": 9,
        "warmup": 2,
        "steps": 2,
    }
    assert str(tmp_path / "width64_mixed_bfloat16_xla.svg") in capsys.readouterr().out


def test_defaults_of_the_optimizer_benchmark(calls, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["benchmark", "optimizer"]) == 0
    assert calls == [("resnet50", {"model_garden": "", "repeats": 30, "warmup": 3})]
    assert "Model Garden LARS  0.250 (" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_flags_and_files_of_the_optimizer_benchmark(calls, capsys, tmp_path):
    flags = ["--model=alexnet_bn", "--repeats=4", "--warmup=1", "--model_garden=somewhere"]
    assert run(["benchmark", "optimizer", *flags, f"--output_dir={tmp_path}"]) == 0
    assert calls == [("alexnet_bn", {"model_garden": "somewhere", "repeats": 4, "warmup": 1})]
    values = json.loads((tmp_path / "alexnet_bn.json").read_text())
    assert values["options"] == {"model": "alexnet_bn", "repeats": 4, "warmup": 1}
    assert values["ratio_to"]["SGD"]["median"] == 0.5
    assert str(tmp_path / "alexnet_bn.svg") in capsys.readouterr().out


def test_flags_and_files_of_the_pipeline_benchmark(monkeypatch, capsys, tmp_path):
    asked = []

    def overlap(repeats):
        asked.append(repeats)
        cases = [Case(64, 2, count) for count in (1, 8)]
        return [StepTimes(case, (1.0 / case.micro_batches,), simulated(case)) for case in cases]

    def limit(limit):
        asked.append(limit)
        return [LimitedRun(Case(64), limit, (), "it failed")]

    monkeypatch.setitem(pipeline.PARTS, "overlap", overlap)
    monkeypatch.setitem(pipeline.PARTS, "memory_limit", limit)
    flags = ["--parts=overlap,memory_limit", "--repeats=3", "--memory_limit=100"]
    assert run(["benchmark", "pipeline", *flags, f"--output_dir={tmp_path}"]) == 0
    assert asked == [3, 100 << 20]
    output = capsys.readouterr().out
    assert "it failed" in output
    assert f"{tmp_path}/pipeline.svg" in output
    values = json.loads((tmp_path / "pipeline.json").read_text())
    assert values["options"]["memory_limit"] == 100
    assert values.keys() >= {"overlap", "memory_limit", "hardware"}


def test_parts_of_the_pipeline_benchmark():
    """Those that can be asked for are those that there are."""
    assert list(benchmark._PIPELINE_PARTS) == list(pipeline.PARTS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pipeline", "--parts=overlapp"], "there is no part 'overlapp'; did you mean 'overlap'"),
        (["pipeline", "--parts="], "parts is empty: choose from estimates, schedules"),
        (["pipeline", "--memory_limit=0"], "memory_limit is 0, but must be positive"),
        (["stepp"], "there is no benchmark 'stepp'; did you mean 'step'?"),
        (["--repeats=2"], "there is no benchmark '--repeats=2'; the benchmarks are step"),
        (["step", "--repeats=0"], "repeats is 0, but must be positive"),
        (["optimizer", "--warmup=0"], "warmup is 0, but must be positive"),
        (["optimizer", "--modelgarden=x"], "there is no flag --modelgarden; did you mean --model"),
        (["step", "--precision=float8"], "precision='float8' does not exist"),
        (["step", "--batch=8"], "there is no flag --batch; did you mean --batch_size"),
        (["resnet9", "--recipe=no.flags"], "cannot read flagfile no.flags: No such file"),
        (
            ["input", "--flagfile=facebook_1h_8k"],
            "--flagfile=facebook_1h_8k: there is no flag --",
        ),
        (["resnet9", "--steps=0"], "steps is 0, but must be positive"),
        (["step", "more"], "unexpected argument 'more'"),
    ],
)
def test_mistakes(calls, capsys, arguments, message):
    assert run(["benchmark", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not calls


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_lists_the_benchmarks(capsys, arguments):
    assert run(["benchmark", *arguments]) == 0
    output = capsys.readouterr().out
    assert "  step " in output
    assert "  optimizer " in output


@pytest.mark.parametrize("name", ["step", "resnet9", "optimizer", "pipeline"])
def test_help_of_a_benchmark(capsys, name):
    with pytest.raises(SystemExit, match="0"):
        run(["benchmark", name, "--help"])
    assert f"usage: imagenet-fast benchmark {name}" in capsys.readouterr().out
