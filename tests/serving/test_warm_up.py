"""The requests are what TensorFlow Serving's own messages say, and the SavedModel answers them."""

import numpy as np
import pytest
import tensorflow as tf
from small_config import SMALL
from tensorflow_serving.apis import prediction_log_pb2

from imagenet_fast import build_model, export
from imagenet_fast.serving.warm_up import FILE, synthetic_jpeg, write_warm_up_requests


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A SavedModel of a network that has learnt nothing."""
    return export(build_model(SMALL), tmp_path_factory.mktemp("warm_up") / "model")


def read_requests(directory):
    """The requests of a SavedModel, by TensorFlow Serving's own definitions."""
    logs = tf.data.TFRecordDataset(f"{directory}/{FILE}").as_numpy_iterator()
    parsed = [prediction_log_pb2.PredictionLog.FromString(log) for log in logs]
    assert [log.WhichOneof("log_type") for log in parsed] == ["predict_log"] * len(parsed)
    return [log.predict_log.request for log in parsed]


@pytest.mark.long
def test_place(model):
    assert str(FILE) == "assets.extra/tf_serving_warmup_requests"
    signatures = [request.model_spec.signature_name for request in read_requests(model)]
    assert signatures == ["serving_default", "features", "pixels"]


@pytest.mark.long
def test_a_session_runs_the_requests(model):
    """TensorFlow Serving runs a SavedModel in a session, by its signatures' names of tensors."""
    requests = read_requests(model)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        graph = tf.compat.v1.saved_model.load(session, ["serve"], model)
        for request in requests:
            signature = graph.signature_def[request.model_spec.signature_name]
            assert set(request.inputs) == set(signature.inputs)
            feed = {
                signature.inputs[name].name: tf.make_ndarray(tensor)
                for name, tensor in request.inputs.items()
            }
            names = {name: info.name for name, info in signature.outputs.items()}
            answers = session.run(names, feed)
            assert {len(answer) for answer in answers.values()} == {1}
            assert answers.get("error", [b""]) == [b""]
            # One request that cannot be read does not fail the others that are batched with it.
            if "images" in signature.inputs:
                images = [*feed[signature.inputs["images"].name], b"none"]
                answers = session.run(names, {signature.inputs["images"].name: images})
                assert [bool(error) for error in answers["error"]] == [False, True]


def test_tensors_are_encoded(tmp_path):
    """Of lengths whose encodings have one, two and three bytes."""
    sent = {size: np.arange(size, dtype=np.uint8) for size in (0, 1, 100, 127, 128, 200, 20000)}
    inputs = {f"tensor {size}": tf.make_tensor_proto(value) for size, value in sent.items()}
    assert write_warm_up_requests(tmp_path, {"één": inputs}) == tmp_path / FILE
    (request,) = read_requests(tmp_path)
    assert request.model_spec.signature_name == "één"
    assert request.model_spec.name == ""
    arrived = {name: tf.make_ndarray(tensor) for name, tensor in request.inputs.items()}
    assert set(arrived) == set(inputs)
    for size, value in sent.items():
        np.testing.assert_array_equal(arrived[f"tensor {size}"], value)


def test_the_image_can_be_decoded():
    pixels = tf.io.decode_jpeg(synthetic_jpeg(20)).numpy()
    assert pixels.shape == (20, 20, 3)
    assert pixels.std() > 10
