"""Trains on images that the devices hold, on whatever strategy the arguments ask for.

Arguments: options of Config, as JSON, and the path of an .npz file that the chief writes.
"""

import json
import sys

import numpy as np
from equivalence_job import build_small, train

from imagenet_fast import Config, make_dataset
from imagenet_fast.data.dataset import make_images_on_device
from imagenet_fast.data.info import read_info
from imagenet_fast.data.steps import evaluation_steps
from imagenet_fast.distribute.workers import is_chief

STEPS = 12


def main():
    config = Config(**json.loads(sys.argv[1]))
    model = build_small(config)
    model.training_images = make_images_on_device(config, "train")
    model.validation_images = make_images_on_device(config, "validation")
    results = train(model, make_dataset(config, "train"), STEPS)
    told = model.evaluate(
        make_dataset(config, "validation"),
        steps=evaluation_steps(read_info(config), config, model.distribute_strategy),
        verbose=0,
        return_dict=True,
    )
    if is_chief(model.distribute_strategy):
        np.savez(sys.argv[2], **results, **{f"told_{name}": value for name, value in told.items()})


if __name__ == "__main__":
    main()
