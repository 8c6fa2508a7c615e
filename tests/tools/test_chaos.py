"""The tool that plays faults: its parts, and two faults against a run."""

import copy
import json
import math
import os
import pathlib
import random
import subprocess
import sys
import time
import types

import pytest

from imagenet_fast.distribute.waiting import waiting_message

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
try:
    from chaos import ends, faults, machine, play, report, worker
finally:
    sys.path.remove(str(ROOT / "tools"))

END = {
    "variables": {"a": [1], "b": [2.0, -4.0]},
    "rows": [
        {"kind": "train", "step": 1, "loss": 2.0},
        {"kind": "validation", "step": 1, "loss": 3.0},
    ],
    "files": ["summary.json", "report.html"],
}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda end: None, ""),
        (lambda end: end["variables"].update(b=[2.0, -4.0001]), "1 of 2 variables differ, as b"),
        (lambda end: end["variables"].pop("a"), "other variables"),
        (lambda end: end["rows"].append(end["rows"][0]), "row 2 is ('train', 1), not None"),
        (lambda end: end["rows"].pop(0), "row 0 is ('validation', 1), not ('train', 1)"),
        (lambda end: end["rows"][1].update(loss=3.5), "loss of step 1 is 3.5, not 3.0"),
        (lambda end: end["files"].pop(), "files are ['summary.json']"),
    ],
)
def test_ends_that_differ(change, named):
    changed = copy.deepcopy(END)
    change(changed)
    found = ends.difference(changed, END)
    assert named in found and bool(found) == bool(named)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda end: end["variables"].update(b=[2.003, -4.003]), ""),
        (lambda end: end["variables"].update(b=[2.0, -4.005]), "1 of 2 variables differ, as b"),
        (lambda end: end["variables"].update(b=[2.0]), "1 of 2 variables differ, as b"),
        (lambda end: end["variables"].update(b=[2.0, math.nan]), "1 of 2 variables differ, as b"),
        (lambda end: end["variables"].update(a=[2]), "1 of 2 variables differ, as a"),
        (lambda end: end["rows"][0].update(loss=2.001), ""),
        (lambda end: end["rows"][0].update(loss=2.003), "loss of step 1 is 2.003, not 2.0"),
        (lambda end: end["rows"][0].update(loss=None), "loss of step 1 is None, not 2.0"),
        (lambda end: end["rows"][0].update(kind="validation"), "row 0 is ('validation', 1), not"),
    ],
)
def test_ends_that_differ_by_more_than_rounding(change, named):
    changed = copy.deepcopy(END)
    change(changed)
    found = ends.difference(changed, END, rounding=1e-3)
    assert named in found and bool(found) == bool(named)


def test_largest_difference():
    changed = copy.deepcopy(END)
    changed["variables"].update(a=[5], b=[2.0, -4.002])
    assert ends.largest_difference(changed, END) == pytest.approx(0.002 / 4)


@pytest.fixture
def scene(tmp_path):
    """Three checkpoints, and one whose end was not recorded."""
    disk = machine.Disk(tmp_path / "disk", mounted=False)
    folder = disk.folder / "run" / "checkpoints"
    folder.mkdir(parents=True)
    for step in (10, 20, 30, 40):
        (folder / f"ckpt-{step}.index").write_bytes(bytes(100))
        (folder / f"ckpt-{step}.data-00000-of-00001").write_bytes(bytes(100))
    (folder / "checkpoint").write_text('model_checkpoint_path: "ckpt-30"\n')
    return faults.Scene(disk.folder / "run", disk, None, None, random.Random(0))


def test_damaged_checkpoints_are_not_expected(scene):
    assert scene.whole_checkpoints() == [10, 20, 30]
    files = {file: file.read_bytes() for file in scene.checkpoints.iterdir()}
    with faults.FAULTS["damaged_checkpoint"].play(scene):
        assert {file: file.read_bytes() for file in scene.checkpoints.iterdir()} == files
    left = {file: file.read_bytes() for file in scene.checkpoints.iterdir()}
    (changed,) = {file.name for file in files if left.get(file) != files[file]}
    assert changed.startswith("ckpt-30.") and changed in scene.details["damage"]
    assert scene.whole_checkpoints() == [10, 20]


def test_the_only_checkpoint_stays(scene):
    scene.damaged |= {10, 20}
    with faults.FAULTS["damaged_checkpoint"].play(scene):
        pass
    assert scene.whole_checkpoints() == [30]


def test_kinds_that_a_run_can_have():
    kinds = play.kinds_for(list(faults.FAULTS), workers=1, clock=False, missing=["disk"])
    assert not {"kill_one", "partition", "disk_full", "clock"} & set(kinds)
    assert {"kill_all", "stop", "damaged_checkpoint"} <= set(kinds)
    assert "other_workers" not in kinds
    assert "other_workers" in play.kinds_for(list(faults.FAULTS), 2, clock=False, missing=[])


@pytest.mark.parametrize(("running", "possible"), [(3, {1, 2}), (1, {2, 3})])
def test_another_number_of_workers(scene, running, possible):
    scene.most_workers, chosen = 3, set()
    for _ in range(20):
        scene.workers = [types.SimpleNamespace(send=lambda number: None) for _ in range(running)]
        with faults.FAULTS["other_workers"].play(scene):
            assert all(each.was_signalled for each in scene.workers)
        chosen.add(scene.next_workers)
    assert chosen == possible
    assert "clock" in play.kinds_for(list(faults.FAULTS), workers=1, clock=True, missing=[])


def test_a_worker_that_waits_for_another_is_known():
    assert play._WAITS in waiting_message(["1=127.0.0.1:1"])


def test_summary():
    rows = [
        {"run": 0, "fault": "stop", "lost": 0, "seconds": 1.0, "outcome": "went on"},
        {"run": 0, "fault": "kill_all", "lost": 7, "seconds": 4.0, "outcome": "resumed"},
        {"run": 0, "fault": "kill_all", "lost": 1, "seconds": 3.0, "outcome": "resumed"},
        {"run": 0, "faults": 3, "workers": 2, "problem": "a traceback in the output"},
    ]
    result = report.summary(rows)
    assert result["kinds"]["kill_all"] == {
        "faults": 2,
        "resumed": 2,
        "lost_median": 4,
        "lost_worst": 7,
        "seconds_median": 3.5,
        "seconds_worst": 4.0,
    }
    assert result["all"]["faults"] == 3 and result["all"]["lost_median"] == 1
    lines = report.table(result).splitlines()
    assert "| kill_all | 2 | 2 | 4.0, 7 | 3.5, 4.0 |" in lines
    assert "- run 0: a traceback in the output" in lines


def test_a_worker_has_its_own_output_and_status(tmp_path):
    log = tmp_path / "log"

    def main():
        os.write(1, b"printed")
        return 3

    process = worker.Worker(main, log)
    end = time.monotonic() + 20
    while not process.has_ended() and time.monotonic() < end:
        time.sleep(0.01)
    assert process.status == 3
    assert log.read_bytes() == b"printed"


def test_unknown_faults(tmp_path):
    command = [sys.executable, ROOT / "tools" / "chaos", f"--output_dir={tmp_path}", "--kinds=fire"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "there is no fault fire, only kill_one, kill_all" in done.stderr


@pytest.mark.long
@pytest.mark.slow
def test_two_faults(tmp_path):
    """The log goes on where it ended."""
    command = [sys.executable, ROOT / "tools" / "chaos", f"--output_dir={tmp_path}", "--seed=3"]
    command += ["--steps=100", "--kinds=kill_all,half_written", "--workers=1"]
    for count in (1, 2):
        done = subprocess.run([*command, f"--faults={count}"], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    rows = list(map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines()))
    played = [row for row in rows if "fault" in row]
    assert len(played) >= 2
    assert all(row["outcome"] == "resumed" and row["lost"] <= 40 for row in played)
    runs = [row for row in rows if "faults" in row]
    assert [row["run"] for row in runs] == list(range(len(runs)))
    assert not any(row["problem"] for row in runs)
    result = json.loads((tmp_path / "results.json").read_text())
    assert result["all"]["faults"] == len(played) and result["versions"]["tensorflow"]
    assert "<svg" in (tmp_path / "chaos.svg").read_text()
