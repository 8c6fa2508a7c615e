"""Plans of runs."""

import dataclasses
import json
import math
import xml.etree.ElementTree

import pytest
from small_config import SMALL

from imagenet_fast import UserError
from imagenet_fast.base.durations import milliseconds
from imagenet_fast.config import Config
from imagenet_fast.lab.planning.cost_model.reliability import Conditions
from imagenet_fast.lab.planning.run import CompiledMemory, Hardware, comparison, plan_run

POD = Hardware("tpu-v3", 1024)
CONFIG = SMALL.replace(batch_size=64, strategy="auto")


@pytest.fixture(scope="module")
def pod():
    config = Config.from_flagfile("google_tpu_pod_32k", synthetic=True, num_classes=1000)
    return plan_run(config, POD)


def test_the_pod_of_ying_et_al(pod):
    """32,768 images on 2,048 cores, 91 epochs: more than 1.05 million images/s."""
    assert pod.hardware.cluster.replicas == 2048
    assert pod.step.all_images == 16
    assert pod.steps == 3558
    assert 1.0e6 < pod.images_per_second < 1.2e6
    assert pod.seconds == pytest.approx(3558 * 32768 / pod.images_per_second)
    assert pod.dollars == pytest.approx(2.0 * 1024 * pod.seconds / 3600)
    assert 0.9 < pod.scaling < 1
    assert pod.fits
    assert pod.time.batch_norm > 0  # over groups of 8 replicas


def test_table_of_the_pod(pod):
    table = pod.table()
    assert "1,024 TPU v3, 256 hosts: 2,048 replicas of 16 images" in table
    assert "23.81 without padding, as XLA counts" in table
    assert "torus_2d" in table
    assert "TensorFlow, TPU" in table


def test_segments_are_few_and_good(pod):
    best = dataclasses.replace(pod, config=pod.config.replace(fusion_segments=pod.segments))
    assert len(pod.segments) <= 3
    assert best.time.total <= 1.003 * pod.time.total


def test_where_gradients_are_cut(pod):
    """By the run's options, or the best segments if a compiler or a search decides."""
    sizes = [4 * own.elements for own in pod.step.gradients]

    def cuts(**options):
        return dataclasses.replace(pod, config=pod.config.replace(**options)).cuts

    for size in (5 * 2**20, 25 * 2**20):
        found = cuts(fusion_bytes=size)
        edges = [0, *found, len(sizes)]
        parts = [sum(sizes[a:b]) for a, b in zip(edges, edges[1:])]
        assert max(parts) <= max(size, max(sizes))
        assert len(parts) >= sum(sizes) / size
    assert cuts(fusion_bytes=0) == ()
    assert cuts(fusion_segments=(76,)) == (76,)
    sizes = pod.config.fusion_bytes, 0, 4 * 2**20
    candidates = [*({"fusion_bytes": size} for size in sizes), {"fusion_segments": (76,)}]
    plans = [dataclasses.replace(pod, config=pod.config.replace(**own)) for own in candidates]
    fastest = min(plans, key=lambda plan: plan.time.total)
    assert cuts(fusion="auto") == fastest.cuts
    assert cuts(all_reduce="auto") is None  # XLA's


def test_better_segments_are_advised():
    config = CONFIG.replace(model="alexnet_bn", image_size=227, fusion_bytes=0)
    one = plan_run(config, Hardware("p100", 64, network_gbits=10.0))
    (line,) = (own for own in one.table().splitlines() if "--fusion_segments=" in own)
    gain = float(line.partition("saves ")[2].partition("%")[0])
    better = dataclasses.replace(one, config=config.replace(fusion_segments=one.segments))
    assert gain == pytest.approx(100 * (1 - better.time.total / one.time.total), abs=0.06)
    assert "--fusion_segments=" not in better.table()


def test_one_all_reduce_may_be_best():
    """If each all-reduce takes longer than the backward pass that could hide it."""
    plan = plan_run(CONFIG.replace(fusion_bytes=1000, all_reduce="flat"), Hardware("p100", 64))
    assert plan.segments == ()
    assert len(plan.cuts) > 2
    assert "--fusion_bytes=0 saves" in plan.table()


def test_segments_are_suggested_where_xla_fuses(pod):
    """On TPUs the compiler fuses all-reduces unless segments are given."""
    left = dataclasses.replace(pod, config=pod.config.replace(all_reduce="auto"))
    assert f"--fusion_segments={left.segments[0]}" in left.table()


@pytest.mark.long
def test_only_algorithms_that_training_has_are_listed(pod):
    def algorithms(plan):
        lines = plan.table().split("\nalgorithm ")[1].split("\n\n")[0].splitlines()
        return [line.split()[0] for line in lines[1:]]

    assert algorithms(pod) == ["builtin", "torus_2d"]
    one_host, two = (plan_run(CONFIG, Hardware("p100", chips)) for chips in (8, 16))
    assert algorithms(one_host) == ["builtin"]
    assert "--all_reduce=" not in one_host.table()
    assert algorithms(two) == ["flat", "hierarchical", "torus_2d"]
    half = two.config.replace(all_reduce_dtype="float16")
    assert algorithms(dataclasses.replace(two, config=half)) == ["builtin", *algorithms(two)]
    # A TPU takes its own way where there is none by such a name.
    builtin, other = (
        dataclasses.replace(pod, config=pod.config.replace(all_reduce=name))
        for name in ("builtin", "hierarchical")
    )
    assert other.time == builtin.time


@pytest.mark.long
def test_all_reduce_in_16_bits():
    """Half of the bytes; an exchange has other steps than a ring."""
    config = CONFIG.replace(fusion_bytes=0)
    flat, half, ring = (
        plan_run(config.replace(all_reduce=name, all_reduce_dtype=dtype), Hardware("p100", 64))
        for name, dtype in (("flat", "float32"), ("flat", "float16"), ("builtin", "float16"))
    )
    size = 2 * flat.step.parameters
    seconds = flat.hardware.cluster.all_reduce_seconds
    assert half.time.all_reduce == pytest.approx(seconds("flat", size, exchange=True))
    assert ring.time.all_reduce == pytest.approx(seconds("flat", size))
    assert flat.time.all_reduce == pytest.approx(seconds("flat", 2 * size))


def test_failures_and_stragglers(pod):
    """Checkpoints, failures and slow devices make a run longer."""
    assert pod.times.total == pytest.approx(pod.seconds)
    rough = Conditions(jitter=0.1, hours_between_failures=50, checkpoint_seconds=2.0)
    own = dataclasses.replace(pod, hardware=dataclasses.replace(POD, conditions=rough))
    assert own.times.total.min() > pod.seconds + 2 * pod.steps // 39
    assert own.times.failures.mean() == pytest.approx(
        own.times.total.mean() * 1024 / (50 * 3600), rel=0.2
    )


@pytest.mark.long
def test_progressive_resizing():
    """The time of each image size as often as the run has it."""
    hardware = Hardware("p100", 8)
    large = CONFIG.replace(image_size=32)
    ramp = large.replace(size_ramp=(16, 16), size_ramp_at="10 epochs,20 epochs")
    at_16, at_32, plan = (plan_run(config, hardware) for config in (CONFIG, large, ramp))
    epoch = at_16.steps // 90
    assert plan.seconds == pytest.approx(
        epoch * (15 * at_16.time.total + 75 * at_32.time.total), rel=1e-9
    )
    assert plan.times.total == pytest.approx(plan.seconds)
    assert f"\nsizes       {15 * epoch:,} steps of 16 px, each " in plan.table()
    assert json.loads(plan.json())["steps_of_other_sizes"] == {"16": 15 * epoch}


@pytest.mark.long
def test_selected_images():
    """A forward pass more, both passes of half of the images; their number is as before."""
    whole, half = (
        plan_run(CONFIG.replace(select_by_loss=own), Hardware("p100", 8)) for own in (1.0, 0.5)
    )
    selection = half.time.compute.selection
    assert 0 < selection < half.time.compute.total / 2
    assert half.step.all_images == whole.step.all_images
    assert half.images_per_second == pytest.approx(64 / half.time.total)
    assert f"selecting images {milliseconds(selection)}\n" in half.table()
    assert "selecting" not in whole.table()


def test_files(pod):
    files = pod.files()
    values = json.loads(files["plan.json"])
    assert values["chips"] == 1024
    assert values["seconds"] == pytest.approx(pod.seconds)
    assert values["bound"] == pod.time.bound
    assert files["plan.txt"] == pod.table() + "\n"
    assert xml.etree.ElementTree.fromstring(files["plan.svg"]).tag.endswith("svg")


def test_too_little_memory():
    plan = plan_run(CONFIG, Hardware("p100", 1))
    small = dataclasses.replace(plan, step=dataclasses.replace(plan.step, kept_bytes=17 * 2**30))
    assert plan.fits
    assert not small.fits
    assert "DOES NOT FIT" in small.table()
    assert "--accumulation_steps=2" in small.table()


@pytest.mark.parametrize(
    ("gib", "advice"),
    [
        # Of 66 images' divisors, 2, 3, 6, 11 ...: doubling would reach 4, which is not a divisor.
        (34, "it may fit with --accumulation_steps=3"),
        (80, "it may fit with --accumulation_steps=6"),
        (66 * 17, "no --accumulation_steps makes it fit"),
    ],
)
def test_fewest_accumulation_steps_that_fit(gib, advice):
    plan = plan_run(SMALL.replace(batch_size=66), Hardware("p100", 1))
    large = dataclasses.replace(plan, step=dataclasses.replace(plan.step, kept_bytes=gib * 2**30))
    assert f"advice      {advice}" in large.table()


def test_memory_that_the_workspace_may_exceed():
    """Compiled steps needed up to 1 / 0.78 of their estimates."""
    plan = plan_run(CONFIG, Hardware("p100", 1))
    for gib, tight in ((12, False), (13, True)):
        step = dataclasses.replace(plan.step, kept_bytes=gib * 2**30)
        table = dataclasses.replace(plan, step=step).table()
        assert ("without the operations' workspace: MAY NOT FIT" in table) == tight
        assert ("advice      imagenet-fast compile shows whether" in table) == tight


@pytest.mark.long
def test_constants_and_the_published_numbers_that_test_them():
    table = plan_run(CONFIG, Hardware("p100", 16, network_gbits=25.0)).table()
    assert "TensorFlow 2017, P100: 82.9% of peak in matrix operations, half of that with" in table
    assert "80% of memory bandwidth, 5 us to launch" in table
    assert "80 GB/s between GPUs of a host, 25 Gbit/s between hosts" in table
    assert "checked     against 11 published numbers of NVIDIA P100" in table
    table = plan_run(CONFIG, Hardware("tpu-v5p", 4)).table()
    assert "100 GB/s through each of the torus' 6 links" in table
    assert "checked     against no published number: none of TPU v5p is known" in table


def test_compiled_memory_replaces_the_estimate():
    compiled = CompiledMemory(12 * 2**30, 13 * 2**30, "jax-cuda12-pjrt 0.10.2")
    plan = plan_run(CONFIG, Hardware("v100", 8), compiled)
    assert plan.fits
    line = "memory      12 of 13 GiB per replica, by jax-cuda12-pjrt 0.10.2 (0.00"
    assert line in plan.table()
    assert json.loads(plan.json())["memory_bytes"] == 12 * 2**30
    less = dataclasses.replace(plan, compiled=dataclasses.replace(compiled, usable=11 * 2**30))
    assert "DOES NOT FIT" in less.table()
    assert "advice      it may fit with --accumulation_steps=2" in less.table()


@pytest.mark.long
def test_hosts_that_are_too_slow():
    plan = plan_run(CONFIG, Hardware("p100", 8, host_images=100.0))
    assert plan.time.bound == "input"
    assert plan.images_per_second == pytest.approx(100)
    assert "--input_servers" in plan.table()


def test_unknown_price():
    plan = plan_run(CONFIG, Hardware("p40", 8))
    assert plan.dollars is None
    assert "price       unknown" in plan.table()


@pytest.mark.long
def test_comparison():
    plans = [plan_run(CONFIG, Hardware("v100", chips)) for chips in (1, 8)]
    lines = comparison(plans, ["1", "8"]).splitlines()
    assert len(lines) == 3
    assert lines[1].split()[1] == "64"
    assert lines[2].split()[1] == "8"
    assert plans[0].scaling == 1
    assert math.isclose(plans[0].seconds, plans[0].steps * plans[0].time.total)


def test_refusals():
    with pytest.raises(UserError, match="64 cannot be split evenly over 2,048 replicas"):
        plan_run(CONFIG, POD)
    with pytest.raises(UserError, match="fusion=auto is not for TPUs"):
        plan_run(CONFIG.replace(fusion="auto"), POD)
    with pytest.raises(UserError, match="use plan --pipeline"):
        plan_run(CONFIG.replace(pipeline_stages=2, accumulation_steps=2), Hardware("p100", 1))
    with pytest.raises(UserError, match="does not compute in mixed_bfloat16"):
        plan_run(CONFIG.replace(precision="mixed_bfloat16"), Hardware("p100", 1))
