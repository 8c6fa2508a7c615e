import numpy as np
import pytest

from imagenet_fast.data.prepare.sources.holdout import hold_out


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


def test_groups_stay_together():
    groups = np.repeat([f"patient {number}" for number in range(40)], 12)
    labels = np.repeat(np.arange(40) % 2, 12)
    chosen = hold_out(labels, 0.2, 0, groups)
    assert len(set(groups[chosen])) == 8
    assert not set(groups[chosen]) & set(groups[~chosen])
    assert np.bincount(labels[chosen]).tolist() == [48, 48]
    assert (hold_out(labels, 0.2, 0, groups) == chosen).all()
    assert (hold_out(labels, 0.2, 1, groups) != chosen).any()


def test_groups_of_several_classes_and_sizes():
    random = np.random.RandomState(3)
    labels, groups = random.randint(3, size=2000), random.randint(100, size=2000) ** 2 // 100
    chosen = hold_out(labels, 0.25, 0, groups)
    assert not set(groups[chosen]) & set(groups[~chosen])
    fractions = np.bincount(labels[chosen]) / np.bincount(labels)
    assert fractions == pytest.approx([0.25] * 3, abs=0.05)


def test_no_class_loses_its_last_group():
    labels, groups = np.array([0, 0, 1, 1, 1, 1]), np.array(list("aabbcd"))
    for seed in range(20):
        chosen = hold_out(labels, 0.9, seed, groups)
        assert set(labels[~chosen]) == {0, 1}
        assert not set(groups[chosen]) & set(groups[~chosen])


def test_a_group_that_is_too_large_stays():
    assert not hold_out(np.zeros(100, int), 0.1, 0, np.repeat(["a", "b"], 50)).any()


def test_images_of_several_classes():
    random = np.random.RandomState(0)
    labels = [tuple(np.flatnonzero(random.rand(5) < 0.3).tolist()) for _ in range(2000)]
    chosen = hold_out(labels, 0.2, seed=0)
    hot = np.array([[own in label for own in range(5)] for label in labels])
    assert hot[chosen].sum(0) / hot.sum(0) == pytest.approx(np.full(5, 0.2), abs=0.02)
    unlabelled = ~hot.any(1)
    assert chosen[unlabelled].mean() == pytest.approx(0.2, abs=0.02)
    assert (hold_out(labels, 0.2, seed=0) == chosen).all()
    groups = np.arange(2000) // 4
    grouped = hold_out(labels, 0.2, 0, groups).reshape(500, 4)
    assert (grouped.all(1) == grouped.any(1)).all() and grouped.mean() == pytest.approx(
        0.2, abs=0.03
    )
