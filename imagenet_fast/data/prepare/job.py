"""Conversion of a source of labelled images into TFRecord shards with a manifest.

The images of each shard and their order are chosen before any work, so the shards' bytes do not
depend on the number of threads or on interruptions. A finished shard is renamed into place and
added to a journal, from which a later run resumes. At the end, the manifest replaces the journal.
"""

from __future__ import annotations

import collections
import contextlib
import os
import pathlib
from collections.abc import Collection
from types import ModuleType
from typing import Any

from imagenet_fast.base.cores import cpu_cores
from imagenet_fast.base.errors import UserError, how_to_install, require_choice
from imagenet_fast.base.notices import warn_once
from imagenet_fast.base.paths import Path, to_local_path, to_path
from imagenet_fast.data import manifest as manifests
from imagenet_fast.data import metadata, records
from imagenet_fast.data.images import ENCODINGS, EXIF
from imagenet_fast.data.manifest import JOURNAL, Manifest, Split
from imagenet_fast.data.preparation import Preparation
from imagenet_fast.data.prepare import plan as prepare_plan
from imagenet_fast.data.prepare.image_limit import ImageLimit
from imagenet_fast.data.prepare.journal import (
    Done,
    Journal,
    check_same_job,
    left_path,
    read_job,
    writing,
)
from imagenet_fast.data.prepare.plan import Assignment, Task
from imagenet_fast.data.prepare.shard_maker import ShardMaker
from imagenet_fast.data.prepare.shard_writer import ShardWriter, Writer
from imagenet_fast.data.prepare.sources import Source

# By encoding; increased when the same source would give other shards.
_CONVERTER_VERSIONS = {"jpeg": 3, "png": 4}

RUNNERS = ("local", "beam")
_NAMED = 5  # classes in warnings
# The parts of a job that may differ when it resumes, if the source's files may have changed.
_CHANGING = ("images", "fingerprint")


def default_shards(images: int) -> dict[str, int]:
    """Returns the default numbers of shards for a data set of ``images`` training images.

    They are powers of two, so that 2, 4, 8 ... workers get equally many files. Training has a shard
    for every 1000 images, but 8 to 1024 shards; validation and test have an eighth as many, but at
    least 4. ImageNet gets its customary 1024 and 128.
    """
    train = 8
    while train < 1024 and images >= 2 * train * 1000:
        train *= 2
    others = max(4, train // 8)
    return {"train": train, "validation": others, "test": others}


def prepare(
    source: Source,
    directory: str | os.PathLike[str],
    train_shards: int | None = None,
    validation_shards: int | None = None,
    seed: int = 0,
    encoding: str = "jpeg",
    max_side: int | None = None,
    shorter_side: int | None = None,
    exif: str = "ignore",
    make_baseline: bool = False,
    jpeg_index: bool = True,
    threads: int | None = None,
    max_bad_images: int | float | str = 100,
    progress: bool = True,
    runner: str = "local",
    pipeline_options: str = "",
) -> Manifest:
    """Writes the images of ``source`` as shards into ``directory``, or resumes doing so.

    It also writes the manifest and the images' metadata, see
    :func:`~imagenet_fast.data.metadata.read_metadata`.

    All splits are shuffled: training batches should mix classes, and a part of the validation set
    should be a fair sample of it. Only ``train`` must have images. If the directory holds the
    finished data set, only shards that are missing or have the wrong size are rewritten.

    Args:
      source: the images.
      directory: output directory, created if it does not exist.
      train_shards: number of training files; by default that of ``default_shards``.
      validation_shards: number of validation files, likewise.
      seed: of the shuffle.
      encoding: format of images that are re-encoded: ``jpeg`` (quality 95) or ``png`` (lossless).
        Images are re-encoded if they are resized, turned, or not JPEGs that training can decode;
        other JPEGs are copied unchanged.
      max_side: images with a longer side above this are resized to it; None: no limit.
      shorter_side: likewise for the shorter side. At most one of both limits may be given.
      exif: EXIF orientation: ``ignore`` keeps the pixels as stored, ``apply`` turns images upright.
      make_baseline: whether to convert progressive JPEGs to baseline losslessly, with the program
        ``jpegtran``: an index needs baseline JPEGs, which also decode faster.
      jpeg_index: whether to index baseline JPEGs, so that training decodes only the blocks around a
        crop. It takes a C++ compiler; without one, a warning is printed and there is no index.
      threads: number of shards written in parallel; by default the number of CPU cores.
      max_bad_images: how many undecodable images to skip, and list in the manifest, before an
        error: a count, or a fraction of all images such as 0.01 or ``"1%"``.
      progress: whether to show a progress bar.
      runner: what writes the shards: ``local``, processes of this machine, or ``beam``, Apache
        Beam, for which ``directory`` may be in a bucket, and the source is one of ``open_source``
        or has ``opening``.
      pipeline_options: Beam's own, as ``"--runner=DataflowRunner --region=..."``.

    Returns:
      The manifest, as written into ``directory``.

    Raises:
      UserError: the directory is not writable, is in use by another process, or holds another data
        set or this one converted with other options; an argument is invalid; an image cannot be
        read or has a label out of range; or too many images cannot be decoded.
    """
    check_choices(encoding, exif)
    preparation = _preparation(source, encoding, max_side, shorter_side, exif)
    bad_limit = ImageLimit.parse(str(max_bad_images), "max_bad_images")
    beam = check_runner(runner, pipeline_options)
    directory = to_path(directory) if beam else local_directory(directory)
    assignment = prepare_plan.read_assignment(directory) if source.list_files() else None
    shards = _shard_counts(
        source, {"train": train_shards, "validation": validation_shards}, assignment or {}
    )
    job = {
        **source.describe(),
        "shards": shards,
        "seed": seed,
        **preparation.job,
        "converter_version": _CONVERTER_VERSIONS[encoding],
    }
    existing = _existing_job(directory)
    if make_baseline or "make_baseline" in existing:
        job["make_baseline"] = make_baseline
    indexes = _indexes(jpeg_index, existing)
    if indexes or "jpeg_index" in existing:
        job["jpeg_index"] = indexes
    maker = ShardMaker(source, directory, job)
    writer: Writer = (
        beam.BeamWriter(maker, pipeline_options, bad_limit, progress)
        if beam
        else ShardWriter(maker, threads or cpu_cores(), bad_limit, progress)
    )
    if (directory / manifests.FILE).exists():
        return _repair(writer, assignment)
    _check_no_foreign_shards(directory)
    return _convert(writer, assignment)


def _convert(writer: Writer, assignment: Assignment | None) -> Manifest:
    """Writes the shards that the journal lacks, and then the metadata and the manifest."""
    source, directory, job = writer.maker.source, writer.maker.directory, writer.maker.job
    planned = set(prepare_plan.shard_names(job["shards"]))
    with Journal(directory, job, free=_CHANGING if assignment else ()) as journal:
        if assignment is not None and set(assignment) != planned:
            plan = directory / prepare_plan.FILE
            raise UserError(f"{plan}: names other shards; delete {directory}")
        written = {
            done.shard.file: done
            for done in journal.done
            if done.shard.file in planned
            and done.split == prepare_plan.split_of(done.shard.file)
            and len(done.class_counts) == len(source.labels)
            and (source.multi_label or sum(done.class_counts) == done.shard.examples)
            and not manifests.size_problem(done.shard, directory / done.shard.file)
        }
        tasks, keep_plan = _plan(writer.maker, assignment, written, journal)
        digests = {task.file: task.digest for task in tasks}
        valid = {file: done for file, done in written.items() if done.digest == digests[file]}

        def finish(done: Done) -> None:
            journal.add(done)
            valid[done.shard.file] = done

        missing = [task for task in tasks if task.file not in valid]
        _remove_unfinished(directory, planned)
        writer.run(missing, list(valid.values()), finish, journal.release)
        _remove_unfinished(directory, planned)  # of workers elsewhere that died
        manifest = _summarize(source, job, [valid[task.file] for task in tasks])
        packed = {done.shard.file: done.metadata for done in valid.values()}
        with writing(directory / manifests.FILE):
            metadata.write_metadata(manifest, packed, directory)
            if not keep_plan:
                (directory / prepare_plan.FILE).unlink(missing_ok=True)
            manifests.write_manifest(manifest, directory)
        journal.remove()
    return manifest


def _remove_unfinished(directory: Path, shards: Collection[str]) -> None:
    """Removes temporary files, of which no process is writing one."""
    left = [left_path(directory, shard).name for shard in shards]
    records.remove_unfinished(directory, [*shards, *left, prepare_plan.TASKS])


def _existing_job(directory: Path) -> dict[str, Any]:
    """Returns the finished or started job of a directory, or an empty one."""
    if (directory / manifests.FILE).exists():
        return manifests.read_manifest(directory).source
    return read_job(directory) or {}


def _indexes(requested: bool, existing: dict[str, Any]) -> bool:
    """Returns whether JPEGs get an index; an existing job stays as it is."""
    if not requested or (existing and not existing.get("jpeg_index")):
        return False
    from imagenet_fast.data.jpeg.image_ops import load_image_ops

    try:
        load_image_ops()
    except OSError as error:
        if existing:
            return True  # It may be finished; otherwise the first JPEG raises the error.
        warn_once(f"jpeg_index: images will be read more slowly, without indexes: {error}")
        return False
    return True


def check_runner(runner: str, pipeline_options: str) -> ModuleType | None:
    """Checks what writes the shards; returns the module of Beam, or None without it.

    Raises:
      UserError: there is no such runner, Beam is not installed, or it has no such options.
    """
    require_choice("runner", runner, RUNNERS)
    if runner == "local":
        if pipeline_options:
            raise UserError("pipeline_options are Apache Beam's: give --runner=beam, too")
        return None
    try:
        from imagenet_fast.data.prepare import beam_writer
    except ImportError as error:
        raise UserError(
            f"--runner=beam needs Apache Beam ({error}): {how_to_install('beam')}"
        ) from None
    beam_writer.parse_options(pipeline_options)
    return beam_writer


def check_choices(encoding: str, exif: str) -> None:
    """Checks the choices of ``prepare``.

    Raises:
      UserError: ``encoding`` or ``exif`` is not one of the choices.
    """
    require_choice("encoding", encoding, ENCODINGS)
    require_choice("exif", exif, EXIF)


def _preparation(
    source: Source, encoding: str, max_side: int | None, shorter_side: int | None, exif: str
) -> Preparation:
    for name, value in {"max_side": max_side, "shorter_side": shorter_side}.items():
        if value is not None and value < 1:
            raise UserError(f"{name} is {value}, but must be at least 1")
    values = {"encoding": encoding, "max_side": max_side, "shorter_side": shorter_side}
    try:
        return Preparation.of({**values, "exif": exif, "pad_to": source.pad_to})
    except ValueError as error:
        raise UserError(f"{source.name}: cannot be prepared: {error}") from None


def local_directory(directory: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the directory of shards that processes of this machine write, on a disk.

    Raises:
      UserError: it is in a bucket.
    """
    advice = (
        "; copy it to the bucket from there, with `gcp/tpu copy_data` or `gcloud storage rsync "
        "--recursive`, or prepare it there with --runner=beam"
    )
    return to_local_path(directory, "data_dir", advice)


def _plan(
    maker: ShardMaker, assignment: Assignment | None, written: dict[str, Done], journal: Journal
) -> tuple[list[Task], bool]:
    """Returns all shards' tasks, and whether they cannot be recomputed from the seed alone.

    Args:
      maker: of the requested job.
      assignment: the images of each shard as an earlier run chose them.
      written: the shards that it wrote, perhaps of images that have changed since.
      journal: of the job that was started.

    Raises:
      UserError: the images are others, or the plan cannot be written.
    """
    source, directory, job = maker.source, maker.directory, maker.job
    dealt = prepare_plan.deal(source.splits, job["shards"], job["seed"])
    files = source.list_files()
    if files is None:
        return prepare_plan.tasks_by_index(source, dealt), False
    by_seed = current = prepare_plan.assignment_by_seed(files, dealt)
    if assignment is not None:
        unchanged = {
            file
            for file, done in written.items()
            if done.digest == prepare_plan.digest(assignment[file])
        }
        updated = prepare_plan.update(assignment, files, unchanged)
        if updated is None:
            check_same_job(journal.job, job, directory)
        else:
            current = updated
    if current != assignment:
        with writing(directory / prepare_plan.FILE):
            prepare_plan.write_assignment(directory, current)
    return prepare_plan.tasks_by_file(files, current), current != by_seed


def _repair(writer: Writer, assignment: Assignment | None) -> Manifest:
    """Rewrites the shards of a finished data set that are missing or have the wrong size."""
    source, directory, job = writer.maker.source, writer.maker.directory, writer.maker.job
    manifest = manifests.read_manifest(directory)
    check_same_job(manifest.source, {k: v for k, v in job.items() if k not in _CHANGING}, directory)
    if manifest.source.get("fingerprint") != job["fingerprint"]:
        images = manifest.source.get("images")
        before = _numbers(images) if isinstance(images, dict) else "other images"
        now = _numbers(job["images"])
        raise UserError(
            f"{directory}: is finished, but the images have changed since ({before} then, {now} "
            "now): train on it as it is, or prepare the current images in another directory"
        )
    for old_name, new_name in zip(manifest.labels, source.labels):
        if old_name != new_name:
            raise UserError(
                f"{directory}: is finished, with the class {old_name!r}, which is {new_name!r} "
                "now: train on it as it is, or prepare the images in another directory"
            )
    files = source.list_files()
    if assignment is None or files is None:
        dealt = prepare_plan.deal(source.splits, job["shards"], job["seed"])
        tasks = prepare_plan.tasks_by_index(source, dealt)
    else:
        present = {image for members in files.values() for image in members}
        if not all(image in present for images in assignment.values() for image in images):
            plan = directory / prepare_plan.FILE
            raise UserError(f"{plan}: names images that the source does not have; delete it")
        tasks = prepare_plan.tasks_by_file(files, assignment)
    shards = {shard.file: shard for shard in manifest.shards}
    if shards.keys() != {task.file for task in tasks}:
        raise UserError(f"{directory / manifests.FILE}: names other shards; delete {directory}")
    damaged = [
        task for task in tasks if manifests.size_problem(shards[task.file], directory / task.file)
    ]

    def compare(done: Done) -> None:
        if done.shard != shards[done.shard.file]:
            (directory / done.shard.file).unlink()
            raise UserError(
                f"{directory / done.shard.file}: was rewritten and differs from the original: the "
                "images or Pillow have changed since; delete the directory and prepare it again"
            )

    if damaged:
        with Journal(directory, job) as journal:
            _remove_unfinished(directory, shards)
            writer.run(damaged, [], compare, journal.release)
            journal.remove()
    # A run that was killed between writing the manifest and removing the journal leaves it behind.
    # It does no harm where nothing can be removed, as on a read-only file system.
    with contextlib.suppress(OSError):
        (directory / JOURNAL).unlink(missing_ok=True)
    return manifest


def _numbers(images: dict[str, int]) -> str:
    return ", ".join(f"{number} {split}" for split, number in images.items())


def _check_no_foreign_shards(directory: Path) -> None:
    """Refuses to overwrite shards of the same names that another program wrote."""
    if not directory.is_dir() or (directory / JOURNAL).exists():
        return
    for split in manifests.SPLITS:
        for path in directory.glob(f"{split}-*-of-*"):
            raise UserError(
                f"{directory}: holds {path.name}, which is in no manifest or journal; choose "
                "another directory"
            )


def _shard_counts(
    source: Source, requested: dict[str, int | None], planned: Collection[str]
) -> dict[str, int]:
    """Returns the number of shards of each split; by default as an earlier run planned them."""
    defaults = default_shards(source.splits["train"])
    defaults |= collections.Counter(map(prepare_plan.split_of, planned))
    counts = {}
    for split in manifests.SPLITS:
        images, number = source.splits.get(split, 0), requested.get(split)
        if not images and split != "train" and number is None:
            continue
        if not images:
            raise UserError(f"{source.name}: has no {split} images")
        if number is None:
            number = defaults[split] if planned else min(defaults[split], images)
        elif not 0 < number <= images:
            raise UserError(
                f"{split} shards must be between 1 and the number of images, {images}, not {number}"
            )
        counts[split] = number
    return counts


def _summarize(source: Source, job: dict[str, Any], done: list[Done]) -> Manifest:
    splits = {}
    converted: collections.Counter[str] = collections.Counter()
    for split in job["shards"]:
        members = [shard for shard in done if shard.split == split]
        splits[split] = Split(
            shards=tuple(member.shard for member in members),
            class_counts=tuple(map(sum, zip(*(member.class_counts for member in members)))),
        )
    for shard in done:
        converted.update(shard.converted)
    if not splits["train"].examples:
        raise UserError(f"{source.name}: none of its training images can be used")
    lacking = [n for n, count in enumerate(splits["train"].class_counts) if not count]
    problems = [
        _no_training_image(source.labels[n], {s: own.class_counts[n] for s, own in splits.items()})
        for n in lacking
    ]
    if len(lacking) > _NAMED:
        names = ", ".join(repr(source.labels[n]) for n in lacking[:_NAMED])
        problems = [f"{len(lacking)} classes have no training image: {names} and others"]
    if "validation" in splits and not splits["validation"].examples:
        problems.append("no validation image can be used: accuracy cannot be measured")
    return Manifest(
        name=source.name,
        labels=source.labels,
        splits=splits,
        source=job,
        converted=dict(sorted(converted.items())),
        skipped=tuple(skipped for shard in done for skipped in shard.skipped),
        unindexed=sum(shard.unindexed for shard in done),
        warnings=(*source.warnings, *problems),
        multi_label=source.multi_label,
    )


def _no_training_image(label: str, counts: dict[str, int]) -> str:
    others = " and ".join(
        f"{count} for {'a test' if split == 'test' else split}"
        for split, count in counts.items()
        if count
    )
    return f"class {label!r} has no training image{', but ' * bool(others)}{others}"
