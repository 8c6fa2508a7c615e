"""The recipes for CIFAR-10 against Page 2019 and Jordan 2024 (airbench94_muon)."""

import pathlib

import numpy as np
import pytest

from imagenet_fast import build_model
from imagenet_fast.config import Config
from imagenet_fast.optimizers import SGD, Muon, Role, variable_roles
from imagenet_fast.training.schedule import build_schedule

FLAGS = pathlib.Path(__file__).parents[2] / "imagenet_fast" / "recipes"
IMAGES = 50_000
PAGE = ("myrtle_cifar10", "myrtle_cifar10_baseline", "myrtle_cifar100", "myrtle_fashion_mnist")


def load(name, **changes):
    return Config.from_flagfile(FLAGS / f"{name}.flags", **changes)


def steps_per_epoch(config):
    return IMAGES // config.batch_size


def rate(config, update):
    """The rate of a weight update, counted from 1."""
    return float(build_schedule(config, steps_per_epoch(config))(update - 1))


def made(name, **changes):
    """The recipe's model, narrow, without data: its whitening filters mean nothing."""
    host = {"data_on_device": False, "augment_in_groups": False, "alternating_flip": False}
    plain = {"width": 8, "num_classes": 10, "precision": "float32", "xla": False}
    return build_model(load(name, synthetic=True, cache="none", **host, **plain, **changes))


def made_of(*names):
    return pytest.mark.parametrize("name", names)


# --- Page


@made_of(*PAGE)
def test_page_has_batches_of_512_and_97_steps_an_epoch(name):
    config = load(name)
    assert (config.batch_size, steps_per_epoch(config)) == (512, 97)
    assert config.duration.amount == (24 if name.endswith("baseline") else 10)


def test_learning_rates_of_the_baseline():
    config = load("myrtle_cifar10_baseline")
    # (epoch, rate) of Page's PiecewiseLinear([0, 5, 24], [0, 0.4, 0]).
    for epoch, expected in ((1, 0.08), (5, 0.4), (12, 0.252632), (24, 0)):
        assert rate(config, 97 * epoch) == pytest.approx(expected, abs=1e-6)
    assert rate(config, 1) == pytest.approx(0.4 / (5 * 97), rel=1e-5)


def test_learning_rates_of_all_tricks():
    config = load("myrtle_cifar10")
    for epoch, expected in ((1, 0.5), (2, 1), (5, 0.55), (8, 0.1), (9, 0.1), (10, 0.1)):
        assert rate(config, 97 * epoch) == pytest.approx(expected, abs=1e-6)


@made_of("myrtle_cifar10", "myrtle_cifar10_baseline")
def test_images_of_page(name):
    config = load(name)
    assert (config.train_crop, config.crop_padding, config.crop_border) == ("pad", 4, "reflect")
    assert config.flip and config.cutout == (8 if name.endswith("baseline") else 0)
    assert config.pixel_mean == (125.31, 122.95, 113.87)
    assert config.pixel_std == (62.99, 62.09, 66.70)


def test_optimizer_of_the_baseline_decays_all_alike():
    optimizer = made("myrtle_cifar10_baseline").optimizer
    assert type(optimizer) is SGD
    assert (optimizer.momentum, optimizer.nesterov, optimizer.rate_in_momentum) == (0.9, True, True)
    assert optimizer.l2_weight_decay == 5e-4
    assert set(optimizer.weight_decay_mask) == set(optimizer.rate_factors) == {1.0}


def test_biases_have_64_times_the_learning_rate_and_the_weights_decay():
    model = made("myrtle_cifar10")
    roles, optimizer = variable_roles(model), model.optimizer
    assert set(roles) == {Role.WEIGHT, Role.SHIFT}
    for role, factor, decay in zip(roles, optimizer.rate_factors, optimizer.weight_decay_mask):
        assert factor == (64 if role is Role.SHIFT else 1)
        # What a step takes from the variable is the rate times the decay: the same for all.
        assert factor * decay == 1


def test_averages_of_all_tricks():
    config = load("myrtle_cifar10")
    assert (config.ema_decay, config.ema_every) == (0.99, 5)
    assert (config.label_smoothing, config.test_time_augmentation) == (0.2, "flip")
    # 16 groups of 32 images.
    assert config.batch_norm_batch_size == 32


def test_the_recipe_for_fashion_mnist_is_that_for_cifar10():
    own = load("myrtle_fashion_mnist")
    assert set(own.differences(load("myrtle_cifar10"), free=True)) == {
        "width",
        "pixel_mean",
        "pixel_std",
        "precision",
        "xla",
    }


# --- airbench


def test_learning_rates_of_airbench_decrease_to_0():
    config = load("airbench_cifar10")
    total = 8 * 25
    assert steps_per_epoch(config) == 25
    for step in (0, 1, 99, 199):
        expected = 0.24 * (1 - step / total)
        assert rate(config, step + 1) == pytest.approx(expected, rel=1e-5)


def test_optimizer_of_airbench():
    model = made("airbench_cifar10")
    optimizer = model.optimizer
    assert type(optimizer) is Muon
    assert (optimizer.momentum, optimizer.filter_momentum, optimizer.nesterov) == (0.85, 0.6, True)
    assert not optimizer.rate_in_momentum
    found = {
        (role, variable.shape.rank): (
            0.24 * factor,
            optimizer.l2_weight_decay * decay * 0.24 * factor,
        )
        for variable, role, factor, decay in zip(
            model.trainable_variables,
            variable_roles(model),
            optimizer.rate_factors,
            optimizer.weight_decay_mask,
        )
    }
    # His loss is a sum over 2000 images, and his decays are divided by the rates.
    decay_of_a_step = 2e-6 * 2000
    assert found[Role.BIAS, 1] == pytest.approx((0.053 * 2000, decay_of_a_step), rel=1e-4)
    assert found[Role.SHIFT, 1] == found[Role.BIAS, 1]
    assert found[Role.WEIGHT, 4][0] == pytest.approx(0.24)
    # A head of unit variance, whose outputs are divided by 256, in terms of one that begins as
    # PyTorch's: U(-1/16, 1/16).
    scale = load("airbench_cifar10").logits_scale
    assert scale / (16 * np.sqrt(3)) == pytest.approx(1 / 256, rel=1e-5)
    rate, decay = found[Role.WEIGHT, 2]
    assert rate * scale**2 == pytest.approx(0.67 * 2000 / 256**2, rel=1e-3)
    assert decay == pytest.approx(decay_of_a_step, rel=1e-4)


def test_images_of_airbench():
    config = load("airbench_cifar10")
    assert (config.crop_padding, config.crop_border, config.alternating_flip) == (
        2,
        "reflect",
        True,
    )
    assert (config.batch_norm_momentum, config.batch_norm_epsilon) == (0.6, 1e-12)
    assert (config.whitening_images, config.label_smoothing) == (5000, 0.2)
    assert config.test_time_augmentation == "flip_and_shift"
