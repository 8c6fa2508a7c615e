"""Self-contained HTML pages, without scripts or links to other files."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterable, Sequence

from imagenet_fast.base.plotting import COLORS

# Invalid in HTML, even as numeric references: control characters, surrogates (Python's stand-ins
# for undecodable bytes of a file name) and noncharacters.
_NOT_IN_HTML = re.compile("[\0-\x08\x0b\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")


def document(title: str, body: Iterable[str], style: str = "") -> str:
    """Returns a complete page.

    Args:
      title: the title, as text.
      body: the page's elements, as HTML; empty ones are omitted.
      style: CSS added to that of all pages.
    """
    page = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_PALETTE}{_STYLE}{style}</style>\n"
        "</head>\n<body>\n<main>\n"
        + "\n".join(filter(None, body))
        + "\n</main>\n</body>\n</html>\n"
    )
    page = _NOT_IN_HTML.sub("\ufffd", page)
    # ASCII, so that the page does not depend on the encoding in which the caller writes it.
    return page.encode("ascii", "xmlcharrefreplace").decode("ascii")


def header(title: str, subtitle: str) -> str:
    """Returns the page's header; both arguments are text."""
    return f"<header><h1>{html.escape(title)}</h1><p>{html.escape(subtitle)}</p></header>"


def section(title: str, content: str) -> str:
    """Returns a card with a title (text) and content (HTML)."""
    return f"<section><h2>{html.escape(title)}</h2>{content}</section>"


def table(lines: Iterable[Sequence[str]]) -> str:
    """Returns a table. Each line is a row's header and its values, as text."""
    return (
        "<table>"
        + "".join(
            f'<tr><th scope="row">{html.escape(name)}</th>'
            + "".join(f"<td>{html.escape(value)}</td>" for value in values)
            + "</tr>"
            for name, *values in lines
        )
        + "</table>"
    )


def tile_row(tiles: Iterable[tuple[str, str, str]]) -> str:
    """Returns a row of tiles, each with a label, a value and a note, as text."""
    return (
        '<div class="tiles">'
        + "".join(
            f'<div class="tile"><span>{html.escape(label)}</span>'
            f"<strong>{html.escape(value)}</strong><span>{html.escape(note)}</span></div>"
            for label, value, note in tiles
        )
        + "</div>"
    )


def image(data: bytes, kind: str, small: bool = False) -> str:
    """Returns an ``img`` element with the image embedded.

    Args:
      data: the file's content.
      kind: the file's format, ``jpeg`` or ``png``.
      small: whether to keep pixels visible when the page enlarges the image.
    """
    style = ' class="small"' if small else ""
    text = base64.b64encode(data).decode("ascii")
    return f'<img{style} alt="" src="data:image/{kind};base64,{text}">'


def _variables(dark: bool) -> str:
    """Returns the charts' colours as CSS variables."""
    return " ".join(f"--{name}: {colors[dark]};" for name, colors in COLORS.items())


_PALETTE = f"""
:root {{ color-scheme: light dark; --page: #f6f7f9; --card: #fff; --ink: #1a2230;
  --compile: #f2b134; --other: #a9b4c4; {_variables(dark=False)} }}
@media (prefers-color-scheme: dark) {{ :root {{ --page: #12161d; --card: #1a202a; --ink: #e8ecf2;
  --compile: #e0b04e; --other: #5d6a7e; {_variables(dark=True)} }} }}
"""

_STYLE = """
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); line-height: 1.5;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
  font-variant-numeric: tabular-nums; -webkit-text-size-adjust: 100%; }
main { max-width: 1080px; margin: 0 auto; padding: 40px 20px 64px; }
h1 { font-size: 28px; line-height: 1.2; letter-spacing: -.02em; margin: 0 0 6px;
  overflow-wrap: anywhere; }
h2 { font-size: 15px; font-weight: 600; margin: 0 0 10px; }
header p { color: var(--muted); margin: 0 0 24px; }
.tiles, .cards { display: grid; gap: 16px; margin-bottom: 16px; }
.tiles { grid-template-columns: repeat(auto-fit, minmax(min(210px, 45%), 1fr)); }
.cards { grid-template-columns: repeat(auto-fit, minmax(min(400px, 100%), 1fr)); }
.tile, figure, section { background: var(--card); border-radius: 12px; padding: 18px 20px;
  margin: 0; box-shadow: 0 1px 2px rgb(16 24 40 / 8%); }
.tile span { display: block; color: var(--muted); font-size: 13px; }
.tile strong { display: block; font-size: 30px; line-height: 1.25; font-weight: 650;
  letter-spacing: -.02em; }
.tile:first-child strong { color: var(--validation); }
figure { padding-bottom: 8px; }
.cards:empty { display: none; }
main > section { margin-bottom: 16px; }
figcaption { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 16px;
  margin-bottom: 8px; }
figcaption h2 { margin: 0; }
.keys { display: flex; flex-wrap: wrap; gap: 0 14px; margin: 0; color: var(--muted);
  font-size: 12.5px; }
.keys span { display: inline-flex; align-items: center; gap: 6px; }
.keys i { width: 10px; height: 10px; border-radius: 3px; }
.keys i.solid, .keys i.dashed, .keys i.dotted { width: 18px; height: 0; border-radius: 0;
  border-top: 2.5px solid; }
.keys i.dashed { border-top-style: dashed; }
.keys i.dotted { border-top-style: dotted; }
svg { display: block; width: 100%; height: auto; overflow: visible; stroke-linejoin: round; }
svg text { font-family: inherit !important; }
.bar { display: flex; height: 14px; border-radius: 7px; overflow: hidden; margin-bottom: 8px; }
.bar + .keys { margin-bottom: 12px; }
table { width: 100%; border-collapse: collapse; }
th, td { text-align: left; vertical-align: top; padding: 6px 16px 6px 0; font-weight: 400;
  border-top: 1px solid var(--grid); }
table tr:first-child > * { border-top: 0; }
tbody th { color: var(--muted); width: 46%; }
td { overflow-wrap: anywhere; }
td + td { color: var(--muted); }
.numbers th, .numbers td { width: 20%; text-align: right; padding: 6px 0 6px 12px; }
.numbers td { color: inherit; }
.numbers thead th { color: var(--muted); }
.numbers tbody tr:first-child > * { border-top: 1px solid var(--grid); }
pre { margin: 0; padding: 12px 14px; border-radius: 8px; background: var(--page);
  font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; }
summary { cursor: pointer; color: var(--muted); padding: 6px 0; }
table + details { border-top: 1px solid var(--grid); }
.images { display: grid; gap: 14px 10px;
  grid-template-columns: repeat(auto-fill, minmax(104px, 1fr)); }
.images div { color: var(--muted); font-size: 12px; line-height: 1.35; overflow-wrap: anywhere; }
.images img { display: block; width: 100%; border-radius: 6px; margin-bottom: 4px; }
.images img.small, svg image { image-rendering: pixelated; }
.images b { font-weight: 600; color: var(--ink); }
@media (max-width: 640px) { main { padding: 24px 12px 40px; } h1 { font-size: 23px; }
  .tiles, .cards { gap: 10px; } .tile, figure, section { padding: 14px; }
  .tile strong { font-size: 23px; } svg text { font-size: 10.5px !important; } }
@media print { body { background: none; } figure, section, .tile { break-inside: avoid; } }
"""
