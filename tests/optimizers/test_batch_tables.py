"""Values by the batch: the recipes' own, those between them, and their way into a Config."""

import json

import numpy as np
import pytest

from imagenet_fast.base.durations import Duration
from imagenet_fast.base.errors import UserError
from imagenet_fast.config import Config
from imagenet_fast.optimizers.batch_tables import (
    BATCH_TABLES,
    BatchValues,
    options_for_batch,
    values_for_batch,
)


@pytest.mark.parametrize(
    ("table", "batch", "rate", "warmup", "momentum", "decay"),
    [
        # tensorflow/tpu, models/official/resnet/lars_util.py.
        ("google_tpu_pod", 16384, 25.0, 5, 0.9, 1e-4),
        ("google_tpu_pod", 32768, 32.0, 14, 0.9, 1e-4),
        ("google_tpu_pod", 65536, 35.6, 40, 0.9, 1e-4),
        # mlcommons/training, resnet-tf2, README.
        ("mlperf", 4096, 10.0, 5, 0.9, 2e-4),
        # mlcommons/logging, rcp_checker/training_4.0.0/rcps_resnet.json.
        ("mlperf", 8192, 17.0, 5, 0.9, 2e-4),
        ("mlperf", 65536, 24.699, 31, 0.951807, 1e-4),
        # mlcommons/training_results_v0.6, Google/benchmarks/resnet: twice the flags' weight decay,
        # because it is in the loss and in LARS.
        ("mlperf", 16384, 25.0, 5, 0.9, 2 * 2e-4),
        ("mlperf", 32768, 31.2, 25, 0.9, 2 * 1e-4),
    ],
)
def test_batches_of_recipes_have_the_recipes_values(table, batch, rate, warmup, momentum, decay):
    assert values_for_batch(table, batch) == BatchValues(rate, warmup, momentum, decay)


@pytest.mark.parametrize(
    ("table", "batch", "rate", "warmup", "momentum", "decay"),
    [
        # Half-way, along the logarithm: the roots of products, and the middle of the warmups.
        ("google_tpu_pod", 23170, (25 * 32) ** 0.5, 9.5, 0.9, 1e-4),
        ("google_tpu_pod", 46341, (32 * 35.6) ** 0.5, 27, 0.9, 1e-4),
        ("mlperf", 5793, (10 * 17) ** 0.5, 5, 0.9, 2e-4),
        ("mlperf", 23170, (25 * 31.2) ** 0.5, 15, 0.9, (4e-4 * 2e-4) ** 0.5),
        (
            "mlperf",
            46341,
            (31.2 * 24.699) ** 0.5,
            28,
            1 - (0.1 * 0.048193) ** 0.5,
            (2e-4 * 1e-4) ** 0.5,
        ),
        # A quarter of the way.
        ("google_tpu_pod", 19484, 25**0.75 * 32**0.25, 7.25, 0.9, 1e-4),
    ],
)
def test_values_between_recipes(table, batch, rate, warmup, momentum, decay):
    # The rule rounds to four digits.
    values = values_for_batch(table, batch)
    assert values.learning_rate == pytest.approx(rate, rel=5e-4)
    assert values.warmup_epochs == pytest.approx(warmup, rel=5e-4)
    assert values.momentum == pytest.approx(momentum, rel=5e-4)
    assert values.weight_decay == pytest.approx(decay, rel=5e-4)


@pytest.mark.parametrize("table", BATCH_TABLES)
def test_interpolation_is_continuous(table):
    for batch, recipe in BATCH_TABLES[table].items():
        for neighbour in (batch - 1, batch + 1):
            if min(BATCH_TABLES[table]) <= neighbour <= max(BATCH_TABLES[table]):
                values = values_for_batch(table, neighbour)
                for name in ("learning_rate", "warmup_epochs", "momentum", "weight_decay"):
                    np.testing.assert_allclose(
                        getattr(values, name), getattr(recipe, name), rtol=1e-3
                    )


@pytest.mark.parametrize(
    ("table", "batch", "message"),
    [
        ("google_tpu_pod", 16383, "for batches from 16384 to 65536, not for 16383; give learning_"),
        ("google_tpu_pod", 65537, "not for 65537"),
        ("mlperf", 4095, "for batches from 4096 to 65536, not for 4095"),
        ("mlperf", 2**20, "not for 1048576"),
    ],
)
def test_batches_outside_are_refused(table, batch, message):
    for ask in (
        lambda: values_for_batch(table, batch),
        lambda: options_for_batch(table, batch),
    ):
        with pytest.raises(UserError) as caught:
            ask()
        assert message in str(caught.value)


def test_options_of_a_batch():
    config = Config(optimizer="lars", **options_for_batch("mlperf", 65536))
    assert config.batch_size == 65536
    assert config.learning_rate == config.scaled_learning_rate == 24.699
    assert (config.warmup, config.warmup_first_rate) == (Duration(31, "epochs"), 0.0)
    assert (config.momentum, config.weight_decay) == (0.951807, 1e-4)


def test_no_such_table():
    with pytest.raises(UserError, match="batch_table='google' does not exist"):
        values_for_batch("google", 32768)


def test_a_run_of_before_keeps_the_values_of_its_table():
    config = Config(optimizer="lars", **options_for_batch("mlperf", 32768))
    values = {**json.loads(config.to_json()), "batch_table": "mlperf", "weight_decay": 1e-4}
    assert Config.from_json(json.dumps(values)) == config.replace(weight_decay=1e-4)
