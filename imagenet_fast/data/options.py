"""Options of the data set, the input pipeline, and the augmentation."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import TypeVar

from imagenet_fast.base.durations import Duration
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.option import (
    ADDRESSES,
    ALL_POSITIVE,
    BELOW_ONE,
    FRACTION,
    IMAGE_SIDE,
    IN_ORDER,
    MOST_PIXELS,
    NOT_NEGATIVE,
    POSITIVE,
    PROBABILITY,
    Beside,
    Check,
    option,
    option_text,
)
from imagenet_fast.base.paths import is_local
from imagenet_fast.base.shared_options import SharedOptions
from imagenet_fast.distribute.options import ClusterOptions

_Options = TypeVar("_Options", bound="DataOptions")


@dataclasses.dataclass(frozen=True)
class DataOptions(SharedOptions):
    """The data set, and how its images are read, cropped, augmented and cached."""

    data_dir: str = option(
        "", "directory of TFRecord shards, as written by `prepare`", group="data", free=True
    )
    synthetic: bool = option(
        False,
        "train on random images instead of data_dir, to time everything but the input",
        group="data",
    )
    num_classes: int = option(
        0,
        "number of classes; 0: from the manifest in data_dir",
        group="data",
        check=NOT_NEGATIVE,
    )
    label_offset: int = option(
        0, "added to each label: -1 for shards whose first class is 1", group="data"
    )
    image_size: int = option(
        224,
        "height and width of the network's input images, in pixels",
        group="data",
        check=IMAGE_SIDE,
    )
    eval_image_size: int = option(
        0,
        "height and width of images in evaluation, exported models and predictions, in pixels; "
        "higher than image_size in some recipes (Touvron et al. 2019); 0: image_size",
        group="data",
        check=Check(lambda value: 0 <= value <= MOST_PIXELS, f"be in [1, {MOST_PIXELS}], or 0"),
        free=True,
    )
    train_sizes: tuple[int, ...] = option(
        (),
        "progressive resizing: the first sizes of training images, e.g. 128,160, each used until "
        "its time in train_until; then image_size",
        group="data",
        check=ALL_POSITIVE,
    )
    train_until: tuple[Duration, ...] = option(
        (),
        "when each of train_sizes ends, counted from the start of training, e.g. '10 epochs,20 "
        "epochs'; also in steps or examples",
        group="data",
        check=IN_ORDER,
    )
    size_ramp: tuple[int, ...] = option(
        (),
        "progressive resizing by a ramp: the first size of training images and the step in which "
        "it grows to image_size, e.g. 128,32; both sizes must be multiples of the step",
        group="data",
        check=Check(
            lambda value: not value or (len(value) == 2 and min(value) > 0),
            "have two positive values, the first size and the step",
        ),
        beside=Beside("train_sizes", unless=True),
    )
    size_ramp_at: tuple[Duration, ...] = option(
        (),
        "when the ramp of size_ramp begins and ends, e.g. '20 epochs,30 epochs', also in steps or "
        "examples; a size changes at a whole epoch, step or example",
        group="data",
        check=IN_ORDER,
        beside=Beside("size_ramp"),
    )
    train_crop: str = option(
        "random_resized",
        "crop of training images; random_resized: of random area and aspect ratio, as in "
        "torchvision; inception: likewise with TensorFlow's distribution, as in recipes for TPUs "
        "and MLPerf; pad: of random position in the padded image; none: the centre crop of "
        "evaluation",
        group="data",
        choices=("random_resized", "inception", "pad", "none"),
    )
    crop_min_area: float = option(
        0.08,
        "minimum area of random_resized and inception crops, as a fraction of the image; at least "
        "0.1 for inception",
        group="data",
        check=FRACTION,
        beside=Beside("train_crop", ("random_resized", "inception")),
    )
    crop_attempts: int = option(
        10,
        "maximum number of random_resized or inception crops drawn until one fits into the image; "
        "then the centre is cropped",
        group="data",
        check=POSITIVE,
        beside=Beside("train_crop", ("random_resized", "inception")),
    )
    crop_padding: int = option(
        4,
        "pixels added at each side by train_crop=pad",
        group="data",
        check=NOT_NEGATIVE,
        beside=Beside("train_crop", ("pad",)),
    )
    crop_border: str = option(
        "zeros",
        "padding by train_crop=pad; zeros; reflect: the image reflected at its border",
        group="data",
        choices=("zeros", "reflect"),
        beside=Beside("train_crop", ("pad",)),
    )
    flip: bool = option(
        True, "flip training images horizontally with probability 1/2", group="data"
    )
    alternating_flip: bool = option(
        False,
        "flip each training image in every second epoch, beginning with a random half, instead of "
        "at random; with data_on_device (Jordan 2024)",
        group="data",
        beside=Beside("data_on_device"),
    )
    cutout: int = option(
        0,
        "cutout: side in pixels of a square at a random position in each training image that is "
        "filled with pixel_mean; 0: none",
        group="data",
        check=NOT_NEGATIVE,
    )
    augment_in_groups: bool = option(
        False,
        "draw crops, flips and cutouts of an epoch for at most 200 near-equal groups of images "
        "instead of for each image; with data_on_device (Page 2019)",
        group="data",
        beside=Beside("data_on_device"),
    )
    color_jitter: float = option(
        0.0,
        "strength of random changes of brightness, contrast and saturation (0.4 in "
        "fb.resnet.torch); 0: none",
        group="data",
        check=BELOW_ONE,
    )
    brightness: float = option(
        0.0,
        "random change of brightness: a number up to this one is added to or subtracted from all "
        "normalized pixels of a training image; 0: none",
        group="data",
        check=NOT_NEGATIVE,
    )
    contrast: float = option(
        0.0,
        "random change of contrast, after brightness: normalized pixels of a training image are "
        "multiplied by 1 plus or minus up to this number; 0: none",
        group="data",
        check=BELOW_ONE,
    )
    chroma: float = option(
        0.0,
        "random change of colour: a number up to this one, of 1 for the full range, is added to or "
        "subtracted from Cb, and another from Cr, of all pixels of a training image (0.1 in "
        "tensorflow/tpu's AmoebaNet); 0: none",
        group="data",
        check=BELOW_ONE,
    )
    lighting: float = option(
        0.0,
        "standard deviation of AlexNet's PCA lighting noise (0.1 in fb.resnet.torch); 0: none",
        group="data",
        check=NOT_NEGATIVE,
    )
    rand_augment_layers: int = option(
        0,
        "number of random RandAugment operations for each training image (2 in the paper for "
        "ResNet-50); 0: none",
        group="data",
        check=NOT_NEGATIVE,
    )
    rand_augment_magnitude: float = option(
        10.0,
        "magnitude of RandAugment's operations, from 0 to 10, the maximum of AutoAugment (9 in "
        "the paper for ResNet-50)",
        group="data",
        check=Check(lambda value: 0 <= value <= 10, "be in [0, 10]"),
        beside=Beside("rand_augment_layers"),
    )
    trivial_augment: bool = option(
        False,
        "TrivialAugment: one random operation of random strength for each training image, from "
        "torchvision's wide ranges",
        group="data",
    )
    random_erasing: float = option(
        0.0,
        "random erasing, as in torchvision: probability that a box of 2% to 33% of a training "
        "image's area is filled with pixel_mean; 0: none",
        group="data",
        check=PROBABILITY,
    )
    mixup_alpha: float = option(
        0.0,
        "mixup: blend each training image and its label with another's of the same micro-batch of "
        "a replica, with a weight drawn from Beta(alpha, alpha) (0.2 in the paper for ImageNet); "
        "0: none",
        group="data",
        check=NOT_NEGATIVE,
    )
    cutmix_alpha: float = option(
        0.0,
        "CutMix: paste a box of another training image, as mixup's, of an area drawn from "
        "Beta(alpha, alpha), and blend the labels by area (1 in the paper); with mixup_alpha, each "
        "is used for half of the images; 0: none",
        group="data",
        check=NOT_NEGATIVE,
    )
    resize_method: str = option(
        "bilinear", "interpolation of resized images", group="data", choices=("bilinear", "bicubic")
    )
    antialias: bool = option(
        False,
        "antialias when downscaling, as Pillow and torchvision do, in training, evaluation and "
        "exported models; published TensorFlow recipes do not",
        group="data",
    )
    resize_kernel: str = option(
        "auto",
        "implementation of resizing; native: this package's op, compiled at first use by a C++ "
        "compiler; tensorflow: TensorFlow's slower ops, which resize to equal pixels, but without "
        "JPEG indexes, see jpeg_index; auto: native if available",
        group="data",
        choices=("auto", "native", "tensorflow"),
        free=True,
    )
    jpeg_dct: str = option(
        "accurate",
        "inverse DCT of JPEGs; accurate: as in Pillow; fast: cheaper, with slightly different "
        "pixels",
        group="data",
        choices=("accurate", "fast"),
    )
    jpeg_upsampling: str = option(
        "smooth",
        "upsampling of JPEGs' chroma, which most store at half the width and height; smooth: "
        "interpolated, as in Pillow; plain: repeated, which is cheaper",
        group="data",
        choices=("smooth", "plain"),
    )
    jpeg_scaling: bool = option(
        False,
        "decode JPEGs at 1/2, 1/4 or 1/8 of their size where that suffices for image_size: "
        "cheaper, with slightly different pixels",
        group="data",
    )
    jpeg_index: bool = option(
        True,
        "decode only the blocks around the crop of JPEGs whose records have an index, as written "
        "by prepare; with resize_kernel=native; pixels at a crop's border then equal those of the "
        "whole image",
        group="data",
    )
    eval_crop_fraction: float = option(
        0.875,
        "side of evaluation's centre crop, as a fraction of the image's",
        group="data",
        check=FRACTION,
    )
    eval_crop: str = option(
        "square",
        "shape of evaluation's centre crop; square: of eval_crop_fraction of the shorter side; "
        "proportional: of that fraction of both sides, stretched to a square",
        group="data",
        choices=("square", "proportional"),
    )
    max_pixels: int = option(
        178_956_970,
        "maximum height times width of images; evaluation and exported models refuse larger ones "
        "before decoding, training refuses larger PNGs (default: the limit of Pillow, and so of "
        "prepare)",
        group="data",
        check=POSITIVE,
        free=True,
    )
    normalize_pixels: bool = option(
        True,
        "subtract pixel_mean and divide by pixel_std; otherwise the network's input is pixels in "
        "0..255, for networks that begin with preprocessing of their own",
        group="data",
    )
    pixel_mean: tuple[float, ...] = option(
        (123.675, 116.28, 103.53),
        "means of red, green and blue, subtracted from pixels in 0..255",
        group="data",
        check=Check(
            lambda value: len(value) == 3 and min(value) >= 0 and max(value) <= 255,
            "have three values in [0, 255]",
        ),
    )
    pixel_std: tuple[float, ...] = option(
        (58.395, 57.12, 57.375),
        "standard deviations of red, green and blue, by which the differences are divided",
        group="data",
        check=Check(lambda value: len(value) == 3 and min(value) > 0, "have three positive values"),
        # Augmentations also fill with pixel_mean.
        beside=Beside("normalize_pixels", (True,)),
    )
    shuffle_buffer: int = option(
        8192,
        "number of training images in memory from which the next one is drawn at random",
        group="data",
        check=POSITIVE,
        beside=Beside("data_on_device", unless=True),
    )
    sampling: str = option(
        "",
        "how often training reads each class; balanced: all equally often in an epoch, which stays "
        'as long; or a JSON file of relative numbers by class, {"cat": 2, "dog": 1}, 1 for others; '
        "empty: each image once",
        group="data",
        beside=(Beside("data_on_device", unless=True), Beside("synthetic", unless=True)),
    )
    shard_by: str = option(
        "auto",
        "division of training data among workers; records: each worker reads all shards and uses "
        "its part, so batches are the same for any number of workers; files: each worker reads "
        "its own shards; auto: files for data above 1 GiB",
        group="data",
        choices=("auto", "records", "files"),
    )
    cache: str = option(
        "none",
        "training data that each host reads into memory before the first step; none; encoded: "
        "records; decoded: images, for train_crop=pad or none; the order of images is the same",
        group="data",
        choices=("none", "encoded", "decoded"),
        free=True,
    )
    data_on_device: bool = option(
        False,
        "store all images in the memory of each accelerator, which also shuffles, crops, flips, "
        "cuts out and changes brightness and contrast, without work for the host; for small "
        "images, with train_crop=pad or none",
        group="data",
    )
    cache_dir: str = option(
        "",
        "directory on a local disk to which each host copies the shards that it reads; empty: none",
        group="data",
        check=Check(is_local, "be on a disk of this machine"),
        free=True,
        in_files_of_runs=False,
    )
    data_threads: int = option(
        0,
        "threads that read and decode in each process; 0: one per core",
        group="data",
        check=Check(lambda value: 0 <= value <= 1024, "be in [0, 1024]"),
        free=True,
    )
    input_servers: tuple[str, ...] = option(
        (),
        "host:port of each `imagenet-fast input-server` that reads and decodes training images "
        "instead of this process; the order of images is the same",
        group="data",
        check=ADDRESSES,
        free=True,
        in_files_of_runs=False,
    )
    max_bad_images: int = option(
        100,
        "maximum number of unreadable images to skip between two evaluations; training stops at "
        "more",
        group="data",
        check=NOT_NEGATIVE,
        free=True,
    )

    @property
    def pixel_normalization(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The mean and standard deviation of each channel for ``PixelNormalization``."""
        if self.normalize_pixels:
            return self.pixel_mean, self.pixel_std
        return (0.0,) * 3, (1.0,) * 3

    @property
    def evaluation_image_size(self) -> int:
        """The height and width of images in evaluation and exported models."""
        return self.eval_image_size or self.image_size

    @property
    def sizes_until(self) -> tuple[tuple[int, Duration], ...]:
        """The sizes of training images before ``image_size``, and when each ends."""
        if not self.size_ramp:
            return tuple(zip(self.train_sizes, self.train_until))
        return ramp_sizes(self.size_ramp[0], self.image_size, self.size_ramp[1], *self.size_ramp_at)

    @property
    def input_size(self) -> int | None:
        """The height and width of the network's input images, or None for several sizes."""
        sizes = {size for size, _ in self.sizes_until}
        sizes |= {self.image_size, self.evaluation_image_size}
        return self.image_size if len(sizes) == 1 else None

    @property
    def largest_image_size(self) -> int:
        """The height and width of the largest images that the run trains on."""
        return max(self.image_size, *self.train_sizes, 0)

    def with_image_size(self: _Options, size: int) -> _Options:
        """Returns the options with a single size of training images."""
        return self.replace(image_size=size, train_sizes=(), train_until=(), size_ramp=())

    def for_evaluation(self: _Options) -> _Options:
        """Returns the options of evaluation's images, with their size as ``image_size``."""
        plain = self.replace(eval_image_size=0, train_crop="none", cutout=0)
        return plain.with_image_size(self.evaluation_image_size)

    def _check_together(self) -> None:
        super()._check_together()
        if self.sampling and self.shard_by == "files":
            raise UserError(
                "sampling draws images from all shards, but shard_by=files gives each worker its "
                "own: leave one of them out"
            )
        if self.synthetic and not self.num_classes:
            raise UserError("synthetic data needs num_classes, e.g. --num_classes=1000")
        if len(self.train_sizes) != len(self.train_until):
            raise UserError(
                "train_sizes and train_until must have equally many values, not "
                f"{len(self.train_sizes)} and {len(self.train_until)}"
            )
        self._check_size_ramp()
        if self.cache == "decoded" and self.train_crop in ("random_resized", "inception"):
            raise UserError(
                f"cache=decoded stores images of image_size, but train_crop={self.train_crop} "
                "crops whole images: use cache=encoded, or train_crop=pad or none"
            )
        if self.trivial_augment and self.rand_augment_layers:
            raise UserError("trivial_augment excludes rand_augment_layers: remove one of them")
        self._check_device_data()
        for name, sizes in (
            ("image_size", (self.image_size,)),
            ("train_sizes", self.train_sizes),
            ("size_ramp", self.size_ramp[:1]),
        ):
            least = min(sizes, default=self.image_size)
            if self.cutout > least:
                raise UserError(f"cutout is {self.cutout}, but must be at most {name}, {least}")
            if self.train_crop == "pad" and self.crop_padding >= least:
                raise UserError(
                    f"crop_padding is {self.crop_padding}, but must be less than {name}, {least}"
                )

    def _check_size_ramp(self) -> None:
        if not self.size_ramp:
            return
        if len(self.size_ramp_at) != 2:
            raise UserError(
                "size_ramp needs size_ramp_at, when it begins and ends, e.g. "
                "--size_ramp_at='20 epochs,30 epochs'"
            )
        first, step = self.size_ramp
        if first >= self.image_size:
            raise UserError(
                f"size_ramp starts at {first}, but must be less than image_size, {self.image_size}"
            )
        for name, size in (("size_ramp", first), ("image_size", self.image_size)):
            if size % step:
                raise UserError(
                    f"size_ramp={option_text(self.size_ramp)} makes sizes that are multiples of "
                    f"{step}, but {name} is {size}"
                )

    def _check_device_data(self) -> None:
        if not self.data_on_device:
            return
        if self.train_crop not in ("pad", "none"):
            raise UserError(
                f"data_on_device stores images of image_size, but train_crop={self.train_crop} "
                "crops whole images: use train_crop=pad or none"
            )
        on_host = {
            "synthetic": self.synthetic,
            "train_sizes": self.train_sizes,
            "size_ramp": self.size_ramp,
            "rand_augment_layers": self.rand_augment_layers,
            "trivial_augment": self.trivial_augment,
            "random_erasing": self.random_erasing,
            "color_jitter": self.color_jitter,
            "chroma": self.chroma,
            "lighting": self.lighting,
            "cache": self.cache != "none",
            "input_servers": self.input_servers,
            "shard_by": self.shard_by == "files",
        }
        for name, given in on_host.items():
            if given:
                raise UserError(
                    f"{name}={option_text(getattr(self, name))} cannot be used with "
                    "data_on_device: remove one of them"
                )
        if self.alternating_flip and not self.flip:
            raise UserError("alternating_flip contradicts --noflip: remove one of them")
        if self.alternating_flip and self.augment_in_groups:
            raise UserError("alternating_flip excludes augment_in_groups: remove one of them")


@dataclasses.dataclass(frozen=True)
class InputOptions(DataOptions, ClusterOptions):
    """Options of the input pipeline: the data set and the replicas that it feeds."""


def ramp_sizes(
    first: int, last: int, multiple: int, begin: Duration, end: Duration
) -> tuple[tuple[int, Duration], ...]:
    """Returns the sizes of a ramp before the last one, and the time at which each ends.

    The size grows linearly from ``first``, at ``begin``, to ``last``, at ``end``, and is rounded to
    the nearest multiple of ``multiple``; halfway between two, to the even one, as by ``np.round``.
    It is computed at whole units of time: with epochs, at the beginning of each epoch. This is
    ``get_resolution`` of ffcv-imagenet, by the epoch, and ``ProgressiveResizing`` of composer.

    Args:
      first: the size until ``begin``, in pixels, a multiple of ``multiple``.
      last: the size from ``end`` on, likewise, and larger.
      multiple: the difference of successive sizes.
      begin: time since the start of training.
      end: likewise, in the same unit, and not earlier.
    """
    sizes: list[tuple[int, Duration]] = []
    # 12.8 as 64/5: its float is a little more, which decides where the line is halfway.
    start, stop = Fraction(str(begin.amount)), Fraction(str(end.amount))
    length = stop - start
    for size in range(first, last, multiple):
        # When the line is halfway between this size and the next.
        halfway = start + length * Fraction(2 * (size - first) + multiple, 2 * (last - first))
        until = math.ceil(halfway)
        if until == halfway and size // multiple % 2 == 0:
            until += 1
        if until > (sizes[-1][1].amount if sizes else 0):
            sizes.append((size, Duration(until, begin.unit)))
    return tuple(sizes)
