"""``imagenet-fast prepare``."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.paths import to_local_path, to_path
from imagenet_fast.commands.flags import CommandFlags
from imagenet_fast.data.image_limit import ImageLimit
from imagenet_fast.distribute.quiet import import_tensorflow

if TYPE_CHECKING:
    from imagenet_fast.data.duplicates import FoundDuplicates
    from imagenet_fast.data.manifest import Manifest

# The flags that only some kinds of source take: their defaults and what they are.
_SOURCE_OPTIONS: dict[str, tuple[str | float, str]] = {
    "synsets": (
        "",
        "imagenet: file with a synset a line, in alphabetical order; default: one found beside the "
        "tars, else the devkit's list",
    ),
    "validation_labels": (
        "",
        "imagenet: file with each validation image's synset, a line each; default: likewise",
    ),
    "holdout": (
        0.1,
        "folders, list, huggingface: fraction of each class held out where there is no validation "
        "split",
    ),
    "image_column": (
        "",
        "list, huggingface: the column of the images; default: the first that is called so, as "
        "image, file_name or path",
    ),
    "label_column": (
        "",
        "list, huggingface: the column of the labels; default: likewise, as label",
    ),
    "split_column": (
        "",
        "list: the column that says train, validation or test; default: split, set or subset, if "
        "there is one",
    ),
    "image_dir": ("", "list: directory in which relative paths begin; default: the list's own"),
    "tfds_name": (
        "",
        "tfds: the data set's name, as cifar10, to download and prepare it through TensorFlow "
        "Datasets; source_path is then the directory of all of theirs",
    ),
    "pad_to": (0, "idx: pixels of height and width to reach by a border of zeros; 0: no border"),
}


def main(arguments: list[str]) -> int:
    """Writes shards and a manifest, or verifies them; 2 if they are damaged."""
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
        "path of the source's files; digits has none, and idx, cifar10, cifar100 and, with a name, "
        "tfds know one",
    )
    for name, (default, text) in _SOURCE_OPTIONS.items():
        flags.define(name, default, text)
    flags.define(
        "encoding",
        "jpeg",
        "what images become that are no JPEGs, or are resized or turned: jpeg, of quality 95, or "
        "png, which keeps each pixel",
    )
    flags.define(
        "max_side",
        0,
        "images with a longer side of more pixels are resized to that many; 0: none are",
    )
    flags.define("shorter_side", 0, "likewise by the shorter side; give one of both")
    flags.define(
        "exif",
        "ignore",
        "what becomes of EXIF orientation: ignore, the pixels stay as they are stored, or apply, "
        "those of images that are not upright are turned",
    )
    flags.define(
        "jpeg_index",
        True,
        "index baseline JPEGs, so that training decodes only the blocks around a crop; takes a C++ "
        "compiler",
    )
    flags.define("data_dir", "", "directory for the shards and manifest.json")
    flags.define("train_shards", 0, "training files; 0: by the size of the data")
    flags.define("validation_shards", 0, "validation files; 0: by the size of the data")
    flags.define("threads", 0, "shards written at once; 0: one a core")
    flags.define(
        "max_bad_images",
        "100",
        "undecodable images left out before that fails: a number, or a fraction as 0.01 or 1%",
    )
    flags.define("seed", 0, "of the order of the images")
    flags.define("verify", False, "check data_dir against its manifest, and write nothing")
    flags.define(
        "add_index",
        False,
        "add the index of each JPEG to the shards in data_dir, of an earlier version or another "
        "converter, and do nothing else",
    )
    flags.define("look", False, "write data.html for data_dir again, and nothing else")
    flags.parse(arguments)
    directory = flags["data_dir"]
    if not directory:
        raise UserError("give --data_dir, the directory for the shards")
    if sum(flags[name] for name in ("verify", "look", "add_index")) > 1:
        raise UserError("verify, look and add_index: give one of them")
    if not 0 <= flags["seed"] < 2**32:
        raise UserError(f"seed is {flags['seed']}, but must be in [0, 2**32)")
    for name in ("max_side", "shorter_side", "train_shards", "validation_shards", "threads"):
        if flags[name] < 0:
            raise UserError(f"{name} is {flags[name]}, but must not be negative")
    if flags["max_side"] and flags["shorter_side"]:
        raise UserError("max_side and shorter_side: give one of both")
    ImageLimit.parse(flags["max_bad_images"], "max_bad_images")
    from imagenet_fast.data.prepare import check_choices

    check_choices(flags["encoding"], flags["exif"])
    import_tensorflow()
    if flags["verify"]:
        return _verify(directory)
    if flags["add_index"]:
        return _add_index(directory, flags["threads"] or None)
    return _look(directory) if flags["look"] else _prepare(flags, directory)


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
    from imagenet_fast.data.add_index import add_index

    added = add_index(directory, threads)
    print(f"{directory}: {added.indexed} JPEGs have an index, {added.unindexed} cannot have one")
    return 0


def _look(directory: str) -> int:
    from imagenet_fast.data.data_page import FILE, write_page

    try:
        found = write_page(directory)
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be written: {error.strerror}") from error
    _warn_of_duplicates(found)
    print(f"a page on the images: {to_path(directory, FILE)}")
    return 0


def _warn_of_duplicates(found: FoundDuplicates) -> None:
    _warn(
        duplicates.summary(what)
        for duplicates, what in (
            (found.equal, "duplicate images, byte for byte"),
            (found.similar, "further pairs of similar images"),
        )
        if duplicates
    )


def _prepare(flags: CommandFlags, directory: str) -> int:
    from imagenet_fast.data.data_page import FILE, write_page
    from imagenet_fast.data.prepare import prepare, target_directory
    from imagenet_fast.data.sources import open_source

    if not flags["source"]:
        raise UserError("give --source: what kind of data to prepare")
    options = {
        name: flags[name]
        for name, (default, _) in _SOURCE_OPTIONS.items()
        if flags[name] != default
    }
    target = target_directory(directory)  # before a source is read, for minutes
    if flags["source"] in ("folders", "huggingface") and flags["source_path"]:
        source_path = to_local_path(flags["source_path"], "source_path").resolve()
        if target.resolve().is_relative_to(source_path):
            raise UserError(
                f"data_dir {directory} is inside of source_path {flags['source_path']}, where it "
                "would be taken for a part of the source; choose another"
            )
    source = open_source(flags["source"], flags["source_path"] or None, **options)
    _warn(source.warnings)  # before hours of work
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
        jpeg_index=flags["jpeg_index"],
        threads=flags["threads"] or None,
        max_bad_images=flags["max_bad_images"],
    )
    _warn(warning for warning in manifest.warnings if warning not in source.warnings)
    if manifest.num_classes == 1:
        _warn(["all images are of one class: a model has nothing to learn from them"])
    for kind, count in manifest.converted.items():
        print(f"converted {count} images: {kind}")
    if manifest.unindexed:
        print(
            f"{manifest.unindexed} JPEGs cannot be indexed, such as progressive ones, and are "
            "slower to decode"
        )
    for skipped in manifest.skipped:
        print(f"left out {skipped.file}: {skipped.reason}")
    try:
        _warn_of_duplicates(write_page(directory))
        print(f"a page on the images: {to_path(directory, FILE)}")
    except (OSError, UserError) as error:  # the data can be trained on all the same
        _warn([f"no {FILE}: {error}"])
    print(f"{directory}: {_contents(manifest)}")
    return 0


def _warn(warnings: Iterable[str]) -> None:
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)


def _contents(manifest: Manifest) -> str:
    splits = (f"{split.examples} {name} images" for name, split in manifest.splits.items())
    return f"{manifest.name}, {manifest.num_classes} classes, {', '.join(splits)}"
