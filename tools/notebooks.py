#!/usr/bin/env python3
"""Runs the notebooks and stores their outputs in them, so that readers need not run them.

    tools/install.sh .venv test
    .venv/bin/python tools/notebooks.py [NAME ...]    # default: all, about 8 minutes

Each notebook gets the outputs of a run from top to bottom on this machine: texts, tables and
pictures. Names of temporary folders are replaced, log lines of TensorFlow and libjpeg left out, and
pictures stored with 256 colors or, if large, as small JPEGs. The file's metadata hold a hash of the
code, by which tests/notebooks find outputs of other code.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / "notebooks"

_MAX_PICTURE = 60_000  # bytes
_HASH = "outputs_of"
# TensorFlow's log, such as that there is no GPU, and libjpeg's.
_NOISE = re.compile(
    r"^(?:[IWEF]\d{4} \d\d:.*|WARNING: All log messages before absl.*|INFO:tensorflow:.*"
    r"|Improper call to JPEG library.*)\n",
    re.MULTILINE,
)
# Paths of a machine, and what readers would take for errors.
_UNWANTED = re.compile(
    rf"/(?:home|root|tmp|Users)/\S*|{re.escape(str(ROOT))}|\S*site-packages\S*|.*warning.*|Traceback",
    re.IGNORECASE,
)


def main(arguments: Sequence[str]) -> int:
    """Runs notebooks by name and writes them back; returns the number of those with problems."""
    names = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="*", help=f"of {', '.join(names)}; default: all")
    given = parser.parse_args(arguments).name
    for name in given:
        if name not in names:
            parser.error(f"there is no notebook {name}; the notebooks are {', '.join(names)}")
    failed = 0
    for name in given or names:
        path = FOLDER / f"{name}.ipynb"
        notebook = execute(path)
        clean(notebook)
        nbformat.write(notebook, path)
        found = problems(notebook)
        failed += bool(found)
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB", *found, sep="\n  ")
    return failed


def execute(path: pathlib.Path) -> nbformat.NotebookNode:
    """Returns a notebook with its outputs; a cell that fails raises, with its traceback."""
    notebook = nbformat.read(path, as_version=4)
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    resources = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(notebook, timeout=300, resources=resources, record_timing=False)
    client.execute(env=environment)
    return notebook


def clean(notebook: nbformat.NotebookNode) -> None:
    """Makes the outputs of a run small and independent of the machine's folders."""
    notebook.metadata.language_info = {"name": "python"}  # without the version
    notebook.metadata[_HASH] = _code_hash(notebook)
    for cell in _code_cells(notebook):
        outputs: list[Any] = []
        for output in cell.outputs:
            data = output.get("data", {})
            if "image/png" in data:
                data.update([_smaller(data.pop("image/png"))])
            last = outputs[-1] if outputs else {}
            if "name" in output and output.name == last.get("name"):
                last.text += output.text  # Jupyter splits what is printed at some time or other.
            else:
                outputs.append(output)
        for output in outputs:
            if "text" in output:
                output.text = _clean_text(output.text)
        cell.outputs = [output for output in outputs if output.get("text") != ""]


def problems(notebook: nbformat.NotebookNode) -> list[str]:
    """Returns what is wrong with a notebook's stored outputs."""
    if notebook.metadata.get(_HASH) != _code_hash(notebook):
        return ["its outputs are of other code: run tools/notebooks.py"]
    found = []
    for cell in _code_cells(notebook):
        for output in cell.outputs:
            if output.output_type == "error":
                found.append(f"a cell failed: {output.ename}: {output.evalue}")
            for text in _texts(output):
                found += [f"a cell prints {match[0]!r}" for match in _UNWANTED.finditer(text)]
            for kind in ("png", "jpeg"):
                size = len(base64.b64decode(output.get("data", {}).get(f"image/{kind}", "")))
                if size > _MAX_PICTURE:
                    found.append(f"a picture has {size:,} bytes, more than {_MAX_PICTURE:,}")
    return found


def _code_cells(notebook: nbformat.NotebookNode) -> Iterator[nbformat.NotebookNode]:
    return (cell for cell in notebook.cells if cell.cell_type == "code")


def _code_hash(notebook: nbformat.NotebookNode) -> str:
    code = "\0".join(cell.source for cell in _code_cells(notebook))
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def _texts(output: nbformat.NotebookNode) -> list[str]:
    data = output.get("data", {})
    return [output.get("text", ""), *(data.get(f"text/{kind}", "") for kind in ("plain", "html"))]


def _clean_text(text: str) -> str:
    """Leaves out log lines and what was overwritten in a line, and shortens temporary folders."""
    text = _NOISE.sub("", re.sub(r"[^\n]*\r", "", text.replace("\r\n", "\n")))
    return re.sub(re.escape(tempfile.gettempdir()) + r"/tmp\w+", "FOLDER", text)


def _smaller(png: str) -> tuple[str, str]:
    """Returns a picture's type and file, in base64: a PNG of 256 colors or, if large, a small JPEG.

    Args:
      png: a PNG file, in base64.
    """
    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    file = io.BytesIO()
    picture.quantize(256, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    smaller = min(base64.b64encode(file.getvalue()).decode(), png, key=len)
    if len(base64.b64decode(smaller)) <= _MAX_PICTURE:
        return "image/png", smaller
    for scale in (1, 0.8, 0.6, 0.4):
        file = io.BytesIO()
        size = round(scale * picture.width), round(scale * picture.height)
        picture.resize(size, Image.Resampling.LANCZOS).save(file, "JPEG", quality=75)
        if file.tell() <= _MAX_PICTURE:
            break
    return "image/jpeg", base64.b64encode(file.getvalue()).decode()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
