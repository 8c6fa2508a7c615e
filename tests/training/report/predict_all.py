"""An evaluation whose predictions are kept, as `train` and `evaluate` take it."""

import functools

from imagenet_fast.data.info import read_info
from imagenet_fast.data.pipeline import distributed_dataset, evaluation_steps
from imagenet_fast.training.program import Program
from imagenet_fast.training.report.error_analysis import Predictions


def predictions_of(model, config):
    """Returns the validation images' predictions, before there are any."""
    strategy = model.distribute_strategy
    return Predictions(strategy, config, read_info(config), model.image_loss)


def predict_all(model, config, predictions):
    """Evaluates the model on the validation images."""
    batches = distributed_dataset(config, "validation")
    step = functools.partial(model.test_step, predictions=predictions)
    program = Program(model, step, config, batches)
    done, steps = 0, evaluation_steps(read_info(config), config, model.distribute_strategy)
    predictions.reset()
    with model.evaluated_weights():
        while done < steps:
            done, _ = program.take(done, steps)


def analyze(model, config, step):
    """Returns the error analysis of the model."""
    predictions = predictions_of(model, config)
    predict_all(model, config, predictions)
    return predictions.analysis(step)
