"""What TensorBoard reads of a run's rows."""

import resource
import signal

import pytest
import tensorflow as tf

from imagenet_fast import UserError
from imagenet_fast.training.logs.tensorboard import TensorBoard


def test_numbers_by_their_step(tmp_path):
    board = TensorBoard(str(tmp_path))
    board.write({"kind": "train", "step": 20, "epoch": 2.0, "images_per_second": 800.0})
    board.write({"kind": "validation", "step": 20, "epoch": 2.0, "top1": 0.75})
    board.close()
    assert scalars(tmp_path, "train") == {(20, "epoch"): 2, (20, "images_per_second"): 800}
    assert scalars(tmp_path, "validation") == {(20, "epoch"): 2, (20, "top1"): 0.75}


@pytest.fixture
def full_disk(monkeypatch):
    """Files can have 200 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk(tmp_path, full_disk):
    board = TensorBoard(str(tmp_path))
    for write in (lambda: board.write({"kind": "train", "step": 1, "loss": 2.0}), board.close):
        with pytest.raises(UserError) as caught:
            for _ in range(100):
                write()
        assert f"TensorBoard's folder {tmp_path}/tensorboard cannot be written" in str(caught.value)
        assert "the same command resumes from the last checkpoint" in str(caught.value)


def scalars(model_dir, kind):
    """What TensorBoard reads: (step, name) -> value."""
    found = {}
    for path in (model_dir / "tensorboard" / kind).iterdir():
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                found[event.step, value.tag] = float(tf.make_ndarray(value.tensor))
    return found
