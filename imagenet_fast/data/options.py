"""Options of the data set and the input pipeline."""

from __future__ import annotations

import dataclasses

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.option import (
    ADDRESSES,
    NOT_NEGATIVE,
    POSITIVE,
    Check,
    OnlyIf,
    Options,
    option_text,
)
from imagenet_fast.base.paths import is_local
from imagenet_fast.base.shared_options import SharedOptions
from imagenet_fast.data.augmentation.options import AugmentationOptions
from imagenet_fast.data.pixel_options import data_option
from imagenet_fast.distribute.options import ClusterOptions


@dataclasses.dataclass(frozen=True)
class SourceOptions(Options):
    """The data set."""

    data_dir: str = data_option(
        "", "directory of TFRecord shards, as written by `prepare`", may_change_on_resume=True
    )
    synthetic: bool = data_option(
        False, "train on random images instead of data_dir, to time everything but the input"
    )
    num_classes: int = data_option(
        0, "number of classes; 0: from the manifest in data_dir", check=NOT_NEGATIVE
    )
    label_offset: int = data_option(0, "added to each label: -1 for shards whose first class is 1")

    def _check_together(self) -> None:
        super()._check_together()
        if self.synthetic and not self.num_classes:
            raise UserError("synthetic data needs num_classes, e.g. --num_classes=1000")


@dataclasses.dataclass(frozen=True)
class ReadingOptions(SharedOptions):
    """How records are read: their order, and where they are kept and decoded."""

    sampling: str = data_option(
        "",
        "how often training reads each class; balanced: all equally often in an epoch, which stays "
        'as long; or a JSON file of relative numbers by class, {"cat": 2, "dog": 1}, 1 for others; '
        "empty: each image once",
        only_if=(OnlyIf("data_on_device", unless=True), OnlyIf("synthetic", unless=True)),
    )
    shard_by: str = data_option(
        "auto",
        "division of training data among workers; records: each worker reads all shards and uses "
        "its part, so batches are the same for any number of workers; files: each worker reads "
        "its own shards; auto: files for data above 1 GiB",
        choices=("auto", "records", "files"),
    )
    shuffle_buffer: int = data_option(
        8192,
        "number of training images in memory from which the next one is drawn at random",
        check=POSITIVE,
        only_if=OnlyIf("data_on_device", unless=True),
    )
    cache: str = data_option(
        "none",
        "training data that each host reads into memory before the first step; none; encoded: "
        "records; decoded: images, for train_crop=pad or none; the order of images is the same",
        choices=("none", "encoded", "decoded"),
        may_change_on_resume=True,
    )
    data_on_device: bool = data_option(
        False,
        "store all images in the memory of each accelerator, which also shuffles, crops, flips, "
        "cuts out and changes brightness and contrast, without work for the host; for small "
        "images, with train_crop=pad or none",
    )
    alternating_flip: bool = data_option(
        False,
        "flip each training image in every second epoch, beginning with a random half, instead of "
        "at random; with data_on_device (Jordan 2024)",
        only_if=OnlyIf("data_on_device"),
    )
    augment_in_groups: bool = data_option(
        False,
        "draw crops, flips and cutouts of an epoch for at most 200 near-equal groups of images "
        "instead of for each image; with data_on_device (Page 2019)",
        only_if=OnlyIf("data_on_device"),
    )
    cache_dir: str = data_option(
        "",
        "directory on a local disk to which each host copies the shards that it reads; empty: none",
        check=Check(is_local, "be on a disk of this machine"),
        may_change_on_resume=True,
        in_files_of_runs=False,
    )
    data_threads: int = data_option(
        0,
        "threads that read and decode in each process; 0: one per core",
        check=Check(lambda value: 0 <= value <= 1024, "be in [0, 1024]"),
        may_change_on_resume=True,
    )
    input_servers: tuple[str, ...] = data_option(
        (),
        "host:port of each `imagenet-fast input-server` that reads and decodes training images "
        "instead of this process; the order of images is the same",
        check=ADDRESSES,
        may_change_on_resume=True,
        in_files_of_runs=False,
    )
    max_bad_images: int = data_option(
        100,
        "maximum number of unreadable images to skip between two evaluations; training stops at "
        "more",
        check=NOT_NEGATIVE,
        may_change_on_resume=True,
    )

    def _check_together(self) -> None:
        super()._check_together()
        if self.sampling and self.shard_by == "files":
            raise UserError(
                "sampling draws images from all shards, but shard_by=files gives each worker its "
                "own: leave one of them out"
            )


# The last base's options come first.
@dataclasses.dataclass(frozen=True)
class DataOptions(ReadingOptions, AugmentationOptions, SourceOptions):
    """The data set, and how its images are read, cropped, augmented and cached."""

    def _check_together(self) -> None:
        super()._check_together()
        if self.cache == "decoded" and self.train_crop in ("random_resized", "inception"):
            raise UserError(
                f"cache=decoded stores images of image_size, but train_crop={self.train_crop} "
                "crops whole images: use cache=encoded, or train_crop=pad or none"
            )
        self._check_device_data()

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
            "rand_augment": self.rand_augment,
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
