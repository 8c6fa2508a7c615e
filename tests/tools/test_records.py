"""The page of published records, and its data."""

import dataclasses
import importlib.util
import pathlib
import re
import sys
import xml.etree.ElementTree

import pytest

from imagenet_fast.recipes import find_recipe, read_header

ROOT = pathlib.Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("records_tool", ROOT / "tools" / "records.py")
tool = importlib.util.module_from_spec(spec)
sys.modules["records_tool"] = tool
spec.loader.exec_module(tool)

RECORDS = tool.read()
ENTRIES = [entry for entries in RECORDS.values() for entry in entries]


def test_page_matches_the_data():
    text = (ROOT / "docs" / tool.PAGE).read_text()
    assert tool.filled_page(text, RECORDS) == text
    changed = [dataclasses.replace(entry, time=7.77) for entry in RECORDS["imagenet"]]
    assert "| 7.77 |" in tool.filled_page(text, {**RECORDS, "imagenet": changed})


def test_picture_has_all_labels():
    """In comments; its paths depend on the version of Matplotlib."""
    labels = [entry.text for entry in ENTRIES if entry.label]
    for text in ((tool.DATA.parent / tool.PICTURE).read_text(), tool.picture(RECORDS)):
        assert xml.etree.ElementTree.fromstring(text).tag.endswith("svg")
        found = re.findall(r"<!-- (.+: [\d,]+ .+) -->", text)
        assert sorted(found) == sorted(labels)


def test_the_data():
    for name, panel in tool.PANELS.items():
        assert {entry.line for entry in RECORDS[name]} == set(panel.lines)
    for entry in ENTRIES:
        assert re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])", entry.date)
        assert entry.source.startswith("https://")
        assert entry.label in ("", *tool._PLACES)
        assert entry.time > 0 < entry.accelerators
        assert 74 < entry.accuracy < 95


@pytest.mark.parametrize("entry", [e for e in ENTRIES if e.recipe], ids=lambda e: e.recipe)
def test_recipes_have_the_record_s_accuracy(entry):
    """In the header, as accuracy or error, rounded like there."""
    expected = read_header(find_recipe(entry.recipe)).expected
    numbers = [float(number) for number in re.findall(r"\d+\.\d+", expected)]
    values = [*numbers, *(100 - number for number in numbers)]
    assert any(abs(entry.accuracy - value) < 0.06 for value in values)


def test_numbers_of_the_cost_model_s_rows_are_not_repeated():
    """The first two have a row: in minutes, and in hours."""
    goyal = [entry for entry in RECORDS["imagenet"] if entry.by == "Goyal et al."]
    assert [(e.accelerators, e.chip, e.time, e.epochs) for e in goyal] == [
        (256, "P100", 60, 90),
        (8, "P100", 29 * 60, 90),
    ]
    assert all(0.8 < entry.predicted / entry.time < 1.25 for entry in goyal)
    row = {"by": "A", "row": "ResNet-50, 256 P100", "time": 60}
    with pytest.raises(ValueError, match="A: time of its row are repeated"):
        tool._entry(row, tool.PANELS["imagenet"], {r.name: r for r in tool.ROWS}, {row["row"]: 1})


def test_predictions_of_throughputs():
    """Ying et al.'s row is in images/s: 91 epochs at the predicted speed."""
    (own,) = (entry for entry in ENTRIES if entry.by == "Ying et al.")
    assert (own.accelerators, own.chip, own.time) == (1024, "TPU v3", 2.2)
    assert own.predicted == pytest.approx(91 * 1_281_167 / 1_077_000 / 60, rel=0.01)
