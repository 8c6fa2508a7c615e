import numpy as np

from imagenet_fast.data.sources.holdout import hold_out


def test_the_same_fraction_of_every_class():
    labels = np.repeat([0, 1, 2], [10, 100, 55])
    chosen = hold_out(labels, 0.2, seed=0)
    assert np.bincount(labels[chosen]).tolist() == [2, 20, 11]


def test_choice_depends_on_the_seed_only():
    labels = np.repeat([0, 1], 50)
    first = hold_out(labels, 0.3, seed=1)
    assert (hold_out(labels, 0.3, seed=1) == first).all()
    assert (hold_out(labels, 0.3, seed=2) != first).any()


def test_each_class_keeps_an_image():
    assert not hold_out(np.array([0, 1, 1]), 0.9, seed=0)[0]
    assert hold_out(np.array([0, 1, 1]), 0.9, seed=0).sum() == 1
