"""The study of Page's bag of tricks."""

import importlib
import pathlib
import sys

import pytest

from imagenet_fast.config import Config

ROOT = pathlib.Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tools" / "studies"))
experiments = importlib.import_module("bag_of_tricks.experiments")
log = importlib.import_module("study.log")
report = importlib.import_module("bag_of_tricks.report")

FOLDER = ROOT / "benchmarks" / "bag_of_tricks"
RECORDS = log.read(FOLDER / "runs.jsonl")
# What makes the network narrow, and the data Fashion-MNIST's.
FREE = {"width", "precision", "xla", "pixel_mean", "pixel_std", "shuffle_buffer"}


def recipe(name):
    return Config.from_flagfile(ROOT / "imagenet_fast" / "flags" / f"{name}.flags")


@pytest.mark.parametrize(("step", "name"), [(0, "myrtle_cifar10_baseline"), (-1, "myrtle_cifar10")])
def test_the_ladder_leads_from_the_baseline_to_the_recipe(step, name):
    config = experiments.ladder().settings[step].config
    assert set(config.differences(recipe(name), all_options=True)) <= FREE


def test_the_last_step_is_the_recipe_for_fashion_mnist():
    own = experiments.whole_recipe()
    other = recipe("myrtle_fashion_mnist")
    assert set(own.differences(other, all_options=True)) <= {"shuffle_buffer", "width"}


def test_each_trick_is_one_step_and_can_be_taken_away():
    ladder, ablation = experiments.ladder().settings, experiments.ablation().settings
    whole = ablation[0].config
    assert ladder[-1].config == whole
    prints = {setting.fingerprint for setting in (*ladder, *ablation[1:])}
    assert len(prints) == len(ladder) + len(ablation) - 1
    for setting in ablation[1:]:
        assert setting.config.duration == whole.duration


def test_fewer_epochs_are_of_the_recipes():
    """Settings of two experiments are trained once."""
    prints = {own.fingerprint for own in experiments.fewer_epochs(8).settings}
    whole, *others = experiments.ablation().settings
    (unfrozen,) = (own for own in others if own.method == experiments.FROZEN)
    assert {whole.fingerprint, unfrozen.fingerprint} < prints
    (parts,) = (step.undone for step in experiments.STEPS if step.name == experiments.FROZEN)
    changed = [own.config.differences(whole.config) for own in experiments.frozen_scale().settings]
    assert changed == [[], *([name] for name in parts)]


def test_rates_of_the_steps_are_those_published():
    by_name = {setting.method: setting.config for setting in experiments.ladder().settings}
    peaks = {name: config.learning_rate for name, config in by_name.items()}
    assert peaks["CELU"] == 0.4 and peaks["ghost batch norm"] == 0.6
    assert peaks["patch whitening"] == 1.0
    for name, knots, rates in (
        ("baseline", "0 epochs, 5 epochs, 24 epochs", (0, 1, 0)),
        ("label smoothing", "0 epochs, 4.6 epochs, 23 epochs", (0, 1, 0)),
        ("weight average", "0 epochs, 2.6 epochs, 11 epochs", (0, 1, 0.1)),
        ("no cutout", "0 epochs, 2 epochs, 8 epochs", (0, 1, 0.1)),
    ):
        assert ", ".join(map(str, by_name[name].knots_at)) == knots
        assert by_name[name].knots == rates


def test_each_configuration_is_timed_once():
    timed = list(experiments.timed().values())
    assert len(set(timed)) == len(timed)
    shown = [setting.config for setting in experiments.ladder().settings]
    for width in experiments.EPOCHS:
        shown.append(experiments.fewer_epochs(width).settings[0].config)
        shown += [config.replace(width=width) for config in experiments.recipes().values()]
        shown += [own.config.replace(width=width) for own in experiments.precisions().settings]
    assert set(shown) == set(timed)


def test_page_matches_the_log():
    text = (ROOT / "docs" / report.PAGE).read_text()
    times = report.read_step_times(FOLDER)
    assert report.filled_page(text, RECORDS, times) == text
    assert report.filled_page(text, {}, times) != text
