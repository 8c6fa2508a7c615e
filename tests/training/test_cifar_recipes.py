"""The recipes for CIFAR-10 against Page 2019, Jordan 2024 (airbench94_muon) and Hiverge 2025."""

import pathlib

import numpy as np
import pytest

from imagenet_fast import build_model
from imagenet_fast.config import Config
from imagenet_fast.optimizers import SGD, Muon, Role, variable_roles
from imagenet_fast.training.build.schedule import build_schedule

FLAGS = pathlib.Path(__file__).parents[2] / "imagenet_fast" / "flags"
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
    assert set(own.differences(load("myrtle_cifar10"), all_options=True)) == {
        "width",
        "pixel_mean",
        "pixel_std",
        "precision",
        "xla",
    }


# --- airbench and Hiverge's speedrun


@pytest.mark.parametrize(
    ("name", "peak", "an_epoch", "total"),
    [("airbench_cifar10", 0.24, 25, 8 * 25), ("speedrun_cifar10", 0.205, 32, 243)],
)
def test_learning_rates_decrease_to_0(name, peak, an_epoch, total):
    config = load(name)
    assert steps_per_epoch(config) == an_epoch
    assert config.duration.steps(an_epoch, config.batch_size) == total
    for step in (0, 1, 99, total - 1):
        expected = peak * (1 - step / total)
        assert rate(config, step + 1) == pytest.approx(expected, rel=1e-5)


# Batch, momentum, learning rates of filters, biases and head, decay of a step, steps of the
# whitening layer's bias, and filters: momentum, coefficients and steps between resets of norms.
SOURCES = {
    "airbench_cifar10": (
        *(2000, 0.85, 0.24, 0.053, 0.67, 2e-6 * 2000, 3 * 25),
        *(0.6, (3.4445, -4.7750, 2.0315), (1,)),
    ),
    "speedrun_cifar10": (
        *(1536, 0.825, 0.205, 0.0573, 0.5415, 1.0418e-6 * 1536, 7),
        *(0.655, (3.4576, -4.7391, 2.0843), (2, 17)),
    ),
}


@made_of(*SOURCES)
def test_optimizers_with_muon(name, monkeypatch):
    # Synthetic data have an epoch of another length.
    monkeypatch.setattr(
        "imagenet_fast.training.run.steps_per_epoch",
        lambda info, config: steps_per_epoch(config),
    )
    batch, momentum, of_filters, of_biases, of_head, decay, bias_steps, *filters = SOURCES[name]
    model = made(name)
    optimizer = model.optimizer
    assert type(optimizer) is Muon
    assert (optimizer.momentum, optimizer.nesterov) == (momentum, True)
    assert not optimizer.rate_in_momentum
    found = (optimizer.filter_momentum, optimizer.coefficients, optimizer.norm_every)
    assert found == (filters[0], list(filters[1]), list(filters[2]))
    assert optimizer.newton_schulz_steps == 3
    assert optimizer.total_steps == (243 if name == "speedrun_cifar10" else 200)
    found = {
        (role, variable.shape.rank): (
            of_filters * factor,
            optimizer.l2_weight_decay * decay * of_filters * factor,
            end,
        )
        for variable, role, factor, decay, end in zip(
            model.trainable_variables,
            variable_roles(model),
            optimizer.rate_factors,
            optimizer.weight_decay_mask,
            optimizer.zero_rate_at,
        )
    }
    # The losses of both are sums over the batch, and their decays are divided by the rates.
    biases = (pytest.approx(of_biases * batch, rel=1e-4), pytest.approx(decay, rel=1e-4))
    assert found[Role.BIAS, 1] == (*biases, bias_steps)
    assert found[Role.SHIFT, 1] == (*biases, 0)
    assert found[Role.WEIGHT, 4][0] == pytest.approx(of_filters)
    # A head of unit variance, whose outputs are divided by 256, in terms of one that begins as
    # PyTorch's: U(-1/16, 1/16).
    scale = load(name).logits_scale
    assert scale / (16 * np.sqrt(3)) == pytest.approx(1 / 256, rel=1e-5)
    rate, decay_of_head, _ = found[Role.WEIGHT, 2]
    assert rate * scale**2 == pytest.approx(of_head * batch / 256**2, rel=1e-3)
    assert decay_of_head == pytest.approx(decay, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "momentum", "whitening", "smoothing", "views"),
    [
        ("airbench_cifar10", 0.6, 5000, 0.2, "flip_and_shift"),
        ("speedrun_cifar10", 0.5566, 960, 0.09, "flip_and_shift_equally"),
    ],
)
def test_images_and_batch_norm(name, momentum, whitening, smoothing, views):
    config = load(name)
    assert (config.crop_padding, config.crop_border, config.alternating_flip) == (
        2,
        "reflect",
        True,
    )
    assert (config.batch_norm_momentum, config.batch_norm_epsilon) == (momentum, 1e-12)
    assert (config.whitening_images, config.label_smoothing) == (whitening, smoothing)
    assert config.test_time_augmentation == views


def test_what_only_the_speedrun_has():
    config = load("speedrun_cifar10")
    assert (config.model, config.activation) == ("airbench94", "silu")
    assert (config.brightness, config.contrast) == (0.1399, 0.1308)
    # Of the whole test set.
    assert (config.tta_fraction, config.eval_batch_size) == (0.25, 10_000)


# --- airbench96_faster


def test_learning_rates_of_airbench96():
    config = load("airbench96_cifar10")
    total = config.duration.steps(steps_per_epoch(config), config.batch_size)
    assert (steps_per_epoch(config), total) == (48, 2160)
    # Its lr, of a sum over 512 images.
    peak = 9.0 / (1024 * (1 + 1 / (1 - 0.85))) * 512
    for step in (0, 1, 100, 215, 216, 217, 1000, 2158, 2159):
        warmup, down = 0.2 * (1 - step / 216) + step / 216, (total - step) / (total - 216)
        left = warmup if step < 216 else down
        # Near the end, 1 - progress loses digits in float32.
        assert rate(config, step + 1) == pytest.approx(peak * left, rel=1e-5, abs=1e-7)


def test_optimizer_of_airbench96():
    model = made("airbench96_cifar10")
    peak, decay = 9.0 / (1024 * (1 + 1 / (1 - 0.85))), 0.012 / (1 + 1 / (1 - 0.85))
    for own, every in ((model, 1), (model.selection.proxy.network, 4)):
        optimizer = model.optimizer if own is model else model.selection.proxy.optimizer
        assert type(optimizer) is SGD
        assert (optimizer.momentum, optimizer.nesterov) == (0.85, True)
        assert not optimizer.rate_in_momentum
        for role, factor, decayed in zip(
            variable_roles(own), optimizer.rate_factors, optimizer.weight_decay_mask
        ):
            assert factor == (64 if role is Role.SHIFT else 1)
            # wd / lr in PyTorch: the same fraction of each variable in a step.
            step = factor * decayed * optimizer.l2_weight_decay * peak * 512
            assert step == pytest.approx(decay, rel=1e-5)
        schedule = optimizer.get_config()["learning_rate"]
        assert schedule["class_name"].endswith("EveryNthStep") == (every == 4)
    assert Role.BIAS in variable_roles(model)
    assert Role.BIAS not in variable_roles(model.selection.proxy.network)
    assert (model.lookahead._every, model.lookahead._keep) == (5, 0.95**5)


def test_images_of_airbench96():
    config = load("airbench96_cifar10")
    assert (config.crop_padding, config.crop_border, config.cutout) == (4, "reflect", 12)
    assert config.alternating_flip and config.label_smoothing == 0.2
    assert (config.model, config.whitening_images) == ("airbench96", 5000)
    assert config.batch_size * config.select_by_loss == 512
    assert (config.proxy_model, config.proxy_width, config.proxy_every) == (
        "airbench96_proxy",
        0,
        4,
    )
    assert config.test_time_augmentation == "flip_and_shift"
