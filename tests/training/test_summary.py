"""The file of a run's results."""

import pytest

from imagenet_fast.training.summary import read_summary, write_summary


def test_a_summary_is_read_again(tmp_path):
    assert read_summary(str(tmp_path)) is None
    summary = dict.fromkeys(
        ["top1", "epochs", "train_seconds", "wall_seconds", "images_per_second"], 1
    )
    write_summary(str(tmp_path), summary)
    assert read_summary(str(tmp_path)) == summary


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"top1": 0.5}'])
def test_a_damaged_summary_is_none(tmp_path, text):
    (tmp_path / "summary.json").write_text(text)
    assert read_summary(str(tmp_path)) is None
