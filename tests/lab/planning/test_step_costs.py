"""Counts of a step's graph, against published counts of networks."""

import pytest
from small_config import SMALL

from imagenet_fast.config import Config
from imagenet_fast.lab.planning.cost_model.accelerators import accelerator
from imagenet_fast.lab.planning.cost_model.compute import Efficiency
from imagenet_fast.lab.planning.step_costs import block_seconds, count_blocks, count_step

RESNET50 = Config(synthetic=True, num_classes=1000, precision="mixed_bfloat16")


@pytest.fixture(scope="module")
def resnet50():
    return count_step(RESNET50, images=2, micro_batches=4, slots=1)


def matrices(step, backward):
    found = [own for own in step.operations if own.kind == "matrix" and own.backward == backward]
    return sum(own.flops for own in found) / step.images


def test_resnet50(resnet50):
    """4.09 G multiply-adds forward, and twice that backward, except for the image's gradient."""
    forward, backward = matrices(resnet50, False), matrices(resnet50, True)
    assert forward == pytest.approx(2 * 4.089e9, rel=1e-3)
    assert backward == pytest.approx(2 * forward - 2 * 112 * 112 * 64 * 49 * 3, rel=1e-6)
    assert resnet50.parameters == 25_557_032
    assert len(resnet50.gradients) == 161
    assert sum(resnet50.statistics) == 26_560
    assert resnet50.all_images == 8
    assert resnet50.flops == pytest.approx(8 * (forward + backward), rel=0.02)
    assert resnet50.precision == "mixed_bfloat16"


def test_gradients_are_in_the_order_of_the_layers(resnet50):
    """Jia et al.'s first segment: 76 tensors, 2,102,336 weights."""
    assert sum(own.elements for own in resnet50.gradients[:76]) == 2_102_336
    assert resnet50.gradients[0].elements == 7 * 7 * 3 * 64
    assert [own.elements for own in resnet50.gradients[-2:]] == [2048 * 1000, 1000]
    layers = [own.layer for own in resnet50.operations]
    assert {own.layer for own in resnet50.gradients} <= set(layers)


def test_kept_activations(resnet50):
    """The convolutions' outputs, 11.1 M values of 2 bytes per image, and those of other layers."""
    values = resnet50.kept_bytes / resnet50.images / 2
    assert 2 * 10e6 < values < 2 * 12e6


@pytest.mark.long
def test_against_the_compiler_of_tpus():
    """``imagenet-fast compile`` reports for 128 images per core: 24.05 GFLOPs each, 4.58 GiB."""
    step = count_step(RESNET50, images=128, micro_batches=1, slots=1)
    assert step.unpadded_flops / 128 == pytest.approx(24.05e9, rel=0.01)
    assert step.memory(fuses=True) == pytest.approx(4.58 * 2**30, rel=0.2)
    assert step.memory(fuses=False) > 1.2 * step.memory(fuses=True)


def test_rows_and_bytes(resnet50):
    first = next(own for own in resnet50.operations if own.kind == "matrix")
    assert first.rows == 2 * 112 * 112
    image, filters, result = 2 * 224 * 224 * 3, 7 * 7 * 3 * 64, 2 * 112 * 112 * 64
    assert (
        first.bytes == first.fused_bytes == pytest.approx(2 * (image + filters + result), rel=0.05)
    )
    dense = [own for own in resnet50.operations if own.layer == "logits" and own.kind == "matrix"]
    assert [own.rows for own in dense] == [2, 2, 2]
    others = [own for own in resnet50.operations if own.kind == "other"]
    assert sum(own.fused_bytes for own in others) < 0.02 * sum(own.bytes for own in others)


@pytest.mark.long
def test_twice_the_images_are_twice_the_work():
    one, two = (count_step(SMALL, images, 1, 1) for images in (4, 8))
    assert two.flops == pytest.approx(2 * one.flops, rel=1e-3)
    assert two.kept_bytes == pytest.approx(2 * one.kept_bytes, rel=1e-2)
    assert two.gradients == one.gradients


@pytest.mark.long
def test_mixed_precision_halves_the_traffic():
    full, half = (
        count_step(SMALL.replace(precision=own), 8, 1, 1) for own in ("float32", "mixed_bfloat16")
    )
    moved = [
        sum(own.bytes for own in step.operations if own.kind == "matrix") for step in (full, half)
    ]
    assert moved[1] == pytest.approx(moved[0] / 2, rel=0.05)
    assert half.flops == pytest.approx(full.flops, rel=0.02)


@pytest.mark.long
def test_selected_by_the_network_itself():
    """A forward pass of all images, and both passes of the half with the highest loss."""
    half, whole = (count_step(SMALL, images, 1, 1) for images in (4, 8))
    own = count_step(SMALL.replace(select_by_loss=0.5), 4, 2, 1)
    forward = [each.flops for each in whole.operations if not each.backward]
    assert sum(each.flops for each in own.selection) == sum(forward)
    assert own.flops == pytest.approx(half.flops + sum(forward), rel=1e-3)
    assert own.all_images == 8
    assert own.unpadded_flops == pytest.approx(
        (half.unpadded_flops + whole.unpadded_flops / 3) / 2, rel=0.05
    )


def test_selected_by_a_proxy():
    """airbench96_faster's 3.1 PFLOPs: 45 epochs of 48 steps, and six views of 10,000 images."""
    options = {"model": "airbench96", "proxy_model": "airbench96_proxy", "proxy_every": 4}
    config = SMALL.replace(**options, select_by_loss=0.5, image_size=32)
    own = count_step(config, 1024, 1, 1)
    forward = matrices(own, False) * 1024 / 512
    assert 45 * 48 * own.flops + 60_000 * forward == pytest.approx(3.1e15, rel=0.03)
    proxy = {True: 0.0, False: 0.0}
    for each in own.selection:
        proxy[each.backward] += each.flops
    assert 1.5 < proxy[True] / proxy[False] < 2
    assert 0.02 < sum(proxy.values()) / own.flops < 0.1


@pytest.mark.long
def test_updates_of_muon():
    """Three products in each iteration, of the smaller Gram matrix and of the filters with it."""
    config = SMALL.replace(model="airbench94", width=8, image_size=32, optimizer="muon")
    own = count_step(config.replace(muon_steps=2), 4, 1, 1)
    widths = (24, 8, 8, 32, 32, 32, 32)
    shapes = [sorted((9 * inputs, outputs)) for inputs, outputs in zip(widths, widths[1:])]
    products = [each for each in own.updates if each.kind == "matrix"]
    assert len(products) == 2 * 3 * 6
    assert sum(each.flops for each in products) == 2 * sum(
        2 * (small * small * large + small**3 + small * small * large) for small, large in shapes
    )
    assert not count_step(config.replace(optimizer="sgd"), 4, 1, 1).updates


@pytest.mark.long
def test_blocks_are_the_network():
    """The blocks of a pipeline together have the network's FLOPs."""
    blocks = count_blocks(SMALL, 4)
    whole = count_step(SMALL, 4, 1, 1)
    passes = [own for block in blocks for own in (*block.forward, *block.backward)]
    counted = sum(own.flops for own in passes if own.kind == "matrix")
    assert counted == matrices(whole, False) * 4 + matrices(whole, True) * 4
    efficiency = Efficiency(0.5, 0.0, 0.8, False, 0.0)
    costs = block_seconds(blocks, "float32", accelerator("p100"), efficiency)
    slower = block_seconds(
        blocks, "float32", accelerator("p100"), Efficiency(0.25, 0.0, 0.4, False, 0.0)
    )
    assert sum(own.work for own in slower) == pytest.approx(2 * sum(own.work for own in costs))
    assert [own.name for own in costs] == [own.cost.name for own in blocks]
