"""Checks of compiled steps, with fake modules."""

import pytest

from imagenet_fast import Config
from imagenet_fast.lab.xla_compile.check_compiled import check_compiled, computed_twice
from imagenet_fast.lab.xla_compile.gpus import gpus
from imagenet_fast.lab.xla_compile.module import Array, Instruction, Module

EVERYONE = tuple(range(8))


def module(*instructions):
    return Module(instructions, (), (), {})


def convolution(dtype, name="cudnn-conv.1"):
    images = Array(dtype, (8, 16, 16, 32))
    filters = Array(dtype, (3, 3, 32, 64))
    target = "__cudnn$convForward"
    return Instruction(name, "custom-call", (images,), (images, filters), "", target=target)


def product(dtype, source, target=""):
    matrix = Array(dtype, (8, 8))
    opcode = "custom-call" if target else "dot"
    return Instruction("dot.1", opcode, (matrix,), (matrix, matrix), source, target=target)


def all_reduce(groups, opcode="all-reduce", elements=100):
    array = Array("f32", (elements,))
    return Instruction("all-reduce.1", opcode, (array,), (array,), groups=groups)


LOWERED = module(product("f32", "logits/MatMul"), all_reduce((EVERYONE,)))
GOOD = (
    convolution("f16"),
    convolution("f16", "cudnn-conv.2"),
    product("f32", "logits/MatMul"),
    all_reduce((), "all-reduce-start"),
    all_reduce((), "all-reduce-start"),
)


def checks(*instructions, precision="mixed_float16", gpu="h100", lowered=LOWERED):
    config = Config(precision=precision)
    found = check_compiled(module(*instructions), lowered, config, gpus()[gpu], 8)
    return {own.name: own for own in found}


def wrong(*instructions, **options):
    found = checks(*instructions, **options)
    return {name: own.wrong for name, own in found.items() if own.wrong}


def test_a_correct_step():
    found = checks(*GOOD)
    assert not any(own.wrong for own in found.values())
    assert {name: own.found for name, own in found.items()} == {
        "convolutions": "2 of f16",
        "matrix products": "1 of f32",
        "all-reduces": "2 of 200 numbers of f32, 0.0 MiB, among all 8",
    }


def test_one_convolution_in_float32_is_enough():
    expected = "XLA computes 1 of the convolutions in float32 under mixed_float16"
    assert wrong(*GOOD, convolution("f32")) == {"convolutions": expected}


def test_convolutions_that_cudnn_does_not_have():
    images = Array("f32", (8, 16, 16, 32))
    own = Instruction("convolution.1", "convolution", (images,), (images, images))
    assert "convolutions" in wrong(*GOOD, own)


@pytest.mark.parametrize(
    ("gpu", "precision"),
    [("p100", "mixed_float16"), ("p40", "float32"), ("v100", "mixed_float16")],
)
def test_gpus_without_bfloat16_say_what_to_use(gpu, precision):
    expected = wrong(convolution("f32"), *GOOD[2:], precision="mixed_bfloat16", gpu=gpu)[
        "convolutions"
    ]
    begins = "has no bfloat16 arithmetic, which begins with 8.0"
    assert expected.endswith(f"{begins}; use --precision={precision}")
    expected = wrong(convolution("f32"), *GOOD[2:], precision="mixed_bfloat16", gpu="a100")
    assert "use --precision" not in expected["convolutions"]


def test_requested_float32():
    found = (convolution("f32"), product("f32", "dense/MatMul"), *GOOD[3:])
    assert not wrong(*found, precision="float32")


@pytest.mark.parametrize("target", ["", "__cublas$gemm"])
def test_products_in_float32_are_the_last_layer_s_only(target):
    expected = "XLA computes 1 of the matrix products in float32 under mixed_float16"
    found = wrong(*GOOD, product("f32", "dense/MatMul", target))
    assert found == {"matrix products": expected}
    assert not wrong(*GOOD, product("f16", "dense/MatMul", target))


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (((0, 1, 2, 3), (4, 5, 6, 7)), "(0,1,2,3 4,5,6,7)"),
        (((0, 1, 2, 3),), "all 4"),
    ],
)
def test_groups_that_the_step_does_not_have(groups, expected):
    found = checks(*GOOD[:3], all_reduce(groups))["all-reduces"]
    assert found.found == f"1 of 100 numbers of f32, 0.0 MiB, among {expected}"
    assert found.wrong == "the step has all-reduces among all 8"


def test_groups_in_another_order_are_the_same():
    groups = ((0, 1), (2, 3), (4, 5), (6, 7))
    lowered = module(product("f32", "logits/MatMul"), all_reduce(groups))
    own = all_reduce(((3, 2), (1, 0), (7, 6), (5, 4)))
    assert not wrong(*GOOD[:3], own, lowered=lowered)


ROWS, COLUMNS = ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 4), (1, 5), (2, 6), (3, 7))


@pytest.mark.parametrize(
    ("found", "right"),
    [
        ((ROWS, COLUMNS), True),
        (((EVERYONE,),), True),  # as XLA makes it of both
        ((ROWS,), False),
        ((ROWS, ((0, 1), (2, 3), (4, 5), (6, 7))), False),
    ],
)
def test_two_in_a_row_may_become_one(found, right):
    first = all_reduce(ROWS)
    second = all_reduce(COLUMNS)._replace(before=ROWS)
    lowered = module(product("f32", "logits/MatMul"), first, second)
    expected = wrong(*GOOD[:3], *map(all_reduce, found), lowered=lowered)
    assert bool(expected) != right


def test_all_reduces_that_are_gone():
    assert wrong(*GOOD[:3]) == {"all-reduces": "the step has all-reduces among all 8"}


def test_bytes_by_type():
    gradients = Array("f16", (2**20,))
    own = all_reduce((EVERYONE,), elements=2**18)
    half = own._replace(operands=(gradients,), arrays=(gradients,))
    found = checks(*GOOD[:3], own, half)["all-reduces"].found
    expected = "2 of 262,144 numbers of f32, 1,048,576 numbers of f16, 3.0 MiB, among all 8"
    assert found == expected


def test_a_single_replica():
    lowered = module(product("f32", "logits/MatMul"))
    found = checks(*GOOD[:3], lowered=lowered)["all-reduces"]
    assert (found.found, found.wrong) == ("none", "")


def test_recomputed_operations():
    assert computed_twice(module(*GOOD)) == 0
    again = Instruction("fusion.3.remat2", "fusion", (), ())
    assert computed_twice(module(*GOOD, again)) == 1
