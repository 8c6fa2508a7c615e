"""``imagenet-fast COMMAND``, also as ``python -m imagenet_fast``."""

from __future__ import annotations

import sys

from imagenet_fast.commands import run


def main() -> None:
    """Runs the command line and exits with its status."""
    # As stderr has it: names of files need not be text.
    sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
