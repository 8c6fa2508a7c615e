import html
from html.parser import HTMLParser

import pytest

from imagenet_fast.base.html_page import document, section


def text_of(page):
    found = []
    parser = HTMLParser()
    parser.handle_data = found.append
    parser.feed(page)
    return "".join(found)


@pytest.mark.parametrize("forbidden", ["\0", "\x01", "\x1f", "\x85", "\udce9", "\ufdd0", "\ufffe"])
def test_invalid_characters_are_replaced(forbidden):
    page = document("t", [section(f"caf{forbidden}.png", "")])
    assert "caf\ufffd.png" in text_of(page)
    assert forbidden not in html.unescape(page)
    assert f"&#{ord(forbidden)};" not in page


def test_other_text_is_unchanged():
    text = "tab\tline\n\u202ertl \u65e5\u672c \U0001f600 <script>\"'&amp;"
    assert text in text_of(document("t", [section(text, "")]))
