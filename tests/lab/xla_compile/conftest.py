"""Small training steps of eight replicas, lowered once for several tests."""

import functools
import types

import pytest
from small_config import SMALL

# As libtpu has the cores of v3:2x2.
PLACES = [(x, y, 0, core) for y in range(2) for x in range(2) for core in range(2)]
CONFIG = SMALL.replace(strategy="auto", batch_size=64)


def lower(device="TPU", **options):
    """Returns the configuration, the model and the step."""
    from imagenet_fast import build_model
    from imagenet_fast.distribute.virtual import VirtualGPUStrategy, VirtualTPUStrategy
    from imagenet_fast.lab.xla_compile.lower import lower_step

    config = CONFIG.replace(**options)
    kind = VirtualTPUStrategy if device == "TPU" else VirtualGPUStrategy
    model = build_model(config, kind(PLACES))
    step = lower_step(model, config.batch_size // len(PLACES), config.image_size)
    return types.SimpleNamespace(config=config, model=model, step=step)


@pytest.fixture(scope="session")
def lowered():
    """lowered(**options) caches steps; tests that patch code use ``lower`` instead."""
    return functools.lru_cache(maxsize=None)(lower)


@pytest.fixture
def lower_anew():
    return lower
