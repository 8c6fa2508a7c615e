"""Sphinx extension: the flags, commands and recipes, generated from the package."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import pathlib
import typing
from typing import Any

from sphinx.application import Sphinx

from imagenet_fast import commands
from imagenet_fast.base.durations import Duration
from imagenet_fast.base.option import option_text
from imagenet_fast.commands.benchmark import BENCHMARKS
from imagenet_fast.config import Config, option_names, option_type

_ROOT = pathlib.Path(__file__).parents[2]
_VALUES = {int: "INTEGER", float: "NUMBER", str: "TEXT", Duration: "DURATION"}


def setup(app: Sphinx) -> dict[str, bool]:
    """Connects the extension to Sphinx."""
    app.connect("source-read", _write_parts)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _write_parts(app: Sphinx, page: str, source: list[str]) -> None:
    """Replaces the marks in a page by the generated parts."""
    for mark, part in (("flags", flags), ("commands", command_help), ("recipes", recipes)):
        if f"<!-- {mark} -->" in source[0]:
            source[0] = source[0].replace(f"<!-- {mark} -->", part())


def flags() -> str:
    """Returns all options of Config in Markdown, under the headings of ``--helpfull``."""
    groups: dict[str, list[str]] = {}
    fields = {field.name: field for field in dataclasses.fields(Config)}
    for name in option_names():
        groups.setdefault(fields[name].metadata["group"], []).append(_flag(fields[name]))
    return "\n".join(
        f"## {name.capitalize()}\n\n{''.join(entries)}" for name, entries in groups.items()
    )


def _flag(field: dataclasses.Field) -> str:
    kind = option_type(field.name)
    if kind is bool:
        usage = f"--{field.name}, --no{field.name}"
    else:
        usage = f"--{field.name}={_value(kind, field.metadata['choices'])}"
    default = option_text(field.default)
    suffix = f" (default: `{default}`)" if default else ""
    return f"```{{option}} {usage}\n{field.metadata['help']}{suffix}\n```\n\n"


def _value(kind: Any, choices: tuple[str, ...]) -> str:
    if choices:
        return "|".join(choices)
    if typing.get_origin(kind) is tuple:
        return f"{_VALUES[typing.get_args(kind)[0]]},..."
    return _VALUES[kind]


def command_help() -> str:
    """Returns the ``--help`` of each command but ``train``, in Markdown."""
    sections = []
    for name, text in commands.COMMANDS.items():
        sections.append(f"## {name}\n\n`imagenet-fast {name}`: {text}.\n")
        if name == "train":
            sections.append("It takes all [flags](flags.md).\n")
            continue
        sections.append(_help(name))
        if name == "benchmark":
            sections += [f"### {name} {part}\n\n{_help(name, part)}" for part in BENCHMARKS]
    return "\n".join(sections)


def _help(*command: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        commands.run([*command, "--help"])
    return f"```text\n{printed.getvalue()}```\n"


def recipes() -> str:
    """Returns a table of the recipes, and each file, in Markdown."""
    rows, files = [], []
    for path in sorted((_ROOT / "imagenet_fast" / "flags").glob("*.flags")):
        config = Config.from_flagfile(path)
        values = (config.model, config.batch_size, config.optimizer, config.duration)
        cells = [f"[{path.stem}](#{path.stem})", *map(option_text, values), config.precision]
        rows.append(f"| {' | '.join(cells)} |")
        files.append(f"## {path.stem}\n\n```text\n{path.read_text()}```\n")
    head = "| recipe | network | batch | optimizer | duration | precision |"
    return "\n".join([head, "| --- | --- | --- | --- | --- | --- |", *rows, "", *files])
