"""Gradients of pipelines are those of the same network without one."""

import json
import pathlib

import pytest

pytestmark = pytest.mark.slow

JOB = pathlib.Path(__file__).with_name("gradients_job.py")
MODES = ("always", "except_last", "never")


@pytest.fixture(scope="module")
def differences(tmp_path_factory, run_python_session):
    """The greatest difference of gradients, by the case's name."""
    path = tmp_path_factory.mktemp("gradients") / "out.json"
    run_python_session([JOB, path], timeout=1800)
    return json.loads(path.read_text())


@pytest.mark.parametrize("schedule", ["unrolled", "while"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("parts", [1, 2, 3, 6])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_are_those_of_accumulated_micro_batches(differences, stages, parts, mode, schedule):
    """With batch norm and dropout, of 13 examples, which only 1 divides."""
    assert differences[f"noisy K={stages} M={parts} {mode} {schedule}"] < 1e-6


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("parts", [1, 2, 3, 6])
@pytest.mark.parametrize("stages", [2, 4])
def test_so_are_those_of_forward_and_backward_in_turn(differences, stages, parts, mode):
    assert differences[f"noisy K={stages} M={parts} {mode} 1f1b"] < 1e-6


@pytest.mark.parametrize("schedule", ["unrolled", "while", "1f1b"])
@pytest.mark.parametrize("mode", MODES)
def test_without_batch_norm_they_are_those_of_the_whole_batch(differences, mode, schedule):
    assert differences[f"plain K=3 M=6 {mode} {schedule}, whole batch"] < 1e-6


@pytest.mark.parametrize("parts", [2, 3, 6])
def test_so_are_those_that_they_are_compared_with(differences, parts):
    assert differences[f"plain M={parts}"] < 1e-6


def test_there_is_something_to_compare(differences):
    assert differences["least gradient"] > 1e-4
