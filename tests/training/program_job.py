"""Trains with each number of steps per call, on whatever strategy the arguments ask for.

Arguments: options of Config without model_dir and steps_per_call, as JSON, and a folder, which gets
a model_dir named by each of the other arguments.
"""

import json
import sys

from equivalence_job import with_batch_norm

from imagenet_fast import Config, train


def train_with_each(options, folder, *each):
    for steps in each:
        config = Config(**json.loads(options), model_dir=f"{folder}/{steps}", steps_per_call=steps)
        own = None if config.pipeline_stages > 1 else with_batch_norm
        train(config, model=own)


if __name__ == "__main__":
    train_with_each(*sys.argv[1:])
