"""Every option of a training run: its type, default, help and check, each written once.

A :class:`Config` is made from a flagfile, from keyword arguments or, in ``commands``, from absl
flags that are derived from the fields below. It is frozen, checked before any work starts, and
written beside the model it made. Nothing here imports TensorFlow.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import numbers
import os
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from imagenet_fast.batch_tables import BATCH_TABLES, values_for_batch
from imagenet_fast.distribute.gpus import parse_gpus
from imagenet_fast.distribute.names import ALL_REDUCE_ALGORITHMS, ALL_REDUCE_DTYPES
from imagenet_fast.durations import Duration
from imagenet_fast.errors import UserError, nearest, require_choice
from imagenet_fast.models.names import MODEL_NAMES
from imagenet_fast.paths import Path, is_local, to_path
from imagenet_fast.pipeline_parallel.names import PIPELINE_SCHEDULES, REMATERIALIZE

_COMMENT_MARKS = ("#", "//")
_RECIPES = "flags"  # in a clone of the project
_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Duration: "a duration, as '90 epochs'",
}
_NUMBERS = {int: numbers.Integral, float: numbers.Real}


class _Check(NamedTuple):
    """Which values an option may have.

    Attributes:
      allows: tells whether a value is allowed.
      must: what it asks for, to complete "... must ...".
    """

    allows: Callable[[Any], bool]
    must: str


class _Beside(NamedTuple):
    """What another option must be for this one to have an effect.

    Attributes:
      option: the other's name.
      values: of which it must have one; none: it must not have its default.
      others: whether it must have a value that is none of these instead.
    """

    option: str
    values: tuple[Any, ...] = ()
    others: bool = False

    def holds(self, value: Any, default: Any) -> bool:
        """Returns whether the other option is what it must be."""
        if not self.values:
            return value != default
        return (value in self.values) != self.others


def _is_address(value: str) -> bool:
    host, _, port = value.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 2**16


def _is_gpus(value: str) -> bool:
    try:
        parse_gpus(value)
    except ValueError:
        return False
    return True


def _ordered(value: tuple[Duration, ...]) -> bool:
    amounts = [at.amount for at in value]
    return len({at.unit for at in value}) <= 1 and amounts == sorted(amounts)


_POSITIVE = _Check(lambda value: value > 0, "be positive")
_ALL_POSITIVE = _Check(lambda value: all(entry > 0 for entry in value), "be positive")
_LASTS = _Check(lambda value: value.amount > 0, "be positive")
_NOT_NEGATIVE = _Check(lambda value: value >= 0, "not be negative")
_SHARE = _Check(lambda value: 0 <= value < 1, "be in [0, 1)")
_PART = _Check(lambda value: 0 < value <= 1, "be in (0, 1]")
_PROBABILITY = _Check(lambda value: 0 <= value <= 1, "be in [0, 1]")
_ORDERED = _Check(_ordered, "be in one unit and in order")
_ADDRESSES = _Check(lambda value: all(map(_is_address, value)), "be host:port, each")
_LARS = _Beside("optimizer", ("lars",))
_MUON = _Beside("optimizer", ("muon",))
_OWN_OPTIMIZERS = _Beside("optimizer", ("sgd", "lars", "muon"))
_OTHER_OPTIMIZERS = _Beside("optimizer", ("sgd", "lars", "muon"), others=True)
_STEPS = _Beside("schedule", ("steps",))
_KNOTS = _Beside("schedule", ("piecewise_linear",))
_WARMUP = _Beside("schedule", ("constant", "steps", "polynomial", "cosine"))
_GPUS = _Check(_is_gpus, "be a number of GPUs, or ids as 0,2 or 2, and each once")


def _option(
    default: Any,
    help: str,
    *,
    group: str,
    choices: tuple[str, ...] = (),
    check: _Check | None = None,
    beside: _Beside | None = None,
    free: bool = False,
) -> Any:
    """Declares a field of :class:`Config`.

    Args:
      default: its value where none is given.
      help: one line for ``--helpfull``.
      group: the heading in ``--helpfull`` under which it stands.
      choices: the values allowed, if they can be listed.
      check: which values are allowed; None: all.
      beside: without it, a value other than the default is refused; None: it needs no other option.
      free: whether it may change when a run is continued, because it has no part in the weights.
    """
    metadata = {
        "help": help,
        "group": group,
        "choices": choices,
        "check": check,
        "beside": beside,
        "free": free,
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Config:
    """The options of a training run. ``imagenet-fast train --helpfull`` lists them.

    Durations may be given as text (``duration="90 epochs"``), batch sizes are global: images in a
    weight update, over all replicas and workers.

    Raises:
      UserError: if an option does not exist, has a value that it cannot have, or contradicts
        another one.
    """

    # Data.
    data_dir: str = _option(
        "", "directory of TFRecord shards, as `prepare` writes them", group="data", free=True
    )
    synthetic: bool = _option(
        False, "train on random images instead of data_dir, to time everything else", group="data"
    )
    num_classes: int = _option(
        0,
        "number of classes; 0: as the manifest in data_dir says",
        group="data",
        check=_NOT_NEGATIVE,
    )
    label_offset: int = _option(
        0, "added to each label when read: -1 for shards whose first class is 1", group="data"
    )
    image_size: int = _option(
        224,
        "height and width of the images that the model sees, in pixels",
        group="data",
        check=_POSITIVE,
    )
    train_sizes: tuple[int, ...] = _option(
        (),
        "progressive resizing: sizes of training images at first, as 128,160, each until its time "
        "in train_until; then image_size",
        group="data",
        check=_ALL_POSITIVE,
    )
    train_until: tuple[Duration, ...] = _option(
        (),
        "when each of train_sizes ends, counted from the start of the run, as '10 epochs,20 "
        "epochs'; also steps or examples",
        group="data",
        check=_ORDERED,
    )
    train_crop: str = _option(
        "random_resized",
        "which part of a training image is taken; random_resized: of random area and aspect, as in "
        "torchvision; inception: the same as TensorFlow draws it, in recipes for TPUs and "
        "MLPerf; pad: a border around, then a random window; none: the centre, as in evaluation",
        group="data",
        choices=("random_resized", "inception", "pad", "none"),
    )
    crop_min_area: float = _option(
        0.08,
        "least area of a random_resized or inception crop, as a fraction of the image; inception "
        "never takes less than a tenth",
        group="data",
        check=_PART,
        beside=_Beside("train_crop", ("random_resized", "inception")),
    )
    crop_attempts: int = _option(
        10,
        "random_resized or inception crops that may fail to fit before the middle is taken",
        group="data",
        check=_POSITIVE,
        beside=_Beside("train_crop", ("random_resized", "inception")),
    )
    crop_padding: int = _option(
        4,
        "pixels added at each side by train_crop=pad",
        group="data",
        check=_NOT_NEGATIVE,
        beside=_Beside("train_crop", ("pad",)),
    )
    crop_border: str = _option(
        "zeros",
        "what train_crop=pad adds; zeros; reflect: the image in a mirror",
        group="data",
        choices=("zeros", "reflect"),
        beside=_Beside("train_crop", ("pad",)),
    )
    flip: bool = _option(True, "mirror half of the training images", group="data")
    alternating_flip: bool = _option(
        False,
        "mirror a training image in every second epoch, half of them in the first, in place of at "
        "random; with data_on_device (Jordan 2024)",
        group="data",
        beside=_Beside("data_on_device"),
    )
    cutout: int = _option(
        0,
        "side of a square somewhere in each training image that is replaced by pixel_mean, in "
        "pixels; 0: none",
        group="data",
        check=_NOT_NEGATIVE,
    )
    augment_in_groups: bool = _option(
        False,
        "draw the crop, flip and cutout of an epoch for near-equal groups of images, at most "
        "200, in place of for each image; with data_on_device (Page 2019)",
        group="data",
        beside=_Beside("data_on_device"),
    )
    color_jitter: float = _option(
        0.0,
        "strength of random brightness, contrast and saturation (0.4 in fb.resnet.torch); 0: none",
        group="data",
        check=_SHARE,
    )
    lighting: float = _option(
        0.0,
        "standard deviation of AlexNet's PCA lighting noise (0.1 in fb.resnet.torch); 0: none",
        group="data",
        check=_NOT_NEGATIVE,
    )
    rand_augment_layers: int = _option(
        0,
        "random operations of RandAugment done to each training image, one after another "
        "(2 in the paper, for ResNet-50); 0: none",
        group="data",
        check=_NOT_NEGATIVE,
    )
    rand_augment_magnitude: float = _option(
        10.0,
        "strength of RandAugment's operations, from 0 to 10, AutoAugment's strongest (9 in the "
        "paper, for ResNet-50)",
        group="data",
        check=_Check(lambda value: 0 <= value <= 10, "be in [0, 10]"),
        beside=_Beside("rand_augment_layers"),
    )
    trivial_augment: bool = _option(
        False,
        "TrivialAugment: one random operation of random strength on each training image, from "
        "torchvision's wide ranges",
        group="data",
    )
    random_erasing: float = _option(
        0.0,
        "probability that a box of a training image, of 2% to 33% of its area, is replaced by "
        "pixel_mean, as torchvision does; 0: none",
        group="data",
        check=_PROBABILITY,
    )
    mixup_alpha: float = _option(
        0.0,
        "blend each training image and its label with another's, in shares drawn from "
        "Beta(alpha, alpha) (0.2 in the paper, for ImageNet); 0: do not",
        group="data",
        check=_NOT_NEGATIVE,
    )
    cutmix_alpha: float = _option(
        0.0,
        "paste a box of another training image over each, of an area drawn likewise, and blend "
        "their labels by area (1 in the paper); with mixup_alpha, half of the images get one, half "
        "the other; 0: do not",
        group="data",
        check=_NOT_NEGATIVE,
    )
    resize_method: str = _option(
        "bilinear", "interpolation of resized images", group="data", choices=("bilinear", "bicubic")
    )
    antialias: bool = _option(
        False,
        "antialias what is made smaller, as Pillow and torchvision do, in training, evaluation and "
        "exported models; published recipes in TensorFlow do not",
        group="data",
    )
    resize_kernel: str = _option(
        "auto",
        "native: an op of our own, compiled at first use, which takes a C++ compiler; tensorflow: "
        "its own, slower ones; auto: native if it can be had; pixels are the same",
        group="data",
        choices=("auto", "native", "tensorflow"),
        free=True,
    )
    jpeg_dct: str = _option(
        "accurate",
        "inverse DCT of JPEGs; accurate: as Pillow's; fast: cheaper, pixels differ a little",
        group="data",
        choices=("accurate", "fast"),
    )
    jpeg_upsampling: str = _option(
        "smooth",
        "enlarging of the colours, which most JPEGs hold at half the width and height; "
        "smooth: interpolated, as Pillow's; plain: repeated, which is cheaper",
        group="data",
        choices=("smooth", "plain"),
    )
    jpeg_scaling: bool = _option(
        False,
        "decode JPEGs at 1/2, 1/4 or 1/8 of their size where that is still enough for image_size: "
        "cheaper, pixels differ a little",
        group="data",
    )
    eval_crop_fraction: float = _option(
        0.875,
        "side of the centre crop in evaluation, as a fraction of the image's shorter side",
        group="data",
        check=_PART,
    )
    max_pixels: int = _option(
        178_956_970,
        "pixels of an image, height times width; evaluation and exported models refuse larger "
        "images before they are decoded, and training refuses larger PNGs (default: where Pillow, "
        "and so prepare, refuses)",
        group="data",
        check=_POSITIVE,
        free=True,
    )
    pixel_mean: tuple[float, ...] = _option(
        (123.675, 116.28, 103.53),
        "means of red, green and blue, which are subtracted from pixels in 0..255",
        group="data",
        check=_Check(
            lambda value: len(value) == 3 and min(value) >= 0 and max(value) <= 255,
            "have three values in [0, 255]",
        ),
    )
    pixel_std: tuple[float, ...] = _option(
        (58.395, 57.12, 57.375),
        "standard deviations of red, green and blue, by which those differences are divided",
        group="data",
        check=_Check(
            lambda value: len(value) == 3 and min(value) > 0, "have three positive values"
        ),
    )
    shuffle_buffer: int = _option(
        8192,
        "training images from which the next one is drawn at random; they are held in memory",
        group="data",
        check=_POSITIVE,
    )
    shard_by: str = _option(
        "auto",
        "records: each worker reads all shards and keeps its share, so that batches are the same "
        "for any number of workers; files: each worker reads shards of its own; "
        "auto: files for data above 1 GiB",
        group="data",
        choices=("auto", "records", "files"),
    )
    cache: str = _option(
        "none",
        "what of the training images each host holds in memory, read before the first step; none; "
        "encoded: records; decoded: images, for train_crop=pad or none; the order stays the same",
        group="data",
        choices=("none", "encoded", "decoded"),
        free=True,
    )
    data_on_device: bool = _option(
        False,
        "hold all images in the memory of each accelerator, which also shuffles, crops, mirrors "
        "and cuts them: no work for the host; for small images, with train_crop=pad or none",
        group="data",
    )
    cache_dir: str = _option(
        "",
        "directory on a local disk to which each host copies the shards that it reads; empty: none",
        group="data",
        check=_Check(is_local, "be on a disk of this machine"),
        free=True,
    )
    data_threads: int = _option(
        0,
        "threads that read and decode in each process; 0: one a core",
        group="data",
        check=_NOT_NEGATIVE,
        free=True,
    )
    input_servers: tuple[str, ...] = _option(
        (),
        "host:port of each `imagenet-fast input-server` that reads and decodes training images in "
        "place of this process; the order stays the same",
        group="data",
        check=_ADDRESSES,
        free=True,
    )
    max_bad_images: int = _option(
        100,
        "unreadable images skipped between two evaluations before the run stops",
        group="data",
        check=_NOT_NEGATIVE,
        free=True,
    )

    # Model.
    model: str = _option("resnet50", "network", group="model", choices=MODEL_NAMES)
    width: int = _option(
        0,
        "channels of the first convolution of resnet9 and of the first group of airbench94 to "
        "airbench96, with which those of the others grow; 0: as published, 64, or 128 of "
        "airbench95 and airbench96",
        group="model",
        check=_NOT_NEGATIVE,
    )
    pool_order: str = _option(
        "conv_bn_relu_pool",
        "where resnet9 pools; conv_bn_relu_pool; conv_bn_pool_relu: the same function for less "
        "work; conv_pool_bn_relu: another one for less again",
        group="model",
        choices=("conv_bn_relu_pool", "conv_bn_pool_relu", "conv_pool_bn_relu"),
    )
    activation: str = _option(
        "relu", "of resnet9: relu or celu", group="model", choices=("relu", "celu")
    )
    celu_alpha: float = _option(
        0.075,
        "limit of celu at minus infinity, without its sign",
        group="model",
        check=_POSITIVE,
    )
    logits_scale: float = _option(
        0.0,
        "what the logits of resnet9 and airbench94 to airbench96 are multiplied by; 0: as "
        "published, 1/8 and 1/9",
        group="model",
        check=_NOT_NEGATIVE,
    )
    whitening: bool = _option(
        False,
        "begin resnet9 with filters of 3x3 that whiten the patches of training images, and stay "
        "as they are",
        group="model",
    )
    identity_init: bool = _option(
        True,
        "start as many filters of each convolution of airbench94 to airbench96 as it has inputs "
        "at the identity",
        group="model",
    )
    normal_cells: int = _option(
        18,
        "normal cells of amoebanet_b and amoebanet_d, L in GPipe's (L, D): a third of them before "
        "each of two reductions and after",
        group="model",
        check=_Check(lambda value: value > 0 and value % 3 == 0, "be a positive multiple of 3"),
    )
    cell_filters: int = _option(
        208,
        "channels of each operation in the first cells of amoebanet_b and amoebanet_d, D in "
        "GPipe's (L, D); each reduction doubles them",
        group="model",
        check=_Check(lambda value: value > 0 and value % 8 == 0, "be a positive multiple of 8"),
    )
    whitening_images: int = _option(
        10_000,
        "number of training images, the first ones, from which whitening filters are made",
        group="model",
        check=_POSITIVE,
    )
    initial_weights: str = _option(
        "",
        "what the weights begin as: the model_dir of a run, a SavedModel of `export`, or a file of "
        "Keras applications' weights (.h5); the last layer starts anew, unless the classes are the "
        "same as those of the run; empty: random",
        group="model",
    )
    freeze_through: str = _option(
        "",
        "with initial_weights: the first layers, through this one or those whose names begin so "
        "(stem, stage3; pool2 of AlexNet), stay as they are; empty: all are trained",
        group="model",
    )
    stem: str = _option(
        "imagenet",
        "first layers of resnet18 to resnet152; imagenet: a 7x7 convolution and a pool, each of "
        "stride 2; small: a 3x3 convolution, for images of about 32 pixels",
        group="model",
        choices=("imagenet", "small"),
    )
    stride_on_1x1: bool = _option(
        False,
        "put a bottleneck's stride in its first convolution, as ResNet v1, not in its 3x3, as v1.5",
        group="model",
    )
    zero_gamma: bool = _option(
        True, "start the last batch norm of each residual block at gamma 0", group="model"
    )
    batch_norm_momentum: float = _option(
        0.9,
        "share of the old moving average that a step keeps",
        group="model",
        check=_SHARE,
    )
    batch_norm_epsilon: float = _option(
        1e-5,
        "added to the variance in batch norm",
        group="model",
        check=_POSITIVE,
    )
    batch_norm_scale: bool = _option(
        True, "train gamma in batch norm of resnet9; else it is 1", group="model"
    )
    batch_norm_batch_size: int = _option(
        0,
        "images over which batch norm takes its statistics: so many neighbouring replicas work "
        "together, or each takes several for parts of its images (ghost batch norm); 0: one for "
        "each replica",
        group="model",
        check=_NOT_NEGATIVE,
    )
    dropout: float = _option(
        0.5,
        "share of AlexNet's fully connected units dropped",
        group="model",
        check=_SHARE,
    )

    batch_norm_after_pool5: bool = _option(
        True, "AlexNet's fifth batch norm, after its last pool (Jia et al. 2018)", group="model"
    )

    # Optimization.
    batch_size: int = _option(
        256,
        "images in a weight update, over all replicas",
        group="optimization",
        check=_POSITIVE,
    )
    accumulation_steps: int = _option(
        1,
        "micro-batches that each replica's share is split into, to save memory",
        group="optimization",
        check=_POSITIVE,
    )
    duration: Duration = _option(
        Duration(90, "epochs"),
        "length of the run, as '90 epochs' or '5000 steps'; also examples",
        group="optimization",
        check=_LASTS,
    )
    optimizer: str = _option(
        "sgd",
        "sgd; lars, for batches above 2000; muon, for the filters of convolutions, with sgd for "
        "the rest; a Keras optimizer by its name, as adam; or, with TensorFlow Addons, tfa:NAME, "
        "as tfa:LAMB or tfa:Lookahead(adam)",
        group="optimization",
    )
    momentum: float = _option(
        0.9,
        "share of the momentum that a step keeps, in optimizers that have one",
        group="optimization",
        check=_SHARE,
    )
    nesterov: bool = _option(
        True,
        "Nesterov's momentum, of sgd, lars and muon",
        group="optimization",
        beside=_OWN_OPTIMIZERS,
    )
    weight_decay: float = _option(
        1e-4,
        "share of the weights that is added to their gradients (L2) in sgd, lars and, but for "
        "filters, muon; else the optimizer's own weight_decay, as adamw's",
        group="optimization",
        check=_NOT_NEGATIVE,
    )
    weight_decay_on: str = _option(
        "auto",
        "what weight_decay is for; weights: not biases, nor gamma and beta of batch norm; "
        "weights_and_biases; all; auto: weights in lars, else weights_and_biases",
        group="optimization",
        choices=("auto", "weights", "weights_and_biases", "all"),
    )
    lars_eeta: float = _option(
        0.001,
        "trust coefficient of lars",
        group="optimization",
        check=_POSITIVE,
        beside=_LARS,
    )
    lars_epsilon: float = _option(
        0.0,
        "added to the norm of the gradient in lars",
        group="optimization",
        check=_NOT_NEGATIVE,
        beside=_LARS,
    )
    optimizer_epsilon: float = _option(
        0.0,
        "added to the denominators of Keras' and Addons' optimizers, as of rmsprop; 0: what the "
        "optimizer has by itself",
        group="optimization",
        check=_NOT_NEGATIVE,
        beside=_OTHER_OPTIMIZERS,
    )
    rate_in_momentum: str = _option(
        "auto",
        "where sgd, lars and muon multiply by the rate; yes: before the momentum (MLPerf's scaled "
        "momentum); no: after it; auto: lars before, the others after",
        group="optimization",
        choices=("auto", "yes", "no"),
        beside=_OWN_OPTIMIZERS,
    )
    bias_rate_factor: float = _option(
        1.0,
        "rate of biases, and of beta of batch norm, in sgd, lars and muon, as a multiple of "
        "learning_rate; their weight_decay is divided by it",
        group="optimization",
        check=_POSITIVE,
        beside=_OWN_OPTIMIZERS,
    )
    muon_momentum: float = _option(
        0.6,
        "momentum of filters in muon; that of the rest is momentum",
        group="optimization",
        check=_SHARE,
        beside=_MUON,
    )
    muon_head_rate_factor: float = _option(
        1.0,
        "rate of the last layer's weights in muon, as a multiple of learning_rate; their "
        "weight_decay is divided by it",
        group="optimization",
        check=_POSITIVE,
        beside=_MUON,
    )
    clip_norm: float = _option(
        0.0,
        "greatest norm of all gradients together, after their sum over replicas; 0: no clipping",
        group="optimization",
        check=_NOT_NEGATIVE,
    )
    ema_decay: float = _option(
        0.0,
        "share that a step keeps of the weights' moving average, with which evaluation and export "
        "work; 0: no average",
        group="optimization",
        check=_SHARE,
    )
    ema_every: int = _option(
        1,
        "steps, counted anew in each epoch, after which that average takes in the weights, with "
        "as much of it kept as all of them would have",
        group="optimization",
        check=_POSITIVE,
        beside=_Beside("ema_decay"),
    )
    lookahead_every: int = _option(
        0,
        "steps after which the weights go back to their slow average (Zhang et al. 2019); 0: none",
        group="optimization",
        check=_NOT_NEGATIVE,
    )
    lookahead_decay: float = _option(
        0.95,
        "share that a step keeps of lookahead's slow average at the end of the run, to which it "
        "grows with the cube of the time",
        group="optimization",
        check=_SHARE,
        beside=_Beside("lookahead_every"),
    )
    label_smoothing: float = _option(
        0.0,
        "probability spread evenly over all classes",
        group="optimization",
        check=_SHARE,
    )
    seed: int = _option(
        0,
        "of all random numbers: first weights, order of the data, augmentation, dropout",
        group="optimization",
        check=_Check(lambda value: 0 <= value < 2**32, "be in [0, 2**32)"),
    )

    # Learning rate.
    learning_rate: float = _option(
        0.1,
        "reference rate, for a batch of learning_rate_batch images",
        group="learning rate",
        check=_NOT_NEGATIVE,
    )
    learning_rate_batch: int = _option(
        256,
        "batch size for which learning_rate is meant; see rate_scaling",
        group="learning rate",
        check=_POSITIVE,
    )
    rate_scaling: str = _option(
        "linear",
        "how the rate grows with batch_size / learning_rate_batch: linear (the linear scaling "
        "rule), sqrt or none",
        group="learning rate",
        choices=("linear", "sqrt", "none"),
    )
    batch_table: str = _option(
        "",
        "take learning_rate, warmup, momentum and weight_decay for batch_size from a family of "
        f"recipes for lars, interpolated between theirs: {' or '.join(BATCH_TABLES)}; "
        "empty: do not",
        group="learning rate",
        choices=("", *BATCH_TABLES),
        beside=_WARMUP,
    )
    warmup: Duration = _option(
        Duration(5, "epochs"),
        "time at the start in which the rate grows from warmup_start to that of this batch",
        group="learning rate",
        beside=_WARMUP,
    )
    warmup_kind: str = _option(
        "gradual",
        "gradual: by the same amount each step; constant: warmup_start, until the warmup ends",
        group="learning rate",
        choices=("gradual", "constant"),
        beside=_WARMUP,
    )
    warmup_start: float = _option(
        -1.0,
        "first rate of the warmup; -1: learning_rate, and no warmup unless the scaled rate is "
        "higher",
        group="learning rate",
        check=_Check(lambda value: value >= 0 or value == -1, "not be negative, or be -1"),
        beside=_WARMUP,
    )
    schedule: str = _option(
        "steps",
        "course of the rate after the warmup: constant; steps, at decay_at; polynomial or cosine, "
        "to end_learning_rate at the end of the run; piecewise_linear, through knots",
        group="learning rate",
        choices=("constant", "steps", "polynomial", "cosine", "piecewise_linear"),
    )
    decay_at: tuple[Duration, ...] = _option(
        (Duration(30, "epochs"), Duration(60, "epochs"), Duration(80, "epochs")),
        "schedule=steps: when to multiply the rate by decay_factor",
        group="learning rate",
        check=_ORDERED,
        beside=_STEPS,
    )
    decay_factor: float = _option(
        0.1,
        "schedule=steps: by which the rate is multiplied at each of decay_at, or decay_every",
        group="learning rate",
        check=_PART,
        beside=_STEPS,
    )
    decay_every: Duration = _option(
        Duration(0, "steps"),
        "schedule=steps: how often to multiply the rate; 0 steps: not so, but at decay_at",
        group="learning rate",
        beside=_STEPS,
    )
    decay_power: float = _option(
        2.0,
        "schedule=polynomial: power to which the share of the run that is left is raised",
        group="learning rate",
        check=_POSITIVE,
        beside=_Beside("schedule", ("polynomial",)),
    )
    end_learning_rate: float = _option(
        0.0,
        "schedule=polynomial and cosine: rate at the end of the run",
        group="learning rate",
        check=_NOT_NEGATIVE,
        beside=_Beside("schedule", ("polynomial", "cosine")),
    )
    knots_at: tuple[Duration, ...] = _option(
        (),
        "schedule=piecewise_linear: times, counted from step 1, between which the rate changes by "
        "the same amount each step; a warmup is in them, too",
        group="learning rate",
        check=_ORDERED,
        beside=_KNOTS,
    )
    knots: tuple[float, ...] = _option(
        (),
        "schedule=piecewise_linear: the rate at each of knots_at, as a share of that of this batch",
        group="learning rate",
        check=_Check(lambda value: not value or min(value) >= 0, "not be negative"),
        beside=_KNOTS,
    )

    # Hardware.
    strategy: str = _option(
        "auto",
        "devices to train on; one_device; mirrored: all GPUs of this machine; multi_worker: those "
        "of the processes that TF_CONFIG or Slurm names; tpu; auto: tpu if there is one, "
        "multi_worker if several are named, mirrored if there are several GPUs, else one_device",
        group="hardware",
        choices=("auto", "one_device", "mirrored", "multi_worker", "tpu"),
    )
    tpu: str = _option("", "name or address of a TPU; local: this machine's", group="hardware")
    gpus: str = _option(
        "",
        "GPUs of each machine to use; a number: so many; ids, as 0,2 or 2, (with a comma): those; "
        "0: none, train on the CPU; empty: all",
        group="hardware",
        check=_GPUS,
        free=True,
    )
    logical_cpus: int = _option(
        0,
        "split the CPU into so many devices, to try replicas without accelerators",
        group="hardware",
        check=_NOT_NEGATIVE,
    )
    pipeline_stages: int = _option(
        1,
        "stages of a pipeline, each on a device of its own, into which the network is cut; the "
        "accumulation_steps micro-batches pass through them one after another (GPipe); 1: no "
        "pipeline",
        group="hardware",
        check=_POSITIVE,
        free=True,
    )
    pipeline_servers: tuple[str, ...] = _option(
        (),
        "host:port of each `imagenet-fast stage-server`, whose devices take the stages that this "
        "process has no device for",
        group="hardware",
        check=_ADDRESSES,
        free=True,
    )
    pipeline_balance: tuple[int, ...] = _option(
        (),
        "blocks of each stage, as 3,6,7,8; none: stages of about as much work each, which "
        "`imagenet-fast plan --pipeline` shows",
        group="hardware",
        check=_ALL_POSITIVE,
        free=True,
    )
    pipeline_schedule: str = _option(
        "unrolled",
        "order of micro-batches in a pipeline; unrolled: all forward, then all backward; while: "
        "the same in loops, whose graph does not grow with their number; 1f1b: forward and "
        "backward in turn, which keeps fewer activations",
        group="hardware",
        choices=PIPELINE_SCHEDULES,
        free=True,
    )
    rematerialize: str = _option(
        "except_last",
        "activations that a pipeline computes again in the backward pass instead of keeping them; "
        "always: all; except_last: all but those of the last micro-batch; never: none",
        group="hardware",
        choices=REMATERIALIZE,
        free=True,
    )
    fusion: str = _option(
        "fixed",
        "what tells how gradients are joined for their sums; fixed: fusion_bytes, or "
        "fusion_segments; auto: times measured before training, at image_size, by which all would "
        "be summed earliest; not for TPUs",
        group="hardware",
        choices=("fixed", "auto"),
    )
    fusion_bytes: int = _option(
        25 * 2**20,
        "bytes of gradients that workers sum at once; 0: all of them",
        group="hardware",
        check=_NOT_NEGATIVE,
    )
    fusion_segments: tuple[int, ...] = _option(
        (),
        "instead of fusion_bytes: after how many gradients, counted from the first layer's, to "
        "begin a new sum; Jia et al. took 20 for AlexNet, 76 for ResNet-50",
        group="hardware",
        check=_Check(
            lambda value: all(a < b for a, b in zip((0, *value), value)),
            "be positive and increasing",
        ),
    )
    all_reduce: str = _option(
        "auto",
        "how gradients are summed over replicas: builtin, as the strategy does; on workers also "
        "flat, one ring; hierarchical, a ring of the groups' first replicas; torus_2d, along rows "
        "and columns, on TPUs, too; auto: flat for workers without GPUs, else builtin",
        group="hardware",
        choices=ALL_REDUCE_ALGORITHMS,
    )
    all_reduce_group: int = _option(
        0,
        "replicas in a group, or row, of all_reduce=hierarchical and torus_2d; 0: those of one "
        "host, or about the square root of all",
        group="hardware",
        check=_NOT_NEGATIVE,
    )
    all_reduce_dtype: str = _option(
        "float32",
        "weights are updated in float32; type in which gradients travel between replicas",
        group="hardware",
        choices=ALL_REDUCE_DTYPES,
    )
    precision: str = _option(
        "float32",
        "weights, logits, loss and batch statistics are float32; type of all else",
        group="hardware",
        choices=("float32", "mixed_bfloat16", "mixed_float16"),
    )
    loss_scale: float = _option(
        0.0,
        "fixed scale of the loss under mixed_float16; 0: adapted as training goes",
        group="hardware",
        check=_NOT_NEGATIVE,
    )
    xla: bool = _option(
        False,
        "compile with XLA: the whole step of one device, the forward and backward pass of several",
        group="hardware",
    )
    deterministic: bool = _option(
        False,
        "only operations that give the same bits each time, even where slower",
        group="hardware",
    )

    # Run.
    model_dir: str = _option(
        "",
        "directory for checkpoints, metrics and the report; a run found there is continued",
        group="run",
        free=True,
    )
    eval_every: Duration = _option(
        Duration(1, "epochs"),
        "time between evaluations, as '1 epoch' or '500 steps'",
        group="run",
        check=_LASTS,
    )
    eval_batch_size: int = _option(
        0,
        "images in a step of evaluation, over all replicas; 0: as many as in a micro-batch of "
        "training, batch_size / accumulation_steps, by `evaluate` at most 256 on each device",
        group="run",
        check=_NOT_NEGATIVE,
        free=True,
    )
    test_time_augmentation: str = _option(
        "none",
        "what evaluation, and an exported model, take the mean logits over; none: the image; flip: "
        "and its mirror image; flip_and_shift: and both moved by a pixel, up to the left and down "
        "to the right",
        group="run",
        choices=("none", "flip", "flip_and_shift"),
    )
    checkpoint_every: Duration = _option(
        Duration(1, "epochs"),
        "time between checkpoints",
        group="run",
        check=_LASTS,
    )
    keep_checkpoints: int = _option(
        2, "latest checkpoints kept", group="run", check=_POSITIVE, free=True
    )
    on_damaged_checkpoint: str = _option(
        "previous",
        "what to do if the newest checkpoint is damaged: previous sets it aside and resumes from "
        "the one before it; stop ends the run",
        group="run",
        choices=("previous", "stop"),
        free=True,
    )
    log_every: Duration = _option(
        Duration(20, "steps"),
        "time between lines of metrics.jsonl",
        group="run",
        check=_LASTS,
        free=True,
    )
    stop_at_accuracy: float = _option(
        0.0,
        "end the run at this top-1 accuracy, a fraction; 0: do not",
        group="run",
        check=_SHARE,
        free=True,
    )
    tensorboard: bool = _option(
        True, "write scalars and pictures to model_dir/tensorboard", group="run", free=True
    )
    examine: bool = _option(
        True,
        "show some training images as the model sees them and, after the run, by one more "
        "evaluation, the classes that it confuses and its worst mistakes, in TensorBoard and "
        "report.html",
        group="run",
        free=True,
    )
    profile_steps: tuple[int, ...] = _option(
        (),
        "first and last step that TensorFlow's profiler records for TensorBoard, as 100,110",
        group="run",
        check=_Check(
            lambda value: not value or (len(value) == 2 and 0 < value[0] <= value[1]),
            "be the first step, from 1, and the last one",
        ),
        free=True,
    )
    mlperf_log: bool = _option(
        False, "write MLPerf's log lines to model_dir/mlperf.log", group="run", free=True
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = self._coerce(field, getattr(self, field.name))
            object.__setattr__(self, field.name, value)
            self._check(field, value)
        if self.batch_table:
            self._fill_from_batch_table()
        self._check_beside()
        self._check_together()

    @staticmethod
    def _coerce(field: dataclasses.Field, value: Any) -> Any:
        """Takes text for durations, and whole numbers and lists where floats and tuples belong."""
        name, kind = field.name, option_type(field.name)
        if typing.get_origin(kind) is not tuple:
            return _convert(name, kind, value)
        if isinstance(value, str):
            return parse_option(name, value)
        if not isinstance(value, (list, tuple)):
            raise UserError(f"{name} is {value!r}, but must be a list")
        item = typing.get_args(kind)[0]
        return tuple(_convert(name, item, entry) for entry in value)

    @staticmethod
    def _check(field: dataclasses.Field, value: Any) -> None:
        choices, check = field.metadata["choices"], field.metadata["check"]
        if choices:
            require_choice(field.name, value, choices)
        if check and not check.allows(value):
            raise UserError(f"{field.name} is {option_text(value)}, but must {check.must}")

    def _check_beside(self) -> None:
        """Refuses options that nothing would read, because of another one's value.

        Raises:
          UserError: if one has another value than its default.
        """
        for field in _without_effect(vars(self)):
            beside, value = field.metadata["beside"], getattr(self, field.name)
            other = self.__dataclass_fields__[beside.option]
            text, found = option_text(value), option_text(getattr(self, other.name))
            if beside.values and beside.others:
                reason = f"is not for {other.name}={found}"
            elif beside.values:
                needed = " or ".join(f"{other.name}={own}" for own in beside.values)
                reason = f"is for {needed}, but {other.name} is {found}"
            else:
                reason = f"has no effect, because {other.name} is {found}"
            default = option_text(field.default) or "empty"
            raise UserError(f"{field.name}={text} {reason}: leave it out; its default is {default}")

    def _check_together(self) -> None:
        """Checks of options against each other that need neither data nor devices."""
        if self.batch_size % self.accumulation_steps:
            raise UserError(
                f"batch_size {self.batch_size} cannot be split into "
                f"accumulation_steps={self.accumulation_steps} equal parts"
            )
        stages = len(self.pipeline_balance)
        if stages and self.pipeline_stages > 1 and stages != self.pipeline_stages:
            raise UserError(
                f"pipeline_balance is of {stages} stages, but pipeline_stages is "
                f"{self.pipeline_stages}"
            )
        if self.synthetic and not self.num_classes:
            raise UserError("synthetic data needs num_classes, e.g. --num_classes=1000")
        if self.freeze_through and not self.initial_weights:
            raise UserError(
                "freeze_through would leave layers at their random weights: give --initial_weights"
            )
        if self.loss_scale and self.precision != "mixed_float16":
            raise UserError(
                f"loss_scale is for precision=mixed_float16, but precision is {self.precision}"
            )
        if self.tpu and self.strategy not in ("auto", "tpu"):
            raise UserError(f"tpu={self.tpu!r} contradicts strategy={self.strategy}")
        if self.gpus and parse_gpus(self.gpus) != 0:
            for name in ("logical_cpus", "tpu"):
                if getattr(self, name):
                    raise UserError(f"gpus={self.gpus} contradicts {name}={getattr(self, name)}")
            if self.strategy == "tpu":
                raise UserError(f"gpus={self.gpus} contradicts strategy=tpu")
        if self.fusion == "auto" and self.fusion_segments:
            raise UserError("fusion=auto finds fusion_segments itself: leave one of them out")
        if self.fusion == "auto" and self.deterministic:
            raise UserError(
                "fusion=auto measures times, which are never the same: leave it or deterministic "
                "out"
            )
        if self.fusion == "auto" and self.pipeline_stages > 1:
            raise UserError(
                "fusion=auto is not for pipelines, each of whose stages sums gradients of its own"
            )
        if self.xla and self.strategy == "tpu":
            raise UserError("xla is for GPUs and CPUs: a TPU always compiles")
        if self.schedule == "piecewise_linear" and not self.knots:
            raise UserError("schedule=piecewise_linear needs knots_at and knots")
        if len(self.train_sizes) != len(self.train_until):
            raise UserError(
                f"there are {len(self.train_sizes)} train_sizes, but {len(self.train_until)} times "
                "in train_until"
            )
        if len(self.knots) != len(self.knots_at):
            raise UserError(
                f"there are {len(self.knots)} knots, but {len(self.knots_at)} times in knots_at"
            )
        if self.cache == "decoded" and self.train_crop in ("random_resized", "inception"):
            raise UserError(
                f"cache=decoded holds images of image_size, but train_crop={self.train_crop} needs "
                "the whole ones: use cache=encoded, or train_crop=pad or none"
            )
        if self.trivial_augment and self.rand_augment_layers:
            raise UserError("trivial_augment takes the place of rand_augment_layers: leave one out")
        self._check_device_data()
        for name, sizes in (("image_size", (self.image_size,)), ("train_sizes", self.train_sizes)):
            least = min(sizes, default=self.image_size)
            if self.cutout > least:
                raise UserError(f"cutout {self.cutout} is more than {name} {least}")
            if self.train_crop == "pad" and self.crop_padding >= least:
                raise UserError(
                    f"crop_padding {self.crop_padding} must be smaller than {name} {least}"
                )

    def _check_device_data(self) -> None:
        if not self.data_on_device:
            return
        if self.train_crop not in ("pad", "none"):
            raise UserError(
                f"data_on_device holds images of image_size, but train_crop={self.train_crop} "
                "needs the whole ones: use train_crop=pad or none"
            )
        elsewhere = {
            "synthetic": self.synthetic,
            "train_sizes": self.train_sizes,
            "rand_augment_layers": self.rand_augment_layers,
            "trivial_augment": self.trivial_augment,
            "random_erasing": self.random_erasing,
            "color_jitter": self.color_jitter,
            "lighting": self.lighting,
            "cache": self.cache != "none",
            "input_servers": self.input_servers,
            "shard_by": self.shard_by == "files",
        }
        for name, given in elsewhere.items():
            if given:
                raise UserError(
                    f"{name}={option_text(getattr(self, name))} is for images that the host "
                    "prepares: leave it or data_on_device out"
                )
        if self.alternating_flip and not self.flip:
            raise UserError("alternating_flip contradicts noflip")
        if self.alternating_flip and self.augment_in_groups:
            raise UserError("alternating_flip and augment_in_groups both say who is mirrored")

    def _fill_from_batch_table(self) -> None:
        values = values_for_batch(self.batch_table, self.batch_size)
        filled = {
            "learning_rate": values.learning_rate,
            "rate_scaling": "none",
            "warmup": Duration(values.warmup_epochs, "epochs"),
            "warmup_start": 0.0,
            "momentum": values.momentum,
            "weight_decay": values.weight_decay,
        }
        for name, value in filled.items():
            object.__setattr__(self, name, value)

    @property
    def largest_image_size(self) -> int:
        """The height and width of the largest images that the run trains on."""
        return max(self.image_size, *self.train_sizes, 0)

    @property
    def scaled_learning_rate(self) -> float:
        """The rate of this batch, after the warmup.

        Linear scaling is the rule of Goyal et al. 2017; by the square root, which their Table 2a
        tries too, the variance of a step stays the same.
        """
        ratio = self.batch_size / self.learning_rate_batch
        factor = {"linear": ratio, "sqrt": ratio**0.5, "none": 1.0}[self.rate_scaling]
        return self.learning_rate * factor

    @property
    def warmup_first_rate(self) -> float | None:
        """The rate with which the warmup begins; None where there is none."""
        if self.warmup_start >= 0:
            return self.warmup_start
        return self.learning_rate if self.scaled_learning_rate > self.learning_rate else None

    def replace(self, **changes: Any) -> Config:
        """Returns a copy with other values for some options.

        What is left without effect by these goes back to its default: with ``optimizer="sgd"`` the
        options of LARS do.

        Raises:
          UserError: if there is no such option, or its value cannot be used.
        """
        for name in changes:
            _require_option(name)
        values = {name: getattr(self, name) for name in option_names()} | changes
        for field in _without_effect(values):
            if field.name not in changes:
                values[field.name] = field.default
        return type(self)(**values)

    def on_one_device(self) -> Config:
        """Returns the configuration of the same network in float32, made whole on one device.

        Its weights are those of the run, and so is what it computes, but for rounding.
        """
        return self.replace(
            precision="float32", loss_scale=0.0, pipeline_stages=1, batch_norm_batch_size=0
        )

    @classmethod
    def from_flagfile(cls, path: str | os.PathLike[str], **changes: Any) -> Config:
        """Reads a recipe: one ``--option=value`` a line, ``#`` before a comment.

        Args:
          path: a flagfile; it may name others with ``--flagfile=other.flags``, taken from its own
            folder if they are not found from here.
          **changes: options that differ from the recipe's.

        Raises:
          UserError: if the file cannot be read, or names what is no option.
        """
        lines = list(read_flagfile(path))
        values = {line.name: parse_option(line.name, line.text) for line in lines}
        for name in changes:
            _require_option(name)
        sources = in_order(
            [*((line.name, line.source) for line in lines), *((n, "") for n in changes)]
        )
        return cls().replace(**without_superseded({**values, **changes}, sources))

    def to_json(self) -> str:
        """Returns all options as a JSON object, durations as text."""
        values = {name: _plain(getattr(self, name)) for name in option_names()}
        return json.dumps(values, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Config:
        """Reads what :meth:`to_json` wrote.

        Raises:
          UserError: if it is not that.
        """
        try:
            values = json.loads(text)
        except ValueError as error:
            raise UserError(f"not a configuration: {error}") from None
        if not isinstance(values, dict):
            raise UserError("not a configuration: expected a JSON object of options")
        for name in values:
            _require_option(name)
        # Runs of before the check may have some.
        ignored = {field.name for field in _without_effect(values)}
        return cls().replace(**{k: v for k, v in values.items() if k not in ignored})

    def differences(self, other: Config, *, free: bool = True) -> list[str]:
        """Returns the names of the options in which two configurations differ.

        Args:
          other: the other configuration.
          free: whether to count options that have no part in the weights.
        """
        return [
            field.name
            for field in dataclasses.fields(self)
            if (free or not field.metadata["free"])
            and getattr(self, field.name) != getattr(other, field.name)
        ]


class FlagfileLine(NamedTuple):
    """An option that a flagfile gives.

    Attributes:
      name: the option's.
      text: its value.
      source: the file's path.
    """

    name: str
    text: str
    source: str


def in_order(given: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Returns where each option was given last, in the order of these last times.

    Args:
      given: pairs of an option's name and a file's path, or an empty text for no file.
    """
    sources: dict[str, str] = {}
    for name, source in given:
        sources.pop(name, None)
        sources[name] = source
    return sources


def without_superseded(values: Mapping[str, Any], sources: Mapping[str, str]) -> dict[str, Any]:
    """Leaves out what a later flagfile or flag has left without effect.

    After ``--flagfile=recipe.flags --schedule=cosine`` nothing reads the recipe's ``decay_at``.

    Args:
      values: of options.
      sources: of :func:`in_order`.
    """
    order = list(sources)

    def superseded(field: dataclasses.Field) -> bool:
        other = field.metadata["beside"].option
        return (
            other in sources
            and sources[other] != sources[field.name]
            and order.index(other) > order.index(field.name)
        )

    dropped = {field.name for field in _without_effect(values) if superseded(field)}
    return {name: value for name, value in values.items() if name not in dropped}


def _without_effect(values: Mapping[str, Any]) -> list[dataclasses.Field]:
    """Returns the options whose values, not their defaults, nothing reads."""
    fields = {field.name: field for field in dataclasses.fields(Config)}

    def value_of(name: str) -> Any:
        return Config._coerce(fields[name], values.get(name, fields[name].default))

    def idle(field: dataclasses.Field) -> bool:
        beside = field.metadata["beside"]
        if beside is None or value_of(field.name) == field.default:
            return False
        return not beside.holds(value_of(beside.option), fields[beside.option].default)

    return [field for field in fields.values() if idle(field)]


def option_names() -> list[str]:
    """Returns the names of all options, in the order in which they are declared."""
    return [field.name for field in dataclasses.fields(Config)]


def option_type(name: str) -> Any:
    """Returns the Python type of the option ``name``."""
    return _type_hints()[name]


@functools.lru_cache(maxsize=1)
def _type_hints() -> dict[str, Any]:
    return typing.get_type_hints(Config)


def option_text(value: Any) -> str:
    """Returns an option's value as it is written in a flagfile."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if isinstance(value, tuple):
        return ",".join(option_text(item) for item in value)
    return str(value)


def parse_option(name: str, text: str) -> Any:
    """Returns the value that ``text`` stands for, as the type of the option ``name``.

    Raises:
      UserError: if there is no such option, or ``text`` is no value for it.
    """
    _require_option(name)
    kind = option_type(name)
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        return tuple(_parse(name, item, part) for part in text.split(",") if part.strip())
    return _parse(name, kind, text)


def _convert(name: str, kind: Any, value: Any) -> Any:
    """Returns ``value`` as ``kind``, if it is that, text for it, or a whole number for a float.

    Numbers may be NumPy's.
    """
    if isinstance(value, str) and kind is not str:
        return _parse(name, kind, value)
    number = not isinstance(value, bool) and _NUMBERS.get(kind)
    if number and isinstance(value, number):
        return _finite(name, kind(value))
    if type(value) is not kind:
        raise UserError(f"{name} is {value!r}, but must be {_KINDS[kind]}")
    return value


def _finite(name: str, value: float) -> float:
    if not math.isfinite(value):
        raise UserError(f"{name} is {value}, but must be finite")
    return value


def _parse(name: str, kind: Any, text: str) -> Any:
    text = text.strip()
    if kind is Duration:
        try:
            return Duration.parse(text)
        except UserError as error:
            raise UserError(f"{name}: {error}") from None
    if kind is bool:
        if text.lower() not in ("true", "false", "1", "0"):
            raise UserError(f"{name} is {text!r}, but must be {_KINDS[bool]}")
        return text.lower() in ("true", "1")
    try:
        value = kind(text)
    except ValueError:
        raise UserError(f"{name} is {text!r}, but must be {_KINDS[kind]}") from None
    return _finite(name, value) if kind is float else value


def read_flagfile(path: str | os.PathLike[str]) -> Iterator[FlagfileLine]:
    """Yields the options of a flagfile, in order, those of nested files in place.

    Raises:
      UserError: if a file cannot be read, a line is no flag, or files name each other in a circle.
    """
    yield from _read_flagfile(to_path(path), ())


def _read_flagfile(path: Path, parents: tuple[Path, ...]) -> Iterator[FlagfileLine]:
    if path.resolve() in parents:
        raise UserError(f"flagfile {path} includes itself")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        raise UserError(
            f"cannot read flagfile {path}: {error.strerror}{_nearest_flagfiles(path)}"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read flagfile {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"cannot read flagfile {path}: it is not text") from None
    for number, line in enumerate(lines, start=1):
        flag = line.strip()
        if not flag or flag.startswith(_COMMENT_MARKS):
            continue
        if not flag.startswith("-"):
            raise UserError(f"{path}, line {number}: {flag!r} is not a flag (--option=value)")
        name, equals, text = flag.lstrip("-").partition("=")
        if name == "flagfile":
            nested = to_path(text)
            if not nested.exists():
                nested = path.parent / nested
            yield from _read_flagfile(nested, (*parents, path.resolve()))
            continue
        try:
            if not equals:
                name, text = _boolean_flag(name)
            parse_option(name, text)
        except UserError as error:
            raise UserError(f"{path}, line {number}: {error}") from None
        yield FlagfileLine(name, text, str(path))


def _nearest_flagfiles(path: Path) -> str:
    """Returns a hint at files of like names, in the folder of ``path`` and among the recipes."""
    files = {
        file.stem: repr(str(file))
        for folder in (to_path(_RECIPES), path.parent)
        for file in sorted(folder.glob("*.flags"))
    }
    return nearest(path.stem, files, files.get)


def _boolean_flag(flag: str) -> tuple[str, str]:
    """Reads ``--xla`` and ``--noxla``."""
    name, text = flag, "true"
    if flag.startswith("no") and flag[2:] in option_names():
        name, text = flag[2:], "false"
    _require_option(name)
    if option_type(name) is not bool:
        raise UserError(f"{name} needs a value: --{name}=...")
    return name, text


def _require_option(name: str) -> None:
    if name not in option_names():
        raise UserError(f"there is no option {name!r}{nearest(name, option_names())}")


def _plain(value: Any) -> Any:
    """Returns ``value`` as JSON can hold it."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Duration) else value
