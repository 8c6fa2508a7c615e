"""Options of decoding, resizing and evaluation's crop of images."""

from __future__ import annotations

import dataclasses
import functools
import math
from fractions import Fraction
from typing import TypeVar

from imagenet_fast.base.durations import Duration
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.option import (
    ALL_POSITIVE,
    FRACTION,
    IMAGE_SIDE,
    IN_ORDER,
    MOST_PIXELS,
    POSITIVE,
    Check,
    OnlyIf,
    Options,
    option,
    option_text,
)

data_option = functools.partial(option, group="data")
_Options = TypeVar("_Options", bound="PixelOptions")


@dataclasses.dataclass(frozen=True)
class PixelOptions(Options):
    """Which pixels the network gets of an image, besides random changes."""

    image_size: int = data_option(
        224,
        "height and width of the network's input images, in pixels",
        check=IMAGE_SIDE,
        in_evaluation=True,
    )
    eval_image_size: int = data_option(
        0,
        "height and width of images in evaluation, exported models and predictions, in pixels; "
        "higher than image_size in some recipes (Touvron et al. 2019); 0: image_size",
        check=Check(lambda value: 0 <= value <= MOST_PIXELS, f"be in [1, {MOST_PIXELS}], or 0"),
        may_change_on_resume=True,
    )
    train_sizes: tuple[int, ...] = data_option(
        (),
        "progressive resizing: the first sizes of training images, e.g. 128,160, each used until "
        "its time in train_until; then image_size",
        check=ALL_POSITIVE,
    )
    train_until: tuple[Duration, ...] = data_option(
        (),
        "when each of train_sizes ends, counted from the start of training, e.g. '10 epochs,20 "
        "epochs'; also in steps or examples",
        check=IN_ORDER,
    )
    size_ramp: tuple[int, ...] = data_option(
        (),
        "progressive resizing by a ramp: the first size of training images and the step in which "
        "it grows to image_size, e.g. 128,32; both sizes must be multiples of the step",
        check=Check(
            lambda value: not value or (len(value) == 2 and min(value) > 0),
            "have two positive values, the first size and the step",
        ),
        only_if=OnlyIf("train_sizes", unless=True),
    )
    size_ramp_at: tuple[Duration, ...] = data_option(
        (),
        "when the ramp of size_ramp begins and ends, e.g. '20 epochs,30 epochs', also in steps or "
        "examples; a size changes at a whole epoch, step or example",
        check=IN_ORDER,
        only_if=OnlyIf("size_ramp"),
    )
    eval_crop_fraction: float = data_option(
        0.875, "side of evaluation's centre crop, as a fraction of the image's", check=FRACTION
    )
    eval_crop: str = data_option(
        "square",
        "shape of evaluation's centre crop; square: of eval_crop_fraction of the shorter side; "
        "proportional: of that fraction of both sides, stretched to a square",
        choices=("square", "proportional"),
    )
    resize_method: str = data_option(
        "bilinear",
        "interpolation of resized images",
        choices=("bilinear", "bicubic"),
        in_evaluation=True,
    )
    antialias: bool = data_option(
        False,
        "antialias when downscaling, as Pillow and torchvision do, in training, evaluation and "
        "exported models; published TensorFlow recipes do not",
        in_evaluation=True,
    )
    resize_kernel: str = data_option(
        "auto",
        "what reads, decodes and resizes images; native: this package's ops, a batch at a time, "
        "compiled at first use by a C++ compiler; tensorflow: TensorFlow's slower ops, which make "
        "equal pixels, but without JPEG indexes, see jpeg_index; auto: native if available",
        choices=("auto", "native", "tensorflow"),
        may_change_on_resume=True,
    )
    jpeg_index: bool = data_option(
        True,
        "decode only the blocks around the crop of JPEGs whose records have an index, as written "
        "by prepare; with resize_kernel=native; pixels at a crop's border then equal those of the "
        "whole image",
    )
    max_pixels: int = data_option(
        178_956_970,
        "maximum height times width of images; evaluation and exported models refuse larger ones "
        "before decoding, training refuses larger PNGs (default: the limit of Pillow, and so of "
        "prepare)",
        check=POSITIVE,
        may_change_on_resume=True,
    )
    pixel_mean: tuple[float, ...] = data_option(
        (123.675, 116.28, 103.53),
        "means of red, green and blue, subtracted from pixels in 0..255; 0,0,0, with 1,1,1 as "
        "pixel_std, for networks that begin with preprocessing of their own",
        check=Check(
            lambda value: len(value) == 3 and min(value) >= 0 and max(value) <= 255,
            "have three values in [0, 255]",
        ),
        in_evaluation=True,
    )
    pixel_std: tuple[float, ...] = data_option(
        (58.395, 57.12, 57.375),
        "standard deviations of red, green and blue, by which the differences are divided",
        check=Check(lambda value: len(value) == 3 and min(value) > 0, "have three positive values"),
        in_evaluation=True,
    )

    @property
    def normalizes_pixels(self) -> bool:
        """Whether the network's input is not the pixels as they are, in 0..255."""
        return any(self.pixel_mean) or set(self.pixel_std) != {1.0}

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

    def _check_together(self) -> None:
        super()._check_together()
        if len(self.train_sizes) != len(self.train_until):
            raise UserError(
                "train_sizes and train_until must have equally many values, not "
                f"{len(self.train_sizes)} and {len(self.train_until)}"
            )
        self._check_size_ramp()

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
