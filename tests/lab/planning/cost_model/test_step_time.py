"""Step times, by hand and in their limits."""

import dataclasses
import math

import pytest

from imagenet_fast import UserError
from imagenet_fast.lab.planning.cost_model.accelerators import accelerator
from imagenet_fast.lab.planning.cost_model.compute import (
    Efficiency,
    Gradient,
    Operation,
    StepWork,
    compute_time,
)
from imagenet_fast.lab.planning.cost_model.step_time import ChipCluster, step_time

GPU, TPU = accelerator("p100"), accelerator("tpu-v3")
EFFICIENCY = Efficiency(0.5, 0.0, 0.8, False, 0.0)
# Ten layers of 1 M weights, backward twice as long as forward.
STEP = StepWork(
    images=32,
    micro_batches=1,
    operations=(
        *(Operation(f"{i}", "matrix", False, 5e10, 1, 1e6, 1e6) for i in range(10)),
        *(Operation(f"{i}", "matrix", True, 1e11, 1, 1e6, 1e6) for i in reversed(range(10))),
    ),
    gradients=tuple(Gradient(f"{i}", 10**6) for i in range(10)),
    statistics=(64,) * 10,
    kept_bytes=1e6,
    fused_kept_bytes=1e6,
    unpadded_flops=1.5e12,
    precision="float32",
    slots=1.0,
)


def time_of(chips, kind=GPU, host_bandwidth=5e9, **options):
    return step_time(STEP, ChipCluster(kind, chips, host_bandwidth), EFFICIENCY, **options)


def test_one_replica_only_computes():
    time = time_of(1)
    assert time.total == compute_time(STEP, GPU, EFFICIENCY).total
    assert (time.all_reduce, time.exposed, time.batch_norm) == (0, 0, 0)


def test_all_reduces_overlap_with_the_backward_pass():
    """All but the first segment, which has at least one tensor."""
    time = time_of(256)
    assert 0 < time.exposed < 0.25 * time.all_reduce
    assert time.all_reduce >= 2 * 40e6 * 31 / 32 / 5e9
    whole = time_of(256, segments=())
    assert whole.exposed == pytest.approx(whole.all_reduce)
    assert whole.total > time.total


def test_slow_networks_bound_the_step():
    slow = time_of(256, host_bandwidth=0.05e9)
    assert slow.bound == "all-reduce"
    assert slow.total == pytest.approx(slow.all_reduce, rel=0.2)
    assert time_of(256).bound == "matrices"
    halved = time_of(256, host_bandwidth=0.05e9, gradient_bytes=2)
    assert halved.all_reduce == pytest.approx(slow.all_reduce / 2, rel=0.05)


def test_input_bounds_the_step():
    """The 8 GPUs of a host consume 256 images per step."""
    time = time_of(256, host_images=100.0)
    assert time.bound == "input"
    assert time.total == pytest.approx(2.56)
    assert time_of(256, host_images=math.inf).input == 0


def test_statistics_over_groups_cost_time():
    alone, group = (time_of(256, kind=TPU, batch_norm_group=size).batch_norm for size in (1, 16))
    assert alone == 0
    # Ten layers, forward and backward, a ring of eight chips each.
    assert group == pytest.approx(20 * 14e-6, rel=0.05)
    assert time_of(256, kind=TPU, batch_norm_group=2).batch_norm == 0  # the cores of a chip


@pytest.mark.parametrize(
    ("kind", "chips", "group", "within", "between"),
    [
        (GPU, 24, 12, 18, 4),  # hosts of 8: each group has one of its own and half of another
        (GPU, 24, 6, 6, 4),  # the second group is in two hosts
        (GPU, 24, 8, 14, 0),
        (GPU, 48, 16, 26, 4),
        (accelerator("tpu-v4"), 12, 4, 2, 4),  # rows of 3, groups of 4 chips
    ],
)
def test_groups_need_not_fit_rows(kind, chips, group, within, between):
    """The group with the most messages outside of a host or a row determines the time."""
    cluster = ChipCluster(kind, chips, latency=1e-3)
    # The same on a torus.
    far = 1e-6 if kind.torus else 1e-3
    near = 1e-6 if kind.torus else 5e-6
    assert cluster.group_all_reduce_seconds(group, 0) == pytest.approx(
        within * near + between * far
    )


def test_a_torus_is_equally_fast_at_any_size():
    """Its bandwidth grows with its size; only the number of steps along the axes grows."""
    times = [
        ChipCluster(TPU, chips).all_reduce_seconds("torus_2d", 100e6)
        for chips in (16, 64, 256, 1024)
    ]
    assert max(times) < 1.3 * min(times)
    # Each chip sends nearly twice the tensor through four links.
    assert times[-1] == pytest.approx(200e6 / (4 * TPU.link), rel=0.2)
    flat = ChipCluster(TPU, 1024).all_reduce_seconds("flat", 100e6)
    assert flat > 3 * times[-1]


def test_hosts_share_their_network():
    """Either all chips of a host send a part to other hosts, or one sends everything."""
    cluster = ChipCluster(GPU, 64, host_bandwidth=5e9, latency=0.0)
    whole = cluster.all_reduce_seconds("hierarchical", 80e6)
    parts = cluster.all_reduce_seconds("torus_2d", 80e6)
    ring = cluster.all_reduce_seconds("flat", 80e6)
    across = 2 * 7 / 8 * 80e6 / 5e9
    assert parts == pytest.approx(across, rel=0.15)
    assert whole == pytest.approx(across + 4 * 7 / 8 * 80e6 / GPU.link, rel=0.05)
    assert ring == pytest.approx(across, rel=0.15)


def test_exchange_of_16_bit_gradients():
    """In this package's algorithms; XLA and NCCL use the same algorithm for all types."""
    for own, name in ((ChipCluster(GPU, 64), "builtin"), (ChipCluster(TPU, 64), "torus_2d")):
        assert own.all_reduce_seconds(name, 1e6, exchange=True) == own.all_reduce_seconds(name, 1e6)
    cluster = ChipCluster(GPU, 64, host_bandwidth=5e9, latency=0.0)
    # Each of a host's 8 chips sends 56 of 64 parts out; then the sums go around once.
    assert cluster.all_reduce_cost("flat", exchange=True)(80e6) == pytest.approx(
        (8 * 56 / 64 + 63 / 64) * 80e6 / 5e9, rel=0.02
    )
    ring, exchanged = (
        time_of(64, algorithm="hierarchical", gradient_bytes=2, exchange=exchange).all_reduce
        for exchange in (False, True)
    )
    assert exchanged < ring  # fewer steps, as many bytes


def test_group_size():
    assert ChipCluster(TPU, 1024).group_size == 32
    assert ChipCluster(TPU, 512).group_size in (16, 32)
    assert ChipCluster(GPU, 64).group_size == 8
    assert ChipCluster(GPU, 6).group_size == 6
    assert ChipCluster(GPU, 12).group_size == 4
    assert ChipCluster(GPU, 20).hosts == 3
    assert ChipCluster(TPU, 4).replicas == 8


def test_refusals():
    with pytest.raises(UserError, match=r"chips is 2,048, but must be .* of TPU v3, at most 1,024"):
        ChipCluster(TPU, 2048)
    with pytest.raises(UserError, match="chips is 0"):
        ChipCluster(GPU, 0)
    with pytest.raises(UserError, match="does not compute in mixed_bfloat16"):
        step_time(
            dataclasses.replace(STEP, precision="mixed_bfloat16"), ChipCluster(GPU, 8), EFFICIENCY
        )
