"""What the bar tells of a run's rows."""

from imagenet_fast.training.progress_bar import ProgressBar

TRAINED = {"kind": "train", "loss": 0.5, "top1": 0.5, "images_per_second": 800.0}
EVALUATED = {"kind": "validation", "loss": 0.25, "top1": 0.75, "top5": 0.9, "examples": 359.0}


def test_progress_and_evaluations(capsys):
    bar = ProgressBar(10, 40, devices=4)
    bar.write({**TRAINED, "step": 20, "epoch": 2.0})
    bar.write({**EVALUATED, "step": 20, "epoch": 2.0})
    bar.write({**TRAINED, "step": 40, "epoch": 4.0})
    bar.close()
    out, err = capsys.readouterr()
    last = err.replace("\r", "\n").strip().splitlines()[-1]
    assert "40/40" in last
    assert "epoch 4.00, loss 0.5000, top-1 50.0%, 800 images/s, 200 per device" in last
    assert "10/40" in err
    assert "epoch 2: validation top-1 75.00%, top-5 90.00%, loss 0.2500 on 359 images" in err
    assert out == ""
