"""The file of a run's rows, also after kills and damage."""

import json
import math
import pathlib

import pytest

from imagenet_fast.training.logs.evaluations import Evaluations
from imagenet_fast.training.logs.metrics_file import JsonLines, read_rows


def row(step, kind="train", **values):
    return {"kind": kind, "step": step, "epoch": step / 10, "loss": 0.5, **values}


def test_rows_are_written_at_once(tmp_path):
    assert read_rows(str(tmp_path)) == []
    lines = JsonLines(str(tmp_path), 0)
    assert read_rows(str(tmp_path)) == []
    lines.write(row(1))
    assert read_rows(str(tmp_path)) == [row(1)]
    lines.write(row(2, "validation", loss=0.1 + 0.2))
    lines.close()
    assert read_rows(str(tmp_path)) == [row(1), row(2, "validation", loss=0.1 + 0.2)]


def test_rows_of_repeated_steps_are_dropped(tmp_path):
    lines = JsonLines(str(tmp_path), 0)
    for step in range(2, 12, 2):
        lines.write(row(step))
    lines.close()
    lines = JsonLines(str(tmp_path), 6)
    assert [r["step"] for r in read_rows(str(tmp_path))] == [2, 4, 6]
    lines.write(row(8, loss=0.25))
    lines.close()
    assert read_rows(str(tmp_path))[3:] == [row(8, loss=0.25)]
    JsonLines(str(tmp_path), 0).close()
    assert read_rows(str(tmp_path)) == []


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize(
    "bad", [b'{"kind": "tr\xff\xfe', b"null", b"7", b"{}", b'{"kind": "train", "step": "2"}', b"\0"]
)
def test_a_damaged_line_affects_no_other(tmp_path, capsys, place, bad):
    lines = [json.dumps(row(step)).encode() for step in (2, 4, 6)]
    lines.insert(place, bad)
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([*lines, b""]))
    assert read_rows(str(tmp_path)) == [row(2), row(4), row(6)]
    JsonLines(str(tmp_path), 4).close()
    assert read_rows(str(tmp_path)) == [row(2), row(4)]
    told = f"{tmp_path}/metrics.jsonl: 1 line is damaged and skipped; 3 can be read"
    assert capsys.readouterr().err.count(told) == 1, "once"


@pytest.mark.parametrize("end", ['{"kind": "train", "st', "{", '{"kind": "train", "step": 4}'])
def test_a_line_cut_short_is_left_out(tmp_path, end):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{json.dumps(row(2))}\n{end}")
    whole = end.endswith("}")
    assert len(read_rows(str(tmp_path))) == 1 + whole
    lines = JsonLines(str(tmp_path), 10)
    lines.write(row(6))
    lines.close()
    assert [r["step"] for r in read_rows(str(tmp_path))] == [2, 4, 6][:: 1 if whole else 2]


def test_a_kill_while_rows_are_copied_loses_none(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row(s))}\n" for s in (2, 4)))

    def killed(self, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(pathlib.Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        JsonLines(str(tmp_path), 10)
    assert read_rows(str(tmp_path)) == [row(2), row(4)]


def test_evaluations_without_an_accuracy_are_not_the_best(tmp_path):
    rows = [{"kind": "validation", "step": step} for step in range(3)]
    assert Evaluations.of_rows(rows).best == {}
    rows[0]["top1"], rows[1]["top1"] = None, 0.25
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert Evaluations.of_rows(read_rows(str(tmp_path))).best == rows[1]


def test_rows_of_other_types_are_skipped(tmp_path, capsys):
    lines = ['{"kind": "train", "step": 1}']
    for value in ('"1"', "-1", "1.5", "null", "[]", "9" * 400):
        lines.append(f'{{"kind": "train", "step": {value}}}')
        if value != "null":
            lines.append(
                f'{{"kind": "train", "step": 1, "loss": {value if value == "[]" else "{}"}}}'
            )
    (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    assert read_rows(str(tmp_path)) == [{"kind": "train", "step": 1}]
    assert "damaged and skipped" in capsys.readouterr().err


def test_numbers_that_no_chart_shows_are_left_out(tmp_path):
    rows = [{"kind": "train", "step": n, "loss": loss} for n, loss in enumerate((1.0, 1e308))]
    rows.append({"kind": "train", "step": 2, "loss": math.nan})  # of a run that has diverged
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert [row["step"] for row in read_rows(str(tmp_path))] == [0, 2]
