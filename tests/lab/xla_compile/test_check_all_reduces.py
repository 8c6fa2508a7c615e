"""Checks of a step's all-reduces: recipes pass, planted errors are found."""

import pytest
import tensorflow as tf

from imagenet_fast.distribute import all_reduce, virtual
from imagenet_fast.distribute.groups import columns, consecutive
from imagenet_fast.lab.xla_compile.check_all_reduces import check_all_reduces, groups_text
from imagenet_fast.layers import grouped_batch_normalization
from imagenet_fast.training.step.classifier import Classifier

GROUPED = {"batch_norm_batch_size": 16}
TORUS = {"all_reduce": "torus_2d"}
PAIRS = "(0,1 2,3 4,5 6,7)"
AXES = "along (0,1,2,3 4,5,6,7) and (0,4 1,5 2,6 3,7), half first along each"


def checks(found, **changes):
    """Returns the check of statistics and that of gradients."""
    return check_all_reduces(found.step.module, found.config.replace(**changes), found.model)


@pytest.mark.parametrize(
    ("options", "statistics", "gradients"),
    [
        pytest.param(
            {},
            "none: batch norm of each replica alone",
            "24 of f32 (75,295 numbers) among all 8",
            id="builtin",
            marks=pytest.mark.long,
        ),
        # Two of each of seven layers: [sums, sums of squares, count].
        pytest.param(
            GROUPED,
            f"14 of f32 (974 numbers) among {PAIRS}",
            "24 of f32 (75,295 numbers) among all 8",
            id="groups",
        ),
        pytest.param(
            {**GROUPED, **TORUS, "precision": "mixed_bfloat16"},
            f"14 of f32 (974 numbers) among {PAIRS}",
            # Filled up to a multiple of the replicas.
            f"4 of f32 (75,304 numbers) {AXES}",
            id="torus",
            marks=pytest.mark.long,
        ),
        pytest.param(
            {**TORUS, "all_reduce_group": 2, "all_reduce_dtype": "bfloat16"},
            "none: batch norm of each replica alone",
            "2 of f32 (8 numbers), 2 of bf16 (75,296 numbers) along (0,1 2,3 4,5 6,7) and "
            "(0,2,4,6 1,3,5,7), half first along each",
            id="torus_16_bit",
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"fusion_segments": (4, 9), "all_reduce_dtype": "bfloat16", "accumulation_steps": 2},
            "none: batch norm of each replica alone",
            "1 of f32 (8 numbers), 3 of bf16 (75,296 numbers) among all 8",
            id="segments",
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"batch_norm_batch_size": 64, "accumulation_steps": 2},
            "14 of f32 (974 numbers) among all 8",
            "24 of f32 (75,295 numbers) among all 8",
            id="micro_batches",
            marks=pytest.mark.long,
        ),
    ],
)
def test_recipes(lowered, options, statistics, gradients):
    found = checks(lowered(**options))
    assert [own.found for own in found] == [statistics, gradients]
    assert [own.wrong for own in found] == ["", ""]


@pytest.mark.parametrize(
    ("options", "recipe", "statistics", "gradients"),
    [
        (GROUPED, {"batch_norm_batch_size": 32}, "14 are missing among (0,1,2,3 4,5,6,7)", PAIRS),
        pytest.param({}, GROUPED, f"14 are missing among {PAIRS}", "", marks=pytest.mark.long),
        (GROUPED, {"batch_norm_batch_size": 0}, "", f"there are all-reduces among {PAIRS}"),
        ({}, TORUS, "", "there are all-reduces among all 8"),
        pytest.param(
            TORUS,
            {"all_reduce": "auto"},
            "",
            "there are all-reduces among (0,1,2,3 4,5,6,7) and (0,4 1,5",
            marks=pytest.mark.long,
        ),
        (
            TORUS,
            {"all_reduce_group": 2},
            "",
            "there are all-reduces among (0,1,2,3 4,5,6,7) and (0,4 1,5",
        ),
        (
            {},
            {"all_reduce_dtype": "bfloat16"},
            "",
            "0 of bf16, but there should be 75,290, and 75,295 of f32, but there should be 5",
        ),
    ],
)
def test_steps_of_other_recipes(lowered, options, recipe, statistics, gradients):
    one, other = checks(lowered(**options), **recipe)
    assert statistics in one.wrong
    assert bool(statistics) == bool(one.wrong)
    assert gradients in other.wrong
    assert bool(gradients) == bool(other.wrong)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (((0, 1, 2),), "all 3"),
        (((0, 1), (2, 3), (4, 5), (6, 7)), PAIRS),
        (consecutive(40, 8).members, "(0,1,...,7 8,9,...,15 ... 32,33,...,39)"),
    ],
)
def test_groups_in_words(groups, expected):
    assert groups_text(groups) == expected


# --- Mistakes in the code that sums


def strided(replicas, size):
    return columns(consecutive(replicas, replicas // size))


@pytest.mark.long
def test_batch_norm_with_replicas_that_are_no_neighbours(lower_anew, monkeypatch):
    monkeypatch.setattr(grouped_batch_normalization, "consecutive", strided)
    statistics, _ = checks(lower_anew(**GROUPED))
    assert statistics.wrong == (
        f"14 are missing among {PAIRS}; there are all-reduces of the same sizes among "
        "(0,4 1,5 2,6 3,7)"
    )


@pytest.mark.long
def test_batch_norm_without_its_sum_backward(lower_anew, monkeypatch):
    original = grouped_batch_normalization.group_sum
    monkeypatch.setattr(
        grouped_batch_normalization,
        "group_sum",
        lambda tensor, *rest: tensor + tf.stop_gradient(original(tensor, *rest) - tensor),
    )
    statistics, gradients = checks(lower_anew(**GROUPED))
    assert statistics.wrong == f"7 are missing among {PAIRS}"
    assert not gradients.wrong


@pytest.mark.long
def test_gradients_of_half_of_the_replicas(lower_anew, monkeypatch):
    monkeypatch.setattr(
        virtual, "consecutive", lambda replicas, size: consecutive(replicas, size // 2)
    )
    assert checks(lower_anew())[1].wrong == "there are all-reduces among (0,1,2,3 4,5,6,7)"


@pytest.mark.long
def test_gradients_that_are_left_out(lower_anew, monkeypatch):
    original = Classifier._all_reduce

    def all_but_the_first(self, gradients, sums):
        return [gradients[0], *original(self, gradients[1:], sums)]

    monkeypatch.setattr(Classifier, "_all_reduce", all_but_the_first)
    # The 3x3 convolution of 3 channels to 16.
    assert checks(lower_anew())[1].wrong == (
        f"{75_295 - 3 * 3 * 3 * 16:,} of f32, but there should be 75,295"
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("orders", "expected"),
    [
        pytest.param(
            [("rows", "columns"), ("rows", "columns")],
            "75,304 numbers go along rows first, but 0",
            id="one_order",
        ),
        pytest.param(
            [("rows", "columns"), ("columns",)],
            "columns, then rows: 37,652 numbers go along the fi",
            id="one_axis",
        ),
        pytest.param(
            [("rows", "columns"), ("columns", "rows", "columns")],
            "numbers go along the first axis",
            id="thrice",
        ),
    ],
)
def test_a_torus_along_other_axes(lower_anew, monkeypatch, orders, expected):
    def along(tensor, rows, columns):
        axes = {"rows": rows, "columns": columns}
        parts = tf.split(tensor, 2)
        for i, order in enumerate(orders):
            for axis in order:
                parts[i] = all_reduce.cross_replica_sum(parts[i], axes[axis])
        return tf.concat(parts, 0)

    monkeypatch.setattr(all_reduce, "sum_along_both_axes", along)
    assert expected in checks(lower_anew(**TORUS))[1].wrong
