"""Each of three workers exchanges texts; then the last one exits unexpectedly.

Arguments: the prefix of a path; each other worker writes ``PREFIX{index}.json``.
"""

import json
import os
import pathlib
import sys
import time

import tensorflow as tf

from imagenet_fast import Config, make_strategy
from imagenet_fast.distribute.exchange import text_of_chief, texts_of_all, wait_for_all


def main():
    strategy = make_strategy(Config(strategy="multi_worker", batch_size=3))
    worker = strategy.cluster_resolver.task_id
    time.sleep(worker / 2)  # The others wait.
    found = {
        "texts": texts_of_all(strategy, f"worker {worker} " + "ä " * 300),
        "chief": text_of_chief(strategy, f"{worker}"),
    }
    wait_for_all(strategy)
    if worker == 2:
        os._exit(0)
    try:
        wait_for_all(strategy)
    except tf.errors.UnavailableError as error:
        found["error"] = error.message
    pathlib.Path(f"{sys.argv[1]}{worker}.json").write_text(json.dumps(found))
    os._exit(0)  # A normal exit would wait for the lost worker.


if __name__ == "__main__":
    main()
