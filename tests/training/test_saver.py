"""When checkpoints are written."""

import types

from imagenet_fast.training.clock import Clock
from imagenet_fast.training.evaluations import Evaluations
from imagenet_fast.training.saver import Saver


def test_a_checkpoint_comes_after_the_evaluation_of_its_step():
    """Else a run that reached its target would, when started again, not know that it had."""
    time, saved = iter(range(0, 1000, 10)), []
    clock = Clock(lambda: next(time))
    clock.start()
    checkpoints = types.SimpleNamespace(save=lambda step, state: saved.append((step, state)))
    evaluations = Evaluations({"step": 0, "top1": 0.0})
    recorder = types.SimpleNamespace(step=0, read=lambda: None, evaluations=evaluations)
    saver = Saver(checkpoints, clock, recorder, [], every=2, total_steps=100, train_examples=6)
    saver.set_params({"steps": 3})
    for epoch in range(2):
        for batch in range(3):
            recorder.step += 1
            saver.on_train_batch_end(batch)
        recorder.evaluations.add({"step": recorder.step, "top1": 0.0})
        saver.on_epoch_end(epoch)
    told = [(step, state["step"], state["validation"]["step"]) for step, state in saved]
    assert told == [(2, 2, 0), (4, 4, 3), (6, 6, 6)]
