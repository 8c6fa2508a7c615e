"""The options of the data: where it is, how it is read, cropped, augmented and cached."""

from __future__ import annotations

import dataclasses

from imagenet_fast.base.durations import Duration
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.option import (
    ADDRESSES,
    ALL_POSITIVE,
    BELOW_ONE,
    FRACTION,
    IN_ORDER,
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


@dataclasses.dataclass(frozen=True)
class DataOptions(SharedOptions):
    """Which images a run reads, and what is done to them."""

    data_dir: str = option(
        "", "directory of TFRecord shards, as `prepare` writes them", group="data", free=True
    )
    synthetic: bool = option(
        False, "train on random images instead of data_dir, to time everything else", group="data"
    )
    num_classes: int = option(
        0,
        "number of classes; 0: as the manifest in data_dir says",
        group="data",
        check=NOT_NEGATIVE,
    )
    label_offset: int = option(
        0, "added to each label when read: -1 for shards whose first class is 1", group="data"
    )
    image_size: int = option(
        224,
        "height and width of the images that the model sees, in pixels",
        group="data",
        check=POSITIVE,
    )
    train_sizes: tuple[int, ...] = option(
        (),
        "progressive resizing: sizes of training images at first, as 128,160, each until its time "
        "in train_until; then image_size",
        group="data",
        check=ALL_POSITIVE,
    )
    train_until: tuple[Duration, ...] = option(
        (),
        "when each of train_sizes ends, counted from the start of the run, as '10 epochs,20 "
        "epochs'; also steps or examples",
        group="data",
        check=IN_ORDER,
    )
    train_crop: str = option(
        "random_resized",
        "which part of a training image is taken; random_resized: of random area and aspect, as in "
        "torchvision; inception: the same as TensorFlow draws it, in recipes for TPUs and "
        "MLPerf; pad: a border around, then a random window; none: the centre, as in evaluation",
        group="data",
        choices=("random_resized", "inception", "pad", "none"),
    )
    crop_min_area: float = option(
        0.08,
        "least area of a random_resized or inception crop, as a fraction of the image; inception "
        "never takes less than a tenth",
        group="data",
        check=FRACTION,
        beside=Beside("train_crop", ("random_resized", "inception")),
    )
    crop_attempts: int = option(
        10,
        "random_resized or inception crops that may fail to fit before the middle is taken",
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
        "what train_crop=pad adds; zeros; reflect: the image, reflected at its border",
        group="data",
        choices=("zeros", "reflect"),
        beside=Beside("train_crop", ("pad",)),
    )
    flip: bool = option(True, "flip half of the training images", group="data")
    alternating_flip: bool = option(
        False,
        "flip a training image in every second epoch, half of them in the first, in place of at "
        "random; with data_on_device (Jordan 2024)",
        group="data",
        beside=Beside("data_on_device"),
    )
    cutout: int = option(
        0,
        "side of a square somewhere in each training image that is replaced by pixel_mean, in "
        "pixels; 0: none",
        group="data",
        check=NOT_NEGATIVE,
    )
    augment_in_groups: bool = option(
        False,
        "draw the crop, flip and cutout of an epoch for near-equal groups of images, at most "
        "200, in place of for each image; with data_on_device (Page 2019)",
        group="data",
        beside=Beside("data_on_device"),
    )
    color_jitter: float = option(
        0.0,
        "strength of random brightness, contrast and saturation (0.4 in fb.resnet.torch); 0: none",
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
        "random operations of RandAugment done to each training image, one after another "
        "(2 in the paper, for ResNet-50); 0: none",
        group="data",
        check=NOT_NEGATIVE,
    )
    rand_augment_magnitude: float = option(
        10.0,
        "strength of RandAugment's operations, from 0 to 10, AutoAugment's strongest (9 in the "
        "paper, for ResNet-50)",
        group="data",
        check=Check(lambda value: 0 <= value <= 10, "be in [0, 10]"),
        beside=Beside("rand_augment_layers"),
    )
    trivial_augment: bool = option(
        False,
        "TrivialAugment: one random operation of random strength on each training image, from "
        "torchvision's wide ranges",
        group="data",
    )
    random_erasing: float = option(
        0.0,
        "probability that a box of a training image, of 2% to 33% of its area, is replaced by "
        "pixel_mean, as torchvision does; 0: none",
        group="data",
        check=PROBABILITY,
    )
    mixup_alpha: float = option(
        0.0,
        "blend each training image and its label with another's, by a fraction drawn from "
        "Beta(alpha, alpha) (0.2 in the paper, for ImageNet); 0: do not",
        group="data",
        check=NOT_NEGATIVE,
    )
    cutmix_alpha: float = option(
        0.0,
        "paste a box of another training image over each, of an area drawn likewise, and blend "
        "their labels by area (1 in the paper); with mixup_alpha, half of the images get one, half "
        "the other; 0: do not",
        group="data",
        check=NOT_NEGATIVE,
    )
    resize_method: str = option(
        "bilinear", "interpolation of resized images", group="data", choices=("bilinear", "bicubic")
    )
    antialias: bool = option(
        False,
        "antialias what is made smaller, as Pillow and torchvision do, in training, evaluation and "
        "exported models; published recipes in TensorFlow do not",
        group="data",
    )
    resize_kernel: str = option(
        "auto",
        "native: an op of our own, compiled at first use, which takes a C++ compiler; tensorflow: "
        "its own, slower ones; auto: native if it can be had; pixels are the same",
        group="data",
        choices=("auto", "native", "tensorflow"),
        free=True,
    )
    jpeg_dct: str = option(
        "accurate",
        "inverse DCT of JPEGs; accurate: as Pillow's; fast: cheaper, pixels differ a little",
        group="data",
        choices=("accurate", "fast"),
    )
    jpeg_upsampling: str = option(
        "smooth",
        "enlarging of the colours, which most JPEGs hold at half the width and height; "
        "smooth: interpolated, as Pillow's; plain: repeated, which is cheaper",
        group="data",
        choices=("smooth", "plain"),
    )
    jpeg_scaling: bool = option(
        False,
        "decode JPEGs at 1/2, 1/4 or 1/8 of their size where that is still enough for image_size: "
        "cheaper, pixels differ a little",
        group="data",
    )
    jpeg_index: bool = option(
        True,
        "decode only the blocks around the crop of JPEGs whose records have an index, as prepare "
        "writes it, with resize_kernel=native; pixels at a crop's border are then those of the "
        "whole image",
        group="data",
        free=True,
    )
    eval_crop_fraction: float = option(
        0.875,
        "side of the centre crop in evaluation, as a fraction of the image's shorter side",
        group="data",
        check=FRACTION,
    )
    max_pixels: int = option(
        178_956_970,
        "pixels of an image, height times width; evaluation and exported models refuse larger "
        "images before they are decoded, and training refuses larger PNGs (default: where Pillow, "
        "and so prepare, refuses)",
        group="data",
        check=POSITIVE,
        free=True,
    )
    pixel_mean: tuple[float, ...] = option(
        (123.675, 116.28, 103.53),
        "means of red, green and blue, which are subtracted from pixels in 0..255",
        group="data",
        check=Check(
            lambda value: len(value) == 3 and min(value) >= 0 and max(value) <= 255,
            "have three values in [0, 255]",
        ),
    )
    pixel_std: tuple[float, ...] = option(
        (58.395, 57.12, 57.375),
        "standard deviations of red, green and blue, by which those differences are divided",
        group="data",
        check=Check(lambda value: len(value) == 3 and min(value) > 0, "have three positive values"),
    )
    shuffle_buffer: int = option(
        8192,
        "training images from which the next one is drawn at random; they are held in memory",
        group="data",
        check=POSITIVE,
    )
    shard_by: str = option(
        "auto",
        "records: each worker reads all shards and keeps its part, so that batches are the same "
        "for any number of workers; files: each worker reads shards of its own; "
        "auto: files for data above 1 GiB",
        group="data",
        choices=("auto", "records", "files"),
    )
    cache: str = option(
        "none",
        "what of the training images each host holds in memory, read before the first step; none; "
        "encoded: records; decoded: images, for train_crop=pad or none; the order stays the same",
        group="data",
        choices=("none", "encoded", "decoded"),
        free=True,
    )
    data_on_device: bool = option(
        False,
        "hold all images in the memory of each accelerator, which also shuffles, crops, flips "
        "and cuts them: no work for the host; for small images, with train_crop=pad or none",
        group="data",
    )
    cache_dir: str = option(
        "",
        "directory on a local disk to which each host copies the shards that it reads; empty: none",
        group="data",
        check=Check(is_local, "be on a disk of this machine"),
        free=True,
    )
    data_threads: int = option(
        0,
        "threads that read and decode in each process; 0: one a core",
        group="data",
        check=NOT_NEGATIVE,
        free=True,
    )
    input_servers: tuple[str, ...] = option(
        (),
        "host:port of each `imagenet-fast input-server` that reads and decodes training images in "
        "place of this process; the order stays the same",
        group="data",
        check=ADDRESSES,
        free=True,
    )
    max_bad_images: int = option(
        100,
        "unreadable images skipped between two evaluations before the run stops",
        group="data",
        check=NOT_NEGATIVE,
        free=True,
    )

    @property
    def largest_image_size(self) -> int:
        """The height and width of the largest images that the run trains on."""
        return max(self.image_size, *self.train_sizes, 0)

    def _check_together(self) -> None:
        super()._check_together()
        if self.synthetic and not self.num_classes:
            raise UserError("synthetic data needs num_classes, e.g. --num_classes=1000")
        if len(self.train_sizes) != len(self.train_until):
            raise UserError(
                f"there are {len(self.train_sizes)} train_sizes, but {len(self.train_until)} times "
                "in train_until"
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
            raise UserError("alternating_flip and augment_in_groups both say who is flipped")


@dataclasses.dataclass(frozen=True)
class InputOptions(DataOptions, ClusterOptions):
    """What the input pipeline of a run needs to know: its images, and the replicas they are for."""
