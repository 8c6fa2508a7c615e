#!/usr/bin/env python3
"""Makes JPEGs that resemble ImageNet's from a few photographs, to measure throughput.

    sudo apt-get install mate-backgrounds
    python tools/photos.py --output_dir=runs/photos --train_images=2000 --validation_images=200
    imagenet-fast prepare --source=folders --source_path=runs/photos --data_dir=runs/photos_shards

Each image is a random crop of a photograph, resized to about 500x375 pixels, the most common size
in ImageNet, a quarter of them in portrait format, with a JPEG quality of 90 to 95. The package's
photographs have soft backgrounds, so a file has 35 kB on average, and ImageNet's 108 (138 GB in
1,281,167 files): the same number of pixels to decode, but fewer bytes to read and fewer
coefficients. --quality=100 gives the file size of ImageNet's. --tiles=3 makes images of about 2
megapixels, of 3 x 3 such crops of a photograph each; --tiles=8 of about 12.

An image's class is its photograph. These are not real labels: crops of a photograph look alike and
overlap, even between training and validation, so accuracy on these images is meaningless.

The same photographs, flags and version of Pillow give the same files. Needs Pillow, NumPy and tqdm.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import pathlib
import shutil
import sys
from collections.abc import Iterator

import numpy as np
from PIL import Image
from tqdm import tqdm

# Photographs of flowers, drops and dunes; the neighbouring folders contain drawings.
DEFAULT_SOURCE = pathlib.Path("/usr/share/backgrounds/mate/nature")
SPLITS = ("train", "validation")
_SUFFIXES = (".jpg", ".jpeg", ".png")
_LONG_SIDE = (400, 600)
_ASPECT = (4 / 3, 3 / 2)
_PORTRAIT = 0.25
_QUALITY = (90, 95)

# Left, top, right and bottom, in pixels.
Box = tuple[float, float, float, float]


class PhotosError(Exception):
    """The images cannot be made; the message says why and what to do."""


@dataclasses.dataclass(frozen=True)
class Crop:
    """A crop of a photograph, and the image that is made of it.

    Attributes:
      box: left, top, right and bottom in the photograph, in pixels.
      size: width and height of the image, in pixels; at most the box'.
      quality: of the JPEG, 1 to 100.
    """

    box: Box
    size: tuple[int, int]
    quality: int


@dataclasses.dataclass(frozen=True)
class Format:
    """How images are made and stored.

    Attributes:
      quality: lowest and highest JPEG quality.
      tiles: crops in a row and in a column of an image.
    """

    quality: tuple[int, int] = _QUALITY
    tiles: int = 1


def choose_crop(
    photo_size: tuple[int, int], random: np.random.Generator, quality: tuple[int, int] = _QUALITY
) -> Crop:
    """Draws a crop of a photograph of at least 600x600 pixels.

    Args:
      photo_size: width and height of the photograph, in pixels.
      random: random number generator.
      quality: lowest and highest JPEG quality.
    """
    long_side = random.uniform(*_LONG_SIDE)
    size = (round(long_side), round(long_side / random.uniform(*_ASPECT)))
    if random.random() < _PORTRAIT:
        size = size[::-1]
    box = _choose_box(photo_size, size, random)
    return Crop(box, size, int(random.integers(quality[0], quality[1] + 1)))


def _choose_box(
    photo_size: tuple[int, int], size: tuple[int, int], random: np.random.Generator
) -> Box:
    # From a crop at the photograph's resolution to the largest one.
    scale = random.uniform(1, min(photo_size[0] / size[0], photo_size[1] / size[1]))
    width, height = size[0] * scale, size[1] * scale
    left = random.uniform(0, photo_size[0] - width)
    top = random.uniform(0, photo_size[1] - height)
    return left, top, left + width, top + height


def make_image(
    photo: Image.Image, random: np.random.Generator, form: Format
) -> tuple[Image.Image, int]:
    """Makes an image of crops of a photograph; returns it and its JPEG quality."""
    crop = choose_crop(photo.size, random, form.quality)
    width, height = crop.size
    image = Image.new("RGB", (form.tiles * width, form.tiles * height))
    box = crop.box
    for tile in range(form.tiles**2):
        if tile:
            box = _choose_box(photo.size, crop.size, random)
        row, column = divmod(tile, form.tiles)
        resized = photo.resize(crop.size, Image.Resampling.LANCZOS, box)
        image.paste(resized, (column * width, row * height))
    return image, crop.quality


def find_photos(source: pathlib.Path) -> list[pathlib.Path]:
    """Returns the photographs in a folder and its subfolders, in order.

    Images that are too small for crops are skipped, and named on stderr.

    Raises:
      PhotosError: if the folder does not exist or has no photographs, or one is corrupt.
    """
    if not source.is_dir():
        advice = "give --source, a folder of photographs"
        if source == DEFAULT_SOURCE:
            advice = f"`apt-get install mate-backgrounds` installs these photographs; or {advice}"
        raise PhotosError(f"{source}: no such folder; {advice}")
    photos = []
    for path in sorted(source.rglob("*")):
        if path.suffix.lower() not in _SUFFIXES:
            continue
        try:
            with Image.open(path) as photo:
                width, height = photo.size
        except OSError:
            raise PhotosError(f"{path}: not a JPEG or PNG image; remove it") from None
        if min(width, height) < _LONG_SIDE[1]:
            limit = f"{_LONG_SIDE[1]}x{_LONG_SIDE[1]}"
            print(f"skipped {path}: {width}x{height} is smaller than {limit}", file=sys.stderr)
            continue
        photos.append(path)
    if not photos:
        raise PhotosError(
            f"{source} has no photographs ({', '.join(_SUFFIXES)}) that are large enough"
        )
    return photos


def make_images(
    source: pathlib.Path,
    output: pathlib.Path,
    images: dict[str, int],
    seed: int = 0,
    form: Format = Format(),
) -> None:
    """Writes ``SPLIT/CLASS/*.jpg``, one class for each photograph, of equal sizes.

    Args:
      source: a folder of photographs.
      output: the folder to write; it must not exist, and gets its name when it is complete.
      images: number of images in each split.
      seed: of the crops.
      form: the images' number of crops and their JPEG quality.

    Raises:
      PhotosError: if ``output`` exists or cannot be written, there are no photographs, or a split
        has fewer images than photographs, so that classes would be empty.
    """
    if output.exists():
        raise PhotosError(f"{output} exists already: remove it, or choose another folder")
    photos = find_photos(source)
    for split, count in images.items():
        if count < len(photos):
            raise PhotosError(
                f"{count} {split} images are too few: each of the {len(photos)} photographs needs "
                "at least one"
            )
    temporary = output.with_name(output.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with tqdm(total=sum(images.values()), unit=" images", dynamic_ncols=True) as bar:
            for number, photo in enumerate(photos):
                for _ in _cut(photo, number, len(photos), temporary, images, seed, form):
                    bar.update()
        temporary.rename(output)
    except OSError as error:
        raise PhotosError(f"cannot make {output}: {error}") from error


def _cut(
    path: pathlib.Path,
    number: int,
    photos: int,
    output: pathlib.Path,
    images: dict[str, int],
    seed: int,
    form: Format,
) -> Iterator[None]:
    """Crops one photograph's images: every ``photos``-th one, from ``number`` on."""
    try:
        with Image.open(path) as file:
            photo = file.convert("RGB")
    except OSError as error:
        raise PhotosError(f"{path}: corrupt ({error}); remove it") from None

    def write(split: str, index: int) -> None:
        random = np.random.default_rng([seed, SPLITS.index(split), index])
        image, quality = make_image(photo, random, form)
        # The number distinguishes photographs of the same name.
        name = pathlib.Path(split, f"{number:02d}_{path.stem}", f"{index:06d}.jpg")
        image.save(output / name, quality=quality)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        pending = []
        for split, count in images.items():
            (output / split / f"{number:02d}_{path.stem}").mkdir(parents=True)
            pending += [pool.submit(write, split, index) for index in range(number, count, photos)]
        for done in concurrent.futures.as_completed(pending):
            yield done.result()


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parses the command line; errors end the process with status 2."""
    parser = argparse.ArgumentParser(
        usage="photos.py --output_dir=DIR [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--output_dir", type=pathlib.Path, required=True, help="folder to write")
    parser.add_argument(
        "--source",
        type=pathlib.Path,
        default=DEFAULT_SOURCE,
        help="folder of photographs (default: %(default)s, of Debian's mate-backgrounds)",
    )
    for split, count in zip(SPLITS, (2000, 200)):
        parser.add_argument(
            f"--{split}_images", type=int, default=count, help="(default: %(default)d)"
        )
    parser.add_argument(
        "--quality",
        type=_quality,
        default=_QUALITY,
        metavar="Q[,Q]",
        help="JPEG quality, 1 to 100, or the lowest and the highest (default: 90,95)",
    )
    parser.add_argument(
        "--tiles",
        type=int,
        default=1,
        help="crops in a row and in a column of an image (default: %(default)d)",
    )
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)d)")
    options = parser.parse_args(arguments)
    if options.seed < 0:
        parser.error(f"--seed is {options.seed}, but must not be negative")
    if options.tiles < 1:
        parser.error(f"--tiles is {options.tiles}, but must be positive")
    return options


def _quality(text: str) -> tuple[int, int]:
    """Parses ``95`` or ``90,95``."""
    values = [int(value) for value in text.split(",")]
    low, high = values * 2 if len(values) == 1 else values
    if not 1 <= low <= high <= 100:
        raise ValueError
    return low, high


def main(arguments: list[str]) -> int:
    """Makes the images of a command line; returns the exit status."""
    options = parse(arguments)
    images = {split: getattr(options, f"{split}_images") for split in SPLITS}
    try:
        form = Format(options.quality, options.tiles)
        make_images(options.source, options.output_dir, images, options.seed, form)
    except PhotosError as error:
        print(f"photos.py: error: {error}", file=sys.stderr)
        return 2
    files = sorted(options.output_dir.rglob("*.jpg"))
    kilobytes = sum(file.stat().st_size for file in files) / len(files) / 1000
    print(f"{options.output_dir}: {len(files)} images, {kilobytes:.0f} kB on average")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
