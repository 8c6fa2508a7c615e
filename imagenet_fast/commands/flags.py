"""The absl flags of a command: options of Config, and flags of its own."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

from imagenet_fast.base.errors import UserError, nearest
from imagenet_fast.base.former_names import RENAMED_FLAGS, advice, with_todays_names
from imagenet_fast.base.notices import warn_once
from imagenet_fast.base.option import option_text, parse
from imagenet_fast.commands import COMMANDS
from imagenet_fast.config import Config, option_names, option_type, parse_option
from imagenet_fast.flagfiles import read_flagfile, resolve

_HELP_WIDTH = 96


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
        kind = type(default)

        def read(value: str) -> Any:
            try:
                # Blanks at the ends of a text, as of a separator, belong to it.
                return value if kind is str else parse(name, kind, value)
            except UserError as error:
                raise UserError(f"{error}: {text}") from None

        _define(name, kind, default, text, read, self._flags)

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
            raise UserError(str(reason).removeprefix("flag ")) from None
        if rest and not positional:
            raise UserError(f"unexpected argument {rest[0]!r}: options are written --name=value")
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


class _Parser(flags.ArgumentParser):
    """Reads a flag's text by a function, which may raise UserError."""

    def __init__(self, read: Callable[[str], Any]) -> None:
        super().__init__()
        self._read = read

    def parse(self, argument: Any) -> Any:
        return self._read(argument) if isinstance(argument, str) else argument


def _define(
    name: str,
    kind: Any,
    default: Any,
    text: str,
    read: Callable[[str], Any],
    values: flags.FlagValues,
) -> None:
    if kind is bool:  # --name and --noname, too
        flags.DEFINE_boolean(name, default, text, flag_values=values)
        values[name].parser = _Parser(read)
    else:
        flags.DEFINE(_Parser(read), name, default, text, flag_values=values)


def _define_option(field: dataclasses.Field, values: flags.FlagValues) -> None:
    name, text = field.name, field.metadata["help"]
    if field.metadata["choices"] and ": " not in text:
        text = f"{text}: {', '.join(field.metadata['choices'])}"
    read = functools.partial(parse_option, name)
    _define(name, option_type(name), field.default, text, read, values)
