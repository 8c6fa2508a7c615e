import math
import xml.etree.ElementTree

import matplotlib
import numpy as np
import pytest

from imagenet_fast.base.plotting import COLORS
from imagenet_fast.training.report import charts, formats
from imagenet_fast.training.report.charts import LEARNING_RATE, Chart, Curve

SVG = "{http://www.w3.org/2000/svg}"


def rows(rates):
    return [
        {"kind": "train", "epoch": float(epoch), "learning_rate": value}
        for epoch, value in enumerate(rates)
    ]


def test_smoothing_keeps_a_straight_line():
    line = np.linspace(3.0, 1.0, 41)
    np.testing.assert_allclose(charts._running_mean(line, 4), line)
    # An outlier is spread over itself and four neighbours on both sides.
    outlier = np.eye(41)[20]
    np.testing.assert_allclose(
        charts._running_mean(outlier, 4), np.where(abs(np.arange(41) - 20) <= 4, 1 / 9, 0)
    )


def test_curve_takes_numbers_of_its_kind():
    curve = Curve("", "train", "loss", "train")
    found, values = curve.points(
        [
            {"kind": "train", "epoch": 1, "loss": 3.0},
            {"kind": "validation", "epoch": 1, "loss": 4.0},
            {"kind": "train", "epoch": 2, "loss": math.nan},
            {"kind": "train", "epoch": 3},
            {"kind": "train", "epoch": 4, "loss": 2.0},
        ]
    )
    assert found.tolist() == [1, 4]
    assert values.tolist() == [3, 2]


@pytest.mark.parametrize(
    ("value", "expected"), [(0, True), (1.5, True), (math.inf, False), (None, False), ("1", False)]
)
def test_is_number(value, expected):
    assert formats.is_number(value) is expected


def test_nothing_to_draw():
    assert LEARNING_RATE.render([]) == ""
    assert LEARNING_RATE.render([{"kind": "validation", "epoch": 1, "learning_rate": 1.0}]) == ""


def test_figure_for_a_page_has_the_pages_colors():
    figure = Chart("Rate & more", LEARNING_RATE.curves).render(rows([0.1, 0.2]))
    assert "Rate &amp; more" in figure
    assert "stroke: var(--rate)" in figure
    assert COLORS["rate"][0] not in figure


def curve_of(picture):
    """Returns the points of the curve in an SVG picture, in its coordinates."""
    root = xml.etree.ElementTree.fromstring(picture)
    (path,) = (
        path for path in root.iter(f"{SVG}path") if COLORS["rate"][0] in path.get("style", "")
    )
    numbers = path.get("d").replace("M", " ").replace("L", " ").split()
    return np.array(numbers, np.float64).reshape(-1, 2)


def test_picture_is_self_contained():
    picture = LEARNING_RATE.picture(rows(np.linspace(0, 1, 50)), "a title")
    root = xml.etree.ElementTree.fromstring(picture)
    assert root.tag == f"{SVG}svg"
    assert root.get("width")
    assert "var(--" not in picture
    assert "#0000a" not in picture
    # No font that the reader may lack.
    assert not list(root.iter(f"{SVG}text"))


def test_picture_shows_the_curve():
    """A warmup over a tenth of the epochs, then a straight way down."""
    rates = np.interp(np.arange(101), [0, 10, 100], [0.0, 1.0, 0.0])
    x, y = curve_of(LEARNING_RATE.picture(rows(rates), "")).T
    # SVG counts downwards.
    epochs, heights = (x - x[0]) / (x[-1] - x[0]) * 100, (y[0] - y) / (y[0] - y.min())
    assert epochs[heights.argmax()] == pytest.approx(10, abs=0.01)
    np.testing.assert_allclose(heights, np.interp(epochs, [0, 10, 100], [0, 1, 0]), atol=1e-4)


@pytest.mark.parametrize(
    ("rates", "jumps"),
    [
        # A warmup, a decay after some steps, and one right before the end.
        ([0.1, 0.5, 1, 1, 1, 0.1, 0.1, 0.1, 0.01], [4, 7]),
        ([0.1, 0.1, 1.0, 1.0], [1]),  # a constant warmup
        ([0.1, 1.0, 1.0], []),
        (np.cos(np.linspace(0, np.pi / 2, 9)), []),
        (np.interp(np.arange(9), [0, 2, 8], [0, 1, 0]), []),
        ([0.1], []),
    ],
)
def test_jumps_are_drawn_as_steps(rates, jumps):
    figure = LEARNING_RATE._figure(LEARNING_RATE._drawn(rows(rates)))
    (line,) = figure.axes[0].lines
    epochs, values = line.get_data()
    points = [(epoch, rate) for epoch, rate in enumerate(rates)]
    steps = [(jump, rates[jump + 1]) for jump in jumps]
    assert sorted(zip(epochs, values)) == sorted([*points, *steps])
    assert list(epochs) == sorted(epochs)
    # Only what was measured is marked.
    assert [(epochs[i], values[i]) for i in line.get_markevery()] == points


def test_same_picture_whatever_the_users_settings():
    expected = LEARNING_RATE.picture(rows([0.1, 0.3, 0.2]), "title")
    with matplotlib.rc_context({"axes.linewidth": 5, "font.size": 30}):
        assert LEARNING_RATE.picture(rows([0.1, 0.3, 0.2]), "title") == expected
    assert LEARNING_RATE.picture(rows([0.1, 0.3, 0.2]), "other") != expected
