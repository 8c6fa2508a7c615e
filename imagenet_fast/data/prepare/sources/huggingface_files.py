"""Checks of a data set in Hugging Face's layouts before its library reads it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from imagenet_fast.base.errors import UserError, first_line
from imagenet_fast.base.outside import MAX_JSON, read_bounded, read_json

SAVED = ("dataset_dict.json", "state.json")  # by `save_to_disk`
_SHOWN = 200  # characters of a name in a message
_CARDS = ("README.md", ".huggingface.yaml")


class _Splits(msgspec.Struct):
    """The content of ``dataset_dict.json``."""

    splits: list[str]


class _DataFile(msgspec.Struct):
    filename: str


class _State(msgspec.Struct):
    """The content of ``state.json``."""

    data_files: list[_DataFile] = msgspec.field(name="_data_files")


def check_names(path: Path, allow_outside: bool) -> None:
    """Checks the names of files and folders that the files in a data set's folder give.

    Raises:
      UserError: one is an address or, unless allowed, outside; there is a script, which old
        versions of the library run; or a file that has such names is not as the library writes it.
    """
    script = path / f"{path.name}.py"
    if script.exists():
        raise UserError(f"{script}: may be run by old versions of Hugging Face's datasets; move it")
    try:
        names = [*_saved_names(path), *_card_names(path)]
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: its description cannot be read: {first_line(error)}") from error
    for file, name in names:
        is_address = "://" in name or "::" in name
        if is_address or (_is_outside(name) and not allow_outside):
            advice = "" if is_address else ", or give --allow_outside if you know who wrote it"
            raise UserError(
                f"{file}: names {name[:_SHOWN]!r}, which is not in its folder; correct it{advice}"
            )


def check_arrow_files(path: Path) -> None:
    """Checks Arrow files, which are used as they are: wrong offsets in one could crash a process.

    Raises:
      UserError: one is damaged.
    """
    import pyarrow as pa

    for file in sorted(path.rglob("*.arrow")):
        if not file.is_file():
            continue
        try:
            with pa.memory_map(str(file)) as mapped:
                try:
                    batches: Iterable[Any] = pa.ipc.open_stream(mapped)
                except pa.ArrowInvalid:
                    batches = _batches(pa.ipc.open_file(mapped))
                for batch in batches:
                    batch.validate(full=True)
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{file}: is damaged: {first_line(error)}") from error


def _batches(reader: Any) -> Iterator[Any]:
    return (reader.get_batch(number) for number in range(reader.num_record_batches))


def _is_outside(name: str) -> bool:
    return Path(name).is_absolute() or name.startswith("~") or ".." in re.split(r"[/\\]", name)


def _saved_names(path: Path) -> Iterator[tuple[Path, str]]:
    folders = [path]
    parts = path / SAVED[0]
    if parts.is_file():
        splits = read_json(parts, _Splits).splits
        yield from ((parts, name) for name in splits)
        folders += [path / name for name in splits if not _is_outside(name)]
    for folder in folders:
        state = folder / SAVED[1]
        if state.is_file():
            yield from ((state, file.filename) for file in read_json(state, _State).data_files)


def _card_names(path: Path) -> Iterator[tuple[Path, str]]:
    """Yields the patterns of data files in a data set's card."""
    import yaml  # that datasets requires
    from huggingface_hub import DatasetCard

    for card in (path / name for name in _CARDS):
        if not card.is_file():
            continue
        text = read_bounded(card, MAX_JSON).decode(errors="replace")
        try:
            if card.suffix == ".md":
                configs = DatasetCard(text, ignore_metadata_errors=True).data.get("configs")
            else:
                configs = (yaml.safe_load(text) or {}).get("configs")
            for config in configs or ():
                for key in ("data_files", "data_dir"):
                    yield from ((card, name) for name in _texts(config.get(key)))
        except (AttributeError, RecursionError, TypeError, yaml.YAMLError) as error:
            raise ValueError(f"{card.name}: {first_line(error)}") from error


def _texts(value: Any) -> set[str]:
    """Returns all texts in a value; aliases of YAML may repeat a part of it many times."""
    texts, waiting, seen = set(), [value], set()
    while waiting:
        part = waiting.pop()
        if isinstance(part, str):
            texts.add(part)
        elif isinstance(part, (dict, list, tuple)) and id(part) not in seen:
            seen.add(id(part))
            waiting += part.values() if isinstance(part, dict) else part
    return texts
