"""Predictions for files, written as text for people, as JSON lines or as CSV."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.files import new_path, open_new, temporary_beside
from imagenet_fast.base.paths import Path

_FORMATS = {".csv": "csv", ".jsonl": "json"}
Answers = Iterable[dict[str, Any]]


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
    temporary = temporary_beside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Names of files need not be text.
        with io.TextIOWrapper(open_new(temporary), "utf-8", "surrogateescape", newline="") as file:
            counts = write_answers(file, answers, _FORMATS[path.suffix.lower()])
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)
    return counts


def write_answers(file: TextIO, answers: Answers, form: str, width: int = 0) -> tuple[int, int]:
    """Writes each answer of ``predict`` when it comes.

    Args:
      file: to write to.
      answers: of ``predict``.
      form: ``text``, ``json`` (an object a line) or ``csv``, with the columns ``file``, ``error``,
        ``class1``, ``probability1``, ``class2`` and so on, best first.
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
    last = unread[-1] if unread else {}
    # Of images with several labels, up to all classes are predictions.
    count = last.get("classes", len(last.get("predictions", ())))
    ranks = range(1, count + 1)
    columns = (f"{name}{rank}" for rank in ranks for name in ("class", "probability"))
    writer.writerow(["file", "error", *columns])
    for answer in itertools.chain(unread, answers):
        predictions = answer.get("predictions", ())
        cells = [value for p in predictions for value in (p["label"], p["probability"])]
        cells += [""] * (2 * count - len(cells))
        writer.writerow([answer["file"], answer.get("error", ""), *cells])
