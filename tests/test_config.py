"""Config: values, checks, files; and that no option is there for nothing."""

import ast
import dataclasses
import json
import math
import pathlib

import numpy as np
import pytest

import imagenet_fast
from imagenet_fast.base.durations import Duration
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.option import option_text
from imagenet_fast.config import Config, option_names, option_type, parse_option
from imagenet_fast.data.pixel_options import PixelOptions
from imagenet_fast.models.options import ModelOptions

PACKAGE = pathlib.Path(imagenet_fast.__file__).parent
RECIPES = sorted((PACKAGE / "flags").rglob("*.flags"))

# One value other than the default for each option.
OTHER = {
    "data_dir": "/data/imagenet",
    "synthetic": True,
    "num_classes": 1000,
    "label_offset": -1,
    "image_size": 160,
    "eval_image_size": 192,
    "train_sizes": (128, 144),
    "train_until": (Duration(6, "epochs"), Duration(12, "epochs")),
    "size_ramp": (128, 16),
    "size_ramp_at": (Duration(6, "epochs"), Duration(12, "epochs")),
    "eval_crop_fraction": 0.1 + 0.2,
    "eval_crop": "proportional",
    "resize_method": "bicubic",
    "antialias": True,
    "resize_kernel": "tensorflow",
    "jpeg_index": False,
    "max_pixels": 4096,
    "pixel_mean": (0.0, 1e-7, 127.5),
    "pixel_std": (1.0, 1 / 3, 255.0),
    "train_crop": "pad",
    "crop_min_area": 0.25,
    "crop_attempts": 100,
    "crop_padding": 3,
    "crop_border": "reflect",
    "flip": False,
    "cutout": 8,
    "color_jitter": 0.4,
    "brightness": 0.14,
    "contrast": 0.13,
    "chroma": 0.1,
    "lighting": 0.1,
    "rand_augment": (2.0, 9.0),
    "trivial_augment": True,
    "random_erasing": 0.1,
    "mixup_alpha": 0.2,
    "cutmix_alpha": 1.0,
    "sampling": "shares.json",
    "shard_by": "files",
    "shuffle_buffer": 1,
    "cache": "encoded",
    "data_on_device": True,
    "alternating_flip": True,
    "augment_in_groups": True,
    "cache_dir": "/local/disk",
    "data_threads": 3,
    "input_servers": ("reader-0:5050", "10.0.0.7:65535"),
    "max_bad_images": 0,
    "model": "resnet101",
    "width": 16,
    "pool_order": "conv_pool_bn_relu",
    "activation": "celu",
    "celu_alpha": 0.3,
    "logits_scale": 0.0625,
    "whitening": True,
    "normal_cells": 3,
    "cell_filters": 32,
    "whitening_images": 5000,
    "proxy_model": "airbench94",
    "proxy_width": 8,
    "initial_weights": "runs/before",
    "pretrained": True,
    "normalization": "pixel_mean",
    "freeze_through": "stage2",
    "stem": "small",
    "stride_on_1x1": True,
    "blur_pool": "convolutions",
    "padding": "same",
    "zero_gamma": False,
    "conv_init": "he_normal",
    "gamma_init": "uniform",
    "batch_norm_momentum": 0.99,
    "batch_norm_epsilon": 1e-3,
    "batch_norm_scale": False,
    "batch_norm_batch_size": 64,
    "fused_batch_norm": False,
    "dropout": 0.0,
    "batch_norm_after_pool5": False,
    "batch_size": 8192,
    "accumulation_steps": 4,
    "seed": 2**32 - 1,
    "duration": Duration(1_281_167, "examples"),
    "optimizer": "lars",
    "optimizer_arguments": ("beta_1=0.95", "beta_2=0.98"),
    "momentum": 0.0,
    "nesterov": False,
    "weight_decay": 5e-5,
    "decoupled_weight_decay": True,
    "weight_decay_on": "weights",
    "lars_eeta": 0.01,
    "optimizer_epsilon": 1.0,
    "rate_in_momentum": "no",
    "bias_rate_factor": 64.0,
    "bias_rate_factor_on": "batch_norm",
    "layer_decay": 0.75,
    "muon_momentum": 0.5,
    "muon_steps": 5,
    "muon_coefficients": (2.0, -1.5, 0.5),
    "muon_norm_every": (2, 17),
    "muon_head_rate_factor": 7.0,
    "clip_norm": 1.5,
    "ema_decay": 0.999,
    "ema_every": 5,
    "lookahead_every": 5,
    "lookahead_decay": 0.9,
    "loss": "binary_cross_entropy",
    "focal_gamma": 1.5,
    "focal_alpha": 0.5,
    "positive_gamma": 1.0,
    "negative_gamma": 2.0,
    "probability_margin": 0.0,
    "class_weights": "weights.json",
    "label_smoothing": 0.1,
    "teacher": "runs/teacher",
    "distillation_temperature": 2.0,
    "select_by_loss": 0.5,
    "proxy_every": 4,
    "learning_rate": 1 / 3,
    "learning_rate_batch": 512,
    "rate_scaling": "sqrt",
    "warmup": Duration(0, "steps"),
    "warmup_start": 0.0,
    "whitening_bias_until": Duration(3, "epochs"),
    "schedule": "piecewise_linear",
    "decay_at": (Duration(0.5, "epochs"), Duration(12, "epochs")),
    "decay_factor": 1.0,
    "decay_every": Duration(2.4, "epochs"),
    "decay_power": 1.0,
    "end_learning_rate": 1e-4,
    "knots_at": (Duration(0, "epochs"), Duration(5, "epochs")),
    "knots": (0.0, 1.0),
    "replicas": (8, 2),
    "precision": "mixed_float16",
    "strategy": "tpu",
    "tpu": "local",
    "gpus": "0",
    "logical_cpus": 4,
    "pipeline_stages": 2,
    "fusion": "auto",
    "fusion_bytes": 0,
    "fusion_segments": (20, 76),
    "all_reduce": "torus_2d",
    "all_reduce_group": 4,
    "all_reduce_dtype": "bfloat16",
    "deterministic": True,
    "loss_scale": 1024.0,
    "pipeline_servers": ("stage-1:5060",),
    "pipeline_balance": (3, 4),
    "pipeline_schedule": "1f1b",
    "pipeline_stages_per_device": 2,
    "rematerialize": "never",
    "xla": True,
    "compile_cache": "/caches/xla",
    "model_dir": "/runs/a b",
    "eval_batch_size": 300,
    "eval_every": Duration(100, "steps"),
    "test_time_augmentation": "flip",
    "tta_fraction": 0.25,
    "checkpoint_every": Duration(1e7, "examples"),
    "keep_checkpoints": 1,
    "steps_per_call": "7",
    "log_every": Duration(1, "steps"),
    "best_metric": "f1_macro",
    "stop_at_accuracy": 0.749,
    "early_stopping": 3,
    "keep_best": True,
    "tensorboard": False,
    "examine": False,
    "profile_steps": (100, 110),
    "mlperf_log": True,
}
# A TPU always compiles, what a host prepares is not on the device, and buckets are given by bytes
# or by segments, or timed: not in one configuration. Nor are options of different crops,
# augmentations, networks, optimizers and schedules.
LEFT_OUT = {
    "size_ramp",
    "size_ramp_at",
    *("pretrained", "normalization", "optimizer_arguments"),
    "trivial_augment",
    "sampling",
    *("class_weights", "teacher", "distillation_temperature"),
    *(
        "xla",
        "compile_cache",
        "fusion",
        "fusion_bytes",
        "data_on_device",
        "alternating_flip",
        "augment_in_groups",
    ),
    *("crop_min_area", "crop_attempts", "muon_momentum", "muon_head_rate_factor"),
    *("muon_steps", "muon_coefficients", "muon_norm_every", "whitening_bias_until"),
    *("warmup", "warmup_start", "decay_power", "end_learning_rate"),
    *("decay_every", "knots_at", "knots", "decoupled_weight_decay"),
    *("pool_order", "activation", "celu_alpha", "logits_scale", "whitening"),
    *(
        "whitening_images",
        "normal_cells",
        "cell_filters",
        "batch_norm_scale",
        "fused_batch_norm",
    ),
    *("dropout", "batch_norm_after_pool5", "pipeline_stages_per_device"),
    *("focal_gamma", "focal_alpha", "positive_gamma", "negative_gamma", "probability_margin"),
}
CHANGED = Config(
    **{
        **{name: value for name, value in OTHER.items() if name not in LEFT_OUT},
        "schedule": "steps",
    }
)


RAMP_AT = {"size_ramp_at": "20 epochs,30 epochs"}
ONE = {"strategy": "one_device"}
KNOTS = {"schedule": "piecewise_linear", "knots_at": "0 steps,9 steps", "knots": (0.0, 1.0)}


# --- Options


def test_this_file_has_all_options():
    assert list(OTHER) == option_names(), "give OTHER another value of each, in the same order"
    default = Config()
    assert [name for name in OTHER if OTHER[name] == getattr(default, name)] == []


@pytest.mark.parametrize("name", option_names())
def test_text_of_each_option(name):
    for value in (getattr(Config(), name), OTHER[name]):
        again = parse_option(name, option_text(value))
        assert again == value
        assert type(again) is type(value)


@pytest.mark.parametrize("field", dataclasses.fields(Config), ids=lambda field: field.name)
def test_each_option_has_help_and_a_group(field):
    assert field.metadata["help"]
    assert field.metadata["group"] in (
        "data",
        "model",
        "optimization",
        "learning rate",
        "hardware",
        "run",
    )


@pytest.mark.parametrize(
    "field",
    [field for field in dataclasses.fields(Config) if field.metadata["choices"]],
    ids=lambda field: field.name,
)
def test_help_names_each_choice(field):
    """Help without a list gets all of them appended."""
    text, choices = field.metadata["help"], field.metadata["choices"]
    if ": " in text:
        assert [choice for choice in choices if choice not in text] == []
    else:
        assert all(choices)


# Options of the network and of pixels that only training reads, or that may differ in evaluation.
NOT_IN_EVALUATION = {
    *("whitening_images", "proxy_model", "proxy_width", "initial_weights", "freeze_through"),
    "pretrained",
    *("zero_gamma", "conv_init", "gamma_init", "dropout"),
    *("batch_norm_momentum", "batch_norm_batch_size", "fused_batch_norm"),
    *("eval_image_size", "train_sizes", "train_until", "size_ramp", "size_ramp_at"),
    *("eval_crop_fraction", "eval_crop", "resize_kernel", "max_pixels"),
    "jpeg_index",
}


def test_evaluation_needs_all_other_options_of_the_network_and_its_pixels():
    needed = {field.name for field in dataclasses.fields(Config) if field.metadata["in_evaluation"]}
    own = {*ModelOptions.__annotations__, *PixelOptions.__annotations__}
    assert needed == own - NOT_IN_EVALUATION | {"loss", "ema_decay"}


def test_networks_of_the_user():
    config = Config(model="my_package.module:Networks.build")
    assert Config.from_json(config.to_json()) == config
    assert Config(model="custom").model == "custom"
    with pytest.raises(
        UserError, match=r"'my_module\.build' does not exist.*may also be module:fun"
    ):
        Config(model="my_module.build")


@pytest.mark.parametrize("name", ["initial_weights", "conv_init", "zero_gamma"])
def test_users_networks_do_not_get_the_options_of_the_packages(name):
    changed = Config(model="resnet50", **{name: OTHER[name]})
    assert getattr(changed.replace(model="mine:build"), name) == getattr(Config(), name)
    with pytest.raises(UserError, match="my_module:build: leave it out"):
        Config(model="my_module:build", **{name: OTHER[name]})


def test_networks_of_keras_have_their_image_size_unless_another_is_given():
    model = "keras:Xception"
    assert Config.from_changes({"model": model}).image_size == 299
    assert Config.from_changes({"model": model, "image_size": 224}).image_size == 224
    assert Config.from_flagfile("digits", model=model).image_size == 32
    assert Config.from_changes({"model": "resnet50"}).image_size == 224
    assert Config.from_changes({}) == Config()


def test_recipe_of_the_paper_is_the_default():
    """Goyal et al. 2017, for one server of 8 GPUs."""
    config = Config()
    assert (config.model, config.batch_size, config.learning_rate) == ("resnet50", 256, 0.1)
    assert (config.momentum, config.nesterov, config.weight_decay) == (0.9, True, 1e-4)
    assert config.duration == Duration(90, "epochs")
    assert config.warmup == Duration(5, "epochs")
    assert [str(at) for at in config.decay_at] == ["30 epochs", "60 epochs", "80 epochs"]
    assert (config.decay_factor, config.zero_gamma, config.stride_on_1x1) == (0.1, True, False)
    assert config.batch_norm_momentum == 0.9
    # In 0..255 what the paper's code has in 0..1.
    np.testing.assert_allclose(np.array(config.pixel_mean) / 255, [0.485, 0.456, 0.406])
    np.testing.assert_allclose(np.array(config.pixel_std) / 255, [0.229, 0.224, 0.225])


@pytest.mark.parametrize(
    ("batch", "rate"),
    [(128, 0.05), (256, 0.1), (1024, 0.4), (4096, 1.6), (8192, 3.2), (16384, 6.4), (65536, 25.6)],
)
def test_linear_scaling_rule(batch, rate):
    assert Config(batch_size=batch).scaled_learning_rate == pytest.approx(rate, rel=1e-15)
    root = Config(batch_size=batch, rate_scaling="sqrt").scaled_learning_rate
    assert root == pytest.approx(0.1 * (batch / 256) ** 0.5, rel=1e-15)
    assert Config(batch_size=batch, rate_scaling="none").scaled_learning_rate == 0.1


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().seed = 1


def test_replace_leaves_the_original():
    config = Config(seed=3)
    assert config.replace(seed=4, model="resnet18") == Config(seed=4, model="resnet18")
    assert config == Config(seed=3)


def test_accepted_forms():
    config = Config(
        duration="10 epochs",
        decay_at=["3 epochs", Duration(6, "epochs")],
        weight_decay=0,
        pixel_mean=[1, 2.5, "3"],
        pixel_std="1, 2,3",
        batch_size="512",
        xla="True",
    )
    assert config.duration == Duration(10, "epochs")
    assert config.decay_at == (Duration(3, "epochs"), Duration(6, "epochs"))
    assert type(config.weight_decay) is float
    assert config.pixel_mean == (1.0, 2.5, 3.0)
    assert config.pixel_std == (1.0, 2.0, 3.0)
    assert config.batch_size == 512
    assert config.xla is True
    assert Config(decay_at="").decay_at == ()
    assert Config(decay_at=[]).decay_at == ()


def test_numbers_of_numpy():
    config = Config(learning_rate=np.float64(0.25), batch_size=np.int64(96), momentum=np.int32(0))
    assert config == Config(learning_rate=0.25, batch_size=96, momentum=0.0)
    values = (config.learning_rate, config.batch_size, config.momentum)
    assert [type(value) for value in values] == [float, int, float]


def test_paths():
    assert Config(data_dir=pathlib.Path("data/a")).data_dir == "data/a"
    with pytest.raises(UserError, match="batch_size is 'a'"):
        Config(batch_size=pathlib.Path("a"))


# --- Values that an option cannot have


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # Of the wrong type.
        ({"batch_size": 256.0}, "batch_size is 256.0, but must be a whole number"),
        ({"batch_size": True}, "batch_size is True, but must be a whole number"),
        ({"batch_size": "many"}, "batch_size is 'many', but must be a whole number"),
        ({"batch_size": "1e3"}, "batch_size is '1e3', but must be a whole number"),
        ({"batch_size": None}, "batch_size is None, but must be a whole number"),
        ({"learning_rate": False}, "learning_rate is False, but must be a number"),
        ({"learning_rate": "high"}, "learning_rate is 'high', but must be a number"),
        ({"learning_rate": [0.1]}, "learning_rate is [0.1], but must be a number"),
        ({"learning_rate": math.inf}, "learning_rate is inf, but must be finite"),
        ({"learning_rate": "inf"}, "learning_rate is inf, but must be finite"),
        ({"pixel_std": (1.0, math.nan, 1.0)}, "pixel_std is nan, but must be finite"),
        ({"batch_size": np.float64(256)}, "but must be a whole number"),
        ({"nesterov": 1}, "nesterov is 1, but must be true or false"),
        ({"nesterov": "yes"}, "nesterov is 'yes', but must be true or false"),
        ({"data_dir": 5}, "data_dir is 5, but must be text"),
        ({"duration": 90}, "duration is 90, but must be a duration, as '90 epochs'"),
        ({"duration": "90"}, "duration: '90' is not a duration"),
        ({"duration": "90 hours"}, "duration: '90 hours' is not a duration"),
        ({"decay_at": 30}, "decay_at is 30, but must be a list"),
        ({"decay_at": [30, 60]}, "decay_at is 30, but must be a duration"),
        ({"decay_at": Duration(3, "steps")}, "must be a list"),
        ({"pixel_mean": 0.5}, "pixel_mean is 0.5, but must be a list"),
        ({"pixel_mean": [None, 1, 2]}, "pixel_mean is None, but must be a number"),
        ({"pixel_mean": "1,two,3"}, "pixel_mean is 'two', but must be a number"),
        # Out of its range.
        ({"num_classes": -1}, "num_classes is -1, but must not be negative"),
        ({"image_size": 0}, "image_size is 0, but must be in [1, 8192]"),
        ({"crop_min_area": 0.0}, "crop_min_area is 0, but must be in (0, 1]"),
        ({"crop_min_area": 1.01}, "crop_min_area is 1.01, but must be in (0, 1]"),
        ({"crop_attempts": 0}, "crop_attempts is 0, but must be positive"),
        ({"crop_padding": -1}, "crop_padding is -1, but must not be negative"),
        ({"color_jitter": 1.0}, "color_jitter is 1, but must be in [0, 1)"),
        ({"contrast": 1.0}, "contrast is 1, but must be in [0, 1)"),
        ({"proxy_model": "airbench"}, "proxy_model is 'airbench', but must be a network of this p"),
        ({"muon_norm_every": (1, 2, 3)}, "1,2,3, but must have one or two positive values"),
        ({"muon_coefficients": (1.0,)}, "muon_coefficients is 1, but must have three values"),
        ({"lighting": -0.1}, "lighting is -0.1, but must not be negative"),
        ({"eval_crop_fraction": 0.0}, "eval_crop_fraction is 0, but must be in (0, 1]"),
        ({"pixel_mean": (1.0, 2.0)}, "pixel_mean is 1,2, but must have three values in"),
        ({"pixel_mean": (1.0, 2.0, 300.0)}, "pixel_mean is 1,2,300, but must have three values in"),
        ({"pixel_std": (1.0, 2.0)}, "pixel_std is 1,2, but must have three positive values"),
        ({"pixel_std": (1.0, 0.0, 1.0)}, "pixel_std is 1,0,1, but must have three positive"),
        ({"shuffle_buffer": 0}, "shuffle_buffer is 0, but must be positive"),
        ({"data_threads": -1}, "data_threads is -1, but must be in [0, 1024]"),
        ({"input_servers": "here:50,there"}, "input_servers is here:50,there, but must be host:p"),
        ({"input_servers": [":50"]}, "input_servers is :50, but must be host:port, each"),
        ({"input_servers": ["a:0"]}, "input_servers is a:0, but must be host:port, each"),
        ({"input_servers": ["a:65536"]}, "input_servers is a:65536, but must be host:port"),
        ({"max_bad_images": -1}, "max_bad_images is -1, but must not be negative"),
        ({"batch_norm_momentum": 1.0}, "batch_norm_momentum is 1, but must be in [0, 1)"),
        ({"batch_norm_epsilon": 0.0}, "batch_norm_epsilon is 0, but must be positive"),
        ({"dropout": 1.0}, "dropout is 1, but must be in [0, 1)"),
        ({"normal_cells": 4}, "normal_cells is 4, but must be a multiple of 3 in [3, 150]"),
        ({"normal_cells": 0}, "normal_cells is 0, but must be a multiple of 3 in [3, 150]"),
        ({"cell_filters": 12}, "cell_filters is 12, but must be a positive multiple of 8"),
        ({"batch_size": 0}, "batch_size is 0, but must be positive"),
        ({"accumulation_steps": 0}, "accumulation_steps is 0, but must be positive"),
        ({"duration": "0 epochs"}, "duration is 0 epochs, but must be positive"),
        ({"learning_rate": -0.1}, "learning_rate is -0.1, but must not be negative"),
        ({"learning_rate": float("nan")}, "learning_rate is nan, but must be finite"),
        ({"learning_rate_batch": 0}, "learning_rate_batch is 0, but must be positive"),
        ({"warmup_start": -0.5}, "warmup_start is -0.5, but must not be negative, or be -1"),
        ({"end_learning_rate": -1.0}, "end_learning_rate is -1, but must not be negative"),
        ({"decay_power": 0.0}, "decay_power is 0, but must be positive"),
        ({"knots_at": "5 epochs,0 epochs"}, "must be in one unit and in order"),
        ({"knots": (1.0, -1.0)}, "knots is 1,-1, but must not be negative"),
        ({"lars_eeta": 0.0}, "lars_eeta is 0, but must be positive"),
        ({"optimizer_epsilon": -1.0}, "optimizer_epsilon is -1, but must not be negative"),
        ({"clip_norm": -1.0}, "clip_norm is -1, but must not be negative"),
        ({"ema_decay": 1.0}, "ema_decay is 1, but must be in [0, 1)"),
        ({"ema_decay": -0.1}, "ema_decay is -0.1, but must be in [0, 1)"),
        ({"decay_at": "60 epochs,30 epochs"}, "must be in one unit and in order"),
        ({"decay_at": "30 epochs,9000 steps"}, "must be in one unit and in order"),
        ({"decay_factor": 0.0}, "decay_factor is 0, but must be in (0, 1]"),
        ({"momentum": 1.0}, "momentum is 1, but must be in [0, 1)"),
        ({"weight_decay": -1e-4}, "weight_decay is -0.0001, but must not be negative"),
        ({"label_smoothing": 1.0}, "label_smoothing is 1, but must be in [0, 1)"),
        ({"seed": -1}, "seed is -1, but must be in [0, 2**32)"),
        ({"seed": 2**32}, "seed is 4294967296, but must be in [0, 2**32)"),
        (
            {"cache_dir": "gs://b/cache"},
            "cache_dir is 'gs://b/cache', but must be on a disk of this",
        ),
        ({"logical_cpus": -1}, "logical_cpus is -1, but must not be negative"),
        ({"pipeline_stages": 0}, "pipeline_stages is 0, but must be positive"),
        ({"pipeline_stages": 2, "pipeline_balance": (3, 4, 5)}, "pipeline_balance has 3 stages"),
        ({"fusion": "auto", "fusion_segments": (3,)}, "fusion=auto chooses fusion_segments itself"),
        ({"fusion": "auto", "deterministic": True}, "depends on measured times, which are not"),
        ({"fusion": "auto", "pipeline_stages": 2}, "fusion=auto is not for pipelines"),
        ({"fusion_bytes": -1}, "fusion_bytes is -1, but must not be negative"),
        ({"fusion_segments": (76, 20)}, "fusion_segments is 76,20, but must be positive and incr"),
        ({"fusion_segments": (0,)}, "fusion_segments is 0, but must be positive and increasing"),
        ({"all_reduce": "torus"}, "all_reduce='torus' does not exist; did you mean 'torus_2d'?"),
        ({"loss_scale": -1.0}, "loss_scale is -1, but must not be negative"),
        ({"eval_every": "0 steps"}, "eval_every is 0 steps, but must be positive"),
        ({"eval_batch_size": -1}, "eval_batch_size is -1, but must not be negative"),
        ({"checkpoint_every": "0 steps"}, "checkpoint_every is 0 steps, but must be positive"),
        ({"keep_checkpoints": 0}, "keep_checkpoints is 0, but must be positive"),
        ({"log_every": "0 epochs"}, "log_every is 0 epochs, but must be positive"),
        ({"stop_at_accuracy": 76.0}, "stop_at_accuracy is 76, but must be in [0, 1)"),
        ({"profile_steps": (5,)}, "profile_steps is 5, but must be the first step, from 1, and"),
        ({"profile_steps": (0, 5)}, "profile_steps is 0,5, but must be the first step, from 1"),
        ({"profile_steps": "6,5"}, "profile_steps is 6,5, but must be the first step"),
        ({"profile_steps": "5.5,7"}, "profile_steps is '5.5', but must be a whole number"),
        # No such choice.
        ({"model": "resnet-50"}, "model='resnet-50' does not exist; did you mean 'resnet50'"),
        ({"model": "xxx"}, "model='xxx' does not exist; choose from resnet18, resnet34"),
        ({"train_crop": "random"}, "did you mean 'random_resized'"),
        ({"resize_method": "cubic"}, "did you mean 'bicubic'"),
        ({"shard_by": "file"}, "did you mean 'files'"),
        ({"stem": "tiny"}, "choose from imagenet, small"),
        ({"schedule": "polynom"}, "did you mean 'polynomial'"),
        ({"rate_scaling": "root"}, "did you mean 'sqrt'"),
        ({"weight_decay_on": "biases"}, "did you mean"),
        ({"strategy": "mirror"}, "did you mean 'mirrored'"),
        ({"precision": "bfloat16"}, "did you mean 'mixed_bfloat16'"),
        # Contradictions.
        ({"batch_size": 10, "accumulation_steps": 4}, "batch_size 10 cannot be split into"),
        ({"synthetic": True}, "synthetic data needs num_classes"),
        ({"loss_scale": 128.0}, "loss_scale=128 is for precision=mixed_float16, but precision is"),
        ({"tpu": "local", "strategy": "mirrored"}, "tpu='local' contradicts strategy=mirrored"),
        ({"schedule": "piecewise_linear"}, "schedule=piecewise_linear needs knots_at and knots"),
        (
            {"schedule": "piecewise_linear", "knots": (0.0, 1.0), "knots_at": "0 steps"},
            "there are 2 knots, but 1 times in",
        ),
        ({"xla": True, "strategy": "tpu"}, "a TPU always compiles"),
        ({"trivial_augment": True, "rand_augment": (2, 9)}, "trivial_augment excludes rand_augmen"),
        ({"random_erasing": 1.5}, "random_erasing is 1.5, but must be in [0, 1]"),
        (
            {"train_crop": "pad", "image_size": 8, "crop_padding": 8},
            "crop_padding is 8, but must be less than image_size, 8",
        ),
        (
            {"train_crop": "pad", "train_sizes": (8, 4), "train_until": "1 steps,2 steps"},
            "crop_padding is 4, but must be less than train_sizes, 4",
        ),
        (
            {"cutout": 20, "train_sizes": (16,), "train_until": "1 steps"},
            "cutout is 20, but must be at most train_sizes, 16",
        ),
    ],
    ids=str,
)
def test_rejected(changes, message):
    for make in (lambda: Config(**changes), lambda: Config().replace(**changes)):
        with pytest.raises(UserError) as caught:
            make()
        assert message in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_size": 12, "accumulation_steps": 4},
        {"synthetic": True, "num_classes": 1},
        {"loss_scale": 128.0, "precision": "mixed_float16"},
        {"tpu": "local", "strategy": "auto"},
        {"tpu": "local", "strategy": "tpu"},
        {"xla": True, "strategy": "mirrored"},
        {"train_crop": "pad", "image_size": 8, "crop_padding": 7},
        {"crop_min_area": 1.0, "eval_crop_fraction": 1.0, "decay_factor": 1.0},
        {"decay_at": "30 epochs,30 epochs"},
        {"profile_steps": (1, 1)},
        {"optimizer": "sgd", "lars_eeta": 0.001},
        {"optimizer": "rmsprop", "optimizer_epsilon": 1.0},
        {"optimizer": "muon", "nesterov": False, "muon_momentum": 0.5},
        {"schedule": "cosine", "end_learning_rate": 0.1, "warmup": "0 steps"},
        {"ema_decay": 0.9, "ema_every": 5},
    ],
    ids=str,
)
def test_allowed_at_the_edge(changes):
    Config(**changes)


def test_unknown_option_with_the_nearest():
    for make in (
        lambda: Config().replace(bach_size=3),
        lambda: Config.from_json('{"bach_size": 3}'),
        lambda: parse_option("bach_size", "3"),
    ):
        with pytest.raises(UserError, match=r"no option 'bach_size'; did you mean 'batch_size'"):
            make()
    with pytest.raises(UserError, match=r"no option 'qqq'$"):
        Config().replace(qqq=3)


# --- Options that nothing would read


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"lars_eeta": 0.01},
            "lars_eeta=0.01 is for optimizer=lars, but optimizer is sgd: leave it out; its default "
            "is 0.001",
        ),
        ({"muon_momentum": 0.5, "optimizer": "lars"}, "is for optimizer=muon, but optimizer is l"),
        ({"muon_head_rate_factor": 2.0}, "is for optimizer=muon, but optimizer is sgd"),
        (
            {"nesterov": False, "optimizer": "adam"},
            "nesterov=false is for optimizer=sgd or optimizer=lars or optimizer=muon, but",
        ),
        ({"rate_in_momentum": "yes", "optimizer": "adam"}, "but optimizer is adam"),
        (
            {"optimizer_epsilon": 1.0},
            "optimizer_epsilon=1 has no effect, because optimizer is sgd: leave it out; its "
            "default is 0",
        ),
        (
            {"optimizer_epsilon": 1.0, "optimizer": "muon"},
            "has no effect, because optimizer is muon",
        ),
        ({"bias_rate_factor": 2.0, "optimizer": "tfa:LAMB"}, "but optimizer is tfa:LAMB"),
        ({"decay_at": "3 epochs", "schedule": "cosine"}, "decay_at=3 epochs is for schedule=step"),
        ({"decay_factor": 0.2, "schedule": "constant"}, "decay_factor=0.2 is for schedule=steps"),
        ({"decay_every": "2 epochs", "schedule": "polynomial"}, "decay_every=2 epochs is for"),
        ({"decay_power": 1.0}, "decay_power=1 is for schedule=polynomial, but schedule is steps"),
        ({"end_learning_rate": 0.1}, "is for schedule=polynomial or schedule=cosine, but"),
        (
            {"knots": (0.0, 1.0), "knots_at": "0 steps,9 steps", "schedule": "cosine"},
            "knots_at=0 steps,9 steps is for schedule=piecewise_linear, but schedule is cosine: "
            "leave it out; its default is empty",
        ),
        ({"warmup_start": 0.1, **KNOTS}, "but schedule is piecewise_linear"),
        ({"warmup": "2 epochs", **KNOTS}, "warmup=2 epochs is for schedule=constant or"),
        (
            {"decay_at": "3 epochs", "decay_every": "2 epochs"},
            "decay_at=3 epochs has no effect, because decay_every is 2 epochs: leave it out",
        ),
        ({"celu_alpha": 0.3, "model": "resnet9"}, "is for activation=celu, but activation is auto"),
        ({"whitening_images": 5000}, "is for model=resnet9 or model=airbench94 or"),
        (
            {"whitening_images": 5000, "model": "resnet9"},
            "has no effect, because whitening is false",
        ),
        (
            {"all_reduce_group": 4, "all_reduce": "flat"},
            "is for all_reduce=hierarchical or all",
        ),
        ({"all_reduce_dtype": "float16", **ONE}, "has no effect, because strategy is one_device"),
        ({"fusion_bytes": 0, **ONE}, "has no effect, because strategy is one_device"),
        ({"fusion_segments": (20,), **ONE}, "has no effect, because strategy is one_device"),
        (
            {"shuffle_buffer": 5, "data_on_device": True, "train_crop": "pad"},
            "shuffle_buffer=5 has no effect, because data_on_device is true",
        ),
        ({"decay_factor": 0.5, "decay_at": ()}, "has no effect, because decay_at is empty: leave"),
        ({"warmup": "0 steps", "warmup_start": 0.1}, "has no effect, because warmup is 0 steps"),
        ({"warmup": "0 epochs", "warmup_start": 0.0}, "because warmup is 0 epochs"),
        (
            {"weight_decay_on": "all", "weight_decay": 0},
            "weight_decay_on=all has no effect, because weight_decay is 0: leave it out",
        ),
        ({"ema_every": 5}, "ema_every=5 has no effect, because ema_decay is 0: leave it out"),
        ({"lookahead_decay": 0.9}, "has no effect, because lookahead_every is 0"),
        ({"distillation_temperature": 2.0}, "has no effect, because teacher is empty"),
        ({"label_smoothing": 0.1, "teacher": "t"}, "=0.1 has no effect, because teacher is t"),
        ({"class_weights": "balanced", "teacher": "t"}, "has no effect, because teacher is t"),
        ({"teacher": "t", "loss": "focal"}, "teacher=t is for loss=cross_entropy, but loss is fo"),
        ({"tta_fraction": 0.25}, "has no effect, because test_time_augmentation is none"),
        ({"proxy_model": "resnet8"}, "has no effect, because select_by_loss is 1"),
        ({"proxy_every": 4}, "has no effect, because proxy_model is empty"),
        ({"bias_rate_factor_on": "batch_norm"}, "has no effect, because bias_rate_factor is 1"),
        ({"crop_min_area": 0.25, "train_crop": "pad"}, "is for train_crop=random_resized or"),
        ({"crop_padding": 3}, "is for train_crop=pad, but train_crop is random_resized"),
        (
            {"fusion_bytes": 0, "fusion_segments": (20, 76)},
            "fusion_bytes=0 has no effect, because fusion_segments is 20,76: leave it out",
        ),
        (
            {"pipeline_schedule": "1f1b"},
            "has no effect, because pipeline_stages is 1: leave it out",
        ),
        ({"pipeline_balance": (3, 4)}, "has no effect, because pipeline_stages is 1"),
        ({"pipeline_servers": ("a:1",)}, "has no effect, because pipeline_stages is 1"),
        ({"dropout": 0.2}, "dropout=0.2 is for model=alexnet_bn, but model is resnet50: leave it"),
        (
            {"stem": "small", "model": "resnet9"},
            "stem=small is for model=resnet18 or model=resnet34",
        ),
    ],
    ids=str,
)
def test_without_effect(changes, message):
    with pytest.raises(UserError) as caught:
        Config(**changes)
    assert message in str(caught.value)


def test_without_effect_has_exceptions():
    Config(whitening_images=5000, model="resnet9", whitening=True)
    Config(whitening_images=5000, model="airbench94")
    Config(decay_factor=0.5, decay_every="2 epochs")
    # Those of earlier versions' config.json return to their defaults.
    assert Config.from_json('{"warmup": "0 epochs", "warmup_start": 0.1}') == Config(
        warmup="0 epochs"
    )


def test_a_warmup_without_effect_is_reported(capsys):
    Config.from_flagfile("photos").warn_of_unused_warmup([])
    assert not capsys.readouterr().err
    Config.from_flagfile("photos", warmup="1 epoch")
    expected = "warmup without effect: there is no warmup, because the scaled learn"
    assert expected in capsys.readouterr().err
    for changes in ({"batch_size": 64}, {"warmup_start": 0}, {"warmup": "0 epochs"}):
        Config.from_flagfile("photos", **{"warmup": "1 epoch", **changes})
    assert capsys.readouterr().err == ""


def test_options_that_do_not_exist():
    with pytest.raises(UserError, match="there is no option 'learning_ratee'; did you mean 'lear"):
        Config(learning_ratee=0.1)
    with pytest.raises(UserError, match=r"there is no option 'lr'$"):
        Config(lr=0.1)


@pytest.mark.parametrize("name", ["runs/a\nb", "runs/a\0b", "runs/\udcff"])
def test_directories_that_no_message_can_name(name):
    with pytest.raises(UserError, match="must be text without control characters") as caught:
        Config(model_dir=name)
    assert str(caught.value).isprintable()
    assert Config(model_dir="runs/ü ñ 日\u3000本").model_dir.startswith("runs")


def test_decoupled_weight_decay_needs_a_learning_rate():
    with pytest.raises(UserError, match=r"but learning_rate is 0: give a positive learning_rate"):
        Config(decoupled_weight_decay=True, learning_rate=0)
    Config(learning_rate=0)


def test_another_choice_resets_dependent_options():
    config = Config(optimizer="lars", lars_eeta=0.01, momentum=0.8)
    assert config.replace(optimizer="sgd") == Config(momentum=0.8)
    with pytest.raises(UserError, match=r"lars_eeta=0\.02 is for optimizer=lars"):
        config.replace(optimizer="sgd", lars_eeta=0.02)
    for name in ("augment_in_groups", "alternating_flip"):
        config = Config(data_on_device=True, train_crop="pad", **{name: True})
        assert config.replace(data_on_device=False) == Config(train_crop="pad")


# --- JSON


@pytest.mark.parametrize("config", [Config(), CHANGED], ids=["default", "changed"])
def test_json_round_trip(config):
    text = config.to_json()
    assert text.endswith("}\n")
    assert Config.from_json(text) == config
    assert list(json.loads(text)) == option_names()


def test_json_is_readable():
    values = json.loads(CHANGED.to_json())
    assert values["duration"] == "1281167 examples"
    assert values["decay_at"] == ["0.5 epochs", "12 epochs"]


def test_json_of_an_older_version_takes_the_defaults():
    assert Config.from_json('{"seed": 3}') == Config(seed=3)


@pytest.mark.parametrize(
    ("given", "ignored"),
    [
        ({}, {"lars_eeta": 0.01}),
        ({}, {"celu_alpha": 0.3, "whitening_images": 5000, "loss_scale": 8.0}),
        ({"weight_decay": 0.0}, {"weight_decay_on": "all"}),
        ({"fusion_segments": (20,)}, {"fusion_bytes": 0, "pipeline_schedule": "1f1b"}),
        ({"decay_every": "2 epochs"}, {"decay_at": ["3 epochs"]}),
    ],
)
def test_json_of_a_run_that_had_options_without_effect(given, ignored):
    text = json.dumps({**json.loads(Config(**given).to_json()), **ignored})
    assert Config.from_json(text) == Config(**given)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a configuration"),
        ("{", "not a configuration"),
        ("[1]", "Expected `object`, got `array`"),
        ('{"seed": null}', "seed is None"),
        ('{"seed": "x"}', "seed is 'x'"),
        ('{"duration": 90}', "duration is 90"),
        ('{"decay_at": [[1]]}', "decay_at is"),
    ],
)
def test_json_that_is_not_a_configuration(text, message):
    with pytest.raises(UserError, match=message):
        Config.from_json(text)


# --- Differences


def test_differences():
    assert Config().differences(Config()) == []
    changed = Config(seed=1, data_dir="/elsewhere", data_threads=3)
    assert Config().differences(changed) == ["data_dir", "data_threads", "seed"]
    assert Config().differences(changed, all_options=False) == ["seed"]


def test_what_shapes_the_weights_may_not_change_on_resume():
    free = set(CHANGED.differences(Config())) - set(
        CHANGED.differences(Config(), all_options=False)
    )
    assert free == {
        "data_dir",
        "cache",
        "cache_dir",
        "data_threads",
        "gpus",
        # The logical replicas stay.
        *("precision", "strategy", "logical_cpus", "deterministic"),
        *("fusion_segments", "all_reduce", "all_reduce_group", "all_reduce_dtype"),
        "input_servers",
        "resize_kernel",
        "max_bad_images",
        "max_pixels",
        "model_dir",
        "eval_batch_size",
        "eval_image_size",
        "keep_checkpoints",
        "pipeline_stages",
        "pipeline_servers",
        "pipeline_balance",
        "pipeline_schedule",
        "rematerialize",
        "log_every",
        "steps_per_call",
        "best_metric",
        "stop_at_accuracy",
        "early_stopping",
        "keep_best",
        "tpu",
        "eval_every",
        "checkpoint_every",
        "test_time_augmentation",
        "tta_fraction",
        "tensorboard",
        "examine",
        "profile_steps",
        "mlperf_log",
    }


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes(path):
    Config.from_flagfile(path)


# --- Every option is read by something


def unread_options(names, config_source, other_sources):
    """Returns the options that no code reads.

    An option is read by ``config.NAME`` (or ``x.config.NAME``, ``options.NAME``), or by a property
    of Config that is itself read.
    """
    read = set()
    for source in other_sources:
        read |= _reads(ast.parse(source))
    for function in ast.walk(ast.parse(config_source)):
        if isinstance(function, ast.FunctionDef) and function.name in read:
            read |= {
                node.attr
                for node in ast.walk(function)
                if isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "self"
            }
    return [name for name in names if name not in read]


def _reads(tree):
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and _is_config(node.value)
    }


def _is_config(node):
    return (isinstance(node, ast.Name) and node.id in ("config", "options")) or (
        isinstance(node, ast.Attribute)
        and node.attr in ("config", "_config", "options", "_options")
    )


def test_every_option_is_read():
    declare = {PACKAGE / "config.py", *PACKAGE.rglob("*options.py")}
    others = [path.read_text() for path in PACKAGE.rglob("*.py") if path not in declare]
    declared = "\n".join(
        path.read_text().replace("from __future__ import annotations\n", "") for path in declare
    )
    # The training code passes models their options by name.
    of_models = {
        argument.arg
        for path in (PACKAGE / "models").glob("*.py")
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef)
        for argument in function.args.kwonlyargs
    }
    names = [name for name in (*option_names(), "made_up") if name not in of_models]
    unread = unread_options(names, declared, others)
    assert unread == ["made_up"], "read options as config.NAME or options.NAME, or remove them"


@pytest.mark.parametrize(
    ("code", "read"),
    [
        ("x = config.rate", True),
        ("x = self.config.rate + 1", True),
        ("x = self._config.rate", True),
        ("x = options.rate", True),
        ("x = config.scaled_rate", True),
        ("x = self.rate", False),
        ("config.rate = 3", False),
        ("x = optimizer.rate", False),
        ("x = rate", False),
        ("x = 'config.rate'  # config.rate", False),
        ("NAMES = ('rate',)", False),
        ("x = config.unscaled", False),
    ],
)
def test_search_for_reads(code, read):
    config_source = (
        "class Config:\n"
        "    def __post_init__(self):\n        self.rate\n"
        "    def scaled_rate(self):\n        return 2 * self.rate\n"
        "    def unscaled(self):\n        return 2\n"
    )
    assert (unread_options(["rate"], config_source, [code]) == []) == read


def test_types():
    assert option_type("batch_size") is int
    assert option_type("duration") is Duration
    assert option_type("decay_at") == tuple[Duration, ...]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"train_sizes": (128,)}, "train_until must have equally many values, not 1 and 0"),
        (
            {"train_sizes": (0,), "train_until": "1 epochs"},
            "train_sizes is 0, but must be positive",
        ),
        ({"train_sizes": "9,9", "train_until": "2 epochs,1 epochs"}, "in one unit and in order"),
        ({"size_ramp": "128,32"}, "size_ramp needs size_ramp_at"),
        ({"size_ramp": "128"}, "size_ramp is 128, but must have two positive values"),
        (
            {"size_ramp_at": "1 epochs"},
            "size_ramp_at=1 epoch has no effect, because size_ramp is",
        ),
        (
            {"size_ramp": "224,32", **RAMP_AT},
            "starts at 224, but must be less than image_size, 224",
        ),
        ({"size_ramp": "120,32", **RAMP_AT}, "multiples of 32, but size_ramp is 120"),
        ({"size_ramp": "120,40", **RAMP_AT}, "multiples of 40, but image_size is 224"),
        ({"size_ramp": "128,32", "cutout": 140, **RAMP_AT}, "cutout is 140, but .* size_ramp, 128"),
        (
            {"size_ramp": "128,32", "train_sizes": "9", "train_until": "1 epochs", **RAMP_AT},
            "size_ramp=128,32 has no effect, because train_sizes is 9",
        ),
    ],
)
def test_train_sizes_need_times(options, told):
    with pytest.raises(UserError, match=told):
        Config(**options)
