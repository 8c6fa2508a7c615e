"""Values by the batch: the recipes' own, those between them, and their way into a Config."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest

from imagenet_fast.base.durations import Duration
from imagenet_fast.base.errors import UserError
from imagenet_fast.config import Config
from imagenet_fast.optimizers.batch_tables import (
    BATCH_TABLES,
    BatchValues,
    describe,
    values_for_batch,
)

FLAGS = pathlib.Path(__file__).parents[2] / "imagenet_fast" / "flags"


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
        lambda: describe(table, batch),
        lambda: Config(batch_size=batch, batch_table=table),
    ):
        with pytest.raises(UserError) as caught:
            ask()
        assert message in str(caught.value)


def test_description_says_where_values_come_from():
    assert describe("mlperf", 65536) == (
        "learning rate 24.699, warmup 31 epochs, momentum 0.951807, weight decay 0.0001: "
        "from mlperf"
    )
    assert describe("google_tpu_pod", 23170) == (
        "learning rate 28.28, warmup 9.5 epochs, momentum 0.9, weight decay 0.0001: interpolated "
        "from google_tpu_pod's at 16384 and 32768"
    )


def test_config_takes_the_values():
    config = Config(batch_size=65536, batch_table="mlperf", optimizer="lars")
    assert config.learning_rate == config.scaled_learning_rate == 24.699
    assert (config.warmup, config.warmup_first_rate) == (Duration(31, "epochs"), 0.0)
    assert (config.momentum, config.weight_decay) == (0.951807, 1e-4)
    names = (
        *("learning_rate", "rate_scaling", "warmup", "warmup_start", "momentum", "weight_decay"),
        *("batch_size", "batch_table", "optimizer"),
    )
    # 1e-4 is the default of weight_decay.
    assert set(config.differences(Config())) == set(names) - {"weight_decay"}


def test_a_config_can_be_made_from_anothers_values():
    config = Config(batch_size=4096, batch_table="mlperf", optimizer="lars")
    assert dataclasses.replace(config, seed=3) == config.replace(seed=3)
    assert Config(**json.loads(config.to_json())) == config


def test_a_table_replaces_a_recipes_values_but_not_those_given_with_it():
    recipe = FLAGS / "mlperf_32k.flags"
    config = Config.from_flagfile(recipe, batch_size=4096, batch_table="mlperf")
    assert (config.learning_rate, config.weight_decay) == (10.0, 2e-4)
    with pytest.raises(UserError, match="learning_rate=1 has no effect, because batch_table is ml"):
        config.replace(learning_rate=1.0)


def test_another_batch_takes_its_own_values():
    config = Config(batch_size=32768, batch_table="google_tpu_pod")
    assert config.replace(batch_size=16384).learning_rate == 25.0
    assert config.replace(batch_size=23170).learning_rate == pytest.approx(28.28)
    assert Config.from_json(config.to_json()) == config


def test_no_such_table():
    with pytest.raises(UserError, match="batch_table='google' does not exist"):
        Config(batch_size=32768, batch_table="google")


def test_a_run_made_with_another_table_keeps_its_values():
    """A table may change between versions: that of mlperf had half the weight decay at 32768."""
    config = Config(batch_size=32768, batch_table="mlperf", optimizer="lars")
    values = json.loads(config.to_json())
    assert Config.from_json(json.dumps(values)) == config
    values["weight_decay"] = 1e-4
    old = Config.from_json(json.dumps(values))
    assert (old.weight_decay, old.learning_rate) == (1e-4, config.learning_rate)
    assert set(config.differences(old)) == {"batch_table", "weight_decay"}
