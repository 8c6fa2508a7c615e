"""A run's scalars, images and texts for TensorBoard."""

from __future__ import annotations

import contextlib
import time

import tensorflow as tf

from imagenet_fast.base.paths import seconds_between_writes, to_path
from imagenet_fast.training.failures import writing
from imagenet_fast.training.logs.logger import Logger, Row

# More than are ever written at once, so that the queue never flushes by itself.
_SCALARS_AT_ONCE = 10_000


class TensorBoard(Logger):
    """Writes rows as TensorBoard scalars by step, and images and texts beside them.

    There is one writer of each kind: TensorBoard may ignore all files but the newest of a folder.

    Raises:
      UserError: if they cannot be written, as to a full disk; all methods raise it.
    """

    def __init__(self, model_dir: str) -> None:
        self._folder = str(to_path(model_dir, "tensorboard"))
        with self._writing():
            self._writers = {
                kind: tf.summary.create_file_writer(
                    tensorboard_folder(model_dir, kind), max_queue=_SCALARS_AT_ONCE
                )
                for kind in ("train", "validation")
            }
        self._pause = seconds_between_writes(to_path(model_dir))
        self._written = time.monotonic()
        self._waiting: list[Row] = []

    def write(self, row: Row) -> None:
        """Writes a row's numbers; to a bucket only after some time, or by :meth:`flush`."""
        self._waiting.append(row)
        if time.monotonic() - self._written >= self._pause:
            self.flush()

    def flush(self) -> None:
        """Writes the waiting rows."""
        for kind, writer in self._writers.items():
            rows = [row for row in self._waiting if row["kind"] == kind]
            if rows:
                with self._writing(), writer.as_default():  # flushes at its end
                    for row in rows:
                        _write_scalars(row)
        self._waiting = []
        self._written = time.monotonic()

    def show_image(self, kind: str, step: int, name: str, png: bytes) -> None:
        """Writes a PNG image for ``train`` or ``validation``."""
        with self._writing(), self._writers[kind].as_default(step=step):
            tf.summary.image(name, tf.io.decode_png(png, 3)[tf.newaxis])

    def show_text(self, kind: str, step: int, name: str, markdown: str) -> None:
        """Writes a text for ``train`` or ``validation``."""
        with self._writing(), self._writers[kind].as_default(step=step):
            tf.summary.text(name, markdown)

    def close(self) -> None:
        """Writes the waiting rows and closes the files."""
        self.flush()
        for writer in self._writers.values():
            with self._writing():
                writer.close()

    def _writing(self) -> contextlib.AbstractContextManager[None]:
        return writing("TensorBoard's folder", self._folder, "resumes from the last checkpoint")


def _write_scalars(row: Row) -> None:
    for name, value in row.items():
        if name not in ("kind", "step"):
            tf.summary.scalar(name, value, step=row["step"])


def tensorboard_folder(model_dir: str, kind: str) -> str:
    """Returns TensorBoard's folder of a run's ``train`` or ``validation`` data."""
    return str(to_path(model_dir, "tensorboard", kind))
