"""Predictions of published numbers; all of them are in benchmarks/planning."""

import dataclasses
import itertools
import json
import pathlib
import re
import xml.etree.ElementTree

import pytest

from imagenet_fast.lab.planning.validation.predictions import (
    Prediction,
    Validation,
    by_cumulative_work,
    cut_of,
    fitted,
    validate,
)
from imagenet_fast.lab.planning.validation.published import ROWS, STACKS, linear_scaling
from imagenet_fast.lab.planning.validation.results import DataParallel, Pipelined, PublishedResult
from imagenet_fast.pipeline_parallel.simulation import BlockCost

RESULTS = pathlib.Path(__file__).parents[4] / "benchmarks" / "planning" / "validation.json"


def rows_of(stack):
    return [own for own in ROWS if own.stack == stack]


def test_the_data():
    """Each constant has rows that it is fitted to, and others that test it."""
    assert len({own.name for own in ROWS}) == len(ROWS)
    for stack, own in STACKS.items():
        fits = [row for row in rows_of(stack) if row.fits]
        assert len(fits) == 1 + bool(own.half_rows)
        assert len(rows_of(stack)) > len(fits)
    assert {own.stack for own in ROWS} == set(STACKS)
    assert all(own.value > 0 and own.source for own in ROWS)


@pytest.mark.long
def test_resnet9_is_predicted():
    """Page's other runs, with the constant fitted to the first whose images are on the GPU."""
    stack = "PyTorch, V100, ResNet-9"
    found = validate(rows_of(stack))
    fits = [own.row.name for own in found.predictions if own.row.fits]
    assert fits == ["ResNet-9, preprocessing on the GPU"]
    assert found.median_error < 0.1
    assert not found.missed
    (baseline,) = (own for own in found.predictions if own.row.fits)
    assert baseline.error == pytest.approx(0, abs=1e-3)
    assert fitted(stack).matrix == pytest.approx(STACKS[stack].matrix, rel=1e-3)


@pytest.mark.long
def test_a_pod_is_predicted():
    """Ying et al.'s million images/s, with constants fitted to another benchmark."""
    rows = [own for own in ROWS if own.source.startswith("Ying et al.")]
    (pod,) = validate(rows).predictions
    assert pod.value > 1e6
    assert abs(pod.error) < 0.1


def test_published_results_are_of_this_model():
    """The committed results have all rows and the current constants."""
    results = json.loads(RESULTS.read_text())
    assert [own["name"] for own in results["rows"]] == [own.name for own in ROWS]
    assert [own["published"] for own in results["rows"]] == [own.value for own in ROWS]
    assert results["constants"] == {k: dataclasses.asdict(own) for k, own in STACKS.items()}
    assert results["tested"] >= 12
    assert results["median_error"] < 0.1
    assert [own["published"] for own in results["cuts"]] == [[20], [76]]
    assert [own["published"] for own in results["scalings"]] == [0.99, 0.97]


RUN = DataParallel({"model": "resnet50"}, "p100", 8, 256)


def test_published_segments_of_alexnet():
    """Jia et al. cut after the 20th tensor, where the dense layers begin."""
    (row,) = (own for own in ROWS if own.name.startswith("AlexNet"))
    cut = cut_of(row, STACKS[row.stack])
    assert cut.published == (20,)
    assert len(cut.best) == 1
    assert 0 <= cut.waited - cut.waited_best < 0.02 * cut.step
    assert "published after 20, " in str(cut)


def test_scaling_without_optimizations():
    """Without fusion, each of 26 all-reduces has its own latency, in a flat ring of 2,046 steps."""
    (row,) = (own for own in ROWS if own.name.startswith("AlexNet"))
    alone = dataclasses.replace(row.run, chips=1, batch=row.run.batch // 1024)
    scaled = dataclasses.replace(row, unit="scaling", value=0.9, to=alone)
    ((own,), prediction) = (found := validate([scaled])).scalings, found.predictions[0]
    assert own.predicted == prediction.value
    assert own.neither < own.unfused < own.predicted < 1
    assert own.neither < own.flat < own.predicted
    assert "flat ring" in str(own)


@pytest.mark.parametrize(
    ("unit", "expected"),
    [("images/s", 200.0), ("seconds", 10.0), ("minutes", 1 / 6), ("times", 0.5), ("scaling", 0.25)],
)
def test_units(unit, expected):
    row = PublishedResult("a", "b", "c", RUN, 1.0, unit, 2, 1000, dataclasses.replace(RUN, chips=4))
    assert row.in_unit(200.0, 400.0) == pytest.approx(expected)


def test_table_and_files():
    good = PublishedResult("one", "A 2017", "PyTorch, P40", RUN, 100.0)
    bad = dataclasses.replace(good, name="two", why="nobody knows")
    fit = dataclasses.replace(good, name="three", fits=True)
    found = Validation(
        (Prediction(good, 105.0), Prediction(bad, 60.0, 80.0), Prediction(fit, 100.0, 100.0))
    )
    assert found.median_error == pytest.approx((0.05 + 0.4) / 2)
    assert found.median_errors_beside_linear == pytest.approx((0.4, 0.2))
    assert [own.row.name for own in found.missed] == ["two"]
    table = found.table()
    assert "2 numbers that no constant was fitted to: median error 22.5%, 1 over 25%:" in table
    assert "two (-40%): nobody knows" in table
    assert "of these, 1 have a smaller" in table
    assert "system: median error 40.0%, linear scaling 20.0%" in table
    assert re.search(r"two +100 +60 images/s +-40\.0% +80 +-20\.0%\n", table)
    assert re.search(r"similar ones\n  TPU v5e +TensorFlow, TPU\n", table)
    files = found.files()
    assert files["validation.txt"] == table + "\n"
    values = json.loads(files["validation.json"])
    assert values["rows"][1]["error"] == -0.4
    assert values["rows"][1]["linear_error"] == pytest.approx(-0.2)
    assert values["rows"][0]["linear"] is None
    assert values["chips_without_row"] == ["tpu-v5e", "tpu-v5p", "tpu-v6e"]
    assert xml.etree.ElementTree.fromstring(files["validation.svg"]).tag.endswith("svg")


def test_lingvo_s_partition():
    """Stage min(int(K * fraction of the work so far), K - 1)."""
    blocks = [BlockCost(f"{i}", w, 0.0, *[0] * 8) for i, w in enumerate((1, 1, 1, 1, 4, 8))]
    assert by_cumulative_work(blocks, 4) == [3, 1, 1, 1]


def test_linear_scaling():
    """From the smallest published run of the same network on the same system."""
    by_name = {row.name: row for row in ROWS}
    # 8 GPUs need 29 hours, an 8th of 256 one 32nd of that.
    assert linear_scaling(by_name["ResNet-50, 256 P100"]) == pytest.approx(29 * 60 / 32)
    assert linear_scaling(by_name["ResNet-50, 8 P100"]) is None
    # No smaller run of ResNet-101 with Caffe2 was published.
    assert linear_scaling(by_name["ResNet-101, 256 P100"]) is None
    assert linear_scaling(by_name["ResNet-101, 8 stages on P40"]) == pytest.approx(8 * 95.862)
    assert linear_scaling(by_name["ResNet-50, 1024 P40 to 1"]) == 1
    assert linear_scaling(by_name["AmoebaNet-D, 8 stages on TPU v2, 32 micro-batches"]) == 4
    assert linear_scaling(by_name["ResNet-50, 64 TPU v4"]) == pytest.approx(8 * 27830)


def test_stages_of_torchgpipe_s_resnet():
    """All 74 blocks; torchgpipe's cuts for 8 stages are after these residual blocks."""
    runs = {
        row.run.stages: row.run
        for row in ROWS
        if isinstance(row.run, Pipelined) and row.name.endswith("on P40") and row.unit == "images/s"
    }
    assert sorted(runs) == [1, 2, 4, 8]
    assert {sum(run.balance) for run in runs.values()} == {74}
    ends = list(itertools.accumulate(runs[8].balance))[:-1]
    # Its stem has 4 modules and each residual block 11; here they are 6 and 2 blocks.
    modules = itertools.accumulate((26, 22, 33, 44, 44, 66, 66))
    assert ends == [6 + 2 * (count - 4) // 11 for count in modules]
