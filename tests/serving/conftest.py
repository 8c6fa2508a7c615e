"""A trained network, and what evaluation says of each validation image."""

import itertools

import pytest

from imagenet_fast import Config, build_model, make_dataset
from imagenet_fast.data.examples import ENCODED, LABEL, decode_example
from imagenet_fast.data.info import read_info
from imagenet_fast.data.records import read_records
from imagenet_fast.training.checkpoints.checkpoint import Checkpoints, restore_weights
from imagenet_fast.training.checkpoints.model_dir import claim_model_dir


@pytest.fixture(scope="session")
def config(digits, made_once):
    """The options of a run of which a checkpoint is there.

    The model computes in bfloat16, but was trained in float32, which takes a CPU a part of the
    time.
    """
    config = Config(
        data_dir=digits,
        model="resnet8",
        image_size=16,
        train_crop="none",
        flip=False,
        pixel_mean=(77.9, 77.9, 77.9),
        pixel_std=(95.9, 95.9, 95.9),
        batch_size=32,
        learning_rate_batch=32,
        warmup="0 steps",
        strategy="one_device",
    )

    def make(directory):
        learner = build_model(config)
        learner.fit(make_dataset(config, "train"), epochs=2, verbose=0)
        own = config.replace(precision="mixed_bfloat16", model_dir=str(directory))
        model = build_model(own)
        model.set_weights(learner.get_weights())
        claim_model_dir(own, model.labels)
        Checkpoints(model, own).save(88, {"step": 88})

    directory = made_once("exported run", make)
    return config.replace(precision="mixed_bfloat16", model_dir=str(directory))


@pytest.fixture(scope="session")
def trained(config):
    """The model of that run."""
    model = build_model(config)
    restore_weights(model, config.model_dir)
    return model


@pytest.fixture(scope="session")
def twin(config, trained):
    """The same weights in float32."""
    model = build_model(config.replace(precision="float32"))
    restore_weights(model, config.model_dir)
    return model


@pytest.fixture(scope="session")
def validation(config):
    """Encoded images and labels in the order of evaluation: a record of each shard in turn."""
    paths = read_info(config).splits["validation"].paths
    shards = [[decode_example(record) for record in read_records(path)] for path in paths]
    examples = [e for turn in itertools.zip_longest(*shards) for e in turn if e is not None]
    labels = [int(example[LABEL][0]) for example in examples]
    return [bytes(example[ENCODED][0]) for example in examples], labels


@pytest.fixture(scope="session")
def evaluated(config, twin, validation):
    """Probabilities of the validation images, float32 [359, 10], by evaluation's own pipeline."""
    return evaluate(twin, config.replace(precision="float32"), validation[1])


@pytest.fixture(scope="session")
def evaluated_in_bfloat16(config, trained, validation):
    """The same in bfloat16."""
    return evaluate(trained, config, validation[1])


def evaluate(model, config, labels):
    validation = make_dataset(config, "validation")
    assert [label for _, some, _ in validation for label in some.numpy()] == labels
    return model.predict(validation, verbose=0)
