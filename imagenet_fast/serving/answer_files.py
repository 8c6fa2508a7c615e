"""Predictions for files, written as text for people, as JSON lines or as CSV."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.files import new_path, written_whole
from imagenet_fast.base.paths import Path

_FORMATS = {".csv": "csv", ".jsonl": "json"}
Answers = Iterable[dict[str, Any]]


def check_arguments(directory: str, paths: Sequence[str]) -> None:
    """Checks that a SavedModel and images are named.

    Args:
      directory: of the SavedModel.
      paths: of the images.

    Raises:
      UserError: if one is missing.
    """
    if not paths:
        raise UserError("no images: name image files or folders")
    if not directory:
        raise UserError("no model: give --saved_model, a directory that `export` wrote")


def output_path(path: str) -> Path:
    """Returns the path of a file to write, after checking that it can be written.

    Raises:
      UserError: if it exists, or has another suffix.
    """
    if not path.lower().endswith(tuple(_FORMATS)):
        raise UserError(f"output: {path} must end with {' or '.join(_FORMATS)}")
    return new_path(path, "give another name")


def write_file_of_answers(path: Path, answers: Answers) -> tuple[int, int]:
    """Writes a CSV or JSON Lines file, by the end of its name; see :func:`write_answers`.

    It is written under another name first.

    Raises:
      UserError: if it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Names of files need not be text.
        with (
            written_whole(path) as opened,
            io.TextIOWrapper(opened, "utf-8", "surrogateescape", newline="") as file,
        ):
            return write_answers(file, answers, _FORMATS[path.suffix.lower()])
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None


def write_answers(file: TextIO, answers: Answers, form: str, width: int = 0) -> tuple[int, int]:
    """Writes each answer of ``predict`` when it comes.

    Args:
      file: to write to.
      answers: of ``predict``.
      form: ``text``, ``json`` (an object a line) or ``csv``, with the columns ``file``, ``error``,
        ``class1``, ``probability1``, ``class2`` and so on, best first; if images have several
        labels, ``file``, ``error``, ``classes`` and ``probabilities``, separated by semicolons.
      width: of a file's name, in text.

    Returns:
      The number of files, and of those that could not be read.
    """
    files = unreadable = 0

    def counted() -> Iterator[dict[str, Any]]:
        nonlocal files, unreadable
        for answer in answers:
            files += 1
            unreadable += "error" in answer
            yield answer

    if form == "csv":
        _write_csv(file, counted())
    else:
        for answer in counted():
            print(json.dumps(answer) if form == "json" else _line(answer, width), file=file)
    return files, unreadable


def _line(answer: dict[str, Any], width: int) -> str:
    if "error" in answer:
        return f"{answer['file']:{width}}  error: {answer['error']}"
    classes = (f"{p['label']} {p['probability']:.1%}" for p in answer["predictions"])
    return f"{answer['file']:{width}}  {', '.join(classes) or 'no class'}"


def _write_csv(file: TextIO, answers: Iterator[dict[str, Any]]) -> None:
    writer = csv.writer(file)
    # How many classes the model predicts is known at the first image that can be read.
    unread = []
    for answer in answers:
        unread.append(answer)
        if "error" not in answer:
            break
    several = bool(unread) and "multi_label" in unread[-1]
    count = len(unread[-1].get("predictions", ())) if unread else 0
    columns = [f"{name}{rank + 1}" for rank in range(count) for name in ("class", "probability")]
    if several:
        columns = ["classes", "probabilities"]
    writer.writerow(["file", "error", *columns])
    for answer in itertools.chain(unread, answers):
        predictions = answer.get("predictions", ())
        cells = [value for p in predictions for value in (p["label"], p["probability"])]
        if several:
            cells = [";".join(map(str, part)) for part in (cells[::2], cells[1::2])]
        cells += [""] * (len(columns) - len(cells))
        writer.writerow([answer["file"], answer.get("error", ""), *cells])
