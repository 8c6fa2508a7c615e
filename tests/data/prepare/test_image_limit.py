from fractions import Fraction

import pytest

from imagenet_fast.base.errors import UserError
from imagenet_fast.data.prepare.image_limit import ImageLimit


@pytest.mark.parametrize(
    ("text", "exact"),
    [
        ("0.01", Fraction(1, 100)),
        ("1%", Fraction(1, 100)),
        ("29 %", Fraction(29, 100)),
        ("0.29", Fraction(29, 100)),
        (".5%", Fraction(1, 200)),
        ("0.5%", Fraction(1, 200)),
        ("100%", Fraction(1)),
        ("1.0", Fraction(1)),
        ("0.", Fraction(0)),
        ("1e-3", Fraction(1, 1000)),
        ("2.5e-4", Fraction(1, 4000)),
    ],
)
def test_a_fraction_is_one_of_all_images(text, exact):
    for total in (1, 99, 100, 1200, 1_281_167):
        limit = ImageLimit.parse(text, "max_bad_images").images(total)
        assert limit == int(exact * total)


@pytest.mark.parametrize("text", ["0", "1", "100", "1281167"])
def test_a_whole_number_is_a_count(text):
    assert ImageLimit.parse(text, "max_bad_images").images(10) == int(text)


@pytest.mark.parametrize("text", ["", "-1", "-0.1", "1.5", "101%", "nan", "inf", "ten", "1/3", "%"])
def test_what_is_neither_is_an_error(text):
    with pytest.raises(UserError, match=r"max_bad_images is '.*', but must be a number of images"):
        ImageLimit.parse(text, "max_bad_images")
