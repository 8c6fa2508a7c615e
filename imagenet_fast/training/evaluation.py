"""Evaluations of a run's model, on all validation images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from imagenet_fast.data.dataset import distributed_dataset
from imagenet_fast.data.steps import evaluation_steps
from imagenet_fast.training.logs.logger import Logger
from imagenet_fast.training.program import Program
from imagenet_fast.training.run import Run
from imagenet_fast.training.step.classifier import Classifier


class Evaluation:
    """Evaluates a model as often as a run wants it, by one program.

    Args:
      run: gives data and devices.
      model: to be evaluated, with the averages of its weights if it has them.
    """

    def __init__(self, run: Run, model: Classifier) -> None:
        config = run.config
        batches = None if config.data_on_device else distributed_dataset(config, "validation")
        self._model = model
        self._program = Program(model, model.test_step, config, batches)
        self._steps = evaluation_steps(run.info, config, run.strategy)

    def take(self, step: int, loggers: Sequence[Logger]) -> Mapping[str, tf.Tensor]:
        """Evaluates the model.

        Args:
          step: weight updates of the model.
          loggers: are told what happens.

        Returns:
          The metrics, over all images.
        """
        for logger in loggers:
            logger.before_evaluation(step)
        with self._model.evaluated_weights():
            self._model.reset_metrics()
            self._program.restart()
            done = 0
            while done < self._steps:
                for logger in loggers:
                    logger.before_evaluation_steps(done)
                done, _ = self._program.take(done, self._steps)
                for logger in loggers:
                    logger.after_evaluation_steps(done)
        for logger in loggers:
            logger.after_evaluation()
        return self._model.metric_sums.results()
