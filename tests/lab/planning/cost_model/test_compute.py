"""The roofline model, against calculations by hand."""

import dataclasses

import pytest

from imagenet_fast.lab.planning.cost_model.accelerators import accelerator
from imagenet_fast.lab.planning.cost_model.compute import (
    Efficiency,
    Gradient,
    Operation,
    StepWork,
    compute_time,
    operation_seconds,
)

# 1 TFLOP/s, 1 GB/s, two cores.
CHIP = dataclasses.replace(
    accelerator("tpu-v3"), flops={"float32": 2e12}, bandwidth=2e9, replicas=2
)
ALL = Efficiency(matrix=1.0, half_rows=0.0, memory=1.0, fuses=False, launch_seconds=0.0)


def operation(layer="a", kind="matrix", backward=False, flops=0.0, rows=1, moved=1.0, fused=0.0):
    return Operation(layer, kind, backward, flops, rows, moved, fused or moved * (kind != "other"))


def seconds(own, **changes):
    return operation_seconds(own, "float32", CHIP, dataclasses.replace(ALL, **changes))


def test_the_longer_of_arithmetic_and_traffic():
    assert seconds(operation(flops=3e12, moved=1e9)) == pytest.approx(3)
    assert seconds(operation(flops=3e12, moved=4e9)) == pytest.approx(4)
    assert seconds(operation(flops=3e12, moved=1e9), matrix=0.5) == pytest.approx(6)
    assert seconds(operation(flops=3e12, moved=4e9), memory=0.5) == pytest.approx(8)


def test_only_matrices_have_arithmetic():
    assert seconds(operation(kind="other", flops=3e12, moved=1e9)) == pytest.approx(1)


def test_fused_values_are_not_moved():
    own = operation(kind="other", moved=1e9)
    assert seconds(own, launch_seconds=0.1) == pytest.approx(1)
    assert seconds(own, fuses=True, launch_seconds=0.1) == 0


def test_operations_are_launched():
    assert seconds(operation(moved=1e3), launch_seconds=0.25) == 0.25


def test_few_rows_reach_less():
    assert seconds(operation(flops=1e12, rows=16), half_rows=16.0) == pytest.approx(2)
    assert seconds(operation(flops=1e12, rows=48), half_rows=16.0) == pytest.approx(4 / 3)


def step(**changes):
    """Two layers and a loss."""
    values = {
        "images": 8,
        "micro_batches": 1,
        "operations": (
            operation("a", flops=1e12),
            operation("b", flops=2e12),
            operation("", "other", moved=1e9),
            operation("b", backward=True, flops=4e12),
            operation("a", backward=True, flops=2e12),
            operation("a", "other", backward=True, moved=1e9),
        ),
        "gradients": (Gradient("a", 10), Gradient("b", 20), Gradient("b", 30)),
        "statistics": (),
        "kept_bytes": 100.0,
        "fused_kept_bytes": 50.0,
        "unpadded_flops": 9e12,
        "precision": "float32",
        "slots": 1.0,
    }
    return StepWork(**{**values, **changes})


def test_a_step():
    own = step()
    time = compute_time(own, CHIP, ALL)
    assert (time.forward, time.backward) == pytest.approx((4, 7))
    assert time.gradients_ready == pytest.approx((7, 4, 4))
    assert time.by_kind == pytest.approx({"matrix": 9, "other": 2})
    # Weight and momentum are read and written, the gradient read.
    assert time.update == pytest.approx(60 * 4 * 5 / 1e9)
    assert time.total == pytest.approx(11 + time.update)
    assert own.flops == 9e12
    assert own.memory(fuses=False) == 60 * 4 * 3 + 100
    assert own.memory(fuses=True) == 60 * 4 * 3 + 50


def test_micro_batches():
    """The gradients are ready at the end of the last micro-batch."""
    one = compute_time(step(), CHIP, ALL)
    four = compute_time(step(micro_batches=4), CHIP, ALL)
    assert four.forward == pytest.approx(4 * one.forward)
    assert four.backward == pytest.approx(4 * one.backward)
    assert four.gradients_ready == one.gradients_ready
    assert four.update == one.update
    assert step(micro_batches=4).all_images == 32


def test_images_are_selected():
    """A forward pass in each step, and a backward pass in every fourth."""
    own = step(
        selection=(operation(flops=2e12), operation(backward=True, flops=4e12)), selection_every=4
    )
    time, without = (compute_time(each, CHIP, ALL) for each in (own, step()))
    assert time.selection == pytest.approx(2 + 4 / 4)
    assert time.total == pytest.approx(without.total + 3)
    assert time.by_kind["matrix"] == pytest.approx(without.by_kind["matrix"] + 3)
    assert own.flops == 9e12 + 3e12
    assert time.gradients_ready == without.gradients_ready


def test_updates_are_in_their_own_precision():
    """In bfloat16 if the chip has it, once for all micro-batches."""
    own = step(updates=(operation(flops=2e12),), update_precision="mixed_bfloat16", micro_batches=4)
    half = dataclasses.replace(CHIP, flops={"float32": 2e12, "mixed_bfloat16": 8e12})
    plain = compute_time(step(), CHIP, ALL).update
    assert compute_time(own, half, ALL).update == pytest.approx(plain + 0.5)
    assert compute_time(own, CHIP, ALL).update == pytest.approx(plain + 2)
