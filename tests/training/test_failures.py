"""Errors of TensorFlow's that a user can mend, and those that are none of the user's."""

import contextlib
import json
import re
import socket

import pytest
import tensorflow as tf

from imagenet_fast import Config, UserError
from imagenet_fast.training.failures import errors_explained, memory_explained


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


OOM = "OOM when allocating tensor with shape[256,64,112,112] and type float on GPU:0"
TWICE = "give --rematerialize=always, for the same in up to a third more time,"


@pytest.mark.parametrize(
    ("changes", "replicas", "advice"),
    [
        (
            {"batch_size": 256},
            1,
            f"{TWICE} or begin a new run with --accumulation_steps=2, for 128",
        ),
        ({"batch_size": 256}, 4, "--accumulation_steps=2, for 32 instead of 64 of a replica's"),
        ({"batch_size": 27, "accumulation_steps": 3}, 1, "--accumulation_steps=9, for 3 instead"),
        ({"batch_size": 7, "rematerialize": "always"}, 1, ": begin a new run with --accumulation_"),
        ({"batch_size": 6, "mixup_alpha": 0.2}, 1, "--accumulation_steps=2, for 3 instead of 6"),
        ({"batch_size": 6, "mixup_alpha": 0.2, "accumulation_steps": 3}, 1, f"{TWICE}"),
        ({"batch_size": 1, "rematerialize": "always"}, 1, ": use smaller images, a smaller net"),
    ],
)
def test_out_of_memory(changes, replicas, advice):
    config = Config(**changes)
    images = config.batch_size // replicas
    with pytest.raises(UserError) as caught, memory_explained(config, images, images):
        raise tf.errors.ResourceExhaustedError(None, None, f"{OOM}\nmore")
    assert str(caught.value).startswith(f"a device has run out of memory ({OOM}): ")
    assert advice in str(caught.value)
    # The accumulation can be configured.
    for parts in re.findall(r"accumulation_steps=(\d+)", str(caught.value)):
        config.replace(accumulation_steps=int(parts))


def test_what_is_selected_is_split_too():
    config = Config(batch_size=64, select_by_loss=0.5625)
    with pytest.raises(UserError, match="steps=2,"), memory_explained(config, 64, 36):
        raise tf.errors.ResourceExhaustedError(None, None, OOM)


def test_a_full_disk_is_not_memory():
    error = tf.errors.ResourceExhaustedError(None, None, "/data; No space left on device")
    with pytest.raises(tf.errors.ResourceExhaustedError), memory_explained(Config(), 1, 1):
        raise error


@pytest.mark.parametrize("xla", [False, True])
def test_what_tensorflow_says(xla):
    @tf.function
    def ones(count):
        return tf.reduce_max(tf.random.stateless_uniform([count, count], (0, 1)))

    @tf.function(jit_compile=True)
    def large():
        return tf.random.stateless_uniform([2**20, 2**20, 16], (0, 1))

    reason = "Out of memory while trying to allocate 64" if xla else "OOM when allocating tensor"
    message = rf"a device has run out of memory \({reason}.*\): give --rematerialize=always"
    with pytest.raises(UserError, match=message), memory_explained(Config(), 256, 256):
        large() if xla else ones(tf.constant(2**22))
