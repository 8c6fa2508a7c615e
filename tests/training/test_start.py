"""What a run says where it begins."""

import types

import pytest

from imagenet_fast import Config
from imagenet_fast.training import start
from imagenet_fast.training.logs.evaluations import Evaluations


@pytest.mark.parametrize(
    ("changes", "device", "replicas", "step", "expected"),
    [
        ({}, "GPU", 1, 0, True),
        ({"xla": True}, "GPU", 1, 0, False),
        ({"deterministic": True}, "GPU", 1, 0, False),
        ({"pipeline_stages": 2, "accumulation_steps": 2}, "GPU", 1, 0, False),
        ({}, "CPU", 1, 0, False),
        ({}, "GPU", 2, 0, False),
        ({}, "GPU", 1, 1, False),
    ],
)
def test_xla_is_proposed_where_it_was_measured_to_be_faster(
    changes, device, replicas, step, expected, monkeypatch
):
    place = f"/job:localhost/replica:0/task:0/device:{device}:0"
    monkeypatch.setattr(start, "devices_of", lambda _: (place,))
    strategy = types.SimpleNamespace(num_replicas_in_sync=replicas)
    run = types.SimpleNamespace(config=Config(**changes), strategy=strategy)
    begins = start.Start(step, 1000, Evaluations(), False, {})
    assert start.gains_by_xla(run, begins) == expected
