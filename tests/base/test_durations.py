import math

import pytest

from imagenet_fast.base.durations import Duration, milliseconds
from imagenet_fast.base.errors import UserError


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        ("90 epochs", 90, "epochs"),
        ("90epochs", 90, "epochs"),
        ("  90   epochs ", 90, "epochs"),
        ("1 epoch", 1, "epochs"),
        ("0.5 epochs", 0.5, "epochs"),
        (".5epochs", 0.5, "epochs"),
        ("5000steps", 5000, "steps"),
        ("1 step", 1, "steps"),
        ("1e6 examples", 1e6, "examples"),
        ("1.5E+2examples", 150, "examples"),
        ("1e-3 epochs", 0.001, "epochs"),
        ("0 steps", 0, "steps"),
    ],
)
def test_parse(text, amount, unit):
    duration = Duration.parse(text)
    assert (duration.amount, duration.unit) == (amount, unit)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "90",
        "epochs",
        "-1 epochs",
        "nan epochs",
        "1.2.3 epochs",
        ". epochs",
        "1e400 epochs",
        "90 hours",
        "90 Epochs",
        "90 epochss",
        "90 epochs 3 steps",
        "ninety epochs",
    ],
)
def test_parse_rejects(text):
    with pytest.raises(UserError, match="is not a duration"):
        Duration.parse(text)


@pytest.mark.parametrize("amount", [-1, -0.5, math.nan, math.inf])
def test_invalid_amount(amount):
    with pytest.raises(UserError, match="is not a duration: it must be finite and not negative"):
        Duration(amount, "steps")


@pytest.mark.parametrize("unit", ["epoch", "hours", ""])
def test_unknown_unit(unit):
    with pytest.raises(UserError, match="steps, epochs, examples"):
        Duration(1, unit)


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("90 epochs", 14040),
        ("2.5 epochs", 390),
        ("7 steps", 7),
        ("8192 examples", 1),
        ("12287 examples", 1),
        ("12289 examples", 2),
        ("0 epochs", 0),
        ("0.001 epochs", 0),
    ],
)
def test_steps(text, steps):
    got = Duration.parse(text).steps(steps_per_epoch=156, batch_size=8192)
    assert got == steps
    assert type(got) is int


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("17936338 examples", 14 * 1_281_167 / 32768),
        ("2.5 epochs", 97.5),
        ("7.25 steps", 7.25),
        ("0 examples", 0),
    ],
)
def test_exact_steps(text, steps):
    assert Duration.parse(text).exact_steps(steps_per_epoch=39, batch_size=32768) == steps


@pytest.mark.parametrize(
    ("amount", "unit", "text"),
    [
        (90, "epochs", "90 epochs"),
        (90.0, "epochs", "90 epochs"),
        (1, "epochs", "1 epoch"),
        (1, "steps", "1 step"),
        (0.5, "epochs", "0.5 epochs"),
        (1_281_167, "examples", "1281167 examples"),
        (5e6, "steps", "5000000 steps"),
    ],
)
def test_text(amount, unit, text):
    assert str(Duration(amount, unit)) == text


@pytest.mark.parametrize("amount", [0, 1, 1 / 3, 1e-5, 1e-300, 1_281_167, 115_305_030, 2**53, 1e22])
def test_text_round_trip(amount):
    duration = Duration(amount, "examples")
    assert Duration.parse(str(duration)) == duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (1.234e-6, "0.00123 ms"),
        (0.01234, "12.3 ms"),
        (0.9, "900 ms"),
        (2.48, "2,480 ms"),
    ],
)
def test_milliseconds(seconds, text):
    assert milliseconds(seconds) == text
