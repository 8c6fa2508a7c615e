"""Analyzes the errors of an untrained model, on whatever strategy the arguments ask for.

Arguments: the path of a JSON object with ``out`` (a directory, into which each worker writes what
it gets) and ``config``, options of Config.
"""

import json
import pathlib
import sys

import numpy as np

from imagenet_fast import Config, build_model
from imagenet_fast.distribute.cluster import Cluster
from imagenet_fast.distribute.exchange import wait_for_all
from imagenet_fast.training.evaluate import Evaluator
from imagenet_fast.training.run import make_run


def main():
    job = json.loads(pathlib.Path(sys.argv[1]).read_text())
    config = Config(**job["config"])
    model = build_model(config)
    classifier = model.trainable_variables[-2]
    classifier.assign(classifier * 500)
    evaluator = Evaluator(make_run(config), model, keeps_predictions=True)
    evaluator.evaluate(7)
    found = evaluator.analysis()
    cluster = Cluster.from_environment()
    path = pathlib.Path(job["out"], f"worker{cluster.index if cluster else 0}.npz")
    np.savez(path, **vars(found))
    wait_for_all(model.distribute_strategy)


main()
