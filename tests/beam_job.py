"""Prepares noise by Apache Beam, in a process of its own: DIRECTORY, Beam's options.

Beam's workers import this module, too, which must be on their path. SECONDS in the environment is
how long an image takes to read.
"""

import os
import sys
import time

import numpy as np

from imagenet_fast.base.errors import UserError
from imagenet_fast.data.prepare.job import prepare
from imagenet_fast.data.prepare.sources.arrays import ArraySource


class Noise(ArraySource):
    """A source that is not of files, which workers open again."""

    def __init__(self):
        generator = np.random.default_rng(0)
        arrays = {
            split: (generator.integers(0, 256, (count, 9, 7), np.uint8), np.arange(count) % 3)
            for split, count in {"train": 60, "validation": 12}.items()
        }
        super().__init__("noise", "noise", "abc", arrays)
        self.opening = Noise

    def read(self, split, index):
        time.sleep(float(os.environ.get("SECONDS", 0)))
        return super().read(split, index)


def main():
    try:
        prepare(Noise(), sys.argv[1], progress=False, runner="beam", pipeline_options=sys.argv[2])
    except UserError as error:
        sys.exit(str(error))
