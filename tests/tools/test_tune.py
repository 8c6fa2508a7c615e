"""The hyperparameter search, mostly with a fake training of known optimum."""

import collections
import csv
import fcntl
import importlib
import json
import math
import pathlib
import shlex
import sys
import types
import xml.etree.ElementTree

import pytest

from imagenet_fast import Config, UserError
from imagenet_fast.base.durations import Duration
from imagenet_fast.training.logs.metrics_file import read_rows

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
tune = importlib.import_module("tune")
plans = importlib.import_module("tuning.plan")
results = importlib.import_module("tuning.results")
searching = importlib.import_module("tuning.search")
studies = importlib.import_module("tuning.study")

BEST_RATE = 0.3
EVALUATIONS = 8
SEARCH = ("learning_rate=log:0.01:10", "momentum=0.5:0.95", "schedule=steps|cosine")


def final_error(config):
    """The fake training's error: 0.05 with the best learning rate and cosine."""
    distance = abs(math.log10(config.learning_rate / BEST_RATE))
    return min(0.9, 0.05 + 0.3 * distance + 0.02 * (config.schedule != "cosine"))


class FakeTrain:
    """A fake ``train``: evaluates eight times, and diverges above a learning rate.

    Attributes:
      seen: numbers of the evaluations made, by the name of model_dir, one list for each call.
      rates: the learning rate of each call, by the name of model_dir.
    """

    def __init__(self, diverges_above=math.inf, fail=lambda name, evaluation: None):
        self.seen = collections.defaultdict(list)
        self.rates = {}
        self._diverges_above = diverges_above
        self._fail = fail

    def __call__(self, config, callbacks):
        name = pathlib.Path(config.model_dir).name
        seen = []
        self.seen[name].append(seen)
        self.rates[name] = config.learning_rate
        (watcher,) = callbacks
        watcher.set_model(types.SimpleNamespace(stop_training=False))
        for evaluation in range(1, EVALUATIONS + 1):
            diverges = config.learning_rate > self._diverges_above
            watcher.on_train_batch_end(0, {"loss": math.nan if diverges else 1.0})
            if diverges:
                raise UserError("the loss is nan at step 3 (epoch 0.10): training has diverged")
            self._fail(name, evaluation)
            error = final_error(config) + 0.1 * (1 - evaluation / EVALUATIONS)
            seen.append(evaluation)
            watcher.on_epoch_end(evaluation - 1, {"val_top1": 1 - error})
            if watcher.model.stop_training:
                break
        return {"top1": 1 - error, "wall_seconds": float(evaluation)}


@pytest.fixture
def make_plan(digits, tmp_path):
    def make(*search, directory="study", trials=8, fine_trials=0, search_seed=0, **options):
        given = {"data_dir": digits, "duration": "2 epochs", "eval_every": "0.25 epochs", **options}
        flags = [f"--{name}={value}" for name, value in given.items()]
        flags += [f"--search={text}" for text in search or SEARCH]
        flags += [f"--trials={trials}", f"--fine_trials={fine_trials}"]
        flags += [f"--search_seed={search_seed}", f"--study_dir={tmp_path / directory}"]
        return tune.parse(["--flagfile=digits", *flags])

    return make


@pytest.fixture
def run(monkeypatch):
    """Returns a function that searches with a fake ``train``: (outcomes, fake)."""

    def search(plan, **options):
        fake = FakeTrain(**options)
        monkeypatch.setattr(searching, "train", fake)
        # These take longer than all else; there is no model, and drawing has tests of its own.
        monkeypatch.setattr(searching, "_forget_models", lambda: None)
        monkeypatch.setattr(results, "picture", lambda outcomes, space: "<svg/>")
        return searching.search(plan), fake

    return search


def states(outcomes):
    return collections.Counter(outcome.state for outcome in outcomes)


def rows_of(directory):
    with (directory / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


# --- What to search


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("learning_rate=log:0.05:5", plans.Range("learning_rate", 0.05, 5.0, log=True)),
        ("momentum=0.8:0.98", plans.Range("momentum", 0.8, 0.98)),
        ("batch_size=log:32:64", plans.Range("batch_size", 32, 64, log=True, whole=True)),
        ("warmup=epochs:0:1.5", plans.Range("warmup", 0.0, 1.5, unit="epochs")),
        (
            "warmup=steps:log:1:100",
            plans.Range("warmup", 1, 100, log=True, unit="steps", whole=True),
        ),
        ("schedule=steps|cosine", plans.Choices("schedule", ("steps", "cosine"))),
        ("nesterov=1|false", plans.Choices("nesterov", ("true", "false"))),
        (
            "decay_at=1 epoch,2 epochs|0.5 epochs",
            plans.Choices("decay_at", ("1 epoch,2 epochs", "0.5 epochs")),
        ),
    ],
)
def test_searched_options(text, expected, make_plan):
    assert make_plan(text).space == (expected,)


def test_written_back():
    for text in ("learning_rate=log:0.05:5", "warmup=epochs:0:1.5", *SEARCH):
        assert list(map(str, plans.parse_space([text]))) == [text]


def test_the_command_of_the_page():
    """Its recipe has no warmup, so ``warmup_start`` has an effect only in some trials."""
    page = (ROOT / "docs" / "tuning.md").read_text()
    command = page[page.index("python tools/tune.py") :].split("\n\n")[0].replace("\\\n", "")
    plan = tune.parse(shlex.split(command)[2:])
    trial = {"warmup": Duration(1, "epochs"), "schedule": "steps"}
    assert plan.config.replace(**trial).warmup_start == 0
    none = plan.config.replace(**{**trial, "warmup": Duration(0, "epochs")})
    assert none.warmup_start == Config().warmup_start
    assert none.decay_at == Config.from_flagfile("fashion_mnist").decay_at
    assert plan.config.replace(**{**trial, "schedule": "cosine"}).decay_at == Config().decay_at


def test_an_option_without_effect_in_any_trial(make_plan):
    with pytest.raises(UserError, match="warmup_start=0 has no effect"):
        make_plan("momentum=0.8:0.9", warmup_start=0)


def test_the_order_of_searched_options_does_not_matter(make_plan):
    assert make_plan(*SEARCH) == make_plan(*SEARCH[::-1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rat=0:1", "there is no option 'learning_rat'; did you mean 'learning_rate'"),
        ("momentum", "write OPTION="),
        ("momentum=0.9", "'0.9' is not a range; write OPTION="),
        ("momentum=0.9:", "'' is not a number"),
        ("momentum=low:0.9", "'low' is not a number"),
        ("momentum=0.1:nan", "'nan' is not a number"),
        ("momentum=0.9:0.8", "the range is empty: 0.9 is not below 0.8"),
        ("momentum=0.9:0.9", "the range is empty"),
        ("momentum=0.9:1.5", r"momentum is 1.5, but must be in \[0, 1\)"),
        ("momentum=epochs:0.1:0.2", "momentum has no unit, but 'epochs' is given"),
        ("weight_decay=log:0:1", "logarithmic, but 0 is not positive"),
        ("batch_size=10.5:20", "10.5 is not a whole number"),
        ("warmup=0:2", "write one unit, as warmup=epochs:1:5"),
        ("warmup=weeks:0:2", "unknown unit 'weeks': choose from steps, epochs, examples"),
        ("warmup=steps:0:2.5", "2.5 is not a whole number"),
        ("schedule=0:1", "schedule is not a number: write its values as 'schedule=VALUE|VALUE'"),
        ("schedule=steps", "schedule is not a number"),
        ("schedule=steps|cosin", "schedule='cosin' does not exist; did you mean 'cosine'"),
        ("schedule=steps|steps", "the same value is given twice"),
        ("nesterov=true|maybe", "nesterov is 'maybe', but must be true or false"),
        ("eval_every=epochs:1:2", "eval_every does not affect training results"),
        ("data_dir=a|b", "data_dir does not affect training results"),
    ],
)
def test_what_cannot_be_searched(text, message, make_plan):
    with pytest.raises(UserError, match=message) as error:
        make_plan(text)
    assert str(error.value).startswith(f"--search={text}: ")


def test_an_option_that_another_one_sets(make_plan):
    with pytest.raises(UserError, match=r"nesterov=false is for optimizer=sgd .* is adam"):
        make_plan("nesterov=true|false", optimizer="adam")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trials": 0}, "trials is 0, but must be positive"),
        ({"trials": "x"}, "invalid int value: 'x'"),
        ({"fine_trials": -1}, "fine_trials is -1"),
        ({"search_seed": -1}, "search_seed is -1"),
        ({"model_dir": "runs/x"}, "leave out model_dir"),
        ({"stop_at_accuracy": 0.9}, "stop_at_accuracy would stop"),
        ({"momentums": 0.9}, "there is no flag --momentums; did you mean --momentum"),
        ({"momentum": 2}, "momentum is 2, but must be"),
    ],
)
def test_wrong_flags(changes, message, make_plan):
    with pytest.raises(UserError, match=message):
        make_plan(**changes)


def test_an_option_searched_twice(make_plan):
    with pytest.raises(UserError, match="--search names momentum twice"):
        make_plan("momentum=0.1:0.2", "momentum=0.3:0.4")


def test_values_are_short_and_inside():
    rate = plans.Range("learning_rate", 0.0123456, 0.0987654, log=True)
    assert rate.value(0.03333333333) == 0.03333
    assert rate.value(0.0123456) == 0.01235
    # Not 0.09877, which is outside.
    assert rate.value(0.0987654) == 0.0987654
    assert plans.Range("warmup", 0, 9, unit="epochs").value(1.234567) == Duration(1.235, "epochs")
    assert plans.Range("batch_size", 1, 10**6, whole=True).value(123457) == 123457


def test_ranges_are_narrowed_around_the_best_values():
    momentum = plans.Range("momentum", 0.0, 0.5)
    narrow = momentum.narrowed([0.2, 0.3, 0.25])
    assert (narrow.low, narrow.high) == (0.15, 0.35)
    assert momentum.narrowed([0.0, 0.5]) == momentum
    assert momentum.narrowed([0.02]).low == 0.0
    rate = plans.Range("learning_rate", 0.001, 10.0, log=True)
    narrow = rate.narrowed([0.1, 1.0])
    assert (narrow.low, narrow.high) == (
        pytest.approx(0.1 / 10**0.4, rel=1e-3),
        pytest.approx(10**0.4, rel=1e-3),
    )
    batch = plans.Range("batch_size", 10, 100, whole=True)
    assert (batch.narrowed([50, 52]).low, batch.narrowed([50, 52]).high) == (41, 61)
    warmup = plans.Range("warmup", 0.0, 10.0, unit="epochs")
    assert warmup.narrowed([Duration(4, "epochs"), Duration(5, "epochs")]).high == 6
    choices = plans.Choices("schedule", ("steps", "cosine"))
    assert choices.narrowed(["steps"]) == choices


# --- Searching


def test_a_search_and_its_files(make_plan, run):
    plan = make_plan(trials=10, fine_trials=6)
    outcomes, fake = run(plan)
    assert [outcome.number for outcome in outcomes] == list(range(16))
    assert [outcome.round for outcome in outcomes] == ["coarse"] * 10 + ["fine"] * 6
    assert set(states(outcomes)) <= {"complete", "pruned"}
    for outcome in outcomes:
        (seen,) = fake.seen[f"trial_{outcome.number:03d}"]
        assert outcome.values["learning_rate"] == fake.rates[f"trial_{outcome.number:03d}"]
        assert 0.01 <= outcome.values["learning_rate"] <= 10
        assert outcome.seconds == len(seen)
        assert (outcome.state == "complete") == (len(seen) == EVALUATIONS)

    best = min((o for o in outcomes if o.state == "complete"), key=lambda o: o.error)
    assert best.error == pytest.approx(final_error(plan.config.replace(**best.values)))
    found = Config.from_flagfile(plan.directory / "best.flags")
    assert {name: getattr(found, name) for name in best.values} == best.values
    assert (
        f"trial {best.number}, with {best.error:.2%}" in (plan.directory / "best.flags").read_text()
    )

    rows = rows_of(plan.directory)
    names = ["learning_rate", "momentum", "schedule"]
    assert sorted(rows[0]) == sorted(
        ["trial", "round", "state", "validation_error", "seconds", *names]
    )
    for row, outcome in zip(rows, outcomes):
        assert (int(row["trial"]), row["round"]) == (outcome.number, outcome.round)
        assert row["state"] == outcome.state
        assert float(row["validation_error"]) == pytest.approx(outcome.error, abs=1e-6)
        assert float(row["learning_rate"]) == outcome.values["learning_rate"]
        assert row["schedule"] == outcome.values["schedule"]

    lines = results.table(outcomes, plan.space).splitlines()
    assert len(lines) == 17
    assert lines[1].split()[:4] == [str(best.number), best.round, "complete", f"{best.error:.2%}"]
    assert not list(plan.directory.glob("*.tmp"))


def test_the_fine_round_stays_near_the_best_coarse_trials(make_plan, run):
    plan = make_plan("learning_rate=log:0.01:10", trials=12, fine_trials=8)
    outcomes, _ = run(plan)
    coarse = [o for o in outcomes if o.round == "coarse" and o.state == "complete"]
    best = sorted(coarse, key=lambda o: o.error)[:3]
    (narrow,) = [plan.space[0].narrowed([o.values["learning_rate"] for o in best])]
    fine = [o.values["learning_rate"] for o in outcomes if o.round == "fine"]
    assert narrow.low > 0.01 or narrow.high < 10
    assert all(narrow.low <= rate <= narrow.high for rate in fine)
    # 0.07 can be reached.
    assert studies.best_of(outcomes).error < 0.08


def test_bad_trials_end_early(make_plan, run):
    outcomes, fake = run(make_plan(trials=30))
    complete = [o.error for o in outcomes if o.state == "complete"]
    pruned = [o for o in outcomes if o.state == "pruned"]
    assert len(pruned) >= 5
    assert min(complete) < min(o.error for o in pruned)
    # Five must be known, and a quarter of the run over.
    assert min(o.number for o in pruned) >= 5
    lengths = {len(fake.seen[f"trial_{o.number:03d}"][0]) for o in pruned}
    assert min(lengths) >= 2
    assert max(lengths) < EVALUATIONS


def test_values_are_trained_once(make_plan, run):
    outcomes, fake = run(make_plan("nesterov=true|false", "schedule=steps|cosine", trials=12))
    repeated = [outcome for outcome in outcomes if not outcome.seconds]
    assert repeated and len(repeated) + len(fake.seen) == 12
    for outcome in repeated:
        assert f"trial_{outcome.number:03d}" not in fake.seen
        assert (outcome.values, outcome.state, outcome.error) in [
            (own.values, own.state, own.error) for own in outcomes[: outcome.number] if own.seconds
        ]


def test_divergence_is_a_result(make_plan, run):
    outcomes, _ = run(make_plan(trials=12), diverges_above=1.0)
    diverged = [o for o in outcomes if o.state == "diverged"]
    assert len(outcomes) == 12
    assert diverged
    assert {o.error for o in diverged} == {1.0}
    assert all(o.values["learning_rate"] > 1 for o in diverged)
    assert all(o.values["learning_rate"] <= 1 for o in outcomes if o not in diverged)


def test_nothing_but_divergence(make_plan, run):
    plan = make_plan(trials=3, fine_trials=2)
    outcomes, _ = run(plan, diverges_above=0.0)
    assert states(outcomes) == {"diverged": 5}
    assert not (plan.directory / "best.flags").exists()
    assert len(rows_of(plan.directory)) == 5


def test_what_is_not_divergence_ends_the_search_and_is_not_tried_again(make_plan, run):
    def fail(name, evaluation):
        if name == "trial_002":
            raise UserError("too many bad images")

    plan = make_plan(trials=4)
    with pytest.raises(
        UserError, match=r"trial 2 \(momentum=.*, schedule=\w+\): too many bad images"
    ):
        run(plan, fail=fail)
    outcomes, _ = run(plan, fail=fail)
    assert states(outcomes) == {"complete": 4, "failed": 1}
    assert outcomes[2].error is None
    assert rows_of(plan.directory)[2]["validation_error"] == ""


def test_values_that_make_no_configuration_end_the_search(make_plan, run):
    """Each value is valid, but not both together."""
    plan = make_plan("train_crop=pad|none", "crop_padding=17:20", trials=40)
    object.__setattr__(plan, "config", plan.config.replace(image_size=16, train_crop="none"))
    with pytest.raises(
        UserError, match=r"trial \d+ \(.*\): crop_padding.*(must be smaller|is for train_crop)"
    ):
        run(plan)


# --- Going on


@pytest.mark.filterwarnings("ignore:The reported value is ignored")  # It is the same again.
def test_a_resumed_search_has_the_same_result(make_plan, run):
    def interrupt(name, evaluation):
        if (name, evaluation) == ("trial_006", 3):
            raise KeyboardInterrupt

    plan = make_plan(directory="interrupted", trials=14, fine_trials=4)
    with pytest.raises(KeyboardInterrupt):
        run(plan, fail=interrupt)
    assert len(rows_of(plan.directory)) == 6
    outcomes, fake = run(plan)
    assert sorted(fake.seen) == [f"trial_{number:03d}" for number in range(6, 18)]
    expected, _ = run(make_plan(directory="whole", trials=14, fine_trials=4))
    assert outcomes == expected


def test_more_trials(make_plan, run):
    few, _ = run(make_plan(trials=5, fine_trials=2))
    more, fake = run(make_plan(trials=7, fine_trials=3))
    assert more[:7] == few
    assert [outcome.round for outcome in more[7:]] == ["coarse", "coarse", "fine"]
    assert sorted(fake.seen) == ["trial_007", "trial_008", "trial_009"]
    again, fake = run(make_plan(trials=7, fine_trials=3))
    assert again == more
    assert not fake.seen


def test_seeds_are_different_searches(make_plan, run):
    rates = [
        [o.values["learning_rate"] for o in run(make_plan(directory=name, search_seed=seed))[0]]
        for name, seed in (("a", 1), ("b", 2))
    ]
    assert len(set(rates[0]) | set(rates[1])) == 16


@pytest.mark.parametrize(
    ("search", "changes", "message"),
    [
        (SEARCH[:2], {}, r"it searches .*, schedule=steps\|cosine; here .*=log:0.01:10\)"),
        (("momentum=0.5:0.9", *SEARCH[::2]), {}, "momentum=0.5:0.95.*; here .*momentum=0.5:0.9,"),
        (SEARCH, {"search_seed": 3}, "search_seed is 0 there, 3 here"),
        (SEARCH, {"weight_decay": 0.01}, "weight_decay is 0.0005 there, 0.01 here"),
        (SEARCH, {"eval_every": "1 epoch"}, "eval_every is 0.25 epochs there, 1 epoch here"),
    ],
)
def test_another_search_in_the_directory(search, changes, message, make_plan, run):
    run(make_plan(trials=1))
    with pytest.raises(UserError, match=f"contains another search .*{message}"):
        run(make_plan(*search, trials=1, **changes))


def test_what_may_change(make_plan, run):
    """Neither directories nor the recipe's value of a searched option matter."""
    run(make_plan(trials=1))
    outcomes, _ = run(make_plan(trials=2, momentum=0.123, keep_checkpoints=1))
    assert len(outcomes) == 2


def test_one_search_at_a_time(make_plan, run):
    plan = make_plan(trials=1)
    plan.directory.mkdir()
    with (plan.directory / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another search is running in"):
            run(plan)
    assert len(run(plan)[0]) == 1


def test_a_directory_that_cannot_be_made(make_plan, run, tmp_path):
    (tmp_path / "study").write_text("a file")
    with pytest.raises(UserError, match=r"cannot write to study_dir .*: File exists; choose"):
        run(make_plan())


def test_a_single_evaluation_is_reported(make_plan, run, capsys):
    run(make_plan(trials=1, eval_every="5 epochs"))
    assert "note: eval_every is the whole run" in capsys.readouterr().err


def test_progress_is_shown(make_plan, run, capsys):
    outcomes, _ = run(make_plan(trials=3))
    text = capsys.readouterr().err
    for outcome in outcomes:
        momentum = f"{outcome.values['momentum']:g}"
        assert (
            f"trial {outcome.number} (coarse): complete, {outcome.error:.2%} error, 8 s: "
            f"momentum={momentum}, learning_rate="
        ) in text
    best = studies.best_of(outcomes)
    assert f"3/3 trials, ETA 00:00, best {best.error:.2%} (trial {best.number})" in text


def test_data_without_validation(make_plan, run):
    plan = make_plan(data_dir="", synthetic="true", num_classes=10)
    with pytest.raises(UserError, match="needs validation images"):
        run(plan)


# --- The picture


def outcome(number, state, error, round_="coarse", **values):
    return studies.Outcome(number, round_, values, state, error, 1.0)


@pytest.mark.long
def test_the_picture_has_a_panel_for_each_option():
    space = plans.parse_space(
        ["learning_rate=log:0.1:10", "warmup=epochs:0:2", "schedule=steps|cosine"]
    )
    outcomes = [
        outcome(
            number,
            state,
            error,
            round_,
            learning_rate=0.5,
            warmup=Duration(1, "epochs"),
            schedule="steps",
        )
        for number, (state, error, round_) in enumerate(
            [
                ("complete", 0.0, "coarse"),
                ("pruned", 0.5, "coarse"),
                ("diverged", 1.0, "fine"),
                ("failed", None, "fine"),
            ]
        )
    ]
    text = results.picture(outcomes, space)
    assert results.picture(outcomes, space) == text
    root = xml.etree.ElementTree.fromstring(text)
    names = [element.get("id", "") for element in root.iter()]
    assert sum(name.startswith("axes_") for name in names) == 3
    # Letters are drawn; each text stands in a comment.
    for label in ("learning_rate", "warmup (epochs)", "schedule", "cosine", "validation error"):
        assert f"<!-- {label} -->" in text
    for label in ("complete", "ended early", "diverged, fine round", "best"):
        assert f"<!-- {label} -->" in text
    assert "<!-- diverged -->" not in text


@pytest.mark.parametrize("errors", [[], [0.0], [1.0], [0.003, 0.004]])
def test_a_picture_of_few_trials(errors):
    space = plans.parse_space(["momentum=0.1:0.9"])
    outcomes = [
        outcome(number, "complete", error, momentum=0.5) for number, error in enumerate(errors)
    ]
    assert "<!-- momentum -->" in results.picture(outcomes, space)


# --- The command


def test_errors_are_one_line(capsys, tmp_path, monkeypatch):
    assert tune.main([f"--study_dir={tmp_path / 'x'}", "--search=momentum=2:1"]) == 2
    assert tune.main(["--search=momentum=0.1:0.2"]) == 2
    assert tune.main([f"--study_dir={tmp_path / 'x'}"]) == 2
    flags = [f"--study_dir={tmp_path / 'x'}", "--search=momentum=0.1:0.2"]
    assert tune.main([*flags, f"--data_dir={tmp_path / 'nothing'}"]) == 2
    workers = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(workers))
    assert tune.main(flags) == 2
    monkeypatch.delenv("TF_CONFIG")
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert tune.main(flags) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 6
    assert all(line.startswith("tune.py: error: ") for line in lines)
    for line, part in zip(
        lines,
        [
            "range is empty",
            "--study_dir",
            "--search",
            "nothing does not exist",
            "several workers",
            "[tune]",
        ],
    ):
        assert part in line
    assert not (tmp_path / "x").exists()


@pytest.mark.long
def test_real_divergence(make_plan):
    plan = make_plan(
        "learning_rate=log:1e30:1e32",
        trials=1,
        image_size=16,
        duration="4 steps",
        eval_every="4 steps",
        strategy="one_device",
        tensorboard="false",
    )
    (only,) = searching.search(plan)
    assert (only.state, only.error) == ("diverged", 1.0)


@pytest.mark.long
@pytest.mark.slow
def test_a_real_search(run_python, digits, tmp_path):
    flags = ["--flagfile=digits", "--search", "learning_rate=log:0.01:1"]
    flags += ["--image_size=16", "--duration=2 steps", "--eval_every=1 step", "--notensorboard"]
    flags += ["--noexamine", "--model=resnet8", "--strategy=one_device"]
    flags += [f"--data_dir={digits}", f"--study_dir={tmp_path / 'study'}", "--trials=1"]
    finished = run_python([ROOT / "tools" / "tune.py", *flags])
    assert finished.stdout.splitlines()[0].split() == [
        *("trial", "round", "state", "error", "seconds", "learning_rate")
    ]
    assert "1/1 trials" in finished.stderr
    for row in rows_of(tmp_path / "study"):
        directory = tmp_path / "study" / f"trial_{int(row['trial']):03d}"
        validation = [r for r in read_rows(str(directory)) if r["kind"] == "validation"]
        assert [r["step"] for r in validation] == [1, 2]
        assert 1 - validation[-1]["top1"] == pytest.approx(float(row["validation_error"]), abs=1e-5)
        config = Config.from_json((directory / "config.json").read_text())
        assert config.learning_rate == float(row["learning_rate"])
    assert "<!-- learning_rate -->" in (tmp_path / "study" / "study.svg").read_text()
