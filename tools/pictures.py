#!/usr/bin/env python3
"""Makes the pictures in docs/static that show what the program writes.

    sudo apt-get install chromium
    .venv/bin/python tools/pictures.py

Prepares scikit-learn's digits and trains the digits recipe, about a minute, in runs/pictures, where
a second call finds them. Of the run's report and the data's overview it takes screenshots, with at
most 128 colors; the plots of two plans are copied.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from PIL import Image, ImageChops

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / "runs" / "pictures"
OUTPUT = ROOT / "docs" / "static"

# On top of the headings that are kept, nothing but their cards.
_KEEP = """
<script>
const kept = {headings};
for (const card of document.querySelectorAll("header, .tiles, figure, section"))
  if (!kept.includes(card.querySelector("h2")?.innerText)) card.remove();
for (const row of document.querySelectorAll(".cards")) if (!row.children.length) row.remove();
</script>
"""


@dataclasses.dataclass(frozen=True)
class Shot:
    """A screenshot of a page.

    Attributes:
      page: the file, in FOLDER.
      width: of the window, in pixels.
      height: of the picture, at most, in pixels.
      headings: those of the cards to show; empty: the whole page.
    """

    page: str
    width: int
    height: int
    headings: tuple[str, ...] = ()


SHOTS = {
    "report.png": Shot("run/report.html", 1015, 806),
    "error_analysis.png": Shot(
        "run/report.html", 1015, 1600, ("Confusion matrix", "Most confused classes", "Classes")
    ),
    "data.png": Shot("data/data.html", 1015, 900),
}


def main(arguments: Sequence[str]) -> None:
    """Trains, plans, and writes the pictures."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(arguments)
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not (FOLDER / "data" / "manifest.json").exists():
        _program("prepare", "--source=digits", "--data_dir=data")
    _program("train", "--flagfile=digits", "--data_dir=data", "--model_dir=run")
    # As in docs/planning.md.
    _program(
        *("plan", "--flagfile=facebook_1h_8k", "--accelerator=p100", "--chips=256"),
        *("--network_gbits=10", "--output_dir=plan"),
    )
    _program("plan", "--schedule", "--flagfile=facebook_1h_8k", "--output_dir=plan")
    for name in ("plan.svg", "schedule.svg"):
        shutil.copyfile(FOLDER / "plan" / name, OUTPUT / name)
    for name, shot in SHOTS.items():
        page = (FOLDER / shot.page).read_text()
        if shot.headings:
            page += _KEEP.format(headings=json.dumps(shot.headings))
        with tempfile.NamedTemporaryFile("w", suffix=".html") as file:
            file.write(page)
            file.flush()
            take(f"file://{file.name}", OUTPUT / name, shot.width, shot.height)


def take(address: str, path: pathlib.Path, width: int, height: int) -> None:
    """Takes a screenshot, without the empty space at its end.

    Args:
      address: of the page.
      path: of the PNG file.
      width: of the window, in pixels.
      height: of the window, in pixels.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "picture.png")
        subprocess.run(
            [
                *("chromium", "--headless", "--no-sandbox", "--hide-scrollbars"),
                f"--window-size={width},{height}",
                f"--user-data-dir={folder}/profile",
                f"--screenshot={file}",
                address,
            ],
            check=True,
            stderr=subprocess.DEVNULL,
        )
        picture = Image.open(file).convert("RGB")
    background = Image.new("RGB", picture.size, picture.getpixel((0, height - 1)))
    box = ImageChops.difference(picture, background).getbbox()
    picture = picture.crop((0, 0, width, min(height, box[3] + 16)))
    picture.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.relative_to(ROOT)}: {picture.size}, {path.stat().st_size / 1000:.0f} kB")


def _program(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "imagenet_fast", *arguments], cwd=FOLDER, check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
