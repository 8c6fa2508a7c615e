"""The study of five systems and their ingredients at equal seconds."""

import csv
import importlib
import pathlib
import shutil
import sys

import numpy as np
import pytest

from imagenet_fast.base.errors import UserError
from imagenet_fast.config import Config
from imagenet_fast.data.prepare.sources.arrays import ArraySource

ROOT = pathlib.Path(__file__).parents[3]
STUDIES = ROOT / "tools" / "studies"
sys.path.insert(0, str(STUDIES))
experiments = importlib.import_module("equal_seconds.experiments")
report = importlib.import_module("equal_seconds.report")
search_data = importlib.import_module("equal_seconds.search_data")
log = importlib.import_module("study.log")
settings = importlib.import_module("study.settings")
step_times = importlib.import_module("study.step_times")
tables = importlib.import_module("study.tables")

RECIPES = {
    "page": "myrtle_cifar10",
    "airbench96": "airbench96_cifar10",
    "speedrun": "speedrun_cifar10",
    "ffcv": "ffcv_rn18_16",
    "mosaic": "mosaic_mild",
}
# What fits a recipe to the data, the machine and the length of the runs.
FITTED = {
    *("width", "precision", "xla", "pixel_mean", "pixel_std", "eval_crop_fraction"),
    *("batch_size", "eval_batch_size", "duration", "learning_rate"),
}
SMALL = {
    *("stem", "image_size", "eval_image_size", "crop_min_area", "cache", "shuffle_buffer"),
    *("size_ramp", "rate_scaling", "learning_rate_batch"),
}
ALSO_FITTED = {
    "page": {"whitening_images"},
    "airbench96": {"proxy_width", "whitening_images"},
    "speedrun": {"bias_rate_factor", "muon_head_rate_factor"},
    "ffcv": SMALL,
    "mosaic": {*SMALL, "model", "conv_init", "weight_decay", "ema_decay", "ema_every"},
}
SCHEDULED = {"duration", "warmup", "knots_at", "size_ramp_at", "whitening_bias_until"}
# 60 seconds an epoch, and 15 in images of 12 pixels.
TIMES = {name: 15.0 if ", 12 px" in name else 60.0 for name in experiments.timed()}


@pytest.mark.parametrize("name", experiments.SYSTEMS)
def test_systems_are_the_recipes_fitted_to_the_data(name):
    own, published = experiments.config(name, 500), Config.from_flagfile(RECIPES[name])
    assert set(own.differences(published)) - SCHEDULED <= FITTED | ALSO_FITTED[name]
    # Muon's does not depend on the batch, but those of the other weights do.
    ratio = own.batch_size / published.batch_size
    rates = [c.learning_rate * c.bias_rate_factor for c in (own, published)]
    assert rates[0] / rates[1] == pytest.approx(ratio, rel=1e-4)


def test_each_ingredient_is_one_change_of_the_plain_recipe():
    plain, mosaic = (experiments.config(name, 500) for name in ("plain", "mosaic"))
    for name, changes in experiments.INGREDIENTS.items():
        config = experiments.config(name, 500)
        assert set(config.differences(plain)) - SCHEDULED == set(changes)
        assert not set(changes) & set(config.differences(mosaic))
    together = set().union(*experiments.INGREDIENTS.values())
    assert set(mosaic.differences(plain)) - SCHEDULED == together


def test_runs_take_equal_seconds():
    each = experiments.SECONDS * len(experiments.RECIPES)
    for setting, seconds in zip(experiments.recipes(TIMES).settings, each):
        # Steps are rounded to tens.
        assert experiments.seconds_of(setting, TIMES) == pytest.approx(seconds, rel=0.04)
    by_name = {setting.method: setting for setting in experiments.ingredients(TIMES).settings}
    for setting in by_name.values():
        seconds = experiments.seconds_of(setting, TIMES)
        assert seconds == pytest.approx(experiments.INGREDIENT_SECONDS, rel=0.02)
    # Three fifths of the ramp's steps take a quarter of the time.
    steps = [by_name[name].config.duration.amount for name in ("plain", "size ramp")]
    assert steps[1] / steps[0] == pytest.approx(1 / (0.4 + 0.6 / 4), rel=0.03)


def test_seconds_of_several_image_sizes():
    config = Config(
        batch_size=600,
        duration="50 steps",
        image_size=64,
        train_sizes=(32,),
        train_until=("20 steps",),
    )
    setting = settings.Setting("a", config)
    # 100 steps an epoch.
    times = {"a, 32 px": 10, "a, 64 px": 40}
    assert experiments.seconds_of(setting, times) == pytest.approx(2 + 12)
    with pytest.raises(UserError, match="a, 32 px was not timed"):
        experiments.seconds_of(setting, {"a, 64 px": 40})


def test_frontier():
    rows = ((4, 90), (2, 85), (8, 89), (16, 92), (2, 84), (3.9, 80))
    found = report.frontier(
        [
            report.Point("a", 1, seconds, tables.Outcome((1 - accuracy / 100,), 0))
            for seconds, accuracy in rows
        ]
    )
    assert [(point.seconds, round(point.accuracy)) for point in found] == [
        (2, 85),
        (4, 90),
        (16, 92),
    ]
    assert report.frontier([report.Point("a", 1, 2, tables.Outcome((), 0))]) == []


def test_page_is_that_of_the_log():
    text = (ROOT / "docs" / report.PAGE).read_text()
    records = log.read(experiments.RESULTS / "runs.jsonl")
    times = step_times.read(experiments.RESULTS, step_times.CPU)
    assert report.filled_page(text, records, times) == text
    for experiment in (experiments.recipes(times), experiments.ingredients(times)):
        for point in report.points(experiment, records, times):
            assert len(point.outcome.errors) == settings.SEEDS, point.method


@pytest.mark.long
def test_another_log_with_all_runs(tmp_path, run_python):
    """Nothing is trained, and the page beside it is that of the documentation."""
    path = shutil.copy(experiments.RESULTS / "runs.jsonl", tmp_path)
    told = run_python(
        [STUDIES / "__main__.py", "equal_seconds", "--data_dir=none", f"--log={path}"]
    ).stderr
    assert f"nothing to train: {path} contains all runs" in told
    assert (tmp_path / report.PAGE).read_text() == (ROOT / "docs" / report.PAGE).read_text()
    assert (tmp_path / report.PICTURE).exists()


def test_differences_have_their_standard_errors():
    text = (ROOT / "docs" / report.PAGE).read_text()
    plain, blurred, *_ = experiments.ingredients(TIMES).settings
    records = {
        (setting.fingerprint, seed): {"fingerprint": setting.fingerprint, "seed": seed, "error": e}
        for setting, errors in ((plain, (0.1, 0.12)), (blurred, (0.08, 0.08)))
        for seed, e in enumerate(errors)
    }
    filled = report.filled_page(text, records, TIMES)
    assert "| plain | 2810 | 180 | 89.00 ± 1.41 (2) |  |" in filled
    assert "| BlurPool | 2810 | 180 | 92.00 ± 0.00 (2) | +3.00 ± 1.00 |" in filled


def test_our_recipe_is_pages_with_what_the_search_found():
    """None of it changes the time of a step, so that of Page's is its own."""
    own, page = experiments.config("own", 500), experiments.config("page", 500)
    found = {"learning_rate", "label_smoothing", "ema_decay", "weight_decay", "crop_padding"}
    # The search's trials have the evaluation too. Its best average is Page's.
    differences = {"test_time_augmentation", *found} - {"ema_decay"}
    assert set(own.differences(page)) == differences
    assert own.test_time_augmentation == experiments.config("speedrun", 500).test_time_augmentation
    with (experiments.RESULTS / "search.csv").open() as file:
        best = min(csv.DictReader(file), key=lambda row: float(row["validation_error"]))
    assert {name: float(best[name]) for name in found} == pytest.approx(
        {name: getattr(own, name) for name in found}
    )


def test_what_the_page_says_of_ingredients():
    def trials(name, *columns):
        with (experiments.RESULTS / name).open() as file:
            rows = {tuple(row[own] for own in columns): row for row in csv.DictReader(file)}
        return {key: 100 * float(row["validation_error"]) for key, row in rows.items()}

    columns = ("loss", "cutout", "lookahead_every", "brightness", "contrast")
    errors = trials("ingredients.csv", *columns)
    ranges = {
        "cutout": [error for key, error in errors.items() if key[1] == "8"],
        "binary": [error for key, error in errors.items() if key[0] == "binary_cross_entropy"],
        "neither": [error for key, error in errors.items() if key[:2] == ("cross_entropy", "0")],
    }
    bounds = {name: (round(min(own), 2), round(max(own), 2)) for name, own in ranges.items()}
    assert bounds == {"cutout": (14.3, 16.08), "binary": (14.28, 16.08), "neither": (12.45, 13.6)}
    assert min(errors, key=errors.get) == ("cross_entropy", "0", "0", "0.14", "0.13")
    assert len(errors) == 18
    of_seeds = trials("brightness_contrast.csv", "brightness", "contrast", "seed")
    pairs = [
        [error for key, error in of_seeds.items() if key[:2] == pair]
        for pair in (("0.14", "0.13"), ("0", "0.13"), ("0", "0"))
    ]
    assert list(map(np.mean, pairs)) == pytest.approx([12.77, 12.85, 13.2], abs=0.006)
    assert max(map(np.ptp, pairs)) == pytest.approx(0.8, abs=0.05)


def test_searches_do_not_see_the_test_images():
    numbers = np.arange(40)
    images = np.broadcast_to(numbers[:, None, None], (40, 2, 2)).astype(np.uint8)
    arrays = {"train": (images, numbers % 2), "validation": (images[:4] + 100, numbers[:4] % 2)}
    split = search_data.without_test_images(ArraySource("idx", "made_up", ("a", "b"), arrays))
    seen = {
        name: [split.read(name, index) for index in range(count)]
        for name, count in split.splits.items()
    }
    assert {name: len(items) for name, items in seen.items()} == {"train": 36, "validation": 4}
    pixels = [int(item.image[0, 0]) for items in seen.values() for item in items]
    assert sorted(pixels) == list(range(40))
    assert sorted(item.label for item in seen["validation"]) == [0, 0, 1, 1]
