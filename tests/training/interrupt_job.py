"""Trains in workers, of which one gets a signal, then goes on, and prints how each training ended.

Arguments: options of Config without model_dir, as JSON, and a folder, which gets the model_dirs
``whole``, never interrupted, and ``run``.
"""

import json
import os
import signal
import sys

import keras
from equivalence_job import with_batch_norm

from imagenet_fast import Config, train


class Ask(keras.callbacks.Callback):
    """Sends a signal to this process in the batch, or the evaluation, of the given number."""

    def __init__(self, number, *, batch=-1, evaluation=-1):
        super().__init__()
        self.number, self.batch, self.evaluation = number, batch, evaluation
        self.batches = self.evaluations = 0

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        if self.batches == self.batch:
            signal.raise_signal(self.number)

    def on_test_begin(self, logs=None):
        self.evaluations += 1
        if self.evaluations == self.evaluation:
            signal.raise_signal(self.number)


def main(options, folder):
    config = Config(**json.loads(options))
    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    train(config.replace(model_dir=f"{folder}/whole"), model=with_batch_norm)
    asked = [
        (1, {"number": signal.SIGTERM, "batch": 3}),
        (0, {"number": signal.SIGINT, "batch": 2}),
    ]
    ends = []
    for other, ask in [*asked, (None, {})]:
        callbacks = [Ask(**ask)] if other == worker else []
        try:
            train(
                config.replace(model_dir=f"{folder}/run"),
                model=with_batch_norm,
                callbacks=callbacks,
            )
            ends.append("done")
        except BaseException as error:
            ends.append(repr(error))
    print("ends", *ends, sep="|")


if __name__ == "__main__":
    # As in a terminal: tests may run where Ctrl-C is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    main(*sys.argv[1:])
