"""The HTML report on a prepared data set, ``data.html``: a single self-contained file."""

from __future__ import annotations

import functools
import html
import shlex
from collections.abc import Iterable, Sequence
from pathlib import PurePath

import numpy as np

from imagenet_fast.base.counted import counted
from imagenet_fast.base.files import write_file
from imagenet_fast.base.html_page import document, header, section, tile_row
from imagenet_fast.base.paths import to_path
from imagenet_fast.data.manifest import Manifest, read_manifest
from imagenet_fast.data.metadata import HASH_BITS, classes_in, read_metadata
from imagenet_fast.data.prepare.duplicates import FILE as DUPLICATES_FILE
from imagenet_fast.data.prepare.duplicates import (
    Duplicates,
    FoundDuplicates,
    Images,
    duplicates_as_json_lines,
    find_duplicates,
)
from imagenet_fast.data.prepare.page_figures import aspect_histogram, histogram, thumbnail
from imagenet_fast.data.prepare.similar_hashes import DISTANCE

FILE = "data.html"

# With more classes, the table of all is folded, and the largest and smallest ones are shown.
_FEW_CLASSES = 40
_ENDS = 10
# The most classes in the table of all.
_MAX_CLASSES = 2000
# Sample images: about this many in all, at most this many of a class, and of this many classes.
_SAMPLES = 240
_SAMPLES_OF_CLASS = 8
_MAX_SAMPLES = 1000
_PAIRS_SHOWN = 24
_SKIPPED_SHOWN = 200
# Longer lists of skipped images are folded.
_FEW_SKIPPED = 12
# Side in pixels and JPEG quality of thumbnails: if there are few, and if there are many.
_LARGE = 96, 78
_SMALL = 44, 66


def write_page(directory: str, progress: bool = True) -> FoundDuplicates:
    """Writes ``data.html`` and ``duplicates.jsonl`` beside the shards of a prepared data set.

    Args:
      directory: the data set, on a disk or in a bucket.
      progress: whether to show a progress bar if shards must be read because ``data.npz`` is
        missing or out of date.

    Returns:
      The duplicate images.

    Raises:
      OSError: the files cannot be written.
      UserError: there is no data set in ``directory``, or it is damaged.
    """
    path = to_path(directory)
    manifest = read_manifest(path)
    images = Images(manifest, read_metadata(manifest, path, progress), path)
    found = find_duplicates(images)
    write_file(path / DUPLICATES_FILE, duplicates_as_json_lines(found, images))
    write_file(path / FILE, render(images, found, str(directory)))
    return found


def render(images: Images, found: FoundDuplicates, directory: str) -> str:
    """Returns the page as HTML; the directory is for the commands that it shows.

    Raises:
      UserError: a shard is damaged.
    """
    manifest = images.manifest
    body = [
        header(manifest.name, _subtitle(manifest)),
        tile_row(_tiles(manifest, images.rows, found)),
        _warnings(manifest),
        section("Images by class", _classes(manifest)),
        '<div class="cards">',
        section("Sizes", _sizes(images.rows)),
        section("Formats", _formats(manifest, images.rows)),
        "</div>",
        _skipped(manifest),
        section("Equal files", _equal(found.equal, images)),
        section("Similar images", _similar(found.similar, images, directory)),
        section("Samples", _samples(images)),
    ]
    return document(f"Data: {manifest.name}", body, _STYLE)


def _subtitle(manifest: Manifest) -> str:
    parts = [counted(manifest.num_classes, "class", "classes")]
    if manifest.multi_label:
        labels = sum(sum(split.class_counts) for split in manifest.splits.values())
        images = sum(split.examples for split in manifest.splits.values())
        parts.append(f"several labels an image, {labels / max(images, 1):.2f} on average")
    kind, encoding = (manifest.source.get(key) for key in ("kind", "encoding"))
    if kind:
        parts.append(f"source {kind}")
    if encoding:
        parts.append(f"encoded as {encoding}")
    return " · ".join(parts)


def _tiles(
    manifest: Manifest, rows: np.ndarray, found: FoundDuplicates
) -> Iterable[tuple[str, str, str]]:
    for name, split in manifest.splits.items():
        size = sum(shard.bytes for shard in split.shards)
        shards = counted(len(split.shards), "shard")
        what = {"train": "Training", "validation": "Validation", "test": "Test"}.get(name, name)
        yield f"{what} images", f"{split.examples:,}", f"{shards}, {_bytes(size)}"
    converted = sum(manifest.converted.values())
    yield "Skipped", f"{len(manifest.skipped):,}", f"{converted:,} images converted"
    equal = found.equal
    if equal.two_classes.any() or equal.two_splits.any():
        note = (
            f"equal files; {equal.two_classes.sum():,} in two classes, "
            f"{equal.two_splits.sum():,} in two splits"
        )
    else:
        note = "equal files, all within a class and split" if len(equal) else "no equal files"
    yield "Duplicates", equal.count_text(), note


def _warnings(manifest: Manifest) -> str:
    if not manifest.warnings:
        return ""
    lines = "".join(f"<li>{html.escape(warning)}</li>" for warning in manifest.warnings)
    return section("Warnings", f'<ul class="warnings">{lines}</ul>')


def _classes(manifest: Manifest) -> str:
    counts = np.array([split.class_counts for split in manifest.splits.values()]).T
    table = functools.partial(_class_table, manifest.labels, counts, list(manifest.splits))
    all_classes = range(manifest.num_classes)
    if manifest.num_classes <= _FEW_CLASSES:
        return table(all_classes)
    train = counts[:, 0]
    order = np.argsort(-train, kind="stable")
    least, median, most = train.min(), np.median(train), train.max()
    ratio = f" (ratio {most / least:,.1f})" if least else ""
    parts = [
        histogram(
            train,
            "training images of a class",
            "number of classes",
            "classes by their number of training images",
        ),
        _note(
            f"Classes have {least:,} to {most:,} training images{ratio}; the median is "
            f"{median:,.0f}."
        ),
        '<div class="cards">',
        f"<div><h3>Largest</h3>{table(order[:_ENDS])}</div>",
        f"<div><h3>Smallest</h3>{table(order[::-1][:_ENDS])}</div>",
        "</div>",
        f"<details><summary>All {manifest.num_classes:,} classes</summary>"
        f"{table(all_classes)}</details>",
    ]
    return "".join(parts)


def _class_table(
    labels: Sequence[str],
    counts: np.ndarray,
    splits: Sequence[str],
    chosen: Sequence[int] | np.ndarray,
) -> str:
    """Returns a table of classes: a bar for the training images, and the counts of all splits."""
    largest = max(int(counts[:, 0].max()), 1)
    head = "".join(f"<th>{html.escape(name)}</th>" for name in splits)
    shown = chosen[:_MAX_CLASSES]
    lines = [
        _bar_row(labels[index], 100 * counts[index, 0] / largest, counts[index]) for index in shown
    ]
    more = len(chosen) - len(shown)
    return (
        f'<table class="classes"><thead><tr><th>Class</th><th></th>{head}</tr></thead><tbody>'
        f"{''.join(lines)}</tbody></table>"
        + (_note(f"{more:,} more are in manifest.json.") if more else "")
    )


def _bar_row(name: str, percent: float, numbers: Iterable[int]) -> str:
    """Returns a row of a table: a name, a bar and numbers, of which 0 is marked."""
    cells = "".join(
        f"<td>{number:,}</td>" if number else '<td class="empty">0</td>' for number in numbers
    )
    return (
        f'<tr><th scope="row">{html.escape(name)}</th>'
        f'<td><i style="width:{percent:.1f}%"></i></td>{cells}</tr>'
    )


def _sizes(rows: np.ndarray) -> str:
    height, width = (rows[name].astype(np.int64) for name in ("height", "width"))
    shorter = np.minimum(height, width)
    aspect = width / height
    if len(np.unique(height * 2**32 + width)) == 1:
        plots = _note(f"All images have {width[0]} x {height[0]} pixels.")
    else:
        plots = histogram(
            shorter, "shorter side in pixels", "images", "images by their shorter side"
        ) + aspect_histogram(aspect)
    lines = [
        (name, *(show(float(value)) for value in (own.min(), np.median(own), own.max())))
        for name, own, show in (
            ("Width in pixels", width, "{:,.0f}".format),
            ("Height in pixels", height, "{:,.0f}".format),
            ("Shorter side in pixels", shorter, "{:,.0f}".format),
            ("Width / height", aspect, "{:.3g}".format),
            ("File size", rows["bytes"], _bytes),
        )
    ]
    return plots + _table(("", "minimum", "median", "maximum"), lines)


def _formats(manifest: Manifest, rows: np.ndarray) -> str:
    total = len(rows)
    converted = sum(manifest.converted.values())
    originals = [("JPEG, unchanged", total - converted), *manifest.converted.items()]
    originals = sorted((one for one in originals if one[1]), key=lambda one: -one[1])
    png = int(rows["png"].sum())
    grey = int((rows["channels"] == 1).sum())
    kinds = {"JPEG": total - png, "PNG": png, "RGB": total - grey, "greyscale": grey}
    stored = [(name, number) for name, number in kinds.items() if number]
    note = ""
    if manifest.converted:
        encoding = html.escape(manifest.source.get("encoding", "jpeg").upper())
        note = _note(f"Converted images are stored as {encoding}.")
    return f"<h3>Source</h3>{_bars(originals, total)}<h3>Shards</h3>{_bars(stored, total)}{note}"


def _bars(lines: Iterable[tuple[str, int]], total: int) -> str:
    rows = (_bar_row(name, 100 * number / max(total, 1), [number]) for name, number in lines)
    return f'<table class="classes kinds"><tbody>{"".join(rows)}</tbody></table>'


def _skipped(manifest: Manifest) -> str:
    if not manifest.skipped:
        return ""
    lines = [(one.file, one.split, one.reason) for one in manifest.skipped[:_SKIPPED_SHOWN]]
    more = len(manifest.skipped) - len(lines)
    table = _table(("file", "split", "reason"), lines, "texts")
    if more:
        table += _note(f"{more:,} more are in manifest.json.")
    if len(lines) > _FEW_SKIPPED:
        number = counted(len(manifest.skipped), "skipped image")
        table = f"<details><summary>{number}</summary>{table}</details>"
    return section("Skipped images", table)


def _equal(equal: Duplicates, images: Images) -> str:
    if not len(equal):
        return _note("No two files are equal.")
    note = (
        "Images that are equal byte for byte, each beside the first one. Converted images are "
        "equal if their pixels are."
    )
    return _note(note) + _matrix(equal, images) + _pairs(equal, images)


def _similar(similar: Duplicates | None, images: Images, directory: str) -> str:
    if similar is None:
        command = f"imagenet-fast prepare --data_page --data_dir={shlex.quote(directory)}"
        note = _note("Not searched for, because ImageHash is not installed. To add them:")
        return f"{note}<pre>pip install ImageHash\n{html.escape(command)}</pre>"
    note = _note(
        f"Images whose perceptual hashes (pHash) differ in at most {DISTANCE} of {HASH_BITS} bits, "
        "as most re-encoded, resized or brightened copies do; unrelated photographs differ in "
        f"about {HASH_BITS // 2}. Cropped, flipped and rotated copies are not found."
    )
    if not len(similar):
        return note + "<p>No two images are similar.</p>"
    if not similar.pairs.complete:
        note += _note("The search ended early, because too many images have similar hashes.")
    return note + _matrix(similar, images) + _pairs(similar, images)


def _matrix(duplicates: Duplicates, images: Images) -> str:
    """Returns a table of the number of pairs within and across splits."""
    names = list(images.manifest.splits)
    pairs = duplicates.pairs
    first, second = (images.splits[index] for index in (pairs.first, pairs.second))
    lines = []
    for one in range(len(names)):
        for other in range(one, len(names)):
            chosen = (np.minimum(first, second) == one) & (np.maximum(first, second) == other)
            where = names[one] if one == other else f"{names[one]} and {names[other]}"
            if chosen.any() or one != other:
                two_classes = duplicates.two_classes[chosen].sum()
                lines.append((where, f"{chosen.sum():,}", f"{two_classes:,}"))
    lines.append(("total", duplicates.count_text(), f"{duplicates.two_classes.sum():,}"))
    return _table(("", "pairs", "in two classes"), lines)


def _pairs(duplicates: Duplicates, images: Images) -> str:
    shown = min(len(duplicates), _PAIRS_SHOWN)
    pairs = duplicates.pairs
    cards = [
        _pair(
            [images.read(int(index)) for index in (pairs.first[pair], pairs.second[pair])],
            int(pairs.distance[pair]),
            bool(duplicates.two_classes[pair]),
            bool(duplicates.two_splits[pair]),
        )
        for pair in range(shown)
    ]
    more = ""
    if len(duplicates) > shown:
        more = _note(
            f"{shown} of {duplicates.count_text()}, those in two classes first, then those in two "
            f"splits; more are in {DUPLICATES_FILE}."
        )
    return f'<div class="couples">{"".join(cards)}</div>{more}'


def _pair(both: Sequence, distance: int, two_classes: bool, two_splits: bool) -> str:
    marks = '<b class="harm">two classes</b>' * two_classes
    marks += '<b class="risk">two splits</b>' * two_splits
    bits = f"<span>{counted(distance, 'bit')} apart</span>" if distance else ""
    sides = "".join(
        f"<div>{thumbnail(image.data, *_LARGE, crop=False)}<b>{html.escape(image.label)}</b>"
        f'<span title="{html.escape(image.file)}">{html.escape(PurePath(image.file).name)}</span>'
        f"<span>{html.escape(image.split)}</span></div>"
        for image in both
    )
    top = f'<p class="marks">{marks}{bits}</p>' if marks or bits else ""
    return f'<div class="couple{" conflict" * two_classes}">{top}<div>{sides}</div></div>'


def _samples(images: Images) -> str:
    places, labels = classes_in(images.rows)
    classes = images.manifest.num_classes
    number = max(1, min(_SAMPLES_OF_CLASS, _SAMPLES // classes))
    shown = range(min(classes, _MAX_SAMPLES))
    # The first images in the order of the shards: the training set comes first, and is shuffled.
    order = np.argsort(labels, kind="stable")
    starts = np.searchsorted(labels[order], np.arange(classes + 1))
    order = places[order]
    size = _LARGE if len(shown) * number <= _SAMPLES else _SMALL
    blocks = []
    for label in shown:
        indices = order[starts[label] : starts[label + 1]][:number]
        pictures = "".join(
            thumbnail(images.read(int(index)).data, *size, crop=True) for index in indices
        )
        name = html.escape(images.manifest.labels[label])
        if number == 1:
            blocks.append(f'<div title="{name}">{pictures}<span>{name}</span></div>')
        else:
            pictures = pictures or '<span class="empty">no image</span>'
            blocks.append(f"<div><h3>{name}</h3><div>{pictures}</div></div>")
    more = classes - len(shown)
    note = _note(f"The first {len(shown):,} of {classes:,} classes.") if more else ""
    return f'{note}<div class="{"single" if number == 1 else "samples"}">{"".join(blocks)}</div>'


def _note(text: str) -> str:
    """Returns a paragraph; ``text`` is HTML."""
    return f'<p class="note">{text}</p>'


def _table(head: Sequence[str], lines: Iterable[Sequence[str]], kind: str = "counts") -> str:
    """Returns a table with a header, of the CSS class ``kind``: ``counts`` or ``texts``."""
    heads = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    rows = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th>'
        + "".join(f"<td>{html.escape(value)}</td>" for value in values)
        + "</tr>"
        for name, *values in lines
    )
    return f'<table class="{kind}"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'


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
