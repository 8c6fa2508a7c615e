"""What a run shows of its rows."""

import os

import pytest

from imagenet_fast.training.logs.progress_bar import ProgressBar

TRAINED = {"kind": "train", "loss": 0.5, "top1": 0.5, "images_per_second": 800.0}
EVALUATED = {"kind": "validation", "loss": 0.25, "top1": 0.75, "top5": 0.9, "examples": 359.0}


class Clock:
    time = 0.0

    def __call__(self):
        return self.time


def trained(step, **changes):
    return {**TRAINED, "step": step, "epoch": step / 10, **changes}


def evaluated(step):
    return {**EVALUATED, "step": step, "epoch": step / 10}


def show(rows, devices=1, classes=10):
    """Shows rows, each at its time, from step 10 to 40 of 8 images."""
    clock = Clock()
    bar = ProgressBar(10, 40, batch_size=80, devices=devices, classes=classes, now=clock)
    for clock.time, row in rows:
        bar.write(row)
    bar.close()


def test_a_bar_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(os, "isatty", lambda descriptor: True)
    monkeypatch.setenv("COLUMNS", "150")
    show([(0, trained(20)), (1, evaluated(20)), (2, trained(40))], devices=4)
    out, err = capsys.readouterr()
    last = err.replace("\r", "\n").strip().splitlines()[-1]
    assert "40/40" in last
    assert "epoch 4.00, loss 0.5000, top-1 50.0%, 800 images/s, 200 per device" in last
    assert "epoch 2: validation top-1 75.00%, top-5 90.00%, loss 0.2500 on 359 images" in err
    assert out == ""


def test_lines_in_a_file(capsys, monkeypatch):
    monkeypatch.setattr(os, "isatty", lambda descriptor: False)
    rows = [(100, trained(11)), (101, trained(12)), (129, trained(13)), (130, trained(14))]
    show([*rows, (131, evaluated(14)), (132, trained(15)), (133, trained(40))])
    assert capsys.readouterr().err.splitlines() == [
        # Until step 11 it compiled: 29 steps of 80 images at 800 a second.
        " 28% 11/40 steps, ETA 00:02, epoch 1.10, loss 0.5000, top-1 50.0%, 800 images/s",
        # 3 steps in 30 s.
        " 35% 14/40 steps, ETA 04:20, epoch 1.40, loss 0.5000, top-1 50.0%, 800 images/s",
        "epoch 1.4: validation top-1 75.00%, top-5 90.00%, loss 0.2500 on 359 images",
        "100% 40/40 steps, ETA 00:00, epoch 4.00, loss 0.5000, top-1 50.0%, 800 images/s",
    ]


def test_a_first_step_without_a_time(capsys, monkeypatch):
    monkeypatch.setattr(os, "isatty", lambda descriptor: False)
    show([(0, trained(11, images_per_second=0.0))])
    assert "ETA ?, " in capsys.readouterr().err


@pytest.mark.parametrize(("classes", "shown"), [(5, False), (6, True)])
def test_top5_of_few_classes_is_left_out(capsys, classes, shown):
    show([(0, evaluated(20))], classes=classes)
    assert ("top-5" in capsys.readouterr().err) == shown


def test_evaluations_of_several_labels(capsys):
    bar = ProgressBar(0, 10, batch_size=8, devices=1, classes=4)
    bar.write({**EVALUATED, "map": 0.8125, "f1_micro": 0.75, "f1_macro": 0.5, "epoch": 2})
    bar.write({**TRAINED, "step": 10, "epoch": 2.0, "top1": 0.1})
    row = {name: value for name, value in TRAINED.items() if name != "top1"}
    bar.write({**row, "step": 10, "epoch": 2.0})
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first == (
        "epoch 2: validation mAP 81.25%, micro F1 75.00%, macro F1 50.00%, loss 0.2500 on 359 "
        "images"
    )
    assert "top-1" not in last and "loss 0.5000, 800 images/s" in last


def test_a_run_without_a_reader_ends_before_its_next_steps(monkeypatch):
    # Not at once: Ctrl-C has ended the reader, such as tee, too, and the run saves a checkpoint.
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w", closefd=False) as stream:
        monkeypatch.setattr("sys.stderr", stream)
        bar = ProgressBar(10, 40, batch_size=80, devices=1, classes=10)
        bar.before_steps(10)
        bar.write(evaluated(20))
        with pytest.raises(BrokenPipeError):
            bar.before_steps(20)
        bar.close()
        os.dup2(os.open(os.devnull, os.O_WRONLY), write)  # for what is in its buffer
    os.close(write)
