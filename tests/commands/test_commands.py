"""The command line, up to where the work begins."""

import importlib
import io
import logging
import os
import pathlib
import re
import signal
import subprocess
import sys
from importlib.metadata import version

import pytest

from imagenet_fast import commands
from imagenet_fast.__main__ import main
from imagenet_fast.base.durations import Duration
from imagenet_fast.base.files import write_file
from imagenet_fast.base.notices import warn_once
from imagenet_fast.commands.flags import CommandFlags
from imagenet_fast.commands.train import _MAIN_OPTIONS, _say_of_default_batch_norms
from imagenet_fast.config import Config, option_names


def test_version_is_the_installed_one(capsys):
    assert commands.run(["--version"]) == 0
    assert capsys.readouterr().out.split() == ["imagenet_fast", version("imagenet_fast")]


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["--helpfull"], ["help"]])
def test_help_lists_the_commands(capsys, arguments):
    assert commands.run(arguments) == 0
    page = capsys.readouterr().out
    assert page.startswith("usage: imagenet-fast COMMAND")
    for name, text in commands.COMMANDS.items():
        assert any(line.split() == [name, *text.split()] for line in page.splitlines())


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_each_command_has_help(capsys, name):
    try:
        status = commands.run([name, "--help"])
    except SystemExit as end:
        status = end.code
    assert status == 0
    assert capsys.readouterr().out.startswith(f"usage: imagenet-fast {name} ")


def test_nothing_follows_an_error(capsys):
    logger = logging.getLogger("tensorflow")
    before = logger.level
    try:
        logger.setLevel(logging.WARNING)
        assert commands.run(["trian"]) == 2
        assert capsys.readouterr().err.endswith("did you mean 'train'?\n")
        assert not logger.isEnabledFor(logging.WARNING)
    finally:
        logger.setLevel(before)


def test_help_of_train_has_what_a_newcomer_needs_and_a_way_to_the_rest(capsys):
    pages = []
    for argument in ("--help", "--helpfull"):
        with pytest.raises(SystemExit):
            commands.run(["train", argument])
        pages.append(re.findall(r"^  --(?:\[no\])?(\w+):", capsys.readouterr().out, re.M))
    main, full = pages
    assert {*main} <= {*full}
    assert {"data_dir", "model_dir", "batch_size", "learning_rate", "saved_model"} <= {*main}
    assert len(main) == len(_MAIN_OPTIONS) + 2 < 32
    assert {*full} == {*option_names(), "saved_model", "wait_for_hardware"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["trian"],
            "imagenet-fast trian: error: there is no command 'trian'; did you mean 'train'",
        ),
        (["qqq"], "there is no command 'qqq'; the commands are prepare, recipes, train, evaluate"),
        (["--batch_size=3"], "there is no command '--batch_size=3'"),
        (["flags"], "there is no command 'flags'"),
        (
            ["train", "--bach_size=3"],
            "imagenet-fast train: error: there is no flag --bach_size; did",
        ),
        (["train", "--batch_size=x"], "batch_size is 'x', but must be a whole number"),
        (["train", "--batch_size=-3"], "batch_size is -3, but must be positive"),
        (
            ["train", "--model=restnet50"],
            "model='restnet50' does not exist; did you mean 'resnet50'",
        ),
        (["train", "--batch_size=10", "--accumulation_steps=4"], "cannot be split into"),
        (["train", "data"], "unexpected argument 'data'"),
        (["train", "--flagfile=none"], "cannot read flagfile none: No such file"),
        (
            ["evaluate", "--optimizer=sgd"],
            "imagenet-fast evaluate: error: there is no flag --optimizer",
        ),
        (["export"], "give --saved_model"),
        (["export", "--saved_model=x", "--top_k=0"], "top_k is 0, but must be positive"),
        (
            ["export", "--saved_model=x", "--checkpoint=first"],
            "checkpoint='first' does not exist; choose from last, best",
        ),
        (["export", "--onnx=x", "--compare=x"], "give each file a name of its own, not x"),
        (["export", "--onnx=x", "--tflite=./x"], "give each file a name of its own, not x"),
        (["export", "--onnx=x", "--opset=-1"], "opset is -1, but must not be negative"),
        (
            ["export", "--tflite=x", "--opset=15"],
            "opset is of ONNX files: give --onnx or --onnx_int8",
        ),
        (
            ["export", "--tflite_int8=x", "--calibration_images=0"],
            "calibration_images is 0, but must be positive",
        ),
        (
            ["export", "--saved_model=x", "--compare=y"],
            "compare runs ONNX and TFLite files of this",
        ),
        (
            ["export", "--onnx=gs://x/y", "--compare=y"],
            "compare runs ONNX and TFLite files of this",
        ),
        (["export", "--saved_model=x", "--temperature=0"], "temperature is '0', but must be a pos"),
        (["export", "--saved_model=x", "--temperature=hot"], "must be a positive number or auto"),
        (["export", "--saved_model=x", "--temperature=inf"], "must be a positive number or auto"),
        (
            ["evaluate", "--checkpoint=bets"],
            "checkpoint='bets' does not exist; did you mean 'best'",
        ),
        (["prepare"], "give --data_dir"),
        (["prepare", "--data_dir=x", "--seed=-1"], "seed is -1, but must be in [0, 2**32)"),
        (["prepare", "--data_dir=x", "--seed=4294967296"], "seed is 4294967296, but must be in ["),
        (["prepare", "--data_dir=x", "--threads=-2"], "threads is -2, but must not be negative"),
        (["prepare", "--data_dir=x", "--max_side=-9"], "max_side is -9, but must not be negative"),
        (["prepare", "--data_dir=x", "--max_side=9", "--shorter_side=9"], "give one of them"),
        (
            ["prepare", "--data_dir=x", "--verify", "--data_page"],
            "verify, data_page and add_index exclude each other: give one of them",
        ),
        (
            ["prepare", "--source=list", "--data_dir=x", "--exif=turn"],
            "exif='turn' does not exist; choose from ignore, apply",
        ),
        (
            ["prepare", "--source=list", "--data_dir=x", "--encoding=webp"],
            "encoding='webp' does not exist; choose from jpeg, png",
        ),
        (["prepare", "--data_dir=x", "image.jpg"], "unexpected argument 'image.jpg'"),
        (["predict", "--job=3"], "there is no flag --job"),
    ],
    ids=" ".join,
)
def test_user_errors_are_one_line_with_status_2(capsys, arguments, message):
    assert commands.run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith(f"imagenet-fast {arguments[0]}: error: ")
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--flagfile=digits"], "no directory for the results: give --model_dir"),
        (["predict", "--saved_model=x"], "no images: name image files"),
        (["predict", "--saved_model=x", "--output=a.txt", "x.jpg"], "must end with .csv or .jsonl"),
        (["predict", "x.jpg"], "no model: give --saved_model"),
        (["evaluate"], "no model: give --model_dir"),
        (["evaluate", "--model_dir=none"], "none holds no training run: none/config.json: No such"),
        (["export", "--onnx=x", "--model_dir=none"], "none holds no training run"),
        (["prepare", "--data_dir=x"], "give --source"),
        (["prepare", "--data_dir=x", "--source=digit"], "no source 'digit'; choose from cifar10"),
        (["prepare", "--data_dir=x", "--source=folders"], "the source 'folders' needs source_path"),
    ],
    ids=" ".join,
)
def test_errors_that_need_no_tensorflow_come_before_its_import(
    monkeypatch, capsys, arguments, message
):
    command = importlib.import_module(f"imagenet_fast.commands.{arguments[0]}")
    monkeypatch.setattr(command, "import_tensorflow", lambda *_: pytest.fail("imported"))
    assert commands.run(arguments) == 2
    assert message in capsys.readouterr().err


def test_train_warns_of_a_warmup_without_effect(monkeypatch, capsys):
    command = importlib.import_module("imagenet_fast.commands.train")

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "import_tensorflow", stop)
    warn_once.cache_clear()
    commands.run(["train", "--flagfile=photos", "--model_dir=x"])
    assert "warmup" not in capsys.readouterr().err
    commands.run(["train", "--flagfile=photos", "--model_dir=x", "--warmup=3 epochs"])
    expected = (
        "warmup without effect: there is no warmup, because the scaled learning rate, 0.05, is not "
        "above learning_rate; for a warmup from 0 give warmup_start=0\n"
    )
    assert expected in capsys.readouterr().err


def test_interrupt(monkeypatch, capsys):
    def main(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("imagenet_fast.commands.train.main", main)
    arguments = ["train", "--flagfile=digits", "--duration=3 epochs"]
    assert commands.run(arguments) == 130
    assert capsys.readouterr().err == (
        "imagenet-fast train: interrupted; start or resume with: "
        "imagenet-fast train --flagfile=digits '--duration=3 epochs'\n"
    )
    monkeypatch.setattr("imagenet_fast.commands.evaluate.main", main)
    assert commands.run(["evaluate"]) == 130
    assert capsys.readouterr().err == "imagenet-fast evaluate: interrupted\n"


def test_an_interrupted_run_says_whether_it_has_a_checkpoint(monkeypatch, capsys, tmp_path):
    def stop(config):
        raise KeyboardInterrupt

    monkeypatch.setattr("imagenet_fast.training.train.train", stop)
    arguments = ["train", "--flagfile=digits", f"--model_dir={tmp_path}"]
    command = f" with: imagenet-fast train --flagfile=digits --model_dir={tmp_path}\n"
    assert commands.run(arguments) == 130
    assert capsys.readouterr().err.endswith(
        "imagenet-fast train: interrupted before the first checkpoint (checkpoint_every=2 epochs); "
        f"start again{command}"
    )
    (tmp_path / "checkpoints").mkdir()
    for step in (88, 176):
        write_file(tmp_path / "checkpoints" / f"ckpt-{step}.index", "")
    assert commands.run(arguments) == 130
    last = tmp_path / "checkpoints" / "ckpt-176"
    assert capsys.readouterr().err.endswith(
        f"imagenet-fast train: interrupted; resume from the last checkpoint, {last},{command}"
    )


def test_arguments_and_status_are_passed_on(monkeypatch):
    monkeypatch.setattr("imagenet_fast.commands.train.main", lambda arguments: len(arguments))
    assert commands.run(("train", "a", "b", "c")) == 3


def test_errors_of_files_are_one_line(monkeypatch, capsys):
    def main(arguments):
        raise PermissionError(13, "Permission denied", "closed/data")

    monkeypatch.setattr("imagenet_fast.commands.train.main", main)
    assert commands.run(["train"]) == 2
    message = "imagenet-fast train: error: closed/data: Permission denied\n"
    assert capsys.readouterr().err == message


@pytest.mark.parametrize("error", [ValueError("a bug"), OSError(5, "a bug")])
def test_bugs_are_not_hidden(monkeypatch, error):
    def main(arguments):
        raise error

    monkeypatch.setattr("imagenet_fast.commands.train.main", main)
    with pytest.raises(type(error), match="a bug"):
        commands.run(["train"])


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            ModuleNotFoundError("No module named 'absl'", name="absl"),
            "No module named 'absl'; install the dependencies: `pip install -e .`",
        ),
        (
            FileNotFoundError(2, "No usable temporary directory found in ['/tmp']"),
            "No usable temporary directory found in ['/tmp']; set TMPDIR to a writable directory",
        ),
    ],
)
def test_errors_of_the_installation_are_one_line(monkeypatch, capsys, error, message):
    def main(arguments):
        raise error

    monkeypatch.setattr("imagenet_fast.commands.doctor.main", main)
    assert commands.run(["doctor"]) == 2
    assert capsys.readouterr().err.startswith(f"imagenet-fast doctor: error: {message}")


def test_closed_standard_output():
    """As with >&-."""
    command = f"{sys.executable} -m imagenet_fast --help"
    finished = subprocess.run(f"{command} >&-", shell=True, capture_output=True, text=True)
    assert (finished.returncode, finished.stderr) == (0, "")


def test_undecodable_file_names_are_printed(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["imagenet-fast", "predict", "caf\udce9.jpg"])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "utf-8"))
    monkeypatch.setattr("imagenet_fast.commands.predict.main", lambda names: print(*names))
    with pytest.raises(SystemExit):
        main()
    sys.stdout.flush()
    assert sys.stdout.buffer.getvalue() == b"caf\\udce9.jpg\n"


PRINTS = """
import sys
from imagenet_fast.__main__ import main
from imagenet_fast.commands import prepare, recipes
prepare.main = recipes.main = lambda arguments: [print("x" * 1000) for _ in range({lines})] and 0
sys.argv = ["imagenet-fast", "{command}"]
main()
"""


@pytest.mark.parametrize(
    ("command", "lines", "status"),
    # The last one has done its work before its output, in a buffer, finds no reader.
    [("recipes", 10_000, 0), ("prepare", 10_000, 128 + signal.SIGPIPE), ("prepare", 1, 0)],
)
def test_a_reader_that_has_read_enough(command, lines, status):
    """As head does."""
    code = [sys.executable, "-c", PRINTS.format(command=command, lines=lines)]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        code, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=buffered
    ) as process:
        if lines > 1:
            assert len(process.stdout.readline()) == 1001
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == status


@pytest.mark.parametrize("lines", [1, 10_000])
def test_output_on_a_full_disk(lines):
    code = [sys.executable, "-c", PRINTS.format(command="prepare", lines=lines)]
    with pathlib.Path("/dev/full").open("w") as full:
        finished = subprocess.run(code, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert finished.stderr == (
        "imagenet-fast: error: the output cannot be written: No space left on device\n"
    )
    assert finished.returncode == 2


def test_no_space_is_told_in_a_line(monkeypatch, capsys, tmp_path):
    def main(arguments):
        write_file(tmp_path / "summary.json", "{}")

    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("imagenet_fast.base.files.open_new", full)
    monkeypatch.setattr("imagenet_fast.commands.train.main", main)
    assert commands.run(["train"]) == 2
    assert capsys.readouterr().err == (
        f"imagenet-fast train: error: {tmp_path}/summary.json: No space left on device\n"
    )


def test_evaluate_takes_a_limit_of_pixels(tmp_path, monkeypatch):
    from imagenet_fast import Config, UserError
    from imagenet_fast.training import evaluate

    found = []

    def note(config, split, *, checkpoint, **_):
        found.append((config.max_pixels, split, checkpoint))
        raise UserError("seen")

    (tmp_path / "config.json").write_text(Config().to_json())
    monkeypatch.setattr(evaluate, "evaluate", note)
    arguments = ["evaluate", f"--model_dir={tmp_path}", "--max_pixels=1000", "--split=test"]
    arguments.append("--checkpoint=best")
    assert commands.run(arguments) == 2
    assert found == [(1000, "test", "best")]


def test_train_extends_the_run_in_its_model_dir(tmp_path, monkeypatch):
    command, trained = importlib.import_module("imagenet_fast.commands.train"), []
    monkeypatch.setattr(
        "imagenet_fast.training.train.train", lambda config: trained.append(config) or sys.exit(0)
    )
    arguments = ["--flagfile=digits", f"--model_dir={tmp_path}", "--duration=24 epochs"]
    (tmp_path / "config.json").write_text("damaged")
    with pytest.raises(SystemExit):
        command.main(arguments)
    run = Config.from_flagfile("digits", model_dir=str(tmp_path))
    (tmp_path / "config.json").write_text(run.to_json())
    with pytest.raises(SystemExit):
        command.main(arguments)
    new, extended = trained
    assert new.decay_at == (Duration(16, "epochs"), Duration(22, "epochs"))
    assert extended == run.replace(duration="24 epochs")


def test_python_extends_the_run_in_its_model_dir(tmp_path):
    """As the command does: 6 epochs halve the recipe's times, which 12 then keep."""
    changes = {"model_dir": str(tmp_path), "seed": 3}
    run = Config.from_flagfile("digits", duration="6 epochs", **changes)
    assert run.decay_at == (Duration(4, "epochs"), Duration(5.5, "epochs"))
    (tmp_path / "config.json").write_text(run.to_json())
    for again in ({"duration": "12 epochs"}, {}):
        assert Config.from_flagfile("digits", **changes, **again) == run.replace(
            duration="12 epochs"
        )
    assert Config.from_flagfile("digits", duration="6 epochs", **changes) == run
    chosen = Config.from_flagfile("digits", duration="12 epochs", decay_at="9 epochs", **changes)
    assert chosen.decay_at == (Duration(9, "epochs"),)


@pytest.mark.parametrize(
    ("model", "given", "said"),
    [
        (
            "keras:MobileNetV2",
            {"batch_norm_momentum": 0.9},
            ["--batch_norm_momentum=0.9 is the def"],
        ),
        (
            "my_module:build",
            {"batch_norm_epsilon": 1e-5},
            ["--batch_norm_epsilon=1e-05 is the def"],
        ),
        ("my_module:build", {"batch_norm_momentum": 0.95}, []),
        ("resnet8", {"batch_norm_momentum": 0.9}, []),
        ("keras:MobileNetV2", {}, []),
    ],
)
def test_a_default_that_cannot_change_the_batch_norms_of_a_network(model, given, said, capfd):
    flags = CommandFlags("train", option_names())
    flags.parse([f"--model={model}", *(f"--{name}={value}" for name, value in given.items())])
    _say_of_default_batch_norms(Config.from_changes(flags.changes()), flags.given())
    lines = capfd.readouterr().err.splitlines()
    assert [line[: len(text)] for line, text in zip(lines, said)] == said
    assert len(lines) == len(said)
