"""Trains with the options of a JSON file and writes the weights, and what evaluation says.

Arguments: the path of a JSON object with ``config``, options of Config, ``evaluate``, whether to do
that too, and ``out``, an .npz file that the chief writes.
"""

import json
import pathlib
import sys

import numpy as np

from imagenet_fast import Config, build_model, make_dataset
from imagenet_fast.distribute.strategy import make_strategy
from imagenet_fast.distribute.workers import is_chief

STEPS = 3


def train(config, evaluate=False):
    """Returns the trained weights by number, the mean of batch statistics, and images evaluated."""
    model = build_model(config)
    model.fit(make_dataset(config, "train"), epochs=1, steps_per_epoch=STEPS, verbose=0)
    found = {}
    if evaluate:  # It averages the statistics before.
        told = model.evaluate(make_dataset(config, "validation"), verbose=0, return_dict=True)
        found["examples"] = told["examples"]
    else:
        model.average_batch_norm_statistics()
    weights = [variable.numpy() for variable in model.trainable_variables]
    return {
        **{f"weight{i}": value for i, value in enumerate(weights)},
        **{
            f"mean{i}": variable.numpy()
            for i, variable in enumerate(model.non_trainable_variables)
            if "moving_mean" in variable.name
        },
        **found,
    }


def main():
    job = json.loads(pathlib.Path(sys.argv[1]).read_text())
    config = Config(**job["config"])
    results = train(config, job["evaluate"])
    if is_chief(make_strategy(config)):
        np.savez(job["out"], **results)


if __name__ == "__main__":
    main()
