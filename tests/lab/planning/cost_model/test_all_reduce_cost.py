"""Steps, bytes and seconds of all-reduces, against published counts."""

import dataclasses

import pytest

from imagenet_fast import UserError
from imagenet_fast.lab.planning.cost_model.all_reduce import Network, seconds, stages, wire_fraction

ALGORITHMS = ("flat", "hierarchical", "torus_2d")


def steps(algorithm, replicas, group=1):
    return sum(stage.steps for stage in stages(algorithm, replicas, group))


def test_published_steps():
    # Jia et al. 2018: 1024 GPUs flat, and in groups of 16.
    assert steps("flat", 1024) == 2046
    # Goyal et al. 2017: 32 servers.
    assert steps("flat", 32) == 62
    assert steps("halving_doubling", 32) == 10


def test_torus_of_ying_et_al():
    """O(n) steps on an n x n torus, not O(n^2)."""
    found = [steps("torus_2d", n * n, n) for n in (4, 8, 16, 32)]
    assert found == [1 + 2 * (n - 1) + n - 1 for n in (4, 8, 16, 32)]
    assert steps("flat", 32 * 32) > 20 * found[-1]


@pytest.mark.parametrize("replicas", [2, 8, 1024])
def test_bytes_of_a_ring(replicas):
    assert wire_fraction("flat", replicas) == 2 * (replicas - 1) / replicas


@pytest.mark.parametrize(("replicas", "group"), [(8, 4), (8, 2), (64, 8), (16, 1), (16, 16)])
def test_the_torus_sends_no_more_than_a_ring(replicas, group):
    assert wire_fraction("torus_2d", replicas, group) == pytest.approx(
        wire_fraction("flat", replicas)
    )
    assert wire_fraction("hierarchical", replicas, group) >= wire_fraction("flat", replicas) - 1e-12


def test_steps_between_groups():
    """A part of a ring goes around twice, and leaves each of the two groups twice."""
    (ring,) = stages("flat", 8, 4)
    assert (ring.steps_within, ring.steps_between) == (10, 4)
    for algorithm in ("hierarchical", "torus_2d"):
        assert sum(stage.steps_between for stage in stages(algorithm, 8, 4)) == 2
    assert sum(stage.steps_between for stage in stages("flat", 8, 8)) == 0


@pytest.mark.parametrize(("replicas", "group"), [(8, 4), (8, 2), (64, 8), (16, 1), (16, 16)])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_exchange_sends_as_much_as_a_ring_in_fewer_steps(algorithm, replicas, group):
    """One step to exchange the parts, and a ring to gather the sums."""
    rings = stages(algorithm, replicas, group)
    exchanged = stages(algorithm, replicas, group, exchange=True)
    for quantity in ("fraction", "traffic"):
        sent, expected = (
            sum(getattr(stage, quantity) for stage in each) for each in (exchanged, rings)
        )
        assert sent == pytest.approx(expected)
    members = replicas if algorithm == "flat" else replicas // group
    saved = max(0, 2 * (members - 1) - (1 + members - 1))
    assert sum(own.steps for own in rings) - sum(own.steps for own in exchanged) == saved


def test_stages_of_an_exchange():
    """Reduce-scatter and all-gather of one group, but over two groups."""
    exchange, gather = stages("flat", 8, 4, exchange=True)
    assert (exchange.steps_within, exchange.steps_between) == (0, 1)
    assert (gather.steps_within, gather.steps_between) == (5, 2)
    names = [own.name for own in stages("hierarchical", 8, 4, exchange=True)]
    assert names[2:4] == ["exchange of the masters", "all-gather of the masters"]
    scatter, gather = stages("torus_2d", 8, 8)[0], stages("torus_2d", 8, 8)[2]
    assert [dataclasses.replace(own, name="") for own in stages("flat", 8, 8, exchange=True)] == [
        dataclasses.replace(own, name="") for own in (scatter, gather)
    ]


def test_replicas_of_a_group_share_its_network():
    """The bytes that leave a group of 4 of 8 replicas, as a fraction of the tensor."""
    shared = Network(0.0, 0.0, 1e12, 1e12, bandwidth_of_group=25e6)
    for algorithm, exchange, leaving in (
        ("flat", False, 2 * 7 / 8),
        ("flat", True, 4 * 4 / 8 + 7 / 8),  # four send half of their tensors; then a ring
        ("torus_2d", False, 1.0),
        ("torus_2d", True, 1.0),
        ("hierarchical", True, 1.0),
        ("halving_doubling", False, 1.0),
    ):
        found = seconds(algorithm, 8, 25e6, shared, 4, exchange=exchange)
        assert found == pytest.approx(leaving, rel=1e-3)


def test_small_tensors_cost_latency():
    network = Network(0.0, 0.04, 1e9, 1e9)
    assert seconds("flat", 8, 0, network, 4) == pytest.approx(0.16)
    assert seconds("torus_2d", 8, 0, network, 4) == pytest.approx(0.08)
    slow = Network(0.001, 0.04, 1e9, 1e9, start=0.01)
    assert seconds("torus_2d", 8, 0, slow, 4) == pytest.approx(0.01 * 3 + 0.08 + 0.004)


def test_large_tensors_cost_bandwidth():
    network = Network(0.0, 0.0, bandwidth_within=25e6, bandwidth_between=25e6)
    assert seconds("flat", 8, 25e6, network, 4) == pytest.approx(1.75)
    assert seconds("torus_2d", 8, 25e6, network, 4) == pytest.approx(1.75)
    # All of it goes through the masters: 3/4 + 3/4 + 1 + 3/4 + 3/4.
    assert seconds("hierarchical", 8, 25e6, network, 4) == pytest.approx(4.0)


def test_links_within_a_group_may_be_faster():
    network = Network(0.0, 0.0, bandwidth_within=250e6, bandwidth_between=25e6)
    # The ring goes through both groups.
    assert seconds("flat", 8, 25e6, network, 4) == pytest.approx(1.75)
    assert seconds("flat", 8, 25e6, network, 8) == pytest.approx(0.175)
    assert seconds("torus_2d", 8, 25e6, network, 4) == pytest.approx(0.075 + 0.25 + 0.075)
    assert seconds("hierarchical", 8, 25e6, network, 4) == pytest.approx(0.3 + 1.0)


def test_shared_processors():
    """All replicas' traffic counts, but only if the wire is faster."""
    free = Network(0.0, 0.0, 1e12, 1e12)
    busy = dataclasses.replace(free, gamma=1e-9)
    for algorithm, traffic in (
        ("flat", 14),
        ("torus_2d", 6 + 2 + 6),
        ("hierarchical", 6 + 1.5 + 2 + 1.5 + 6),
        ("halving_doubling", 14),
    ):
        assert sum(own.traffic for own in stages(algorithm, 8, 4)) == pytest.approx(traffic)
        found = seconds(algorithm, 8, 25e6, busy, 4)
        assert found == pytest.approx(traffic * 25e6 * 1e-9)
    slow = dataclasses.replace(busy, bandwidth_between=25e6)
    assert seconds("flat", 8, 25e6, slow, 4) == pytest.approx(1.75)
    assert seconds("torus_2d", 8, 25e6, slow, 4) == pytest.approx(0.15 + 0.25 + 0.15)


def test_masters_send_more_than_in_a_ring():
    """Why a hierarchical all-reduce is slower if all ports are equal, even if pipelined."""
    for replicas, group in ((4, 2), (8, 4), (1024, 16)):
        ring = wire_fraction("flat", replicas, group)
        # A master takes in at least its group's sum and its part of the masters' ring.
        assert 1 + 2 * (replicas // group - 1) / (replicas // group) > ring
        assert wire_fraction("hierarchical", replicas, group) > ring


def test_a_group_of_one_has_no_stages():
    network = Network(1.0, 0.0, 1.0, 1.0, start=1.0)
    for algorithm in ALGORITHMS:
        assert seconds(algorithm, 4, 1.0, network, 1) == pytest.approx(1.0 + 1.5)


@pytest.mark.parametrize(
    ("algorithm", "group", "message"),
    [("flat", 3, "8 replicas cannot be split into groups of 3"), ("tree", 2, "all_reduce='tree'")],
)
def test_bad_input(algorithm, group, message):
    with pytest.raises(UserError, match=message):
        stages(algorithm, 8, group)
