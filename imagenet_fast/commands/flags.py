"""The absl flags of a command: options of Config, and flags of its own."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, cast

from absl import flags

from imagenet_fast.base.errors import UserError, nearest
from imagenet_fast.base.former_names import RENAMED_FLAGS, advice, with_todays_names
from imagenet_fast.base.notices import warn_once
from imagenet_fast.base.option import option_text
from imagenet_fast.commands import COMMANDS
from imagenet_fast.config import Config, option_names, option_type, parse_option
from imagenet_fast.flagfiles import read_flagfile, resolve

_HELP_WIDTH = 96
# Absl's message for a value that int or float refuses.
_NO_NUMBER = re.compile(
    r"--(?P<name>\w+)=(?P<value>.*): "
    r"(?:invalid literal for (?P<int>int)|could not convert string to (?P<float>float))"
)


class CommandFlags:
    """The flags of one command.

    Args:
      command: the command's name, for messages.
      options: the options of Config that the command accepts.
      main: the options that ``--help`` lists (``--helpfull`` lists all); empty: all.
      of_run: whether the defaults are the values of an existing run.
      about: the command's description; empty: as in the list of commands.
    """

    def __init__(
        self,
        command: str,
        options: Sequence[str] = (),
        main: Sequence[str] = (),
        of_run: bool = False,
        about: str = "",
    ) -> None:
        self._command, self._of_run = command, of_run
        self._about = about or COMMANDS.get(command, "")
        self._other = set(options) - set(main) if main else set()
        self._has_options = bool(options)
        self._flags = flags.FlagValues()
        self._groups: dict[str, list[str]] = {}
        self._files: list[dict[str, Any]] = []
        self._given: dict[str, None] = {}
        fields = {field.name: field for field in dataclasses.fields(Config)}
        for name in options:
            field = fields[name]
            self._groups.setdefault(field.metadata["group"], []).append(name)
            _define_option(field, self._flags)

    def define(self, name: str, default: str | float | bool, text: str) -> None:
        """Defines a flag of the command, with the type of its default."""
        self._groups.setdefault(self._command, []).append(name)
        define: dict[type, Callable[..., Any]] = {
            str: flags.DEFINE_string,
            int: flags.DEFINE_integer,
            float: flags.DEFINE_float,
            bool: _define_boolean,
        }
        define[type(default)](name, default, text, flag_values=self._flags)

    def parse(self, arguments: Sequence[str], positional: str = "") -> list[str]:
        """Parses the arguments, including flagfiles, and returns the positional ones.

        ``positional`` is their name in the help; empty: none are allowed.

        Raises:
          SystemExit: after printing the help, if requested.
          UserError: if a flag is unknown or has an invalid value.
        """
        if {"--help", "-h", "--helpfull"} & set(arguments):
            print(self._help(positional, full="--helpfull" in arguments))
            raise SystemExit(0)
        try:
            today = [argument for _, argument in with_todays_names(arguments)]
            arguments = self._read_flagfiles(today)
            rest = self._flags([self._command, *map(self._with_new_name, arguments)])[1:]
        except UserError:
            raise
        except flags.UnrecognizedFlagError as error:
            raise UserError(self._unknown(error.flagname)) from None
        except (flags.Error, ValueError) as error:
            # A value that Config refuses; otherwise absl's message, as for --noxla=true.
            reason = error.__context__ if isinstance(error.__context__, UserError) else error
            raise UserError(self._explained(str(reason).removeprefix("flag "))) from None
        if rest and not positional:
            raise UserError(f"unexpected argument {rest[0]!r}: options are written --name=value")
        for name in self.own_names():
            if isinstance(self[name], float) and not math.isfinite(self[name]):
                raise UserError(f"{name} is {self[name]}, but must be a finite number")
        return rest

    def _read_flagfiles(self, arguments: Sequence[str]) -> list[str]:
        """Reads flagfiles, and notes the flags beside them, whose arguments it returns."""
        self._files, self._given, others = [], {}, []
        for argument in arguments:
            name, _, path = argument.lstrip("-").partition("=")
            if name != "flagfile" or not argument.startswith("-"):
                others.append(argument)
                self._given[name if name in self._flags else name.removeprefix("no")] = None
                continue
            if not path:
                raise UserError(
                    "write --flagfile=RECIPE, a name or a file; `imagenet-fast recipes` lists them"
                )
            layers = read_flagfile(Config, path)
            self._files += layers
            for name in itertools.chain(*layers):
                if name not in self._flags:
                    raise UserError(f"--flagfile={path}: {self._unknown(name)}")
                if name in self._given:
                    del self._given[name]
                    warn_once(
                        f"--flagfile={path} overrides the --{name} before it: flags go after "
                        "--flagfile"
                    )
        return others

    def _explained(self, reason: str) -> str:
        """Replaces Python's words for a value that is no number, in absl's message."""
        found = _NO_NUMBER.match(reason)
        if not found:
            return reason
        name, kind = found["name"], "a whole number" if found["int"] else "a number"
        return f"{name} is {found['value']!r}, but must be {kind}: {self._flags[name].help}"

    def _unknown(self, name: str) -> str:
        """Returns the message for a flag that does not exist."""
        if self._has_options and (instead := advice(name)):
            return f"the flag --{name} is gone: {instead}"
        hint = nearest(name, list(self._flags), "--{}".format)
        listed = f"; `imagenet-fast {self._command} --helpfull` lists the flags"
        return f"there is no flag --{name}{hint or listed}"

    def _with_new_name(self, argument: str) -> str:
        """Returns the argument with the new name of a renamed flag."""
        name, equals, value = argument.lstrip("-").partition("=")
        new = RENAMED_FLAGS.get(name, "")
        if not argument.startswith("-") or new not in self._flags:
            return argument
        warn_once(f"--{name} is now --{new}")
        return f"--{new}{equals}{value}"

    def __getitem__(self, name: str) -> Any:
        of_files = [layer[name] for layer in self._files if name in layer]
        return of_files[-1] if of_files and name not in self._given else self._flags[name].value

    def changes(self, run: Config | None = None) -> dict[str, Any]:
        """Returns the given options of Config, with their values.

        Args:
          run: the configuration of the run that the command resumes; None: none.
        """
        options = set(option_names()) - set(self.own_names())
        flags = {
            name: self._flags[name].value
            for name in self._given
            if name in options and self._flags[name].present
        }
        values = resolve(Config, self._files, flags, run)
        return {name: value for name, value in values.items() if name in options}

    def given(self) -> list[str]:
        """Returns the names of the flags whose values are from the command line, not a flagfile."""
        return list(self._given)

    def own_names(self) -> list[str]:
        """Returns the names of the command's flags that are not options of Config."""
        return list(self._groups.get(self._command, ()))

    def _help(self, positional: str, full: bool) -> str:
        arguments = f" {positional} ..." if positional else ""
        # Flagfiles contain options of Config only; a recipe has those of training.
        file = "RECIPE" if "duration" in self._flags else "FILE"
        flagfile = f" [--flagfile={file}]" if self._has_options else ""
        usage = f"usage: imagenet-fast {self._command}{flagfile} [--flag=value ...]{arguments}"
        lines = [usage]
        if self._about:
            lines += ["", self._about]
        left_out = set() if full else self._other
        for group, names in self._groups.items():
            shown = [name for name in names if name not in left_out]
            if shown:
                lines += ["", f"{group}:"]
            for name in shown:
                text = self._text(name)
                lines += textwrap.wrap(
                    f"--{'[no]' if self._flags[name].boolean else ''}{name}: {text}",
                    _HELP_WIDTH,
                    initial_indent="  ",
                    subsequent_indent="      ",
                    break_on_hyphens=False,  # They belong to names, such as ffcv-imagenet.
                )
        if left_out:
            more = f"imagenet-fast {self._command} --helpfull lists {len(left_out)} more flags."
            lines += ["", more]
        return "\n".join(lines)

    def _text(self, name: str) -> str:
        flag = self._flags[name]
        default = "" if flag.value is None else option_text(flag.value)
        if self._of_run and name not in self.own_names():
            if name == "model_dir":
                return "directory of the training run"
            default = "as in training"
        return flag.help + (f" (default: {default})" if default else "")


class _OptionParser(flags.ArgumentParser):
    """Parses a flag as Config parses its option."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def parse(self, argument: Any) -> Any:
        return parse_option(self._name, argument) if isinstance(argument, str) else argument

    def flag_type(self) -> str:
        return str(option_type(self._name))


class _BooleanParser(flags.BooleanParser):
    """Parses true, false, t, f, 1 and 0, as absl does."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def parse(self, argument: Any) -> bool:
        try:
            return super().parse(argument)
        except ValueError:
            reason = f"{self._name} is {argument!r}, but must be true or false"
            raise UserError(reason) from None


class _OptionSerializer(flags.ArgumentSerializer):
    def serialize(self, value: Any) -> str:
        return option_text(value)


def _define_boolean(name: str, default: bool, text: str, flag_values: flags.FlagValues) -> None:
    flags.DEFINE_boolean(name, default, text, flag_values=flag_values)
    flag_values[name].parser = _BooleanParser(name)


def _define_option(field: dataclasses.Field, values: flags.FlagValues) -> None:
    text, default = field.metadata["help"], cast(Any, field.default)
    if field.metadata["choices"] and ": " not in text:
        text = f"{text}: {', '.join(field.metadata['choices'])}"
    if option_type(field.name) is bool:
        _define_boolean(field.name, default, text, flag_values=values)
        return
    flags.DEFINE(
        _OptionParser(field.name),
        field.name,
        default,
        text,
        flag_values=values,
        serializer=_OptionSerializer(),
    )
