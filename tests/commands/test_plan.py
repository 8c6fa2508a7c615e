import csv
import json
import pathlib
import re
import shlex
import xml.etree.ElementTree

import numpy as np
import pytest

from imagenet_fast.commands import run

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "planning.md"
RECIPE = ["--flagfile=facebook_1h_8k"]
GOOGLE = [
    "--schedule=polynomial",
    "--batch_size=32768",
    "--learning_rate=32",
    "--rate_scaling=none",
    "--warmup=17936338 examples",
    "--warmup_start=0",
    "--end_learning_rate=1e-4",
    "--duration=3558 steps",
]
# A pipeline that is planned in no time.
SMALL = ["--pipeline", "--model=resnet8", "--image_size=16", "--accumulation_steps=4"]


@pytest.fixture
def plan(capsys):
    """Runs ``plan --schedule`` and returns what it prints and its table, as lines by the step."""

    def plan(*arguments):
        assert run(["plan", "--schedule", *arguments]) == 0
        text = capsys.readouterr().out
        lines = [line.replace(",", "").split(maxsplit=3) for line in text.splitlines()]
        return text, {
            int(line[0]): line[1:] for line in lines if len(line) > 3 and line[0].isdigit()
        }

    return plan


def test_table_of_a_recipe(plan):
    text, table = plan(*RECIPE)
    assert "planned for ImageNet's 1,281,167 images" in text
    assert "epoch      156 steps" in text
    assert "run        14,040 steps, 90 epochs" in text
    assert "warmup     gradual, 780 steps from 0.1" in text
    assert table == {
        0: ["0.0000", "0.1", "start"],
        779: ["4.9936", "3.196026", "last of the warmup"],
        780: ["5.0000", "3.2", "after the warmup"],
        4680: ["30.0000", "0.32", "times 0.1"],
        9360: ["60.0000", "0.032", "times 0.1"],
        12480: ["80.0000", "0.0032", "times 0.1"],
        14040: ["90.0000", "0.0032", "end of the run"],
    }


def test_warmup_of_google_s_recipe(plan):
    text, table = plan(*GOOGLE)
    assert "warmup     gradual, 547.37 steps from 0" in text
    assert list(table) == [0, 547, 548, 890, 1779, 2668, 3558]
    assert float(table[547][1]) == pytest.approx(32 * 547 * 32768 / 17_936_338)
    assert table[1779][2] == "1/2 of the run"


def test_run_without_warmup(plan):
    text, table = plan("--schedule=cosine", "--duration=100 steps")
    assert "warmup     none" in text
    assert [float(rate) for _, rate, _ in table.values()] == pytest.approx(
        [0.05 * (1 + np.cos(np.pi * share)) for share in (0, 0.25, 0.5, 0.75, 1)], abs=1e-7
    )


def test_options_of_a_warmup_that_there_is_not(capsys):
    arguments = ["--schedule=cosine", "--duration=100 steps", "--warmup=20 steps"]
    assert run(["plan", "--schedule", *arguments]) == 0
    assert "warmup without effect: there is no warmup" in capsys.readouterr().err


def test_constant_and_decays_after_the_end(plan):
    assert list(plan("--schedule=constant", "--duration=100 steps")[1]) == [0, 100]
    assert list(plan("--duration=61 epochs", "--decay_at=30epochs,60epochs,80epochs")[1]) == [
        0,
        30 * 5004,
        60 * 5004,
        61 * 5004,
    ]


def test_knots(plan):
    _, table = plan(
        "--schedule=piecewise_linear",
        "--batch_size=512",
        "--learning_rate_batch=512",
        "--knots_at=0 steps,10 steps,20 steps",
        "--knots=0,1,0.5",
        "--duration=30 steps",
    )
    # The tenth update is step 9.
    assert {step: label for step, (_, _, label) in table.items()} == {
        0: "start",
        9: "knot",
        19: "knot",
        30: "end of the run",
    }
    assert [float(table[step][1]) for step in (9, 19, 30)] == [0.1, 0.05, 0.05]


def test_data_of_one_s_own(plan, digits):
    text, _ = plan(f"--data_dir={digits}", "--flagfile=digits")
    assert "ImageNet" not in text
    assert "images     1,438" in text
    assert "epoch      44 steps" in text


def read(path):
    with path.open(newline="") as file:
        return [
            (int(row["step"]), float(row["epoch"]), float(row["learning_rate"]))
            for row in csv.DictReader(file)
        ]


def test_files(plan, tmp_path):
    directory = tmp_path / "new" / "folder"
    text, table = plan(*RECIPE, f"--output_dir={directory}")
    assert sorted(path.name for path in directory.iterdir()) == ["schedule.csv", "schedule.svg"]
    assert str(directory / "schedule.csv") in text
    rows = read(directory / "schedule.csv")
    steps = [step for step, _, _ in rows]
    assert len(rows) <= 2000
    assert steps == sorted(set(steps))
    assert (steps[0], steps[-1]) == (0, 14_040)
    assert max(np.diff(steps)) < 10
    # Both sides of each jump, with the table's numbers.
    rates = {step: rate for step, _, rate in rows}
    assert {4679, 4680, 9359, 9360, 12479, 12480} <= set(steps)
    assert rates[4679] == pytest.approx(3.2)
    for step, (_, rate, _) in table.items():
        assert rates[step] == pytest.approx(float(rate), rel=1e-6)
    root = xml.etree.ElementTree.parse(directory / "schedule.svg").getroot()
    assert root.tag.endswith("svg")


def test_short_runs_have_all_their_steps(plan, tmp_path):
    plan("--duration=150 steps", f"--output_dir={tmp_path}")
    assert [step for step, _, _ in read(tmp_path / "schedule.csv")] == list(range(151))


def test_nothing_is_written_unasked(plan, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan("--duration=10 steps")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--batch_size=8"],
            "choose what to plan: a run, by --accelerator=NAME and --chips=N, or one of --schedule",
        ),
        (["schedule"], "unexpected argument 'schedule'"),
        (
            ["--schedule=cosine"],
            "choose what to plan: a run, by --accelerator=NAME and --chips=N, or one of --schedule",
        ),
        (["--schedule", "cosine"], "unexpected argument 'cosine'"),
        (["--schedule", "--schedule=cosin"], "schedule='cosin' does not exist; did you mean"),
        (["--schedule", "--batch=8"], "there is no flag --batch; did you mean --batch_size"),
        (
            ["--schedule", "--flagfile=airbench_cifar10"],
            "data_on_device needs data, because it is for small",
        ),
        (["--schedule", "--data_dir=/nowhere"], "data_dir /nowhere does not exist"),
        (
            ["--schedule", *RECIPE, "--duration=4 epochs", "--warmup=5 epochs"],
            "warmup 5 epochs (780 steps) is longer",
        ),
        (["--schedule", "--pipeline"], "plan one thing at a time, not --schedule and --pipeline"),
        (
            ["--pipeline", "--costs=flop"],
            "costs='flop' does not exist; did you mean 'flops'?",
        ),
        (["--pipeline", "--device_memory_gb=-1"], "device_memory_gb is -1, but must not be"),
        (["--pipeline", "--pipeline_stages=2", "--pipeline_balance=3"], "has 1 stages, but"),
        (
            [*SMALL, "--pipeline_stages=2", "--xla"],
            "pipeline_stages does not work with xla: drop one",
        ),
        (
            [*SMALL, "--pipeline_stages=2", "--train_sizes=16", "--train_until=1 epochs"],
            "pipeline_stages does not work with train_sizes: drop one",
        ),
        (
            [*SMALL, "--pipeline_stages=2", "--size_ramp=8,8", "--size_ramp_at=0 steps,9 steps"],
            "pipeline_stages does not work with size_ramp: drop one",
        ),
        (
            [*SMALL, "--pipeline_stages=2", "--eval_image_size=48"],
            "pipeline_stages does not work with eval_image_size: drop one",
        ),
        ([*SMALL, "--pipeline_stages=99"], "cannot be split into 99 stages"),
        ([*SMALL, "--pipeline_stages=2", "--pipeline_balance=3,4"], "is of 7 blocks, but there"),
        pytest.param(
            [*SMALL, "--pipeline_stages=2", "--device_memory_gb=1e-4"],
            "use more devices, larger",
            marks=pytest.mark.long,
        ),
        (["--schedule", "--duration=3 examples"], "is less than one step of 256 images"),
        (
            ["--schedule", "--batch_size=2000000"],
            "batch_size is 2000000, but synthetic has only 1,281,167 training images",
        ),
    ],
)
def test_mistakes(capsys, arguments, message):
    assert run(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_place_that_cannot_be_written_to(capsys, tmp_path):
    (tmp_path / "file").touch()
    assert run(["plan", "--schedule", "--duration=9 steps", f"--output_dir={tmp_path}/file"]) == 2
    assert f"cannot write to {tmp_path}/file" in capsys.readouterr().err


def test_without_arguments_it_lists_the_plans(capsys):
    assert run(["plan"]) == 0
    page = capsys.readouterr().out
    assert "  --schedule " in page
    assert "  --pipeline " in page


@pytest.mark.parametrize("argument", ["--help", "-h"])
def test_help_lists_the_plans_and_the_flags_of_a_run(capsys, argument):
    with pytest.raises(SystemExit, match="0"):
        run(["plan", argument])
    page = capsys.readouterr().out
    assert "  --schedule " in page
    assert all(f"  --{name}: " in page for name in ("accelerator", "chips", "compare", "model"))
    assert "--warmup" not in page
    assert page.count("usage: ") == 1
    assert "--helpfull lists" in page


def test_help_of_a_plan(capsys):
    with pytest.raises(SystemExit, match="0"):
        run(["plan", "--schedule", "--help"])
    page = capsys.readouterr().out
    assert page.startswith("usage: imagenet-fast plan --schedule")
    assert "--output_dir" in page
    assert "--end_learning_rate" in page


@pytest.mark.long
def test_pipeline(capsys, tmp_path):
    arguments = [*SMALL, "--pipeline_stages=3", "--device_memory_gb=2"]
    assert run(["plan", *arguments, f"--output_dir={tmp_path}/new"]) == 0
    text = capsys.readouterr().out
    assert "planned for ImageNet's 1,000 classes" in text
    assert "network     resnet8: " in text
    balance = re.search(r"--pipeline_balance=([\d,]+)", text)[1]
    assert len(balance.split(",")) == 3
    assert "GiB of the 2 GiB of a device" in text
    files = ["pipeline.csv", "pipeline.json", "pipeline.svg"]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == files
    assert all(f"{tmp_path}/new/{name}" in text for name in files)
    # The balance can be given as it was printed.
    again = [*SMALL, "--pipeline_stages=3", f"--pipeline_balance={balance}", "--num_classes=1000"]
    assert run(["plan", *again]) == 0
    other = capsys.readouterr().out
    assert "ImageNet" not in other
    assert table_of(other) == table_of(text)


def table_of(text):
    return [line for line in text.splitlines() if re.match(r" *(\d|all) ", line)]


@pytest.mark.long
def test_pipeline_for_data_of_one_s_own(capsys, digits):
    arguments = ["--image_size=16", "--accumulation_steps=2", "--batch_size=32"]
    assert run(["plan", "--pipeline", "--model=resnet8", f"--data_dir={digits}", *arguments]) == 0
    text = capsys.readouterr().out
    assert "75,290 parameters" in text  # for 10 classes
    # One stage, which computes one of two forward passes twice.
    assert "speed-up    0.86" in text


@pytest.mark.slow
@pytest.mark.long
def test_pipeline_of_a_network_that_is_not_made(run_python):
    """GPipe's AmoebaNet-D (72, 512): 1.84 billion parameters over 8 devices of 8 GB."""
    program = (
        "import pathlib, sys\n"
        "from imagenet_fast.commands import run\n"
        "run(sys.argv[1:])\n"
        # Not getrusage, which begins with the peak of the process that started this one.
        "print(pathlib.Path('/proc/self/status').read_text())"
    )
    arguments = ["--model=amoebanet_d", "--normal_cells=72", "--cell_filters=512"]
    # 128 micro-batches and this balance are torchgpipe's; here, its last block is three.
    arguments += ["--batch_size=128", "--accumulation_steps=128", "--pipeline_stages=8"]
    arguments += ["--pipeline_balance=23,16,11,6,6,5,5,8", "--optimizer=rmsprop"]
    arguments += ["--device_memory_gb=8"]
    job = ["-c", program, "plan", "--pipeline", *arguments]
    text = run_python(job, timeout=600, fresh=True).stdout
    assert "80 blocks, 1,844,858,344 parameters" in text
    most = float(re.search(r"at most (\S+) GiB of the 8 GiB of a device", text)[1])
    # The six cells of the fifth stage: weights, gradients and two slots, 57,706,496 of each.
    assert 6 * 57_706_496 * 16 / 2**30 < most < 8
    # The weights alone would be 6.9 GiB.
    assert int(re.search(r"VmHWM:\s+(\d+) kB", text)[1]) < 2 * 2**20


def test_help_of_the_pipeline(capsys):
    with pytest.raises(SystemExit, match="0"):
        run(["plan", "--pipeline", "--help"])
    page = capsys.readouterr().out
    assert page.startswith("usage: imagenet-fast plan --pipeline")
    assert all(f"--{name}:" in page for name in ("costs", "device_memory_gb", "pipeline_stages"))
    assert "--warmup" not in page
    assert "--helpfull lists" in page
    assert len(page.splitlines()) < 60


RUN = ["--model=resnet8", "--image_size=16", "--batch_size=256", "--duration=2 epochs"]


def test_a_run(capsys, tmp_path):
    arguments = [*RUN, "--accelerator=v100", "--chips=8", f"--output_dir={tmp_path}"]
    assert run(["plan", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "8 NVIDIA V100 (SXM2, 16 GB), 1 host: 8 replicas of 32 images" in printed
    assert {own.name for own in tmp_path.iterdir()} == {"plan.txt", "plan.json", "plan.svg"}


@pytest.mark.long
def test_runs_beside_each_other(capsys, tmp_path):
    assert run(["plan", *RUN, "--accelerator=v100", "--compare=chips=1,2,4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-3:]] == ["1", "2", "4"]
    kept = [f"--output_dir={tmp_path}", "--chips=8"]
    assert run(["plan", *RUN, *kept, "--compare=accelerator=p100,v100"]) == 0
    written = {own.name: json.loads((own / "plan.json").read_text()) for own in tmp_path.iterdir()}
    assert {name: own["accelerator"] for name, own in written.items()} == {
        "accelerator=p100": "p100",
        "accelerator=v100": "v100",
    }
    capsys.readouterr()
    assert run(["plan", *RUN, "--accelerator=v100", "--compare=batch_size=256,512"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-2:]] == ["256", "512"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--accelerator=tpu-v33"], "accelerator='tpu-v33' does not exist; did you mean 'tpu-v3'"),
        (["--chips=2000"], "chips is 2,000, but must be at least 1 and, of TPU v3, at most 1,024"),
        (["--compare=chip=1"], "compare: there is no flag 'chip'; did you mean 'chips'"),
        (["--compare=chips=1,two"], "chips is 'two', but must be a whole number"),
        (
            ["--chips=7"],
            "chips is 7, but the number of chips of a slice of TPU v3 is a power of two",
        ),
        (["--network_gbits=0"], "the network has 0 Gbit/s"),
        (["--network_gbits=1e9"], "must be positive and at most 100,000"),
        (["--host_images=-1"], "host_images is -1, but must not be negative"),
        (["--failure_hours=-1"], "failure_hours is -1, but must not be negative"),
        (["--slow_factor=0.5"], "slow_factor is 0.5, but must be between 1 and 1000"),
        (["--jitter=50"], "jitter is 50, but must be between 0 and 1"),
        (["--jitter=nan"], "jitter is nan, but must be finite"),
        (["--compare=chips"], "give values, as in --compare=chips=1,2"),
        (["--jitter=-1"], "jitter is -1, but must be between 0 and 1"),
    ],
)
def test_mistakes_in_a_run(capsys, arguments, message):
    assert run(["plan", *RUN, "--accelerator=tpu-v3", *arguments]) != 0
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--chips=mi300x", "chips is 'mi300x', but must be a whole number: number of chips of the"),
        (
            "--network_gbits=fast",
            "network_gbits is 'fast', but must be a number: network bandwidth",
        ),
        ("--accelerators=8", "there is no flag --accelerators; did you mean --accelerator"),
        ("--accelerator=mi300x", "accelerator='mi300x' does not exist; choose from p100, v100,"),
    ],
)
def test_hardware_that_is_none(capsys, flag, message):
    assert run(["plan", *RECIPE, flag]) == 2
    assert message in capsys.readouterr().err


def test_the_page_shows_what_the_command_prints(capsys):
    """Numbers to within 1%: other versions of Keras make graphs that differ a little."""
    command, shown = re.search(
        r"^    imagenet-fast (plan .*)\n\n```text\n(.*?)```$",
        PAGE.read_text(),
        re.MULTILINE | re.DOTALL,
    ).groups()
    assert run(shlex.split(command)) == 0
    printed = capsys.readouterr().out
    exact = re.compile("^run .*$", re.MULTILINE)
    assert exact.findall(printed) == exact.findall(shown) != []
    number = re.compile(r"\d[\d,]*(?:\.\d+)?")
    assert number.sub("#", printed).strip() == number.sub("#", shown).strip()
    values = [
        [float(value.replace(",", "")) for value in number.findall(own)] for own in (printed, shown)
    ]
    assert values[0] == pytest.approx(values[1], rel=0.01)
