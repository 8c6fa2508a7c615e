"""Errors of TensorFlow's that a user can mend, and those that are none of the user's."""

import contextlib
import json
import socket

import pytest
import tensorflow as tf

from imagenet_fast import UserError
from imagenet_fast.training.failures import errors_explained


def test_user_error_raised_in_a_dataset():
    def spoilt():
        yield 1
        raise UserError("/data/train-00001: cannot be read")

    spec = tf.TensorSpec([], tf.int32)
    numbers = tf.data.Dataset.from_generator(spoilt, output_signature=spec)
    with pytest.raises(UserError) as caught, errors_explained(then="begins anew"):
        list(numbers.prefetch(2))
    assert str(caught.value) == (
        "/data/train-00001: cannot be read; after fixing that, the same command begins anew"
    )


@pytest.mark.parametrize(
    ("message", "worker"),
    [
        ("from /job:worker/replica:0/task:0: from /job:worker/replica:0/task:1", "worker 1 (b:2)"),
        ("from /job:worker/replica:0/task:0", "another worker"),  # which is this one
        ("Socket closed", "another worker"),
    ],
)
@pytest.mark.parametrize("error", [tf.errors.UnavailableError, tf.errors.AbortedError])
def test_stopped_worker(monkeypatch, error, message, worker):
    cluster = {"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    with pytest.raises(UserError) as caught, errors_explained(then="begins anew"):
        raise error(None, None, message)
    assert str(caught.value) == (
        f"{worker} has stopped or is unreachable, and without it this one cannot continue "
        f"({error.__name__}); see its output, then start all workers again: the same command "
        "begins anew"
    )


@pytest.mark.parametrize(
    ("message", "is_explained"),
    [
        # TensorFlow 2.21, of a worker between which and the others no packet passes.
        (
            "Graph execution error:\n\nCollective ops is aborted by: Deadline Exceeded\n\n"
            "RPC: /tensorflow.CoordinationService/Heartbeat",
            True,
        ),
        ("Deadline Exceeded", False),
    ],
)
def test_network_between_workers(message, is_explained):
    expected = UserError if is_explained else tf.errors.DeadlineExceededError
    with pytest.raises(expected) as caught, errors_explained(then="begins anew"):
        raise tf.errors.DeadlineExceededError(None, None, message)
    assert "is unreachable" in str(caught.value) or not is_explained


@pytest.mark.parametrize(
    ("error", "message", "pointed"),
    [
        # TensorFlow 2.21 with cuDNN 9.5, XLA without libdevice, too little memory for cuDNN.
        (
            tf.errors.InternalError,
            "Autotuner could not find any supported configs for HLO\n%c",
            True,
        ),
        (tf.errors.InternalError, "libdevice not found at ./libdevice.10.bc: CUDA", True),
        (tf.errors.FailedPreconditionError, "DNN library initialization failed.\nsee", True),
        (tf.errors.UnimplementedError, "DNN library is not found.", True),
        (tf.errors.UnknownError, "Failed to get convolution: cuDNN failed to initialize", True),
        (tf.errors.InternalError, "invalid shape", False),
        # Of values that the program itself has made.
        (tf.errors.InvalidArgumentError, "cuDNN", False),
    ],
)
def test_broken_device(error, message, pointed):
    with pytest.raises((UserError, error)) as caught, errors_explained(then="begins anew"):
        raise error(None, None, message)
    assert isinstance(caught.value, UserError) == pointed
    if pointed:
        assert str(caught.value) == (
            f"{message.splitlines()[0]} ({error.__name__}); `imagenet-fast doctor` checks the "
            "devices of this machine"
        )


@pytest.fixture
def stage_servers():
    """Addresses of three, of which nothing answers at the second."""
    with contextlib.ExitStack() as stack:
        own = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        addresses = [f"127.0.0.1:{server.getsockname()[1]}" for server in own]
        own[1].close()
        yield addresses


@pytest.mark.parametrize(
    ("message", "which", "told"),
    [
        ("from /job:stage/replica:0/task:2: Socket closed", [0, 1, 2], "stage server {2} has"),
        ("Socket closed", [0, 1, 2], "stage server {1} has"),
        ("Socket closed", [0], "stage server {0} has"),
        ("Socket closed", [0, 2], "one of the stage servers {0}, {2} has"),
    ],
)
def test_stopped_stage_server(stage_servers, message, which, told):
    used = [stage_servers[place] for place in which]
    with pytest.raises(UserError) as caught, errors_explained("goes on", used):
        raise tf.errors.UnavailableError(None, None, message)
    assert str(caught.value) == (
        f"{told.format(*stage_servers)} stopped or is unreachable (UnavailableError); when it "
        "runs again, the same command goes on"
    )


@pytest.mark.parametrize(
    "place",
    [
        "{{function_node __wrapped__x}} Error in user-defined function passed to FlatMap: ",
        "{{function_node __wrapped__x_device_/job:localhost}} ",  # TensorFlow 2.15
    ],
)
def test_missing_shard(place):
    message = (
        f"{place}/data/a; b/train-0; No such file\n\t [[{{{{function f}}}}{{{{node ReadFile}}}}]]"
    )
    with pytest.raises(UserError) as caught, errors_explained(then="begins anew"):
        raise tf.errors.NotFoundError(None, None, message)
    assert str(caught.value) == (
        "/data/a; b/train-0: cannot be read: No such file; after fixing that, the same command "
        "begins anew"
    )


@pytest.mark.parametrize("error", [tf.errors.PermissionDeniedError, tf.errors.AbortedError])
def test_unavailable_bucket(error):
    message = (
        "Error executing an HTTP request: HTTP response code 403 with body '{\n"
        '  "message": "no more access"\n}\'\n\t when uploading gs://runs/a/ckpt-1.index'
    )
    with pytest.raises(UserError) as caught, errors_explained(then="begins anew"):
        raise error(None, None, message)
    assert str(caught.value).startswith("gs://runs/a/ckpt-1.index: ")
    assert "no more access" in str(caught.value) and "worker" not in str(caught.value)
    assert str(caught.value).endswith("; after fixing that, the same command begins anew")


def test_a_full_disk_of_the_compile_cache():
    message = "/tmp/imagenet-fast-xla-a/xla_compile_cache__1.pb.tmp; No space left on device"
    with pytest.raises(UserError, match="--compile_cache=none"), errors_explained("resumes"):
        raise tf.errors.ResourceExhaustedError(None, None, message)


@pytest.mark.parametrize(
    "error", [tf.errors.InvalidArgumentError(None, None, "a bug"), RuntimeError("a bug")]
)
def test_other_errors_pass(error):
    with pytest.raises(type(error), match="a bug"), errors_explained(then="begins anew"):
        raise error
