"""Diagnosis of unreadable images, and the files in which a run lists them."""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import json
import threading
from typing import Any

from imagenet_fast.base.counted import counted
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.files import read_objects, whole_lines, write_file
from imagenet_fast.base.paths import Path, to_path
from imagenet_fast.data.examples import (
    ENCODED,
    HEIGHT,
    JPEG_INDEX,
    LABEL,
    WIDTH,
    decode_example,
    file_name,
)
from imagenet_fast.data.images import BadImageError, TooManyPixelsError, normalize_encoding
from imagenet_fast.data.info import DatasetInfo
from imagenet_fast.data.options import DataOptions
from imagenet_fast.data.records import lost_record

FILE = "bad_images.jsonl"
# For input pipelines other than the first.
_OTHER_FILE = "bad_images-{:05d}.jsonl"
_ALL_FILES = "bad_images*.jsonl"

# The type of each field of an example, and its minimum number of values; the maximum is 1.
_FIELDS = {
    ENCODED: (bytes, 1),
    LABEL: (int, 1),
    HEIGHT: (int, 0),
    WIDTH: (int, 0),
    JPEG_INDEX: (bytes, 0),
}

# The first bytes of JPEG, PNG, GIF, BMP and WebP files.
_SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"BM", b"RIFF")

# The values of a line of JSON: shard, record and offset of a lost record, or file of an image; and
# split, kind and reason.
BadImage = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class BadImages:
    """The list of images that an input pipeline cannot read, each once in a run.

    Each image is appended to a file as a line of JSON. The methods are thread-safe.
    """

    path: Path  # of the file
    split: str  # that the pipeline reads
    labels: range  # the valid ones of records
    max_pixels: int  # height times width
    multi_label: bool = False  # whether a record has any number of labels

    def add(self, record: bytes) -> None:
        """Adds an unreadable or lost record.

        Raises:
          UserError: if the file cannot be written.
        """
        lost = lost_record(record)
        if lost:
            found = {"shard": to_path(lost.shard).name, "record": lost.record}
            self._add("lost record", {**found, "offset": lost.offset, "reason": lost.reason})
            return
        kind, reason, file = diagnose(record, self.labels, self.max_pixels, self.multi_label)
        digest = hashlib.sha256(record).hexdigest()[:16]  # names may be missing or repeated
        self._add(kind, {"file": file, "reason": reason, "sha256": digest})

    def _add(self, kind: str, image: BadImage) -> None:
        _list_at(self.path).add(json.dumps({"split": self.split, "kind": kind, **image}))


def list_bad_images(
    options: DataOptions, info: DatasetInfo, split: str, pipeline: int
) -> BadImages | None:
    """Returns an input pipeline's list of unreadable images; None without ``model_dir``.

    The file is ``bad_images.jsonl`` for the first pipeline, ``bad_images-00001.jsonl`` and so on
    for others, so workers never write to the same file.
    """
    if not options.model_dir:
        return None
    name = _OTHER_FILE.format(pipeline) if pipeline else FILE
    labels = range(-info.label_offset, info.num_classes - info.label_offset)
    path = to_path(options.model_dir, name).absolute()
    _list_at(path)  # cached now, before several threads could create it at once
    return BadImages(path, split, labels, options.max_pixels, info.multi_label)


def diagnose(
    record: bytes, labels: range, max_pixels: int, multi_label: bool = False
) -> tuple[str, str, str]:
    """Finds out why a record could not be converted to an image; see ``BadImages``.

    Returns:
      The kind, one of ``no example``, ``wrong label``, ``no image``, ``damaged image``, ``large
      image`` and ``unsupported image`` (readable by Pillow, but not by TensorFlow); the reason; and
      the image's name, or an empty string.
    """
    try:
        fields = decode_example(record)
    except ValueError as error:
        return "no example", str(error), ""
    return *_diagnose_fields(fields, labels, max_pixels, multi_label), file_name(record)


def _diagnose_fields(
    fields: dict[str, list[Any]], labels: range, max_pixels: int, multi_label: bool
) -> tuple[str, str]:
    for name, (type_, minimum) in _FIELDS.items():
        values = fields.get(name, [])
        any_number = multi_label and name == LABEL
        if not any_number and not minimum <= len(values) <= 1:
            return "no example", f"it has {counted(len(values), 'value')} of {name}"
        if not all(isinstance(value, type_) for value in values):
            return "no example", f"its {name} has the wrong type"
    for label in fields.get(LABEL, []):
        if label not in labels:
            return "wrong label", f"{label} is not in [{labels.start}, {labels.stop})"
    try:
        image = normalize_encoding(fields[ENCODED][0], max_pixels=max_pixels)
    except TooManyPixelsError as error:
        return "large image", str(error)
    except BadImageError as error:
        is_image = fields[ENCODED][0].startswith(_SIGNATURES)
        return "damaged image" if is_image else "no image", str(error)
    kind = image.converted_from or "JPEG"
    return "unsupported image", f"{kind} of {image.height} x {image.width} that Pillow can read"


def read_bad_images(model_dir: str) -> list[BadImage]:
    """Returns all images that a run has listed, each once, even if several workers listed it."""
    types = {"kind": str, "reason": str}
    found = [image for path in _files(model_dir) for image in read_objects(path, types)]
    return list({json.dumps(image): image for image in found}.values())


def count_kinds(bad_images: list[BadImage]) -> dict[str, int]:
    """Returns the number of images of each kind, the most frequent kind first."""
    counts = collections.Counter(sorted(image["kind"] for image in bad_images))
    return dict(counts.most_common())


def describe(model_dir: str, examples: int = 0) -> str:
    """Returns a summary of a run's unreadable images, the first ``examples`` of them in full.

    It is empty if there are none.
    """
    bad_images = read_bad_images(model_dir)
    if not bad_images:
        return ""
    kinds = ", ".join(f"{number} {kind}" for kind, number in count_kinds(bad_images).items())
    files = _files(model_dir)
    place = files[0] if len(files) == 1 else to_path(model_dir, _ALL_FILES)
    text = f"unreadable images: {len(bad_images)} ({kinds}), listed in {place}"
    if examples:
        text += ": " + "; ".join(map(_describe_one, bad_images[:examples]))
        text += "; ..." * (examples < len(bad_images))
    return text


def _describe_one(image: BadImage) -> str:
    if "shard" in image:
        place = f"record {image.get('record')} of {image['shard']}"
    else:
        place = image.get("file") or "an image without a name"
    return f"{place} ({image['kind']}: {image['reason']})"


def _files(model_dir: str) -> list[Path]:
    return sorted(to_path(model_dir).glob(_ALL_FILES)) if model_dir else []


class _List:
    """A file of unique lines, to which several threads may append; existing ones are kept."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._lines: set[str] | None = None

    def add(self, line: str) -> None:
        """Appends a line, unless the file has it.

        Raises:
          UserError: if it cannot be written.
        """
        with self._lock:
            try:
                # The run's directory may have been removed meanwhile.
                if self._lines is None or not self._path.exists():
                    self._lines = self._open()
                if line not in self._lines:
                    with self._path.open("a") as file:
                        file.write(line + "\n")
                    self._lines.add(line)
            except OSError as error:
                raise UserError(f"cannot write {self._path}: {error.strerror}") from error

    def _open(self) -> set[str]:
        """Creates the file, or removes an incomplete last line, and returns its lines."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = whole_lines(self._path)
        write_file(self._path, "".join(f"{line}\n" for line in lines))
        return set(lines)


@functools.cache
def _list_at(path: Path) -> _List:
    """Returns the list of a file, shared by all splits and all parts of a run."""
    return _List(path)
