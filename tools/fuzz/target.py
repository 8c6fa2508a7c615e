"""One reader under atheris; started by ``python tools/fuzz``, with a folder for its first files.

Before it fuzzes, it prints ``first_mb`` and the memory that its first files took, in MB.
"""

from __future__ import annotations

import pathlib
import random
import resource
import struct
import sys
import tempfile

import atheris

with atheris.instrument_imports(include=["imagenet_fast"]):
    import targets

from imagenet_fast.base.errors import UserError


def main() -> None:
    """Writes the first files, reads them, and fuzzes."""
    reader, corpus, megabytes_above, *options = sys.argv[1:]
    make, read, mutate = targets.TARGETS[reader]
    folder = pathlib.Path(
        tempfile.mkdtemp(prefix="imagenet_fast_", dir=pathlib.Path(corpus).parent)
    )

    def one_input(data: bytes) -> None:
        try:
            read(folder, data)
        except UserError:
            pass
        except OSError as error:
            if not error.filename:
                raise

    for number, content in enumerate(make(folder)):
        pathlib.Path(corpus, str(number)).write_bytes(content)
        one_input(content)
    first_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print("first_mb", first_mb, flush=True)
    options.append(f"-rss_limit_mb={first_mb + int(megabytes_above)}")

    def change(data: bytes, max_size: int, seed: int) -> bytes:
        numbers = random.Random(seed)
        if mutate is not None and numbers.random() < 0.5:
            try:
                return mutate(data, numbers)[:max_size]
            except (ValueError, RecursionError, struct.error):  # no longer of the format
                pass
        return atheris.Mutate(data, max_size)

    atheris.Setup([sys.argv[0], *options, corpus], one_input, custom_mutator=change)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
