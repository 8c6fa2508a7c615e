"""The devices of stages, those of other processes included."""

import contextlib
import json
import pathlib

import numpy as np
import pytest
import tensorflow as tf
from server_processes import HOST, running_stage_server

from imagenet_fast.base.addresses import free_port
from imagenet_fast.base.errors import UserError
from imagenet_fast.pipeline_parallel.placement import stage_devices

JOB = pathlib.Path(__file__).with_name("servers_job.py")


def test_devices_of_this_process():
    own = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    (device,) = stage_devices(1)
    assert tf.DeviceSpec.from_string(own[0].name).device_type in device
    with tf.device(device):
        assert tf.zeros([]).device == device


def test_more_stages_than_devices():
    count = len(tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU"))
    with pytest.raises(UserError, match=f"needs {count + 1} devices, but there are {count}"):
        stage_devices(count + 1)


def test_cpus_are_taken_where_they_are_asked_for(monkeypatch):
    asked = []
    listed = tf.config.list_logical_devices
    monkeypatch.setattr(
        tf.config, "list_logical_devices", lambda kind: asked.append(kind) or listed(kind)
    )
    assert "CPU:0" in stage_devices(1, on_cpus=True)[0]
    assert asked == ["CPU"]


def test_a_server_that_is_not_there():
    server = f"{HOST}:{free_port()}"
    with pytest.raises(UserError, match=f"stage server {server} cannot be reached.*stage-server"):
        stage_devices(2, [server])


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("graph", "servers"), [("loops", 1), ("loops", 2), ("unrolled", 2)])
def test_stages_in_servers_compute_the_same(run_python, tmp_path, graph, servers):
    path = tmp_path / "out.json"
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(running_stage_server()) for _ in range(servers)]
        run_python([JOB, path, graph, *(address for _, address in started)])
    found = json.loads(path.read_text())
    jobs = [tf.DeviceSpec.from_string(device) for device in found["devices"]]
    expected = [("trainer", 0), *(("stage", number) for number in range(servers))]
    assert [(own.job, own.task) for own in jobs] == expected
    assert found["alone"]["jobs"] == ["trainer"]
    assert found["served"]["jobs"] == ["stage", "trainer"]
    for kind in ("losses", "evaluated", "predicted"):
        np.testing.assert_allclose(
            found["served"][kind], found["alone"][kind], rtol=1e-5, atol=1e-6, err_msg=kind
        )
