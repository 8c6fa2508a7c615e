"""The study of batch norm over groups of replicas."""

import importlib
import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tools" / "studies"))
experiments = importlib.import_module("batch_norm_groups.experiments")
log = importlib.import_module("study.log")
report = importlib.import_module("batch_norm_groups.report")

RECORDS = log.read(ROOT / "benchmarks" / "batch_norm_groups" / "runs.jsonl")


def test_each_setting_has_been_run_with_three_seeds():
    (experiment,) = experiments.EXPERIMENTS
    expected = {log.key(setting, seed) for setting in experiment.settings for seed in range(3)}
    assert set(RECORDS) == expected


def test_page_matches_the_log():
    text = (ROOT / "docs" / report.PAGE).read_text()
    assert report.filled_page(text, RECORDS) == text
    assert report.filled_page(text, {}) != text
