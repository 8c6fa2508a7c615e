"""Where a run has been, and what is said when it goes on elsewhere."""

import json

import pytest

from imagenet_fast import Config
from imagenet_fast.commands import history
from imagenet_fast.training.segments import (
    Segment,
    add_segment,
    change_of_hardware,
    lines_of,
    passed_segments,
    read_segments,
)

CONFIG = Config(batch_size=64, replicas=(8, 1))


def segment(step, devices=8, runs_on="8 GPU"):
    return Segment(step=step, devices=devices, runs_on=runs_on, began="2026-01-02T03:04:05+00:00")


def row(step, examples, speed, kind="train"):
    return {"kind": kind, "step": step, "examples": examples, "images_per_second": speed}


def test_segments_are_kept_in_order(tmp_path):
    for step in (0, 20, 50):
        add_segment(str(tmp_path), segment(step))
    assert [one["step"] for one in read_segments(str(tmp_path))] == [0, 20, 50]


def test_a_segment_without_a_checkpoint_is_replaced(tmp_path):
    for step, devices in ((0, 8), (20, 8), (20, 4), (20, 2)):
        add_segment(str(tmp_path), segment(step, devices))
    found = [(one["step"], one["devices"]) for one in read_segments(str(tmp_path))]
    assert found == [(0, 8), (20, 2)]


@pytest.mark.parametrize("text", ["{", '{"step": -1}', '{"step": 1, "devices": 0}', "[]", "\0"])
def test_a_damaged_record_is_skipped(tmp_path, text, capsys):
    add_segment(str(tmp_path), segment(0))
    with (tmp_path / "segments.jsonl").open("a") as file:
        file.write(text + "\n")
    assert [one["step"] for one in read_segments(str(tmp_path))] == [0]


def test_speed_is_of_the_segments_own_rows():
    rows = [row(10, 100, 50.0), row(20, 300, 100.0), row(20, 99, 1.0, "validation")]
    rows.append(row(30, 100, 10.0))
    passed = passed_segments([segment(0), segment(20)], rows, 30)
    assert [(one["step"], one["until"]) for one in passed] == [(0, 20), (20, 30)]
    assert [one["images_per_second"] for one in passed] == [400 / 5, 10.0]
    assert lines_of(passed)[0] == ("1 to 20", "80", "2026-01-02 03:04", "8 GPU")


def test_a_segment_may_have_no_step():
    (passed,) = passed_segments([segment(20)], [], 20)
    assert lines_of([passed]) == [("none", "-", "2026-01-02 03:04", "8 GPU")]


def test_nothing_is_said_of_the_same_hardware():
    assert not change_of_hardware(CONFIG, CONFIG, segment(0), segment(5))
    assert not change_of_hardware(CONFIG, CONFIG, None, segment(5))


def test_other_devices_are_said():
    text = change_of_hardware(CONFIG, CONFIG, segment(0), segment(5, 1, "1 CPU"))
    assert text == (
        "on other devices: 8 replicas, 8 on 1 CPU; before 1 on each of 8 GPU; the same training, "
        "up to the order of sums"
    )


@pytest.mark.parametrize(
    ("changes", "part", "warns"),
    [
        ({"xla": True}, "with xla=true instead of false", False),
        ({"all_reduce": "flat"}, "with all_reduce=flat instead of auto", False),
        ({"precision": "mixed_bfloat16"}, "precision=mixed_bfloat16 instead of float32", True),
        ({"all_reduce_dtype": "bfloat16"}, "all_reduce_dtype=bfloat16 instead of float32", True),
    ],
)
def test_other_arithmetic_is_said(changes, part, warns):
    text = change_of_hardware(CONFIG.replace(**changes), CONFIG, None, segment(5))
    assert part in text and ("WARNING" in text) == warns


@pytest.mark.parametrize("changes", [{"xla": True}, {"pipeline_stages": 2}])
def test_other_random_numbers_are_said(changes):
    texts = [
        change_of_hardware(CONFIG.replace(**changes), CONFIG, None, segment(5), draws)
        for draws in (False, True)
    ]
    assert ["random numbers of its layers" in text for text in texts] == [False, True]


def test_devices_do_not_change_random_numbers():
    text = change_of_hardware(CONFIG, CONFIG, segment(0), segment(5, 1, "1 CPU"), draws=True)
    assert text.endswith("the same training, up to the order of sums")


def test_history(tmp_path, capsys):
    (tmp_path / "config.json").write_text(CONFIG.to_json())
    assert history.main([f"--model_dir={tmp_path}"]) == 0
    assert "no record of its devices" in capsys.readouterr().out
    add_segment(str(tmp_path), segment(0))
    add_segment(str(tmp_path), segment(20, 1, "1 CPU"))
    rows = [row(20, 100, 50.0), row(30, 100, 10.0)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    history.main([f"--model_dir={tmp_path}"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{tmp_path}: 8 replicas, carried by"
    assert [line.split() for line in lines[2:]] == [
        ["1", "to", "20", "50", "2026-01-02", "03:04", "8", "GPU"],
        ["21", "to", "30", "10", "2026-01-02", "03:04", "1", "CPU"],
    ]
    history.main([f"--model_dir={tmp_path}", "--json"])
    assert [one["until"] for one in json.loads(capsys.readouterr().out)] == [20, 30]
