"""The comparison of crops, with a fake torchvision."""

import importlib.util
import json
import pathlib
import sys

import numpy as np
import pytest
import scipy.stats

from imagenet_fast.base.errors import UserError

ROOT = pathlib.Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("tool", ROOT / "tools" / "crop_distribution.py")
tool = importlib.util.module_from_spec(spec)
sys.modules["tool"] = tool
spec.loader.exec_module(tool)

COUNT = 2000


def uniform_crops(count):
    """torchvision's algorithm, one crop after another: Python's random numbers, all of float64."""
    generator = np.random.default_rng(1)

    def one(height, width):
        for _ in range(10):
            area = height * width * generator.uniform(0.08, 1)
            aspect = np.exp(generator.uniform(np.log(3 / 4), np.log(4 / 3)))
            w, h = round((area * aspect) ** 0.5), round((area / aspect) ** 0.5)
            if 0 < w <= width and 0 < h <= height:
                return h, w
        if width / height < 3 / 4:
            return round(width / (3 / 4)), width
        if width / height > 4 / 3:
            return height, round(height * 4 / 3)
        return height, width

    return np.array([[one(*size) for _ in range(count)] for size in tool.SIZES])


@pytest.fixture(scope="module")
def found():
    return {
        "random_resized": tool.draw("random_resized", COUNT),
        "inception": tool.draw("inception", COUNT),
        "torchvision": uniform_crops(COUNT),
    }


def test_distance_is_that_of_scipy():
    generator = np.random.default_rng(0)
    for one, other in (
        (generator.normal(size=50), generator.normal(size=70)),
        (generator.integers(5, size=50), generator.integers(7, size=30)),
    ):
        expected = scipy.stats.ks_2samp(one, other).statistic
        assert tool.distance(one, other) == pytest.approx(expected)


def test_rounded_sides_are_not_outside():
    """Sides of 100.4 and 75.4, with a ratio of 1.331, may be rounded to 100 by 75."""
    crops = np.array([[[75, 100], [75, 101], [75, 102], [100, 75], [102, 75], [3, 4]]])
    assert tool.outside(crops) == pytest.approx(2 / 6)


def test_random_resized_is_torchvisions_and_inception_is_not(found):
    rows = tool.summary(found)
    assert len(rows) == 9
    for row in rows:
        distances = row["area_distance"], row["aspect_distance"]
        if row["crop"] == "torchvision":
            assert distances == (0, 0)
        elif row["crop"] == "random_resized":
            assert max(distances) < row["critical_distance"]
            assert row["outside"] == 0
        else:
            assert row["area_distance"] > 2 * row["critical_distance"]


def test_table_and_picture(found):
    lines = tool.table(tool.summary(found)).splitlines()
    assert lines[2].startswith("| 375x500 | random_resized | 0.0")
    assert "differ by more than 0.0515" in lines[-1]
    assert "torchvision" in tool.picture(found)


def test_the_page_has_the_measured_table():
    rows = json.loads((ROOT / "benchmarks" / "crops" / "crops.json").read_text())["sizes"]
    page = (ROOT / "docs" / "input_pipeline.md").read_text()
    assert [line for line in tool.table(rows).splitlines() if line not in page] == []


def test_an_environment_without_torchvision(tmp_path):
    with pytest.raises(UserError, match="cannot run"):
        tool.draw_torchvision(tmp_path, 1)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to("/bin/false")
    with pytest.raises(UserError, match=r"torchvision of .* does not work"):
        tool.draw_torchvision(tmp_path, 1)
