"""What TensorBoard reads of a run's rows."""

import tensorflow as tf

from imagenet_fast.training.logs.tensorboard import TensorBoard


def test_numbers_by_their_step(tmp_path):
    board = TensorBoard(str(tmp_path))
    board.write({"kind": "train", "step": 20, "epoch": 2.0, "images_per_second": 800.0})
    board.write({"kind": "validation", "step": 20, "epoch": 2.0, "top1": 0.75})
    board.close()
    assert scalars(tmp_path, "train") == {(20, "epoch"): 2, (20, "images_per_second"): 800}
    assert scalars(tmp_path, "validation") == {(20, "epoch"): 2, (20, "top1"): 0.75}


def scalars(model_dir, kind):
    """What TensorBoard reads: (step, name) -> value."""
    found = {}
    for path in (model_dir / "tensorboard" / kind).iterdir():
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                found[event.step, value.tag] = float(tf.make_ndarray(value.tensor))
    return found
