"""The search for the largest size that fits, with few compilations."""

import pytest

from imagenet_fast.lab.xla_compile.search import batch_sizes, divisors, largest_that_fits


class Memory:
    """A fake compiler's bytes by size; counts the compilations."""

    def __init__(self, of):
        self.of, self.asked = of, []

    def __call__(self, size):
        self.asked.append(size)
        return self.of(size)


def search(candidates, limit, of, first):
    memory = Memory(of)
    return largest_that_fits(candidates, limit, memory, {first: of(first)}), memory.asked


def linear(size):
    return 300 + 45 * size


def bent(size):
    # As XLA's memory of ResNet-50 on an H100: beyond some size it computes activations twice.
    return linear(size) if size < 1500 else linear(1500) + 12 * (size - 1500)


@pytest.mark.parametrize("of", [linear, bent, lambda size: size**2 // 10])
@pytest.mark.parametrize("limit", [2_000, 20_000, 65_000, 70_000, 76_000])
def test_largest_of_many(of, limit):
    candidates = batch_sizes(65_536)
    found, asked = search(candidates, limit, of, 256)
    fitting = [size for size in candidates if of(size) <= limit]
    assert found == fitting[-1]
    assert len(asked) == len(set(asked)) <= 9


def test_almost_linear_takes_three_tries():
    found, asked = search(batch_sizes(65_536), 76_000, linear, 256)
    assert found == 1664
    assert len(asked) <= 3


def test_both_neighbours_are_known():
    candidates = batch_sizes(65_536)
    found, asked = search(candidates, 76_000, linear, 256)
    assert {found, candidates[candidates.index(found) + 1]} <= set(asked)


def test_memory_that_jumps():
    # As XLA's of ResNet-50 on an H100, in MiB: it grows, falls, grows and jumps.
    def memory(size):
        if size < 1650:
            return 46 * size
        return 30 * size if size < 2350 else 36 * size

    candidates = batch_sizes(65_536)
    found, asked = search(candidates, 76_000, memory, 256)
    assert found == max(size for size in candidates if size < 2350)
    assert len(asked) <= 9


def test_accumulation_steps_are_divisors_and_not_powers_of_two():
    # 192 images a GPU, of which at most 70 fit at once: three parts of 64, where doubling says 4.
    found, asked = search(divisors(192), 300 + 45 * 70, linear, 192)
    assert 192 // found == 3
    assert sorted(asked) == [64, 96]


def test_sizes_that_cannot_be_used_do_not_fit():
    found, _ = search([1, 2, 4, 8, 16], 500, lambda size: None if size == 4 else 100 * size, 16)
    assert found == 2


def test_nothing_fits():
    found, asked = search([1, 2, 4, 8], 50, linear, 8)
    assert found == 0
    assert 1 in asked


def test_everything_fits():
    found, asked = search([8, 16, 24], 10**6, linear, 8)
    assert found == 24
    assert asked == [24]


def test_memory_that_does_not_grow():
    found, _ = search([8, 16, 24, 32], 50, lambda size: 100, 16)
    assert found == 0


def test_divisors():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


def test_batch_sizes():
    sizes = batch_sizes(4096)
    assert sizes[:3] == [8, 16, 24]
    assert all(size % 8 == 0 for size in sizes)
    steps = [after - size for size, after in zip(sizes, sizes[1:])]
    assert all(step <= max(8, size / 16) for size, step in zip(sizes, steps))
    assert {256, 512, 1024, 2048, 4096} <= set(sizes)
