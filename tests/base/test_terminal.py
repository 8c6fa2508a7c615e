"""What names can do to a terminal: nothing."""

import io
import subprocess
import sys

import pytest

from imagenet_fast.base.terminal import PrintableStream, printable

HOSTILE = "a\x1b[2J\x9b31m\u202eb\x07\x00\x7f"
SHOWN = r"a\x1b[2J\x9b31m\u202eb\x07\x00\x7f"


@pytest.mark.parametrize(
    "text", ["plain", "caf\u00e9 \u732b \U0001f98a", "a\tb\r\n", "\r 5%", "\r  \r"]
)
def test_text_stays(text):
    assert printable(text) == text


def test_controls_are_escaped():
    assert printable(HOSTILE) == SHOWN


def test_a_line_is_not_overwritten():
    assert printable("\rname: ok\rdone\r\r\n") == "\rname: ok\\rdone\\r\r\n"


def test_a_stream(tmp_path):
    under = io.StringIO()
    stream = PrintableStream(under)
    assert stream.write(HOSTILE) == len(HOSTILE)
    stream.writelines(["\n", HOSTILE])
    print(HOSTILE, file=stream, end="", flush=True)
    assert under.getvalue() == f"{SHOWN}\n{SHOWN}{SHOWN}"
    assert stream.isatty() is False


def test_names_on_the_command_line_reach_the_terminal_escaped(tmp_path):
    name = "\x1b]0;run\r\u202e"
    done = subprocess.run(
        [sys.executable, "-m", "imagenet_fast", "evaluate", f"--model_dir={tmp_path / name}"],
        capture_output=True,
    )
    assert done.returncode == 2
    assert rb"\x1b]0;run\r\u202e holds no training run" in done.stderr
    assert not {b"\x1b", b"\r"} & {bytes([byte]) for byte in done.stderr}
