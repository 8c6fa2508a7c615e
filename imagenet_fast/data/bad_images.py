"""Images that cannot be read: what is wrong with each, and the file in which a run lists them."""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import json
import threading
from typing import Any

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.files import read_objects, whole_lines, write_file
from imagenet_fast.base.paths import Path, to_path
from imagenet_fast.data.examples import ENCODED, FILENAME, HEIGHT, LABEL, WIDTH, decode_example
from imagenet_fast.data.images import BadImageError, TooManyPixelsError, normalize_encoding
from imagenet_fast.data.info import DatasetInfo
from imagenet_fast.data.options import DataOptions
from imagenet_fast.data.records import lost_record

FILE = "bad_images.jsonl"
# Of the other input pipelines, by their numbers.
_OTHER_FILE = "bad_images-{:05d}.jsonl"
_ALL_FILES = "bad_images*.jsonl"

# The types of an example's fields, of which each has one value, and whether it must.
_FIELDS = {ENCODED: (bytes, 1), LABEL: (int, 1), HEIGHT: (int, 0), WIDTH: (int, 0)}

# With which a JPEG, PNG, GIF, BMP or WebP begins.
_SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"BM", b"RIFF")

# As the line of JSON says it: a record of a shard has ``shard``, ``record`` and ``offset``, an
# image has ``file``; both have ``split``, ``kind`` and ``reason``.
BadImage = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class BadImages:
    """Lists what an input pipeline cannot read, each image once in a run.

    Lines of JSON are appended to a file as they are found. The methods may be called from several
    threads at once.

    Attributes:
      path: of the file.
      split: that is read.
      labels: that a record may have.
      max_pixels: that an image may have.
    """

    path: Path
    split: str
    labels: range
    max_pixels: int

    def add(self, record: bytes) -> None:
        """Lists a record that no image could be made of, or that is lost.

        Raises:
          UserError: if the list cannot be written.
        """
        lost = lost_record(record)
        if lost:
            found = {"shard": to_path(lost.shard).name, "record": lost.record}
            self._add("lost record", {**found, "offset": lost.offset, "reason": lost.reason})
            return
        kind, reason, file = diagnose(record, self.labels, self.max_pixels)
        digest = hashlib.sha256(record).hexdigest()[:16]  # Not all images have names of their own.
        self._add(kind, {"file": file, "reason": reason, "sha256": digest})

    def _add(self, kind: str, image: BadImage) -> None:
        _list_at(self.path).add(json.dumps({"split": self.split, "kind": kind, **image}))


def list_bad_images(
    options: DataOptions, info: DatasetInfo, split: str, pipeline: int
) -> BadImages | None:
    """Returns where an input pipeline lists what it cannot read; None without ``model_dir``.

    It is ``bad_images.jsonl`` there, for pipelines other than the first ``bad_images-00001.jsonl``
    and so on, so that no two workers write to one file.
    """
    if not options.model_dir:
        return None
    name = _OTHER_FILE.format(pipeline) if pipeline else FILE
    labels = range(-info.label_offset, info.num_classes - info.label_offset)
    bad_images = BadImages(
        to_path(options.model_dir, name).absolute(), split, labels, options.max_pixels
    )
    _list_at(bad_images.path)  # Now, because threads that came first together would make two.
    return bad_images


def diagnose(record: bytes, labels: range, max_pixels: int) -> tuple[str, str, str]:
    """Finds out why no image could be made of a record.

    Args:
      record: the data of the record.
      labels: that it may have.
      max_pixels: that its image may have.

    Returns:
      The kind, one of ``no example``, ``wrong label``, ``no image``, ``damaged image``, ``large
      image`` and ``unsupported image`` (which Pillow reads, but not TensorFlow); the reason; and
      the image's name, empty if it has none.
    """
    try:
        fields = decode_example(record)
    except ValueError as error:
        return "no example", str(error), ""
    file = b"".join(value for value in fields.get(FILENAME, []) if isinstance(value, bytes))
    return *_diagnose_fields(fields, labels, max_pixels), file.decode(errors="replace")


def _diagnose_fields(
    fields: dict[str, list[Any]], labels: range, max_pixels: int
) -> tuple[str, str]:
    for name, (kind, fewest) in _FIELDS.items():
        values = fields.get(name, [])
        if not fewest <= len(values) <= 1:
            return "no example", f"it has {len(values)} values as {name}"
        if not all(isinstance(value, kind) for value in values):
            return "no example", f"its {name} has the wrong type"
    if fields[LABEL][0] not in labels:
        reason = f"{fields[LABEL][0]} is not in [{labels.start}, {labels.stop})"
        return "wrong label", reason
    try:
        image = normalize_encoding(fields[ENCODED][0], max_pixels=max_pixels)
    except TooManyPixelsError as error:
        return "large image", str(error)
    except BadImageError as error:
        known = fields[ENCODED][0].startswith(_SIGNATURES)
        return "damaged image" if known else "no image", str(error)
    found = image.converted_from or "JPEG"
    return "unsupported image", f"{found} of {image.height} x {image.width} that Pillow can read"


def read_bad_images(model_dir: str) -> list[BadImage]:
    """Returns what a run has listed, each image once, even if several workers met it."""
    found = [image for path in _files(model_dir) for image in read_objects(path, {"kind": str})]
    return list({json.dumps(image): image for image in found}.values())


def count_kinds(bad_images: list[BadImage]) -> dict[str, int]:
    """Returns how many there are of each kind, the most frequent one first."""
    counts = collections.Counter(sorted(image["kind"] for image in bad_images))
    return dict(counts.most_common())


def describe(model_dir: str, examples: int = 0) -> str:
    """Tells in a sentence what a run has listed, and where; nothing if it is nothing.

    Args:
      model_dir: of the run.
      examples: how many to tell of.
    """
    bad_images = read_bad_images(model_dir)
    if not bad_images:
        return ""
    kinds = ", ".join(f"{number} {kind}" for kind, number in count_kinds(bad_images).items())
    files = _files(model_dir)
    place = files[0] if len(files) == 1 else to_path(model_dir, _ALL_FILES)
    text = f"unreadable images: {len(bad_images)} ({kinds}), listed in {place}"
    if examples:
        text += ": " + "; ".join(map(_tell, bad_images[:examples]))
        text += "; ..." * (examples < len(bad_images))
    return text


def _tell(image: BadImage) -> str:
    if "shard" in image:
        place = f"record {image['record']} of {image['shard']}"
    else:
        place = image["file"] or "an image without a name"
    return f"{place} ({image['kind']}: {image['reason']})"


def _files(model_dir: str) -> list[Path]:
    return sorted(to_path(model_dir).glob(_ALL_FILES)) if model_dir else []


class _List:
    """A file of lines, each once, whichever thread adds it; those that it holds stay.

    Args:
      path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._known: set[str] | None = None

    def add(self, line: str) -> None:
        """Appends a line that is new.

        Raises:
          UserError: if it cannot be written.
        """
        with self._lock:
            try:
                # The run may have been removed meanwhile, to be started anew.
                if self._known is None or not self._path.exists():
                    self._known = self._start()
                if line not in self._known:
                    with self._path.open("a") as file:
                        file.write(line + "\n")
                    self._known.add(line)
            except OSError as error:
                raise UserError(f"cannot write {self._path}: {error.strerror}") from error

    def _start(self) -> set[str]:
        """Makes the file end with a whole line, and returns its lines."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = whole_lines(self._path)
        write_file(self._path, "".join(f"{line}\n" for line in lines))
        return set(lines)


@functools.cache
def _list_at(path: Path) -> _List:
    """Returns the one list of a file: that of both splits, and of every part of a run."""
    return _List(path)
