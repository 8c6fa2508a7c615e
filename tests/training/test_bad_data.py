"""Runs on data of which some cannot be read: how they end, and what they tell of it."""

import dataclasses
import itertools
import json
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from model_weights import weights_in
from small_network import small_network

from imagenet_fast import Config, UserError, train
from imagenet_fast.data import manifest as manifests
from imagenet_fast.data import records
from imagenet_fast.data.bad_images import read_bad_images
from imagenet_fast.data.examples import ENCODED, LABEL

SHARDS, SHARD = 4, 80
# Of the training images, and what is wrong with each: two of a kind in different shards.
BAD = {
    3: "damaged image",
    40: "lost record",  # its data
    79: "no example",
    80: "wrong label",
    155: "lost record",  # its length
    161: "no image",
    200: "wrong label",
    239: "damaged image",
    241: "no example",
    319: "no image",
}
KINDS = ("damaged image", "lost record", "no example", "wrong label", "no image")
OPTIONS = {
    "model": "resnet8",
    "image_size": 16,
    "train_crop": "none",
    "batch_size": 32,
    "learning_rate_batch": 32,
    "warmup": "0 steps",
    "decay_at": "15 steps",
    "duration": "20 steps",  # two epochs
    "eval_every": "10 steps",
    "checkpoint_every": "3 steps",
    "shuffle_buffer": 200,
    "max_bad_images": 11,
    "tensorboard": False,
    "examine": False,
    "strategy": "one_device",
    "steps_per_call": "1",
}


def spoil(record, kind):
    """Makes a record unreadable."""
    example = tf.train.Example.FromString(record)
    fields = example.features.feature
    (image,) = fields[ENCODED].bytes_list.value
    if kind == "no example":
        return record[:-50]
    if kind == "damaged image":
        fields[ENCODED].bytes_list.value[0] = image[:-60]
    elif kind == "no image":
        fields[ENCODED].bytes_list.value[0] = b"<html>" + image
    elif kind == "wrong label":
        fields[LABEL].int64_list.value[0] = 10
    return example.SerializeToString()


def write_data(directory, digits, kinds):
    """Writes 320 digits, those of BAD unreadable, and 50 to evaluate, one of them unreadable."""
    paths = sorted(pathlib.Path(digits).glob("train-*"))
    examples = itertools.chain.from_iterable(map(records.read_records, paths))
    training = list(itertools.islice(examples, SHARDS * SHARD))
    validation = list(itertools.islice(examples, 50))
    for number, kind in kinds.items():
        training[number] = spoil(training[number], kind)
    validation[7] = spoil(validation[7], "damaged image")

    directory.mkdir()
    train_shards = {f"train-{i:05d}": training[i * SHARD : (i + 1) * SHARD] for i in range(SHARDS)}
    splits = {
        split: manifests.Split(
            shards=tuple(
                manifests.Shard(name, *records.write_records(directory / name, shard))
                for name, shard in shards.items()
            ),
            # Nothing but verify reads how many there are of each.
            class_counts=(sum(map(len, shards.values())), *[0] * 9),
        )
        for split, shards in (
            ("train", train_shards),
            ("validation", {"validation-00000": validation}),
        )
    }
    manifest = manifests.read_manifest(digits)
    manifests.write_manifest(dataclasses.replace(manifest, splits=splits), directory)
    lost = [number for number, kind in kinds.items() if kind == "lost record"]
    for place, number in enumerate(lost):
        path = directory / f"train-{number // SHARD:05d}"
        content = bytearray(path.read_bytes())
        offset = list(records.locate_records(path))[number % SHARD]
        content[offset + (100 if place % 2 == 0 else 2)] ^= 1
        path.write_bytes(content)
    return str(directory)


@pytest.fixture(
    scope="module",
    params=[False, pytest.param(True, marks=pytest.mark.long)],
    ids=["whole", "killed"],
)
def killed(request):
    """Whether the run is killed in its second epoch and goes on."""
    return request.param


@pytest.fixture(scope="module")
def config(killed, digits, tmp_path_factory):
    """Of a run on data that is bad in five ways."""
    directory = tmp_path_factory.mktemp("bad")
    return Config(
        data_dir=write_data(directory / "data", digits, BAD),
        model_dir=str(directory / "run"),
        **OPTIONS,
    )


class At(keras.callbacks.Callback):
    """Does something after so many steps."""

    def __init__(self, step, action):
        super().__init__()
        self._left, self._action = step, action

    def on_train_batch_end(self, batch, logs=None):
        self._left -= 1
        if not self._left:
            self._action(self.model)


def kill(model):
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def summary(config, killed):
    """Of that run."""
    if killed:
        with pytest.raises(KeyboardInterrupt):
            train(config, callbacks=[At(14, kill)], model=small_network)
    return train(config, model=small_network)


@pytest.mark.long
def test_unreadable_images_do_not_change_the_weights(config, summary, digits, tmp_path):
    """All of them are bad in one way here: they have no part in a run, whatever is wrong."""
    one_way = dict.fromkeys(BAD, "wrong label")
    other = train(
        config.replace(
            data_dir=write_data(tmp_path / "data", digits, one_way),
            model_dir=str(tmp_path / "run"),
        ),
        model=small_network,
    )
    assert other["bad_images"] == {"wrong label": 10, "damaged image": 1}
    for name in ("top1", "loss", "images_evaluated", "steps"):
        assert summary[name] == other[name]
    found, expected = (weights_in(directory) for directory in (config.model_dir, tmp_path / "run"))
    assert found.keys() == expected.keys() and len(found) > 10
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_unreadable_images_are_counted_exactly(summary):
    assert summary["images_skipped_in_training"] == 2 * len(BAD)
    assert (summary["images_evaluated"], summary["images_skipped_in_evaluation"]) == (49, 1)
    assert summary["bad_images"] == {"damaged image": 3, **dict.fromkeys(KINDS[1:], 2)}


def test_unreadable_images_are_listed_once(config, summary):
    """After two epochs and three evaluations, or, of a killed run, more."""
    path = pathlib.Path(config.model_dir, "bad_images.jsonl")
    lines = path.read_text().splitlines()
    assert len(lines) == len(set(lines)) == len(BAD) + 1
    found = [json.loads(line) for line in lines]
    kinds = [line["kind"] for line in found if line["split"] == "train"]
    assert sorted(kinds) == sorted(BAD.values())
    assert [line["kind"] for line in found if line["split"] == "validation"] == ["damaged image"]
    lost = {(line["shard"], line["record"]) for line in found if line["kind"] == "lost record"}
    assert lost == {("train-00000", 40), ("train-00001", 155 - SHARD)}
    names = [line["file"] for line in found if line["kind"] not in ("lost record", "no example")]
    assert len(set(names)) == len(names) == 7 and all(names)


def test_unreadable_images_are_in_the_output_and_the_report(config, summary, capsys):
    train(config, model=small_network)
    assert (
        "unreadable images: 11 (3 damaged image, 2 lost record, 2 no example, 2 no image, 2 wrong "
        f"label), listed in {config.model_dir}/bad_images.jsonl\n"
    ) in capsys.readouterr().err
    page = pathlib.Path(config.model_dir, "report.html").read_text()
    assert "Unreadable images" in page
    assert "lost record" in page


@pytest.mark.long
def test_too_many_unreadable_images_stop_the_run(config, tmp_path):
    config = config.replace(model_dir=str(tmp_path / "run"), max_bad_images=3)
    with pytest.raises(UserError, match="images could not be read") as caught:
        train(config, model=small_network)
    message = str(caught.value)
    assert "more than max_bad_images=3; " in message
    assert f"listed in {config.model_dir}/bad_images.jsonl: " in message
    first = read_bad_images(config.model_dir)[:3]
    for image in first:
        assert f"({image['kind']}: {image['reason']})" in message
    assert message.endswith("; ...")


@pytest.mark.long
def test_a_missing_shard_is_named_and_the_run_can_resume(config, digits, tmp_path):
    data = pathlib.Path(write_data(tmp_path / "data", digits, {}))
    # Two epochs more: the next one is read ahead, and what is open cannot disappear. An evaluation
    # would find it first.
    config = config.replace(
        data_dir=str(data),
        model_dir=str(tmp_path / "run"),
        duration="40 steps",
        eval_every="40 steps",
    )
    shard = data / "train-00002"
    with pytest.raises(UserError) as caught:
        train(config, callbacks=[At(3, lambda model: shard.rename(tmp_path / "away"))])
    assert str(caught.value) == (
        f"{shard}: cannot be read: No such file or directory; after fixing that, the same "
        "command resumes from the last checkpoint"
    )
    (tmp_path / "away").rename(shard)
    summary = train(config)
    assert summary["steps"] == 40
    assert summary["images_skipped_in_training"] == 0
