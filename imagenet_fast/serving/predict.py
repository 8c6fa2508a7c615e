"""Predictions of an exported model for image files."""

from __future__ import annotations

import contextlib
import itertools
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import tensorflow as tf

from imagenet_fast.base.errors import UserError, first_line
from imagenet_fast.base.notices import warn_once
from imagenet_fast.base.outside import parse_json, read_bounded
from imagenet_fast.base.paths import is_local, to_path
from imagenet_fast.data.images import (
    JPEG_SIGNATURE,
    PNG_SIGNATURE,
    BadImageError,
    UnknownFormatError,
)
from imagenet_fast.data.preparation import Preparation
from imagenet_fast.data.prepare.sources.files import IMAGE_SUFFIXES, MAX_IMAGE
from imagenet_fast.data.prepare.sources.folders import images_in
from imagenet_fast.serving.answer_files import check_arguments

_NO_IMAGES = "a folder without images"
_OUTPUTS = {
    "classes": tf.int32,
    "labels": tf.string,
    "probabilities": tf.float32,
    "error": tf.string,
}


def predict(directory: str, paths: Sequence[str], batch_size: int = 32) -> Iterator[dict[str, Any]]:
    """Classifies image files with a SavedModel that :func:`~imagenet_fast.export` wrote.

    A SavedModel is a program, which this runs, also while it is loaded: it can read and write this
    user's files. One that you do not trust needs a container without network, as the page on
    security shows.

    Args:
      directory: of the SavedModel.
      paths: images of any format that ``prepare`` reads, and folders, whose images are those that
        ``prepare`` finds there, sorted. What it did to the images of training, such as turning or
        shrinking them, is done to these, too.
      batch_size: files per call of the model.

    Yields:
      For each file, in order, ``file`` and either ``predictions``, a list of ``class``, ``label``
      and ``probability``, best first, and of images with several labels only those whose
      probability is at least the class's ``threshold``, which they have, too, and ``multi_label``,
      true; or ``error``, the reason why there are none.

    Raises:
      UserError: if ``directory`` holds no such model, it fails, or there are no paths.
    """
    check_arguments(directory, paths)
    classify, preparation = _load(directory)
    found = files_in(paths)
    while files := list(itertools.islice(found, batch_size)):
        try:
            answers = _classify(classify, preparation, files)
        # The model may do anything.
        except Exception as error:
            raise UserError(
                f"the model in {directory} failed, or returned what `imagenet-fast export`'s does "
                f"not: {first_line(error)}"
            ) from error
        yield from answers


def files_in(paths: Sequence[str]) -> Iterator[str]:
    """Yields the names of the files that :func:`predict` classifies.

    Args:
      paths: files, and folders, whose images come in their place; a folder without images is left
        to be reported.

    Raises:
      UserError: if a folder cannot be read.
    """
    for name in paths:
        path = to_path(name)
        images: list[pathlib.Path] = []
        # In a bucket, asking takes a request.
        if is_local(path) or not name.lower().endswith(IMAGE_SUFFIXES):
            with contextlib.suppress(OSError):
                images = images_in(cast(pathlib.Path, path)) if path.is_dir() else []
        yield from map(str, images) if images else (name,)


def _load(directory: str) -> tuple[Any, Preparation | None]:
    """Returns a model's signature, and what ``prepare`` did to the images of its training."""
    path = to_path(directory)
    if not path.exists():
        raise UserError(f"saved_model {directory} does not exist")
    if not tf.saved_model.contains_saved_model(str(path)):
        raise UserError(
            f"saved_model {directory} is no SavedModel; of a run, `imagenet-fast export` makes one"
        )
    warn_once(
        f"predict: running the program in {directory}; it can do what this user can: run one that "
        "you do not trust in a container"
    )
    try:
        model = tf.saved_model.load(str(path))
        signatures = model.signatures
    # TensorFlow raises all kinds of errors for damaged graphs.
    except Exception as error:
        raise UserError(f"cannot load {directory}: {first_line(error)}") from error
    signature = signatures.get("serving_default")
    if signature is None or not _is_of_export(signature):
        raise UserError(f"{directory} is not a SavedModel of `imagenet-fast export`")
    # Keep the model alive: a signature does not reference the variables that it uses.
    signature.owner = signatures
    return signature, _preparation(model, directory)


def _preparation(model: Any, directory: str) -> Preparation | None:
    if not hasattr(model, "preparation"):  # of an earlier version
        return None
    try:
        values = parse_json(model.preparation().numpy(), dict[str, Any])
        return Preparation.of(values) if values else None
    except Exception as error:
        reason = first_line(error)
        raise UserError(f"the preparation in {directory} is damaged: {reason}") from error


def _is_of_export(signature: Any) -> bool:
    arguments, inputs = signature.structured_input_signature
    specs = {"images": tf.TensorSpec([None], tf.string, "images")}
    outputs = {name: spec.dtype for name, spec in signature.structured_outputs.items()}
    return (arguments, inputs) == ((), specs) and _OUTPUTS.items() <= outputs.items()


def _classify(
    classify: Any, preparation: Preparation | None, paths: Sequence[str]
) -> list[dict[str, Any]]:
    # Unreadable files are empty images, for which the model returns an error.
    encoded, unread = [b""] * len(paths), {}
    for index, path in enumerate(paths):
        try:
            encoded[index] = _for_model(read_bounded(to_path(path), MAX_IMAGE), preparation)
        except OSError as error:
            unread[index] = _NO_IMAGES if isinstance(error, IsADirectoryError) else error.strerror
        except BadImageError as error:
            unread[index] = str(error)
    outputs = classify(images=tf.constant(encoded))
    classes, labels, probabilities, reasons = (outputs[name].numpy() for name in _OUTPUTS)
    # Of a model of one label an image, all classes that it returns are predictions.
    thresholds = outputs.get("thresholds")
    least = np.full(probabilities.shape, -np.inf) if thresholds is None else thresholds.numpy()
    if least.shape != probabilities.shape:
        raise ValueError(f"thresholds of shape {least.shape}")
    if not len(paths) == len(classes) == len(reasons) or not (
        classes.shape == labels.shape == probabilities.shape
    ):
        raise ValueError(f"{len(classes)} answers for {len(paths)} images")
    results = []
    for index, reason in enumerate(reasons):
        result: dict[str, Any] = {"file": paths[index]}
        if reason:
            result["error"] = unread.get(index, reason.decode())
        else:
            if thresholds is not None:
                result["multi_label"] = True
            best = zip(classes[index], labels[index], probabilities[index], least[index])
            result["predictions"] = [
                {"class": int(c), "label": label.decode(), "probability": float(p)}
                | ({} if thresholds is None else {"threshold": float(threshold)})
                for c, label, p, threshold in best
                if p >= threshold
            ]
        results.append(result)
    return results


def _for_model(data: bytes, preparation: Preparation | None) -> bytes:
    """Returns an image file for the model, which decodes only JPEG and PNG, or names the format.

    The model prepares these, too, but rounds otherwise where images are shrunk.

    Raises:
      BadImageError: it has another format that ``prepare`` reads, but is damaged or too large.
    """
    decodable = data.startswith((JPEG_SIGNATURE, PNG_SIGNATURE))
    if not data or (decodable and (preparation is None or preparation.keeps_jpegs)):
        return data
    try:
        return (preparation or Preparation(encoding="png")).encoded(data).data
    except BadImageError as error:
        if decodable or isinstance(error, UnknownFormatError):
            return data
        raise
