"""``imagenet-fast prepare``."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from imagenet_fast.base.counted import counted
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.paths import to_path
from imagenet_fast.commands.flags import CommandFlags
from imagenet_fast.data.prepare.image_limit import ImageLimit
from imagenet_fast.distribute.quiet import import_tensorflow

if TYPE_CHECKING:
    from imagenet_fast.data.manifest import Manifest
    from imagenet_fast.data.prepare.duplicates import FoundDuplicates

# The flags of some sources only: their defaults and help.
_SOURCE_OPTIONS: dict[str, tuple[str | float, str]] = {
    "synsets": (
        "",
        "imagenet: file with one synset per line, in alphabetical order; default: one beside the "
        "tars, else the devkit's list",
    ),
    "validation_labels": (
        "",
        "imagenet: file with one validation image's synset per line; default: likewise",
    ),
    "holdout": (
        0.1,
        "folders, list, huggingface: fraction of each class held out for validation if there is no "
        "validation split",
    ),
    "image_column": (
        "",
        "list, huggingface: the column of the images; default: the first with a usual name, such "
        "as image, file_name or path",
    ),
    "label_column": (
        "",
        "list, huggingface: the column of the labels; default: likewise, such as label",
    ),
    "split_column": (
        "",
        "list: the column with train, validation or test; default: split, set or subset, if "
        "there is one",
    ),
    "group_column": (
        "",
        "list: the column of what several images are of, such as patients or videos: all images of "
        "one are held out, or none",
    ),
    "label_separator": (
        "",
        "list, huggingface: character between the names of several labels of an image, as in "
        "cat,dog; lists of names need none",
    ),
    "label_columns": (
        "",
        "list, huggingface: columns with 0 or 1, one for each class, separated by commas, of "
        "images with several labels; *: all columns that are not used otherwise",
    ),
    "allow_unlabelled": (
        False,
        "list, huggingface: of data with several labels, also take images without any, which show "
        "none of the classes",
    ),
    "image_dir": (
        "",
        "list: directory of the images, where relative paths start; default: the list's directory",
    ),
    "allow_outside": (
        False,
        "list, huggingface: also take files that the list or a row names outside of the data's "
        "directory, by its path or through a link; of data by others, these could be any of yours",
    ),
    "tfds_name": (
        "",
        "tfds: the data set's name, as cifar10, to download and prepare it with TensorFlow "
        "Datasets; source_path is then the directory of all its data sets",
    ),
    "pad_to": (0, "idx: height and width after padding with zeros, in pixels; 0: no padding"),
}


def main(arguments: list[str]) -> int:
    """Writes shards and a manifest, or verifies them; the status is 2 if they are damaged."""
    flags = CommandFlags("prepare")
    flags.define(
        "source",
        "",
        "folders, list, huggingface, tfds, imagenet, cifar10, cifar100, idx or digits: see "
        "docs/data.md",
    )
    flags.define(
        "source_path",
        "",
        "path of the source's files; digits needs none, and idx, cifar10, cifar100 and tfds with "
        "--tfds_name have a default",
    )
    for name, (default, text) in _SOURCE_OPTIONS.items():
        flags.define(name, default, text)
    flags.define(
        "encoding",
        "jpeg",
        "format for images that are not JPEGs, or are resized or rotated: jpeg, with quality 95, "
        "or png, which is lossless",
    )
    flags.define(
        "max_side",
        0,
        "maximum length of an image's longer side, in pixels; larger images are resized; 0: none",
    )
    flags.define(
        "shorter_side", 0, "maximum length of the shorter side; cannot be combined with max_side"
    )
    flags.define(
        "exif",
        "ignore",
        "EXIF orientation: ignore: keep the stored pixels; apply: rotate images upright",
    )
    flags.define(
        "make_baseline",
        False,
        "convert progressive JPEGs to baseline losslessly, so that they can be indexed and decode "
        "faster; needs the program jpegtran",
    )
    flags.define(
        "jpeg_index",
        True,
        "index baseline JPEGs, so that training decodes only the blocks around a crop; needs a C++ "
        "compiler",
    )
    flags.define("data_dir", "", "directory for the shards and manifest.json")
    flags.define("train_shards", 0, "training files; 0: by the size of the data")
    flags.define("validation_shards", 0, "validation files; 0: by the size of the data")
    flags.define("threads", 0, "shards written concurrently; 0: one per core")
    flags.define(
        "runner",
        "local",
        "what writes the shards: local: processes of this machine; beam: Apache Beam, on other "
        "machines, too, and also into a bucket (docs/data.md)",
    )
    flags.define(
        "pipeline_options",
        "",
        "with --runner=beam: Beam's own options, as '--direct_num_workers=4 "
        "--direct_running_mode=multi_processing'",
    )
    flags.define(
        "max_bad_images",
        "100",
        "maximum of skipped undecodable images: a number, or a fraction as 0.01 or 1%",
    )
    flags.define("seed", 0, "seed of the order of the images")
    flags.define("verify", False, "only check data_dir against its manifest")
    flags.define(
        "add_index",
        False,
        "only add an index of each JPEG to the shards in data_dir, which an earlier version or "
        "another converter wrote",
    )
    flags.define("data_page", False, "only write data.html for data_dir again")
    flags.parse(arguments)
    directory = flags["data_dir"]
    if not directory:
        raise UserError("give --data_dir, the directory for the shards")
    if sum(flags[name] for name in ("verify", "data_page", "add_index")) > 1:
        raise UserError("verify, data_page and add_index exclude each other: give one of them")
    if not 0 <= flags["seed"] < 2**32:
        raise UserError(f"seed is {flags['seed']}, but must be in [0, 2**32)")
    for name in ("max_side", "shorter_side", "train_shards", "validation_shards", "threads"):
        if flags[name] < 0:
            raise UserError(f"{name} is {flags[name]}, but must not be negative")
    if flags["max_side"] and flags["shorter_side"]:
        raise UserError("max_side and shorter_side exclude each other: give one of them")
    ImageLimit.parse(flags["max_bad_images"], "max_bad_images")
    from imagenet_fast.data.prepare.job import check_choices, check_runner

    check_choices(flags["encoding"], flags["exif"])
    if flags["runner"] != "local" and flags["threads"]:
        raise UserError("threads are of --runner=local: Beam's options give the number of workers")
    check_runner(flags["runner"], flags["pipeline_options"])
    if not any(flags[name] for name in ("verify", "data_page", "add_index")):
        _check_source(flags)
    import_tensorflow()  # It takes seconds.
    if flags["verify"]:
        return _verify(directory)
    if flags["add_index"]:
        return _add_index(directory, flags["threads"] or None)
    return _write_page(directory) if flags["data_page"] else _prepare(flags, directory)


def _verify(directory: str) -> int:
    from imagenet_fast.data.manifest import read_manifest, verify

    problems = verify(directory)
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        print(f"{directory} is damaged; problems: {len(problems)}", file=sys.stderr)
        return 2
    print(f"{directory} is whole: {_contents(read_manifest(directory))}")
    return 0


def _add_index(directory: str, threads: int | None) -> int:
    from imagenet_fast.data.prepare.add_index import add_index

    added = add_index(directory, threads)
    print(
        f"{directory}: {counted(added.indexed, 'JPEG')} with an index, {added.unindexed:,} "
        "that cannot have one"
    )
    return 0


def _write_page(directory: str) -> int:
    from imagenet_fast.data.prepare.page import FILE, write_page

    try:
        found = write_page(directory)
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be written: {error.strerror}") from error
    _warn_of_duplicates(found)
    print(f"a page on the images: {to_path(directory, FILE)}")
    return 0


def _warn_of_duplicates(found: FoundDuplicates) -> None:
    if found.equal:
        _warn([found.equal.summary("pairs of equal files")])
    if found.similar:
        _warn([found.similar.summary("further pairs of similar images")])


def _check_source(flags: CommandFlags) -> None:
    from imagenet_fast.data.prepare.sources import check_source

    if not flags["source"]:
        raise UserError("give --source: what kind of data to prepare")
    path = ["path"] if flags["source_path"] else []
    check_source(flags["source"], [*_source_options(flags), *path])


def _source_options(flags: CommandFlags) -> dict[str, Any]:
    """Returns the given options of the source, also those given as the flag's default.

    Empty text means what is not given.
    """
    given = flags.given()
    return {name: flags[name] for name in _SOURCE_OPTIONS if name in given and flags[name] != ""}


def _prepare(flags: CommandFlags, directory: str) -> int:
    from imagenet_fast.data.prepare.job import local_directory, prepare
    from imagenet_fast.data.prepare.page import FILE, write_page
    from imagenet_fast.data.prepare.sources import open_source

    options = _source_options(flags)
    # Before reading the source, which may take minutes.
    is_beam = flags["runner"] == "beam"
    target = to_path(directory) if is_beam else local_directory(directory)
    if flags["source"] in ("folders", "huggingface") and flags["source_path"]:
        source_path = to_path(flags["source_path"]).resolve()
        if target.resolve().is_relative_to(source_path):
            raise UserError(
                f"data_dir {directory} is inside source_path {flags['source_path']}, and would be "
                "read as part of the source; choose another"
            )
    source = open_source(flags["source"], flags["source_path"] or None, **options)
    _warn(source.warnings)  # Before hours of work.
    manifest = prepare(
        source,
        target,
        train_shards=flags["train_shards"] or None,
        validation_shards=flags["validation_shards"] or None,
        seed=flags["seed"],
        encoding=flags["encoding"],
        max_side=flags["max_side"] or None,
        shorter_side=flags["shorter_side"] or None,
        exif=flags["exif"],
        make_baseline=flags["make_baseline"],
        jpeg_index=flags["jpeg_index"],
        threads=flags["threads"] or None,
        max_bad_images=flags["max_bad_images"],
        runner=flags["runner"],
        pipeline_options=flags["pipeline_options"],
    )
    _warn(warning for warning in manifest.warnings if warning not in source.warnings)
    if manifest.num_classes == 1:
        _warn(["all images have the same class, so a model cannot learn anything"])
    for kind, count in manifest.converted.items():
        print(f"converted {counted(count, 'image')}: {kind}")
    if manifest.unindexed:
        hint = "; --make_baseline converts progressive ones, so that they get an index"
        if flags["make_baseline"]:
            hint = ": --make_baseline cannot convert them without a change"
        jpegs = counted(manifest.unindexed, "JPEG")
        print(f"{jpegs} without an index will be decoded more slowly{hint}")
    for skipped in manifest.skipped:
        print(f"skipped {skipped.file}: {skipped.reason}")
    try:
        _warn_of_duplicates(write_page(directory))
        print(f"a page on the images: {to_path(directory, FILE)}")
    except (OSError, UserError) as error:  # The shards are complete without the page.
        _warn([f"no {FILE}: {error}"])
    print(f"{directory}: {_contents(manifest)}")
    return 0


def _warn(warnings: Iterable[str]) -> None:
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)


def _contents(manifest: Manifest) -> str:
    splits = (counted(split.examples, f"{name} image") for name, split in manifest.splits.items())
    classes = counted(manifest.num_classes, "class", "classes")
    several = ", several labels an image" * manifest.multi_label
    return f"{manifest.name}, {classes}{several}, {', '.join(splits)}"
