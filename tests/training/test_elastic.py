"""A run's logical replicas train the same on whatever devices carry them."""

import functools
import pathlib

import numpy as np
import pytest
from elastic_job import CASES

JOB = pathlib.Path(__file__).with_name("elastic_job.py")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory, run_python_session):
    """Weights after some steps, by case and number of devices."""
    folder = tmp_path_factory.mktemp("elastic")

    @functools.cache
    def arrays(devices):
        run_python_session([JOB, folder / f"{devices}.npz", devices])
        return dict(np.load(folder / f"{devices}.npz"))

    def get(case, devices):
        return [own for name, own in arrays(devices).items() if name.startswith(f"{case} ")]

    return get


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_replicas_train_the_same_on_fewer_devices(results, case, devices):
    expected, found = results(case, 4), results(case, devices)
    assert len(found) == len(expected) > 5
    for one, other in zip(found, expected):
        if one.dtype.kind == "f":
            np.testing.assert_allclose(one, other, rtol=0, atol=2e-6)
        else:  # counters of random draws
            np.testing.assert_array_equal(one, other)


def test_cases_differ(results):
    """Each option has an effect, so that the comparisons say something."""
    first = {case: results(case, 4)[0] for case in CASES}
    for one in CASES:
        for other in CASES:
            assert one == other or np.abs(first[one] - first[other]).max() > 1e-4
