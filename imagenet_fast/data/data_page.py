"""A prepared data set as a page: ``data.html``, one file that needs nothing else to be read."""

from __future__ import annotations

import html
import io
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePath

import matplotlib.style
import matplotlib.ticker
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image, ImageOps

from imagenet_fast.base import html_page
from imagenet_fast.base.files import write_file
from imagenet_fast.base.html_page import document, header, section, tile_row
from imagenet_fast.base.paths import to_path
from imagenet_fast.base.plotting import PAGE_STYLE, SENTINELS, page_svg
from imagenet_fast.data.copies import FILE as COPIES_FILE
from imagenet_fast.data.copies import Copies, Found, Images, find_copies, list_copies
from imagenet_fast.data.duplicates import DISTANCE
from imagenet_fast.data.facts import HASH_BITS, read_facts
from imagenet_fast.data.manifest import Manifest, read_manifest

FILE = "data.html"

# More classes are not all shown without a click, and of these so many at both ends.
_FEW_CLASSES = 40
_ENDS = 10
# Of more classes than this a page would become large.
_MOST_CLASSES = 2000
# Images of samples: in all, unless each class has one, and of a class.
_SAMPLES = 240
_SAMPLES_OF_CLASS = 8
_MOST_SAMPLES = 1000
_PAIRS_SHOWN = 24
_LEFT_OUT_SHOWN = 200
_FEW_LEFT_OUT = 12
# Height and width in pixels, and the quality as a JPEG, of few images and of many.
_LARGE = 96, 78
_SMALL = 44, 66
# Images of no more pixels than this each way are shown as they are.
_PIXELATED = 32

_COLORS = {"train": "train", "validation": "validation", "test": "speed"}
_ASPECTS = {0.25: "1:4", 0.5: "1:2", 0.75: "3:4", 1.0: "1:1", 1.333: "4:3", 2.0: "2:1", 4.0: "4:1"}


def write_page(directory: str, progress: bool = True) -> Found:
    """Writes ``data.html`` and ``duplicates.jsonl`` beside the shards of a prepared data set.

    Args:
      directory: The data set, on a disk or in a bucket.
      progress: Show a progress bar if the shards must be read, as where ``data.npz`` is missing.

    Returns:
      The images that are there twice.

    Raises:
      OSError: They cannot be written.
      UserError: There is no data set there, or it is damaged.
    """
    path = to_path(directory)
    manifest = read_manifest(path)
    images = Images(manifest, read_facts(manifest, path, progress), path)
    found = find_copies(images)
    write_file(path / COPIES_FILE, list_copies(found, images))
    write_file(path / FILE, render(images, found, str(directory)))
    return found


def render(images: Images, found: Found, directory: str) -> str:
    """Returns the page.

    Args:
      images: The data set.
      found: The copies in it.
      directory: Where it is, for the commands that the page shows.

    Raises:
      UserError: A shard is damaged.
    """
    manifest = images.manifest
    body = [
        header(manifest.name, _subtitle(manifest)),
        tile_row(_tiles(manifest, images.rows, found)),
        _warnings(manifest),
        section("Images by class", _classes(manifest)),
        '<div class="cards">',
        section("Sizes", _sizes(images.rows)),
        section("Kinds", _kinds(manifest, images.rows)),
        "</div>",
        _left_out(manifest),
        section("Equal files", _equal(found.equal, images)),
        section("Images that look alike", _alike(found.alike, images, directory)),
        section("Samples", _samples(images)),
    ]
    return document(f"Data: {manifest.name}", body, _STYLE)


# --- Numbers --------------------------------------------------------------------------------------


def _subtitle(manifest: Manifest) -> str:
    parts = [_count(manifest.num_classes, "class", "classes")]
    kind, encoding = (manifest.source.get(key) for key in ("kind", "encoding"))
    if kind:
        parts.append(f"source {kind}")
    if encoding:
        parts.append(f"encoded as {encoding}")
    return " · ".join(parts)


def _tiles(manifest: Manifest, rows: np.ndarray, found: Found) -> Iterable[tuple[str, str, str]]:
    for name, split in manifest.splits.items():
        size = sum(shard.bytes for shard in split.shards)
        shards = _count(len(split.shards), "shard")
        what = {"train": "Training", "validation": "Validation", "test": "Test"}.get(name, name)
        yield f"{what} images", f"{split.examples:,}", f"{shards}, {_bytes(size)}"
    converted = sum(manifest.converted.values())
    yield "Left out", f"{len(manifest.skipped):,}", f"{converted:,} images converted"
    harm = found.equal.two_classes.sum() + found.equal.two_splits.sum()
    note = "equal files" if harm else "equal files, all within a class and split"
    if harm:
        note = (
            f"equal files; {found.equal.two_classes.sum():,} in two classes, "
            f"{found.equal.two_splits.sum():,} in two splits"
        )
    yield "Copies", found.equal.number(), note if len(found.equal) else "no two files are equal"


def _warnings(manifest: Manifest) -> str:
    if not manifest.warnings:
        return ""
    lines = "".join(f"<li>{html.escape(warning)}</li>" for warning in manifest.warnings)
    return section("Warnings", f'<ul class="warnings">{lines}</ul>')


def _classes(manifest: Manifest) -> str:
    counts = np.array([split.class_counts for split in manifest.splits.values()]).T
    names = list(manifest.splits)
    train = counts[:, 0]
    order = np.argsort(-train, kind="stable")
    if manifest.num_classes <= _FEW_CLASSES:
        return _class_table(manifest.labels, counts, names, range(manifest.num_classes))
    parts = [
        _histogram(
            train,
            "training images of a class",
            "number of classes",
            "classes by their number of training images",
        ),
        _summary_of_counts(train),
        '<div class="cards">',
        f"<div><h3>Largest</h3>{_class_table(manifest.labels, counts, names, order[:_ENDS])}</div>",
        f"<div><h3>Smallest</h3>"
        f"{_class_table(manifest.labels, counts, names, order[::-1][:_ENDS])}</div>",
        "</div>",
        f"<details><summary>All {manifest.num_classes:,} classes</summary>"
        f"{_class_table(manifest.labels, counts, names, range(manifest.num_classes))}</details>",
    ]
    return "".join(parts)


def _summary_of_counts(train: np.ndarray) -> str:
    least, median, most = train.min(), np.median(train), train.max()
    ratio = f", {most / least:,.1f} times the smallest" if least else ""
    return (
        f'<p class="note">A class has {least:,} to {most:,} training images{ratio}; the median is '
        f"{median:,.0f}.</p>"
    )


def _class_table(
    labels: Sequence[str], counts: np.ndarray, splits: Sequence[str], chosen: Iterable[int]
) -> str:
    """Returns classes as lines with a bar of their training images and numbers of all splits."""
    most = max(int(counts[:, 0].max()), 1)
    head = "".join(f"<th>{html.escape(name)}</th>" for name in splits)
    chosen = list(chosen)
    lines = []
    for index in chosen[:_MOST_CLASSES]:
        numbers = "".join(
            f"<td{_empty(number)}>{number:,}</td>" for number in map(int, counts[index])
        )
        lines.append(
            f'<tr><th scope="row">{html.escape(labels[index])}</th>'
            f'<td><i style="width:{100 * counts[index, 0] / most:.1f}%"></i></td>{numbers}</tr>'
        )
    more = len(chosen) - len(lines)
    return (
        f'<table class="classes"><thead><tr><th>Class</th><th></th>{head}</tr></thead><tbody>'
        f"{''.join(lines)}</tbody></table>"
        + (f'<p class="note">{more:,} more are in manifest.json.</p>' if more else "")
    )


def _empty(number: int) -> str:
    return "" if number else ' class="empty"'


def _sizes(rows: np.ndarray) -> str:
    height, width = (rows[name].astype(np.int64) for name in ("height", "width"))
    shorter = np.minimum(height, width)
    aspect = width / height
    if len(np.unique(height * 2**32 + width)) == 1:
        drawings = f'<p class="note">All images have {width[0]} x {height[0]} pixels.</p>'
    else:
        drawings = _histogram(
            shorter, "shorter side in pixels", "images", "images by their shorter side"
        ) + _aspect_histogram(aspect)
    lines = [
        ("Width in pixels", *map(_whole, _least_median_most(width))),
        ("Height in pixels", *map(_whole, _least_median_most(height))),
        ("Shorter side in pixels", *map(_whole, _least_median_most(shorter))),
        ("Width / height", *(f"{own:.3g}" for own in _least_median_most(aspect))),
        ("Size of the file", *map(_bytes, _least_median_most(rows["bytes"]))),
    ]
    return drawings + _numbers(("", "least", "median", "greatest"), lines)


def _least_median_most(values: np.ndarray) -> tuple[float, float, float]:
    return float(values.min()), float(np.median(values)), float(values.max())


def _kinds(manifest: Manifest, rows: np.ndarray) -> str:
    total = len(rows)
    converted = sum(manifest.converted.values())
    found = [("JPEG, kept as it was", total - converted), *manifest.converted.items()]
    found = sorted((own for own in found if own[1]), key=lambda own: -own[1])
    png = int(rows["png"].sum())
    grey = int((rows["channels"] == 1).sum())
    stored = [
        (name, number)
        for name, number in (
            ("JPEG", total - png),
            ("PNG", png),
            ("RGB", total - grey),
            ("grey", grey),
        )
        if number
    ]
    return (
        f"<h3>As found</h3>{_bars(found, total)}<h3>As stored</h3>{_bars(stored, total)}"
        + _note_of_conversion(manifest)
    )


def _note_of_conversion(manifest: Manifest) -> str:
    if not manifest.converted:
        return ""
    encoding = manifest.source.get("encoding", "jpeg")
    return f'<p class="note">What was converted is stored as {html.escape(encoding.upper())}.</p>'


def _bars(lines: Iterable[tuple[str, int]], total: int) -> str:
    return (
        '<table class="classes kinds"><tbody>'
        + "".join(
            f'<tr><th scope="row">{html.escape(name)}</th>'
            f'<td><i style="width:{100 * number / max(total, 1):.1f}%"></i></td>'
            f"<td>{number:,}</td></tr>"
            for name, number in lines
        )
        + "</tbody></table>"
    )


def _left_out(manifest: Manifest) -> str:
    if not manifest.skipped:
        return ""
    lines = [(own.file, own.split, own.reason) for own in manifest.skipped[:_LEFT_OUT_SHOWN]]
    more = len(manifest.skipped) - len(lines)
    listed = _numbers(("file", "split", "reason"), lines, "texts") + (
        f'<p class="note">{more:,} more are in manifest.json.</p>' * (more > 0)
    )
    if len(lines) > _FEW_LEFT_OUT:
        number = _count(len(manifest.skipped), "image")
        listed = f"<details><summary>{number} that could not be used</summary>{listed}</details>"
    return section("Left out", listed)


# --- Copies ---------------------------------------------------------------------------------------


def _equal(copies: Copies, images: Images) -> str:
    if not len(copies):
        return '<p class="note">No two images are the same file.</p>'
    return (
        '<p class="note">Each image that is stored a second time, byte for byte, beside the first '
        "one. What was converted is equal where its pixels are.</p>"
        + _matrix(copies, images)
        + _pairs(copies, images)
    )


def _alike(copies: Copies | None, images: Images, directory: str) -> str:
    if copies is None:
        command = f"imagenet-fast prepare --look --data_dir={shlex.quote(directory)}"
        return (
            '<p class="note">Not searched for, since the library ImageHash is not installed. To '
            "have them here:</p><pre>pip install ImageHash\n" + html.escape(command) + "</pre>"
        )
    note = (
        '<p class="note">Images of which at most '
        f"{DISTANCE} of the {HASH_BITS} bits of a perceptual hash (pHash) differ: copies that were "
        "encoded again, resized or made a little brighter mostly do, other photographs differ in "
        f"about {HASH_BITS // 2}. Copies that are cropped, flipped or turned are not found.</p>"
    )
    if not len(copies):
        return note + "<p>No two images look alike.</p>"
    if not copies.pairs.complete:
        note += (
            '<p class="note">The search was ended early: too many images of this data set look '
            "alike to the hash.</p>"
        )
    return note + _matrix(copies, images) + _pairs(copies, images)


def _matrix(copies: Copies, images: Images) -> str:
    """Returns the numbers of pairs within and across the splits."""
    names = list(images.manifest.splits)
    first, second = (images.splits[own] for own in (copies.pairs.first, copies.pairs.second))
    lines = []
    for one in range(len(names)):
        for other in range(one, len(names)):
            own = (np.minimum(first, second) == one) & (np.maximum(first, second) == other)
            where = names[one] if one == other else f"{names[one]} and {names[other]}"
            if own.any() or one != other:
                lines.append((where, f"{own.sum():,}", f"{copies.two_classes[own].sum():,}"))
    lines.append(("in all", copies.number(), f"{copies.two_classes.sum():,}"))
    return _numbers(("", "pairs", "of them in two classes"), lines)


def _pairs(copies: Copies, images: Images) -> str:
    shown = min(len(copies), _PAIRS_SHOWN)
    pairs = copies.pairs
    cards = [
        _pair(
            [images.read(int(place)) for place in (pairs.first[own], pairs.second[own])],
            int(pairs.distance[own]),
            bool(copies.two_classes[own]),
            bool(copies.two_splits[own]),
        )
        for own in range(shown)
    ]
    more = ""
    if len(copies) > shown:
        more = (
            f'<p class="note">{shown} of {copies.number()}, first those in two classes, then those '
            f"in two splits; more are in {COPIES_FILE}.</p>"
        )
    return f'<div class="couples">{"".join(cards)}</div>{more}'


def _pair(both: Sequence, distance: int, two_classes: bool, two_splits: bool) -> str:
    marks = '<b class="harm">two classes</b>' * two_classes + '<b class="risk">two splits</b>' * (
        two_splits
    )
    bits = f"{_count(distance, 'bit')} apart" if distance else ""
    sides = "".join(
        f"<div>{_thumbnail(own.data, *_LARGE, crop=False)}<b>{html.escape(own.label)}</b>"
        f'<span title="{html.escape(own.file)}">{html.escape(PurePath(own.file).name)}</span>'
        f"<span>{own.split}</span></div>"
        for own in both
    )
    bits = f"<span>{bits}</span>" if bits else ""
    top = f'<p class="marks">{marks}{bits}</p>' if marks or bits else ""
    return f'<div class="couple{" conflict" * two_classes}">{top}<div>{sides}</div></div>'


# --- Samples --------------------------------------------------------------------------------------


def _samples(images: Images) -> str:
    labels = images.rows["label"]
    classes = images.manifest.num_classes
    number = max(1, min(_SAMPLES_OF_CLASS, _SAMPLES // classes))
    shown = range(min(classes, _MOST_SAMPLES))
    # The first ones of the training set, which is shuffled; of a class that has none, others.
    order = np.argsort(labels, kind="stable")
    starts = np.searchsorted(labels[order], np.arange(classes + 1))
    size = _LARGE if len(shown) * number <= _SAMPLES else _SMALL
    blocks = []
    for label in shown:
        places = order[starts[label] : starts[label + 1]][:number]
        pictures = "".join(
            _thumbnail(images.read(int(place)).data, *size, crop=True) for place in places
        )
        name = html.escape(images.manifest.labels[label])
        if number == 1:
            blocks.append(f'<div title="{name}">{pictures}<span>{name}</span></div>')
        else:
            pictures = pictures or '<span class="empty">no image</span>'
            blocks.append(f"<div><h3>{name}</h3><div>{pictures}</div></div>")
    more = classes - len(shown)
    note = f'<p class="note">The first {len(shown):,} of {classes:,} classes.</p>' if more else ""
    return f'{note}<div class="{"single" if number == 1 else "samples"}">{"".join(blocks)}</div>'


def _thumbnail(data: bytes, side: int, quality: int, crop: bool) -> str:
    """Returns an image as an element: a square of it, or all."""
    image: Image.Image = Image.open(io.BytesIO(data))
    small = max(image.size) <= _PIXELATED
    # A narrower file is decoded at part of its size.
    image.draft(None, (2 * side, 2 * side))
    if crop and min(image.size) > side:
        image = ImageOps.fit(image, (side, side), Image.Resampling.BICUBIC)
    elif not small:
        image.thumbnail((side, side), Image.Resampling.BICUBIC)
    image = image.copy()  # As a file it would have all that was in the header.
    image.info.clear()
    file = io.BytesIO()
    if small:
        image.save(file, "PNG", optimize=True)
        return html_page.image(file.getvalue(), "png", small=True)
    image.save(file, "JPEG", quality=quality, optimize=True)
    return html_page.image(file.getvalue(), "jpeg")


# --- Drawings -------------------------------------------------------------------------------------


def _histogram(values: np.ndarray, x: str, y: str, title: str) -> str:
    """Returns a histogram of whole numbers, without the few that are far above the others."""
    most = int(values.max())
    top = int(np.quantile(values, 0.995, method="higher"))
    top = most if most <= 1.5 * top else top
    least = int(values.min())
    step = max(1, -(-(top - least + 1) // 40))
    edges = np.arange(least, top + step + 1, step) - 0.5
    counts, _ = np.histogram(values, edges)

    def draw(axes: Axes) -> None:
        axes.bar(edges[:-1], counts, np.diff(edges) * 0.92, align="edge", color=_blue())
        axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(8, integer=True))

    drawing = _drawing(draw, x, y, title)
    above = int((values > edges[-1]).sum())
    note = f" {_count(above, 'more is', 'more are')} above, up to {most:,}." if above else ""
    return drawing + (f'<p class="note">{note.strip()}</p>' if note else "")


def _aspect_histogram(aspect: np.ndarray) -> str:
    edges = 2.0 ** (np.arange(-33, 34) / 16)
    counts, _ = np.histogram(np.clip(aspect, edges[0], edges[-1]), edges)

    def draw(axes: Axes) -> None:
        axes.bar(edges[:-1], counts, np.diff(edges) * 0.92, align="edge", color=_blue())
        axes.set_xscale("log")
        axes.set_xlim(edges[0], edges[-1])
        axes.xaxis.set_major_locator(matplotlib.ticker.FixedLocator(list(_ASPECTS)))
        axes.xaxis.set_major_formatter(matplotlib.ticker.FixedFormatter(list(_ASPECTS.values())))
        axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())

    return _drawing(draw, "width : height", "images", "images by their aspect ratio")


def _blue() -> str:
    return SENTINELS["validation"]


def _drawing(draw: Callable[[Axes], None], x: str, y: str, title: str) -> str:
    with matplotlib.style.context(PAGE_STYLE):
        figure = Figure(figsize=(5.0, 1.9), layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.grid(axis="y")
        axes.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(4, integer=True))
        axes.yaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,g}"))
        picture = page_svg(figure)
    return f'<div class="drawing" role="img" aria-label="{html.escape(title)}">{picture}</div>'


# --- How it is written ----------------------------------------------------------------------------


def _numbers(head: Sequence[str], lines: Iterable[Sequence[str]], kind: str = "counts") -> str:
    """Returns a table of numbers, or of texts, below their names."""
    heads = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    rows = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th>'
        + "".join(f"<td>{html.escape(value)}</td>" for value in values)
        + "</tr>"
        for name, *values in lines
    )
    return f'<table class="{kind}"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'


def _count(number: int, noun: str, nouns: str = "") -> str:
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"


def _whole(number: float) -> str:
    return f"{number:,.0f}"


def _bytes(number: float) -> str:
    if number < 1000:
        return f"{number:,.0f} bytes"
    power = min(int(np.log10(number)) // 3, 4)
    return f"{number / 1000**power:,.3g} {('kB', 'MB', 'GB', 'TB')[power - 1]}"


_STYLE = """
h3 { font-size: 13px; font-weight: 600; margin: 14px 0 6px; }
.note { color: var(--muted); font-size: 13.5px; margin: 0 0 12px; max-width: 76ch; }
.warnings { margin: 0; padding-left: 20px; }
.drawing { max-width: 620px; margin-bottom: 10px; }
section .cards { margin: 0 0 8px; }
.classes th, .classes td { padding: 4px 0 4px 12px; width: auto; text-align: right;
  vertical-align: middle;
  color: var(--ink); white-space: nowrap; }
.classes tr > :first-child { text-align: left; padding-left: 0; max-width: 320px;
  white-space: normal; overflow-wrap: anywhere; }
.classes tr > :nth-child(2) { width: 50%; }
.kinds tr > :first-child { width: 38%; }
section .cards .classes tr > :nth-child(2) { width: 32%; }
.classes i { display: block; height: 12px; border-radius: 3px; background: var(--validation);
  min-width: 1px; }
.classes thead th, .counts thead th, .texts thead th { color: var(--muted); }
.classes tbody th, .counts tbody th { color: inherit; }
.classes .empty { color: var(--train); font-weight: 650; }
.counts { margin-bottom: 14px; max-width: 560px; }
.texts th, .texts td { width: auto; padding-right: 20px; overflow-wrap: anywhere; }
.texts tbody th { color: inherit; min-width: 180px; }
.texts td:nth-child(2) { white-space: nowrap; overflow-wrap: normal; color: inherit; }
.texts tbody tr:first-child > * { border-top: 1px solid var(--grid); }
.counts th, .counts td { width: auto; text-align: right; padding: 5px 0 5px 12px; }
.counts td { color: inherit; }
.counts tr > :first-child { text-align: left; padding-left: 0; }
.counts tbody tr:first-child > *, .classes thead + tbody tr:first-child > * {
  border-top: 1px solid var(--grid); }
.couples { display: grid; gap: 12px; grid-template-columns: repeat(auto-fill, minmax(228px, 1fr)); }
.couple { border: 1px solid var(--grid); border-radius: 10px; padding: 10px; }
.couple.conflict { border-color: var(--train); }
.couple > div { display: grid; grid-template-columns: 1fr 1fr; gap: 10px; }
.couple img { height: 96px; max-width: 100%; object-fit: contain; display: block;
  margin: 0 auto 6px; border-radius: 4px; }
.couple div div { min-width: 0; font-size: 12.5px; line-height: 1.35; }
.couple b, .couple span { display: block; overflow: hidden; text-overflow: ellipsis;
  white-space: nowrap; }
.couple b { font-weight: 600; }
.couple span { color: var(--muted); }
.marks { display: flex; gap: 6px; margin: 0 0 8px; font-size: 12px; min-height: 20px;
  align-items: center; }
.marks b { padding: 1px 8px; border-radius: 99px; color: #fff; }
.marks .harm { background: #c4320a; }
.marks .risk { background: var(--muted); color: var(--card); }
.samples { display: grid; gap: 4px 24px;
  grid-template-columns: repeat(auto-fill, minmax(min(440px, 100%), 1fr)); }
.samples > div > div { display: grid; grid-template-columns: repeat(8, 1fr); gap: 5px; }
.samples img { width: 100%; aspect-ratio: 1; object-fit: cover; border-radius: 6px; }
.samples .empty { grid-column: 1 / -1; color: var(--muted); }
.single { display: grid; gap: 10px 6px;
  grid-template-columns: repeat(auto-fill, minmax(64px, 1fr)); }
.single div { min-width: 0; }
.single img { width: 100%; aspect-ratio: 1; object-fit: cover; border-radius: 5px; display: block; }
.single span { display: block; font-size: 10.5px; color: var(--muted); overflow: hidden;
  text-overflow: ellipsis; white-space: nowrap; }
.samples img, .single img { box-shadow: 0 0 0 1px var(--grid); }
img.small { image-rendering: pixelated; }
"""
