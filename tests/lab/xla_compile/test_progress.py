"""Progress messages."""

import io
import re
import sys
import time

from imagenet_fast.lab.xla_compile import progress


def test_a_line_of_a_log(capsys):
    with progress.doing("compiling"):
        assert capsys.readouterr().err == "compiling ..."
    assert re.fullmatch(r" \d+ s\n", capsys.readouterr().err)


def test_it_ends_with_an_error_too(capsys):
    try:
        with progress.doing("compiling"):
            raise ValueError
    except ValueError:
        pass
    assert capsys.readouterr().err.endswith(" s\n")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_seconds_are_counted_on_a_terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "_EVERY_SECONDS", 0.01)
    with progress.doing("compiling"):
        while terminal.getvalue().count("\r") < 2:
            time.sleep(0.01)
    lines = terminal.getvalue().split("\r")
    assert all(re.fullmatch(r"compiling \.\.\. \d+ s\n?", line) for line in lines[1:])
    assert lines[-1].endswith(" s\n")
