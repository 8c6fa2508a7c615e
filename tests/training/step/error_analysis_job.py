"""Analyzes the errors of an untrained model, on whatever strategy the arguments ask for.

Arguments: the path of a JSON object with ``out`` (a directory, into which each worker writes what
it gets) and ``config``, options of Config.
"""

import functools
import json
import pathlib
import sys

import numpy as np

from imagenet_fast import Config, build_model
from imagenet_fast.data.evaluated import file_names_of
from imagenet_fast.data.info import read_info
from imagenet_fast.distribute.cluster import Cluster
from imagenet_fast.distribute.exchange import wait_for_all
from imagenet_fast.training.evaluate import Evaluator
from imagenet_fast.training.run import make_run
from imagenet_fast.training.step.error_analysis import with_file_names


def main():
    job = json.loads(pathlib.Path(sys.argv[1]).read_text())
    config = Config(**job["config"])
    model = build_model(config)
    classifier = model.trainable_variables[-2]
    classifier.assign(classifier * 500)
    evaluator = Evaluator(make_run(config), model, keeps_predictions=True)
    evaluator.evaluate(7)
    found, predictions = evaluator.results()
    names = functools.partial(file_names_of, read_info(config), "validation")
    found = with_file_names(found, predictions, names)
    cluster = Cluster.from_environment()
    path = pathlib.Path(job["out"], f"worker{cluster.index if cluster else 0}.npz")
    np.savez(path, **vars(found))
    wait_for_all(model.distribute_strategy)


main()
