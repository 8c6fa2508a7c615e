"""The experiments of the JPEG-decoding study."""

from __future__ import annotations

import pathlib

from study.settings import Experiment, Setting

from imagenet_fast.base.durations import Duration
from imagenet_fast.config import Config
from imagenet_fast.lab.benchmarks.decode import VARIANTS
from jpeg_decoding.jpegs import BRIGHTNESS, COLOUR, DRAWINGS

_BASE = pathlib.Path(__file__).parents[1] / "large_batch" / "base.flags"

# The pixel statistics of each set: those of base.flags, and those of colours from orange to blue.
_PIXELS = {
    BRIGHTNESS: {},
    COLOUR: {"pixel_mean": (166.0, 118.0, 80.0), "pixel_std": (63.0, 17.0, 80.0)},
}


def drawn_in(drawing: str) -> Experiment:
    """Trains and evaluates with each variant of decoding, at half the images' size.

    Network and schedule are those of the large-batch study, in two epochs instead of five. All
    images are decoded before the first step. A setting's kind is its data set.
    """
    base = Config.from_flagfile(
        _BASE,
        duration=Duration(2, "epochs"),
        warmup=Duration(0.4, "epochs"),
        decay_at=(Duration(1, "epochs"), Duration(1.6, "epochs")),
        cache="decoded",
        **_PIXELS[drawing],
    )
    return Experiment(
        drawing,
        tuple(
            Setting(name, base.replace(**options), drawing) for name, options in VARIANTS.items()
        ),
    )


EXPERIMENTS = tuple(map(drawn_in, DRAWINGS))
