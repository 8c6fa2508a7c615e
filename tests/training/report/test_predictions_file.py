"""Files of predictions, read with other programs."""

import csv

import numpy as np
import pyarrow.parquet
import pytest

from imagenet_fast import UserError
from imagenet_fast.training.report import predictions_file
from imagenet_fast.training.report.predictions_file import (
    check_predictions_file,
    write_predictions,
)
from imagenet_fast.training.step.error_analysis import ImagePredictions

# Some that programs for tables take for formulas.
LABELS = ("=1+1", "cat, dog", '-"tabby"', "+@x", "line\nbreak", "Kätzchen")
FILES = [f"{start}{index}.jpg" for index, start in enumerate(("=", "+", "-", "@", "a,", "\u732b"))]


def predictions():
    generator = np.random.default_rng(0)
    return ImagePredictions(
        rows=np.array([0, 1, 3, 4, 5]),  # the third could not be read
        labels=np.array([0, 5, 3, 4, 2], np.int32),
        losses=np.array([0.1, np.inf, 1e-12, 3, 0.7], np.float32),
        classes=np.argsort(generator.random((5, 6)), axis=1)[:, :5].astype(np.int32),
        probabilities=generator.random((5, 5)).astype(np.float32),
        mistakes=np.zeros(0, np.int64),
        temperature_sums=np.zeros([129, 2]),
    )


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize("at_once", [2, 4096])
def test_round_trip(tmp_path, monkeypatch, suffix, at_once):
    monkeypatch.setattr(predictions_file, "_AT_ONCE", at_once)
    path, given = tmp_path / "new" / f"p{suffix}", predictions()
    write_predictions(path, given, iter(FILES), LABELS)
    if suffix == ".csv":
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    else:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    assert [row["file"] for row in rows] == [FILES[index] for index in given.rows]
    assert [row["label"] for row in rows] == [LABELS[label] for label in given.labels]
    assert list(rows[0]) == [
        *("file", "label"),
        *(f"{name}{rank}" for name in ("class", "probability") for rank in range(1, 6)),
        "loss",
    ]
    for index, row in enumerate(rows):
        assert np.float32(row["loss"]) == given.losses[index]
        for rank in range(5):
            assert row[f"class{rank + 1}"] == LABELS[given.classes[index, rank]]
            own = np.float32(row[f"probability{rank + 1}"])
            assert own == given.probabilities[index, rank]
    assert [item.name for item in path.parent.iterdir()] == [path.name]


def test_nothing_is_left_of_a_file_that_cannot_be_written(tmp_path):
    def names():
        yield FILES[0]
        raise OSError(5, "Input/output error")

    with pytest.raises(UserError, match=r"cannot write .*p\.csv: Input/output error"):
        write_predictions(tmp_path / "p.csv", predictions(), names(), LABELS)
    assert list(tmp_path.iterdir()) == []


def test_files_that_cannot_be_written(tmp_path):
    with pytest.raises(UserError, match=r"p\.txt must end with \.csv or \.parquet"):
        check_predictions_file(str(tmp_path / "p.txt"))
    (tmp_path / "p.csv").touch()
    with pytest.raises(UserError, match=r"p\.csv already exists; remove it, or give another name"):
        check_predictions_file(str(tmp_path / "p.csv"))
    assert check_predictions_file(str(tmp_path / "P.CSV")) == tmp_path / "P.CSV"
