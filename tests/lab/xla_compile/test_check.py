"""Checks of a step's types, correct and wrong ones."""

import re

import pytest
import tensorflow as tf

from imagenet_fast.lab.xla_compile.check import check_types
from imagenet_fast.lab.xla_compile.module import Array, Instruction

# Three of each of seven layers, but TensorFlow 2.22 leaves out the gradient of the images.
CONVOLUTIONS = 21 - (tuple(map(int, tf.__version__.split(".")[:2])) >= (2, 22))


def checks(found, step=None, **changes):
    """By name."""
    config = found.config.replace(**changes)
    images, classes = config.batch_size // 8, len(found.model.labels)
    return {own.name: own for own in check_types(step or found.step, config, images, classes)}


def wrong(found, **arguments):
    return {name: own.wrong for name, own in checks(found, **arguments).items() if own.wrong}


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"precision": "mixed_bfloat16"}, marks=pytest.mark.long),
        {"precision": "mixed_bfloat16", "accumulation_steps": 2, "batch_norm_batch_size": 4},
        pytest.param(
            {"optimizer": "muon", "model": "airbench94", "width": 8, "image_size": 32},
            marks=pytest.mark.long,
        ),
    ],
    ids=str,
)
def test_a_recipe_s_own_step(lowered, options):
    assert not wrong(lowered(**options))


@pytest.mark.long
def test_as_many_images_as_classes(lowered):
    options = {"model": "alexnet_bn", "image_size": 64, "num_classes": 16, "batch_size": 128}
    found = lowered(precision="mixed_bfloat16", **options)
    assert checks(found)["matrix products"][1:] == ("6 of bf16, 3 of f32", "")
    other = wrong(found, precision="float32")["matrix products"]
    assert re.search(r"fc6(_\d+)?/MatMul", other)  # Keras 3 numbers what it calls again.
    assert "and 3 more take other inputs than f32" in other


def test_what_there_is(lowered):
    found = checks(lowered(precision="mixed_bfloat16"))
    assert found["convolutions"].found == f"{CONVOLUTIONS} of bf16"
    # Forward, and the gradients of weights and inputs.
    assert found["matrix products"].found == "3 of f32"
    assert found["variables changed"].found == "61 of f32, 1 of s64"


def test_another_precision_than_the_recipe_s(lowered):
    found = wrong(lowered(), precision="mixed_bfloat16")
    assert set(found) == {"convolutions"}
    more = CONVOLUTIONS - 3
    assert found["convolutions"].endswith(f"and {more} more take other inputs than bf16")
    assert "conv" in found["convolutions"]
    found = wrong(lowered(precision="mixed_bfloat16"), precision="float32")
    assert set(found) == {"convolutions"}


def test_networks_of_the_user_may_compute_in_any_precision(lowered):
    found = lowered()
    config = found.config.replace(precision="mixed_bfloat16")
    rows = check_types(found.step, config, config.batch_size // 8, 10, custom=True)
    assert not [row.wrong for row in rows if row.wrong]


def with_instruction(step, *instructions):
    module = step.module._replace(instructions=(*step.module.instructions, *instructions))
    return step._replace(module=module)


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        (
            Instruction("p", "dot", (Array("f32", (8, 4)),), (Array("f32", (8, 8)),) * 2, "dense"),
            {"matrix products": "dense take other inputs than bf16, or f32 in the last layer"},
        ),
        (
            Instruction(
                "p", "dot", (Array("f32", (8, 9)),), (Array("bf16", (8, 8)),) * 2, "a/logits/b"
            ),
            {"matrix products": "a/logits/b take other inputs than bf16, or f32 in the last layer"},
        ),
        (
            Instruction("e", "exponential", (Array("bf16", (8, 10)),), (), "softmax"),
            {"loss": "softmax is not in f32"},
        ),
        (
            Instruction("a", "add", (Array("f64", (3,)),), (), "sum"),
            {"float64": "sum: accelerators lack it, or compute it slowly"},
        ),
        (
            Instruction("m", "reshape", (Array("f32", (3,), True),), (), "mask"),
            {"shapes": "only bounds of mask"},
        ),
    ],
    ids=["hidden", "last", "loss", "float64", "shape"],
)
def test_what_is_wrong(lowered, instruction, expected):
    found = lowered(precision="mixed_bfloat16")
    assert wrong(found, step=with_instruction(found.step, instruction)) == expected


def test_variables_of_another_type(lowered):
    found = lowered()
    results = [
        array._replace(dtype="bf16") if array.shape == (64, 10) else array
        for array in found.step.module.results
    ]
    step = found.step._replace(module=found.step.module._replace(results=tuple(results)))
    assert "logits/kernel" in wrong(found, step=step)["variables changed"]


@pytest.mark.long
def test_losses_of_selected_images(lowered):
    """Those of all images, which select, and those of the selected."""
    found = lowered(select_by_loss=0.5)
    assert not wrong(found)
    assert wrong(found, select_by_loss=0.25) == {"loss": "no loss of 2 images and 10 classes"}
    assert wrong(lowered(), select_by_loss=0.5) == {"loss": "no loss of 4 images and 10 classes"}


def test_no_softmax_and_nothing_changed(lowered):
    found = lowered()
    kept = tuple(own for own in found.step.module.instructions if own.opcode != "exponential")
    module = found.step.module._replace(instructions=kept, updates={})
    assert wrong(found, step=found.step._replace(module=module)) == {
        "loss": "no loss of 8 images and 10 classes",
        "variables changed": "no variable changes",
    }
