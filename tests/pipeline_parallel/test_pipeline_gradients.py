"""Gradients of pipelines are those of the same network without one."""

import itertools
import json
import pathlib

import pytest

pytestmark = pytest.mark.slow

JOB = pathlib.Path(__file__).with_name("gradients_job.py")
# Of the last, some micro-batches are larger than others, and they are more than stages by two.
PARTS = (1, 2, 3, 6)
MODES = ("always", "except_last", "never")
SCHEDULES = ("unrolled", "while", "1f1b")


def noisy_cases():
    """Yields stages, micro-batches, what is computed again, and the schedule.

    Not all with all: of each schedule, a number of stages meets every number of micro-batches, and
    every mode, once or twice.
    """
    for turn, schedule in enumerate(SCHEDULES):
        for stages in (2, 4) if schedule == "1f1b" else (1, 2, 3, 4):
            for place, parts in enumerate(PARTS):
                yield stages, parts, MODES[(stages + place + turn) % len(MODES)], schedule


NOISY = list(noisy_cases())
PLAIN = list(itertools.product([3], PARTS[-1:], MODES, SCHEDULES))


@pytest.fixture(scope="module")
def differences(tmp_path_factory, run_python_session):
    """The greatest difference of gradients, by the case's name."""
    path = tmp_path_factory.mktemp("gradients") / "out.json"
    cases = [*(("noisy", *case) for case in NOISY), *(("plain", *case) for case in PLAIN)]
    run_python_session([JOB, path, json.dumps(cases)], timeout=900)
    return json.loads(path.read_text())


@pytest.mark.parametrize(("stages", "parts", "mode", "schedule"), NOISY)
def test_are_those_of_accumulated_micro_batches(differences, stages, parts, mode, schedule):
    """With batch norm and dropout, of 13 examples, which only 1 divides."""
    assert differences[f"noisy K={stages} M={parts} {mode} {schedule}"] < 1e-6


@pytest.mark.parametrize(("stages", "parts", "mode", "schedule"), PLAIN)
def test_without_batch_norm_they_are_those_of_the_whole_batch(
    differences, stages, parts, mode, schedule
):
    assert differences[f"plain K={stages} M={parts} {mode} {schedule}, whole batch"] < 1e-6


@pytest.mark.parametrize("parts", [2, 3, 6])
def test_so_are_those_that_they_are_compared_with(differences, parts):
    assert differences[f"plain M={parts}"] < 1e-6


def test_there_is_something_to_compare(differences):
    assert differences["least gradient"] > 1e-4
