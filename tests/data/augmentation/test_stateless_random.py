import zlib

import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast.data.augmentation.stateless_random import permuted, splitmix64, uniform

_MASK = 2**64 - 1
_LARGEST_SEED = 2**32 - 1


def plain_mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


def plain_splitmix64(state):
    """Steele, Lea and Flood's generator, a step at a time."""
    while True:
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        yield plain_mix(state)


def uncorrelated(one, other):
    """Whether the correlation of two samples is within five standard errors of 0."""
    return abs(np.corrcoef(one, other)[0, 1]) < 5 / np.sqrt(len(one))


# --- SplitMix64 -----------------------------------------------------------------------------------

PUBLISHED = {
    0: (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F),
    1234567: (6457827717110365317, 3203168211198807973, 9817491932198370423),
}


@pytest.mark.parametrize("state", PUBLISHED)
def test_splitmix64_gives_the_published_numbers(state):
    numbers = splitmix64(tf.constant(state, tf.uint64), tf.constant([0, 1, 2], tf.uint64))
    assert tuple(map(int, numbers.numpy())) == PUBLISHED[state]
    assert tuple(number for _, number in zip(range(3), plain_splitmix64(state))) == PUBLISHED[state]


def test_splitmix64_begins_anywhere():
    # In the last state the next one is past 2**64.
    for state in (0, 5, 2**63, _MASK):
        plain = [number for _, number in zip(range(1000), plain_splitmix64(state))]
        indices = tf.constant([999, 0, 77], tf.uint64)
        numbers = splitmix64(tf.constant(state, tf.uint64), indices)
        assert list(map(int, numbers.numpy())) == [plain[999], plain[0], plain[77]]


# --- Uniform --------------------------------------------------------------------------------------


def test_numbers_are_those_of_plain_python():
    identities = [
        (0, 0, 0),
        (0, 1, 0),
        (3, 5, 1_281_166),
        (_LARGEST_SEED, 2**31, 2**40),
    ]
    drawn = uniform(tf.constant(identities, tf.int64), "crop", 3).numpy()
    for (seed, epoch, place), numbers in zip(identities, drawn):
        stream = plain_mix((plain_mix(seed) + epoch) & _MASK)
        stream = plain_mix((stream + zlib.crc32(b"crop")) & _MASK)
        state = stream + place * 2**16 * 0x9E3779B97F4A7C15
        plain = [number >> 40 for _, number in zip(range(3), plain_splitmix64(state))]
        np.testing.assert_array_equal(numbers, np.array(plain) / 2**24)


def test_numbers_lie_evenly_in_steps_from_zero_to_below_one(identities):
    numbers = uniform(identities(10_000), "crop", 10)
    assert numbers.shape == (10_000, 10) and numbers.dtype == tf.float32
    numbers = numbers.numpy().astype(np.float64).ravel()
    assert numbers.min() >= 0 and numbers.max() < 1
    steps = numbers * 2**24
    assert (steps == np.floor(steps)).all()
    assert abs(numbers.mean() - 1 / 2) < 5 * np.sqrt(1 / 12 / numbers.size)
    assert abs(numbers.var() - 1 / 12) < 5 * np.sqrt(1 / 180 / numbers.size)
    counts, _ = np.histogram(numbers, bins=64, range=(0, 1))
    expected = numbers.size / 64
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert 20 < chi_squared < 130  # 63 on average, with a standard deviation of 11
    bits = steps.astype(np.int64)[:, None] >> np.arange(24) & 1
    assert (abs(bits.mean(axis=0) - 1 / 2) < 5 / 2 / np.sqrt(numbers.size)).all()


def counting(column, count=20_000):
    """Identities of which one number counts, and the others stay the same."""
    identities = np.full((count, 3), 7)
    identities[:, column] = np.arange(count)
    return identities


@pytest.mark.parametrize("column", [0, 1, 2], ids=["seed", "epoch", "place"])
def test_neighbours_have_nothing_to_do_with_each_other(column):
    numbers = uniform(counting(column), "crop", 2).numpy()
    for apart in (1, 2, 16):
        assert uncorrelated(numbers[apart:, 0], numbers[:-apart, 0])
    # Each is as even as those of one image are.
    assert abs(numbers.mean() - 1 / 2) < 5 * np.sqrt(1 / 12 / numbers.size)
    assert abs(numbers.var() - 1 / 12) < 5 * np.sqrt(1 / 180 / numbers.size)


def test_seed_epoch_and_place_are_not_exchanged_for_one_another():
    numbers = [uniform(counting(column), "crop", 1).numpy()[:, 0] for column in range(3)]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert uncorrelated(numbers[one], numbers[other])
        assert uncorrelated(numbers[one][1:], numbers[other][:-1])


def test_purposes_have_nothing_to_do_with_each_other(identities):
    purposes = ("crop", "flip", "shift", "lighting", "color jitter")
    drawn = [uniform(identities(20_000), purpose, 1).numpy()[:, 0] for purpose in purposes]
    for index, one in enumerate(drawn):
        for other in drawn[:index]:
            assert uncorrelated(one, other)


def test_numbers_of_an_image_have_nothing_to_do_with_each_other(identities):
    numbers = uniform(identities(20_000), "crop", 6).numpy()
    correlation = np.corrcoef(numbers.T) - np.eye(6)
    assert np.abs(correlation).max() < 5 / np.sqrt(20_000)


def test_no_number_of_an_image_is_used_again_for_the_next_one(identities):
    numbers = uniform(identities(3), "crop", 2**16).numpy().reshape(-1)
    # Single numbers come again, of 2**24; three in a row do not.
    in_a_row = np.stack([numbers[:-2], numbers[1:-1], numbers[2:]], axis=1)
    assert len(np.unique(in_a_row, axis=0)) == len(in_a_row)


def test_numbers_depend_on_the_identity_alone(identities):
    all_of_them = identities(50)
    whole = uniform(all_of_them, "crop", 5).numpy()
    np.testing.assert_array_equal(uniform(all_of_them[::-7], "crop", 5), whole[::-7])
    np.testing.assert_array_equal(uniform(all_of_them, "crop", 2), whole[:, :2])
    tf.random.set_seed(1)
    for place in (0, 49):
        np.testing.assert_array_equal(
            uniform(all_of_them[place : place + 1], "crop", 5)[0], whole[place]
        )
    assert (uniform(all_of_them, "flip", 5).numpy() != whole).any(axis=1).all()
    for changes in ({"seed": 4}, {"epoch": 6}):
        other = uniform(identities(50, **changes), "crop", 5).numpy()
        assert (other != whole).any(axis=1).all()


@pytest.mark.parametrize("seed", [2**31, _LARGEST_SEED])
def test_large_seeds(identities, seed):
    numbers = uniform(identities(5000, seed=seed), "crop", 2).numpy()
    assert numbers.min() >= 0 and numbers.max() < 1
    assert abs(numbers.mean() - 1 / 2) < 5 * np.sqrt(1 / 12 / numbers.size)
    assert uncorrelated(*numbers.T)
    # Not what a seed of 32 bits with a sign would be.
    assert (uniform(identities(9, seed=seed - 2**32), "crop", 2) != numbers[:9]).numpy().any()


def test_numbers_are_the_same_inside_a_dataset(identities):
    whole = uniform(identities(24, seed=_LARGEST_SEED), "crop", 5).numpy()
    dataset = tf.data.Dataset.from_tensor_slices(identities(24, seed=_LARGEST_SEED)).batch(8)
    dataset = dataset.map(lambda batch: uniform(batch, "crop", 5), num_parallel_calls=2)
    assert dataset.element_spec.shape[1] == 5
    np.testing.assert_array_equal(np.concatenate(list(dataset.as_numpy_iterator())), whole)


# --- Permutations ---------------------------------------------------------------------------------


def permutation(count, seed=1, epoch=2, purpose="order"):
    return permuted(tf.range(count, dtype=tf.int64), count, seed, epoch, purpose).numpy()


@pytest.mark.parametrize("count", [1, 2, 3, 5, 64, 97, 1000])
def test_each_place_is_taken_once(count):
    for epoch in range(5):
        assert sorted(permutation(count, epoch=epoch)) == list(range(count))


@pytest.mark.long
def test_any_place_may_be_taken_anywhere():
    # As a graph, which takes a hundredth of the time.
    permute = tf.function(lambda epoch: permuted(tf.range(7), 7, 1, epoch, "order"))
    taken = np.stack([permute(tf.constant(epoch)) for epoch in range(700)])
    for place in range(7):
        counts = np.bincount(taken[:, place], minlength=7)
        # 99.99% of chi-squared with 6 degrees of freedom.
        assert ((counts - 100) ** 2 / 100).sum() < 27.9


def test_neighbours_are_parted_and_permutations_independent():
    orders = [
        np.arange(3000),
        permutation(3000),
        permutation(3000, seed=2),
        permutation(3000, epoch=3),
        permutation(3000, purpose="flip"),
    ]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert uncorrelated(one, other)
    assert uncorrelated(orders[1][1:], orders[1][:-1])


def test_a_part_is_taken_where_the_whole_takes_it():
    places = tf.constant([5, 999, 0], tf.int64)
    expected = permutation(1000)[[5, 999, 0]]
    np.testing.assert_array_equal(permuted(places, 1000, 1, 2, "order"), expected)
    compiled = tf.function(lambda x: permuted(x, 1000, 1, 2, "order"), jit_compile=True)
    np.testing.assert_array_equal(compiled(places), expected)
