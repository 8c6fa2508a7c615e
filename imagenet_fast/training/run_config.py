"""The configuration of the run in a ``model_dir``; does not import TensorFlow."""

from __future__ import annotations

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.files import check_no_pattern
from imagenet_fast.base.paths import Path, to_path
from imagenet_fast.config import Config

CONFIG_FILE = "config.json"


def read_config(model_dir: str) -> Config:
    """Returns the configuration of the run in ``model_dir``.

    Raises:
      UserError: if there is none.
    """
    file = directory_of(model_dir) / CONFIG_FILE
    try:
        return Config.from_json(file.read_text(encoding="utf-8")).replace(model_dir=model_dir)
    except OSError as error:
        raise UserError(f"{model_dir} holds no training run: {file}: {error.strerror}") from None
    except ValueError as error:  # a UserError, or bytes that are not UTF-8
        raise UserError(f"{file}: {error}") from None


def directory_of(model_dir: str) -> Path:
    """Returns the path of ``model_dir``.

    Raises:
      UserError: if it is empty, or TensorFlow would read it as a glob pattern.
    """
    if not model_dir:
        raise UserError("no model: give --model_dir, the directory of a training run")
    directory = to_path(model_dir)
    check_no_pattern(directory)
    return directory
