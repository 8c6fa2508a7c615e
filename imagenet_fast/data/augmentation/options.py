"""Options of augmentation."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.option import (
    BELOW_ONE,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    PROBABILITY,
    Check,
    OnlyIf,
)
from imagenet_fast.data.pixel_options import PixelOptions, data_option

_Options = TypeVar("_Options", bound="AugmentationOptions")


def _are_layers(count: float, magnitude: float) -> bool:
    return count >= 1 and count.is_integer() and 0 <= magnitude <= 10


@dataclasses.dataclass(frozen=True)
class AugmentationOptions(PixelOptions):
    """Random changes of training images."""

    train_crop: str = data_option(
        "random_resized",
        "crop of training images; random_resized: of random area and aspect ratio, as in "
        "torchvision; inception: likewise with TensorFlow's distribution, as in recipes for TPUs "
        "and MLPerf; pad: of random position in the padded image; none: the centre crop of "
        "evaluation",
        choices=("random_resized", "inception", "pad", "none"),
    )
    crop_min_area: float = data_option(
        0.08,
        "minimum area of random_resized and inception crops, as a fraction of the image; at least "
        "0.1 for inception",
        check=FRACTION,
        only_if=OnlyIf("train_crop", ("random_resized", "inception")),
    )
    crop_attempts: int = data_option(
        10,
        "maximum number of random_resized or inception crops drawn until one fits into the image; "
        "then the centre is cropped",
        check=POSITIVE,
        only_if=OnlyIf("train_crop", ("random_resized", "inception")),
    )
    crop_padding: int = data_option(
        4,
        "pixels added at each side by train_crop=pad",
        check=NOT_NEGATIVE,
        only_if=OnlyIf("train_crop", ("pad",)),
    )
    crop_border: str = data_option(
        "zeros",
        "padding by train_crop=pad; zeros; reflect: the image reflected at its border",
        choices=("zeros", "reflect"),
        only_if=OnlyIf("train_crop", ("pad",)),
    )
    flip: bool = data_option(True, "flip training images horizontally with probability 1/2")
    cutout: int = data_option(
        0,
        "cutout: side in pixels of a square at a random position in each training image that is "
        "filled with pixel_mean; 0: none",
        check=NOT_NEGATIVE,
    )
    color_jitter: float = data_option(
        0.0,
        "strength of random changes of brightness, contrast and saturation (0.4 in "
        "fb.resnet.torch); 0: none",
        check=BELOW_ONE,
    )
    brightness: float = data_option(
        0.0,
        "random change of brightness: a number up to this one is added to or subtracted from all "
        "normalized pixels of a training image; 0: none",
        check=NOT_NEGATIVE,
    )
    contrast: float = data_option(
        0.0,
        "random change of contrast, after brightness: normalized pixels of a training image are "
        "multiplied by 1 plus or minus up to this number; 0: none",
        check=BELOW_ONE,
    )
    chroma: float = data_option(
        0.0,
        "random change of colour: a number up to this one, of 1 for the full range, is added to or "
        "subtracted from Cb, and another from Cr, of all pixels of a training image (0.1 in "
        "tensorflow/tpu's AmoebaNet); 0: none",
        check=BELOW_ONE,
    )
    lighting: float = data_option(
        0.0,
        "standard deviation of AlexNet's PCA lighting noise (0.1 in fb.resnet.torch); 0: none",
        check=NOT_NEGATIVE,
    )
    rand_augment: tuple[float, ...] = data_option(
        (),
        "RandAugment: number of random operations for each training image and their magnitude, "
        "from 0 to 10, the maximum of AutoAugment (2,9 in the paper for ResNet-50); empty: none",
        check=Check(
            lambda value: not value or (len(value) == 2 and _are_layers(*value)),
            "be a positive number of operations and a magnitude in [0, 10], as 2,9",
        ),
    )
    trivial_augment: bool = data_option(
        False,
        "TrivialAugment: one random operation of random strength for each training image, from "
        "torchvision's wide ranges",
    )
    random_erasing: float = data_option(
        0.0,
        "random erasing, as in torchvision: probability that a box of 2% to 33% of a training "
        "image's area is filled with pixel_mean; 0: none",
        check=PROBABILITY,
    )
    mixup_alpha: float = data_option(
        0.0,
        "mixup: blend each training image and its label with another's of the same micro-batch of "
        "a replica, with a weight drawn from Beta(alpha, alpha) (0.2 in the paper for ImageNet); "
        "0: none",
        check=NOT_NEGATIVE,
    )
    cutmix_alpha: float = data_option(
        0.0,
        "CutMix: paste a box of another training image, as mixup's, of an area drawn from "
        "Beta(alpha, alpha), and blend the labels by area (1 in the paper); with mixup_alpha, each "
        "is used for half of the images; 0: none",
        check=NOT_NEGATIVE,
    )

    def for_evaluation(self: _Options) -> _Options:
        """Returns the options of evaluation's images, with their size as ``image_size``."""
        plain = self.replace(eval_image_size=0, train_crop="none", cutout=0)
        return plain.with_image_size(self.evaluation_image_size)

    def _check_together(self) -> None:
        super()._check_together()
        if self.trivial_augment and self.rand_augment:
            raise UserError("trivial_augment excludes rand_augment: remove one of them")
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
