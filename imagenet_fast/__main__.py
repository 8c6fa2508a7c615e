"""``imagenet-fast COMMAND``, also as ``python -m imagenet_fast``."""

from __future__ import annotations

import io
import os
import pathlib
import sys

from imagenet_fast.commands import run


def main() -> None:
    """Runs the command line and exits with its status."""
    # They are None where the shell has closed them, as `>&-` does; the places must not be taken by
    # the next file that is opened.
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:
            setattr(sys, stream, pathlib.Path(os.devnull).open("w"))  # noqa: SIM115
    # As stderr has it: names of files need not be text.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
