import keras
import pytest

from imagenet_fast.optimizers import LARS, SGD, Muon
from imagenet_fast.optimizers.slots import values_kept


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (SGD, 1),
        (LARS, 1),
        (Muon, 1),
        (keras.optimizers.Adam, 2),
        (keras.optimizers.RMSprop, 1),
        (lambda: keras.optimizers.RMSprop(momentum=0.9), 2),
        (lambda: keras.optimizers.RMSprop(momentum=0.9, centered=True), 3),
        (lambda: keras.optimizers.SGD(momentum=0.9), 1),
    ],
)
def test_slot_values_of_each_weight(make, expected):
    assert values_kept(make()) == expected


def test_factored_slots_are_small():
    assert 0 < values_kept(keras.optimizers.Adafactor()) < 1.1
