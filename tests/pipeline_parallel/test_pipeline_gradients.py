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
SCHEDULES = ("gpipe", "gpipe, looped", "1f1b", "interleaved_1f1b")
STAGES = {"1f1b": (2, 4), "interleaved_1f1b": (2, 4)}


def noisy_cases():
    """Yields stages, micro-batches, what is computed again, and the schedule.

    Not all with all: of each schedule, a number of stages meets every number of micro-batches, and
    every mode, once or twice.
    """
    for turn, schedule in enumerate(SCHEDULES):
        for stages in STAGES.get(schedule, (1, 2, 3, 4)):
            for place, parts in enumerate(PARTS):
                yield stages, parts, MODES[(stages + place + turn) % len(MODES)], schedule


NOISY = list(noisy_cases())
PLAIN = list(itertools.product([3], PARTS[-1:], MODES, SCHEDULES[:3]))
PLAIN += [(4, 6, mode, "interleaved_1f1b") for mode in MODES]
# Each kind of network. In the default run, test_losses.py has 1F1B.
FEW = [
    ("noisy", 3, 6, "except_last", "gpipe, looped"),
    ("plain", 4, 6, "except_last", "interleaved_1f1b"),
]


def parameters(kind, cases):
    """The cases of a kind of network, of which all but a few are long."""
    return [
        pytest.param(*case, marks=() if (kind, *case) in FEW else pytest.mark.long)
        for case in cases
    ]


@pytest.fixture(scope="module")
def differences(tmp_path_factory, run_python_session):
    """Returns a function: the greatest difference of gradients in a case.

    The few cases are computed together, and so are the others, when the first one is asked for.
    """
    many = [*(("noisy", *case) for case in NOISY), *(("plain", *case) for case in PLAIN)]
    rest = [case for case in many if case not in FEW]
    assert len(rest) == len(many) - len(FEW)
    found = {}

    def difference(*case, what=""):
        name = "{} K={} M={} {} {}".format(*case) + what
        if name not in found:
            path = tmp_path_factory.mktemp("gradients") / "out.json"
            cases = json.dumps(FEW if case in FEW else rest)
            run_python_session([JOB, path, cases], timeout=900)
            found.update(json.loads(path.read_text()))
            assert found["least gradient"] > 1e-4, "there is nothing to compare"
        return found[name]

    return difference


@pytest.mark.parametrize(("stages", "parts", "mode", "schedule"), parameters("noisy", NOISY))
def test_are_those_of_accumulated_micro_batches(differences, stages, parts, mode, schedule):
    """With batch norm and dropout, of 13 examples, which only 1 divides."""
    assert differences("noisy", stages, parts, mode, schedule) < 1e-6


@pytest.mark.parametrize(("stages", "parts", "mode", "schedule"), parameters("plain", PLAIN))
def test_without_batch_norm_they_are_those_of_the_whole_batch(
    differences, stages, parts, mode, schedule
):
    """So are those of accumulated micro-batches, which they are compared with above."""
    case = ("plain", stages, parts, mode, schedule)
    assert differences(*case) < 1e-6
    assert differences(*case, what=", whole batch") < 1e-6
