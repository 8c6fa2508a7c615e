"""Files with a model's predictions for each image of a split."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any

import numpy as np

from imagenet_fast.base.errors import UserError, how_to_install
from imagenet_fast.base.files import new_path, written_whole
from imagenet_fast.base.paths import Path
from imagenet_fast.training.step.error_analysis import ImagePredictions

SUFFIXES = (".csv", ".parquet")
# In a file: the best classes.
TOP = 5
_AT_ONCE = 4096


def check_predictions_file(path: str) -> Path:
    """Returns the path of a file to write, after checking that it can be written.

    Raises:
      UserError: if it exists, has another suffix, or a library is missing.
    """
    if not path.lower().endswith(SUFFIXES):
        raise UserError(f"predictions: {path} must end with {' or '.join(SUFFIXES)}")
    if path.lower().endswith(".parquet"):
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError:
            raise UserError(
                f"predictions: Parquet needs pyarrow: {how_to_install('huggingface')}, or write a "
                ".csv"
            ) from None
    return new_path(path, "give another name")


def write_predictions(
    path: Path, predictions: ImagePredictions, files: Iterable[str], labels: Sequence[str]
) -> None:
    """Writes a row for each readable image, in the order of the data.

    The columns are ``file``, ``label``, ``class1`` to ``class5``, ``probability1`` to
    ``probability5`` and ``loss``, without label smoothing. All are kept in memory as numbers only.

    The ``rows`` of the predictions are the indices of the images in the split, of which ``files``
    are all names.

    Raises:
      UserError: if the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as file:
            write = _write_parquet if path.name.lower().endswith(".parquet") else _write_csv
            write(file, _columns(predictions, files, labels))
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None


def _columns(
    predictions: ImagePredictions, files: Iterable[str], labels: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yields the columns of some rows at a time."""
    names = np.array(labels, object)
    counted = set(predictions.rows.tolist())
    found = (file for index, file in enumerate(files) if index in counted)
    for first in range(0, len(predictions.rows), _AT_ONCE):
        part = slice(first, first + _AT_ONCE)
        classes, probabilities = predictions.classes[part], predictions.probabilities[part]
        best = range(1, classes.shape[1] + 1)
        yield {
            "file": list(itertools.islice(found, len(classes))),
            "label": names[predictions.labels[part]].tolist(),
            **{f"class{rank}": names[column].tolist() for rank, column in zip(best, classes.T)},
            **{f"probability{rank}": column for rank, column in zip(best, probabilities.T)},
            "loss": predictions.losses[part],
        }


def _write_csv(file: IO[bytes], parts: Iterable[dict[str, Any]]) -> None:
    with io.TextIOWrapper(file, "utf-8", newline="") as text:
        writer = csv.writer(text)
        for number, columns in enumerate(parts):
            if not number:
                writer.writerow(columns)
            writer.writerows(zip(*columns.values()))


def _write_parquet(file: IO[bytes], parts: Iterable[dict[str, Any]]) -> None:
    import pyarrow
    from pyarrow import parquet

    writer = None
    for columns in parts:
        table = pyarrow.table(columns)
        writer = writer or parquet.ParquetWriter(file, table.schema)
        writer.write_table(table)
    if writer:
        writer.close()
