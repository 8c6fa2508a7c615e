"""When checkpoints are written."""

import types

import pytest

from imagenet_fast.training.clock import Clock
from imagenet_fast.training.evaluations import Evaluations
from imagenet_fast.training.saver import Saver


@pytest.mark.parametrize("keep_best", [True, False])
def test_a_checkpoint_comes_after_the_evaluation_of_its_step(keep_best):
    """Else a run that reached its target would, when started again, not know that it had."""
    time, saved = iter(range(0, 1000, 10)), []
    clock = Clock(lambda: next(time))
    clock.start()
    best = []
    checkpoints = types.SimpleNamespace(
        save=lambda step, state: saved.append((step, state)),
        save_best=lambda step, state: best.append((step, state["best"], [at for at, _ in saved])),
    )
    evaluations = Evaluations({"step": 0, "top1": 0.0})
    recorder = types.SimpleNamespace(step=0, read=lambda: None, evaluations=evaluations)
    saver = Saver(
        checkpoints,
        clock,
        recorder,
        [],
        every=2,
        total_steps=100,
        data={"train_examples": 6},
        keep_best=keep_best,
    )
    saver.set_params({"steps": 3})
    for epoch, top1 in enumerate((0.5, 0.7, 0.7, 0.6)):
        for batch in range(3):
            recorder.step += 1
            saver.on_train_batch_end(batch)
        recorder.evaluations.add({"step": recorder.step, "top1": top1})
        saver.on_epoch_end(epoch)
    told = [(step, state["step"], state["validation"]["step"]) for step, state in saved]
    assert told == [(2, 2, 0), (4, 4, 3), (6, 6, 6), (8, 8, 6), (10, 10, 9), (12, 12, 12)]
    # The first of equal ones; before the checkpoint of the same step, which a run resumes from.
    of_best = [(step, {"step": step, "top1": top1}) for step, top1 in ((3, 0.5), (6, 0.7))]
    expected = [(*pair, steps) for pair, steps in zip(of_best, ([2], [2, 4]))]
    assert best == (expected if keep_best else [])
