"""Evaluation of a checkpoint, against the model asked image by image."""

import collections
import csv
import json
import pathlib
import shutil
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import scipy.optimize
import scipy.special
import tensorflow as tf
from sklearn.metrics import confusion_matrix
from small_network import small_network

from imagenet_fast import (
    Config,
    UserError,
    build_model,
    commands,
    evaluate,
    export,
    make_dataset,
    models,
)
from imagenet_fast.data.evaluated import evaluated_images, file_names
from imagenet_fast.data.examples import FILENAME, LABEL, decode_example
from imagenet_fast.data.info import read_info
from imagenet_fast.data.prepare.job import prepare
from imagenet_fast.data.prepare.sources import open_source
from imagenet_fast.data.prepare.sources.arrays import ArraySource
from imagenet_fast.data.records import read_records
from imagenet_fast.distribute.strategy import make_strategy
from imagenet_fast.training import evaluate as evaluation
from imagenet_fast.training.checkpoints.checkpoint import Checkpoints
from imagenet_fast.training.checkpoints.model_dir import claim_model_dir
from imagenet_fast.training.step.calibration import calibration_error, reliability


@pytest.fixture(scope="module")
def config(digits, tmp_path_factory):
    return Config(
        data_dir=digits,
        model_dir=str(tmp_path_factory.mktemp("evaluate")),
        model="resnet8",
        image_size=16,
        train_crop="none",
        batch_size=32,
        strategy="one_device",
        seed=5,
    )


@pytest.fixture(scope="module")
def saved(config):
    """A model with a checkpoint: not trained, but with answers of some certainty."""
    model = build_model(config)
    classifier = model.trainable_variables[-2]
    classifier.assign(classifier * 500)
    claim_model_dir(config, model.labels)
    Checkpoints(model, config).save(7, {"step": 7})
    return model


@pytest.fixture(scope="module")
def logits_and_labels(config, saved):
    """Of all validation images, float64, in the order of the pipeline of one device."""
    images, labels = [], []
    for some_images, some_labels, _ in make_dataset(config, "validation"):
        real = some_labels.numpy() >= 0
        images.append(some_images.numpy()[real])
        labels.append(some_labels.numpy()[real])
    logits = saved(np.concatenate(images), training=False).numpy().astype("float64")
    labels = np.concatenate(labels)
    assert len(labels) == 359
    return logits, labels


@pytest.fixture(scope="module")
def expected(logits_and_labels):
    """Loss, top-1 and top-5, in NumPy."""
    logits, labels = logits_and_labels
    right = logits[np.arange(359), labels]
    ranks = (logits > right[:, None]).sum(1)
    losses = np.log(np.exp(logits).sum(1)) - right
    return {"loss": losses.mean(), "top1": (ranks < 1).mean(), "top5": (ranks < 5).mean()}


def test_result(config, saved, expected):
    result = evaluate(config)
    assert set(result) == {
        *("loss", "top1", "top5", "top1_interval", "top5_interval", "ece"),
        *("examples", "skipped", "checkpoint"),
    }
    assert {name: result[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert (result["examples"], result["skipped"]) == (359, 0)
    assert type(result["examples"]) is type(result["skipped"]) is int
    assert result["checkpoint"] == f"{config.model_dir}/checkpoints/ckpt-7"
    # More than guessing the same for all.
    assert result["loss"] != pytest.approx(np.log(10), abs=0.01)


def test_a_batch_of_more_images_than_there_are(config, saved, expected):
    """TensorFlow would end the process where there is no memory for it."""
    result = evaluate(config.replace(eval_batch_size=2**40))
    assert {name: result[name] for name in expected} == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"width": 10**6},
        pytest.param(
            {"model": "amoebanet_d", "normal_cells": 150, "image_size": 32}, marks=pytest.mark.long
        ),
    ],
)
def test_a_network_that_is_larger_than_the_checkpoint(config, saved, tmp_path, changes):
    """A configuration of others may ask for any memory."""
    shutil.copytree(config.model_dir, tmp_path / "run")
    large = config.replace(model_dir=str(tmp_path / "run"), model="resnet9").replace(**changes)
    (tmp_path / "run" / "config.json").write_text(large.to_json())
    for command in (evaluate, lambda config: export(config, tmp_path / "export")):
        with pytest.raises(UserError, match=r"is larger than checkpoint .*/run/checkpoints/ckpt-7"):
            command(large)


# In the default run, the test above has a batch that does not divide the images.
@pytest.mark.long
@pytest.mark.parametrize("batch", [50, 1000])
def test_each_image_once_at_any_batch(config, saved, expected, batch):
    result = evaluate(config.replace(eval_batch_size=batch))
    assert result["examples"] == 359
    assert {name: result[name] for name in expected} == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("fraction", "batch"), [(1.0, 8), (0.25, 32)])
def test_the_default_batch_is_trainings_if_the_result_depends_on_it(
    config, saved, monkeypatch, fraction, batch
):
    views = {"test_time_augmentation": "flip_and_shift", "tta_fraction": fraction}
    monkeypatch.setattr(evaluation, "_IMAGES_PER_DEVICE", 8)

    def stop(_, config, *__):
        raise UserError(f"batches of {config.eval_batch_size}")

    monkeypatch.setattr(evaluation, "evaluation_steps", stop)
    with pytest.raises(UserError, match=f"batches of {batch}$"):
        evaluate(config.replace(**views))


@pytest.mark.long
@pytest.mark.parametrize("on_device", [False, True])
def test_another_image_size_than_in_training(config, saved, expected, tmp_path, on_device):
    config = config.replace(data_on_device=on_device)
    result = evaluate(config.replace(eval_image_size=24))
    # As if the weights were of training with that size.
    shutil.copytree(config.model_dir, tmp_path / "run")
    other = config.replace(model_dir=str(tmp_path / "run"), image_size=24)
    (tmp_path / "run" / "config.json").write_text(other.to_json())
    own = evaluate(other)
    assert {**result, "checkpoint": ""} == {**own, "checkpoint": ""}
    assert result["loss"] != pytest.approx(expected["loss"], rel=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
def test_another_precision_than_in_training(config, saved, expected, precision):
    result = evaluate(config.replace(precision=precision))
    assert result["loss"] == pytest.approx(expected["loss"], rel=0.05)
    assert result["top1"] == pytest.approx(expected["top1"], abs=0.05)
    assert result["loss"] != pytest.approx(expected["loss"], rel=1e-6)


def test_a_notebooks_fit_and_evaluate_count_each_image_once(config):
    """Keras itself cannot tell how long a distributed data set is."""
    config = config.replace(eval_batch_size=50)
    model = build_model(config, model=small_network)
    validation = make_dataset(config, "validation")
    train = make_dataset(config, "train")
    history = model.fit(
        train, validation_data=validation, steps_per_epoch=1, epochs=2, verbose=0
    ).history
    assert history["val_examples"] == [359, 359]
    assert history["examples"] == [32, 32]
    told = model.evaluate(validation, verbose=0, return_dict=True)
    assert told["loss"] == pytest.approx(history["val_loss"][-1])
    assert told["examples"] == 359
    # Data of one's own is taken whole.
    images, labels = np.zeros((500, 16, 16, 3), "uint8"), np.zeros(500, int)
    told = model.evaluate(images, labels, batch_size=10, verbose=0, return_dict=True)
    assert told["examples"] == 500


@pytest.mark.long
@pytest.mark.parametrize("on_device", [False, True])
def test_predictions_are_those_that_are_evaluated(config, on_device):
    config = config.replace(data_on_device=on_device, eval_batch_size=50)
    model = build_model(config, model=small_network)
    predicted = model.predict(make_dataset(config, "validation"), verbose=0)
    assert predicted.shape == (400 if on_device else 359, 10)  # devices have whole batches
    if on_device:
        steps = tf.range(8, dtype=tf.int64)
        batches = [model.validation_images.batch(step, tf.constant(0)) for step in steps]
    else:
        batches = make_dataset(config, "validation")
    labels = np.concatenate([labels.numpy() for _, labels, _ in batches])
    right = (predicted.argmax(1) == labels)[labels >= 0]
    told = model.evaluate(make_dataset(config, "validation"), verbose=0, return_dict=True)
    assert right.mean() == pytest.approx(told["top1"])


# --- Predictions, calibration, other test sets


def read_predictions(path):
    """Returns labels, best classes, probabilities and losses by file."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    best = [[row[f"class{rank}"] for rank in range(1, 6)] for row in rows]
    probabilities = [[row[f"probability{rank}"] for rank in range(1, 6)] for row in rows]
    return SimpleNamespace(
        files=[row["file"] for row in rows],
        labels=np.array([int(row["label"]) for row in rows]),
        classes=np.array(best, int),
        probabilities=np.array(probabilities, float),
        losses=np.array([float(row["loss"]) for row in rows]),
    )


@pytest.fixture(scope="module")
def knowing(config, saved, tmp_path_factory):
    """A run that knows most images, and is too sure; and its model."""
    config = config.replace(model_dir=str(tmp_path_factory.mktemp("knowing")))
    model = build_model(config)
    head, network = models.head(models.network_of(model)), models.network_of(model)
    features = keras.Model(network.inputs, head.input)
    images, labels, _ = map(np.concatenate, zip(*make_dataset(config, "validation")))
    inputs = features(model.get_layer("normalize")(images)).numpy()
    some = np.arange(359) % 4 > 0
    weights = np.linalg.lstsq(inputs[some], np.eye(10)[labels[some]], rcond=None)[0]
    head.kernel.assign(25 * weights)
    claim_model_dir(config, model.labels)
    Checkpoints(model, config).save(7, {"step": 7})
    return config, model


def test_predictions_temperature_and_calibration(knowing, tmp_path):
    config, model = knowing
    images, labels, _ = map(np.concatenate, zip(*make_dataset(config, "validation")))
    logits = model(images, training=False).numpy().astype("float64")
    path = tmp_path / "predictions.csv"
    result = evaluate(config, predictions=str(path), fit_temperature=True)
    # By the order of the shards, whatever the order in which they are read.
    order = evaluated_images(read_info(config), config, make_strategy(config), "validation")
    logits, labels = (part[np.argsort(order[order >= 0])] for part in (logits, labels))
    found = read_predictions(path)
    assert found.files == list(file_names(read_info(config), "validation"))
    np.testing.assert_array_equal(found.labels, labels)
    probabilities = scipy.special.softmax(logits, axis=1)
    best = np.argsort(-logits, axis=1)[:, :5]
    np.testing.assert_array_equal(found.classes, best)
    expected = np.take_along_axis(probabilities, best, axis=1)
    np.testing.assert_allclose(found.probabilities, expected, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(found.losses, losses_of(logits, labels, 1), rtol=1e-4, atol=1e-6)

    def nll(inverse):
        return losses_of(logits, labels, 1 / inverse).mean()

    inverse = scipy.optimize.minimize_scalar(nll, bounds=(0.07, 10), options={"xatol": 1e-9}).x
    assert result["temperature"] == pytest.approx(1 / inverse, rel=1e-4)
    assert result["nll"] == pytest.approx(nll(1), rel=1e-5)
    assert result["nll_at_temperature"] == pytest.approx(nll(inverse), rel=1e-5)
    right = labels == best[:, 0]
    for name, values in (
        ("ece", probabilities),
        ("ece_at_temperature", scipy.special.softmax(logits * inverse, axis=1)),
    ):
        bins = reliability(values.max(axis=1), right)
        assert result[name] == pytest.approx(calibration_error(bins), abs=2e-3)
    assert result["ece_at_temperature"] < result["ece"] / 2
    with pytest.raises(UserError, match="already exists"):
        evaluate(config, predictions=str(path))


def losses_of(logits, labels, temperature):
    scaled = scipy.special.log_softmax(logits / temperature, axis=1)
    return -scaled[np.arange(len(labels)), labels]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "workers"),
    [
        (["--strategy=mirrored", "--logical_cpus=3"], 0),
        (["--strategy=multi_worker"], 2),
        (["--strategy=multi_worker", "--shard_by=files"], 2),
    ],
    ids=["replicas", "workers", "workers_files"],
)
def test_replicas_and_workers_say_the_same(knowing, tmp_path, run_python, flags, workers):
    config, _ = knowing
    one = evaluate(config, predictions=str(tmp_path / "one.csv"), fit_temperature=True)
    command = ["-m", "imagenet_fast", "evaluate", f"--model_dir={config.model_dir}", "--json"]
    several = tmp_path / "several.csv"
    more = [f"--predictions={several}", "--fit_temperature", "--eval_batch_size=36", *flags]
    out = run_python([*command, *more], workers=workers).stdout
    (line,) = (line for line in out.splitlines() if "{" in line)
    told = json.loads(line[line.index("{") :])
    assert set(told) == set(one)
    for name, value in one.items():
        if name != "checkpoint":
            assert told[name] == pytest.approx(value, rel=1e-5), name
    found, expected = read_predictions(several), read_predictions(tmp_path / "one.csv")
    assert found.files == expected.files
    for name in ("labels", "classes"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    for name in ("probabilities", "losses"):
        pair = getattr(found, name), getattr(expected, name)
        np.testing.assert_allclose(*pair, rtol=1e-4, atol=1e-7)


def test_a_test_set_of_some_classes(with_some_classes, saved, tmp_path):
    """Only its classes compete, by whatever names."""
    config, (logits, labels) = with_some_classes, logits_of_some_classes(with_some_classes, saved)
    (tmp_path / "map.json").write_text(json.dumps({name: int(name) for name in "0123456789"}))
    own = [0, 1, 4, 7]
    among_all = (logits.argmax(axis=1) == labels).mean()
    logits, labels = logits[:, own].astype("float64"), np.searchsorted(own, labels)
    for class_map in ("same", str(tmp_path / "map.json")):
        path = tmp_path / f"{len(class_map)}.csv"
        result = evaluate(config, class_map=class_map, per_class=True, predictions=str(path))
        answers = logits.argmax(axis=1)
        assert result["top1"] == pytest.approx((answers == labels).mean())
        assert result["loss"] == pytest.approx(losses_of(logits, labels, 1).mean(), rel=1e-4)
        assert result["top1"] > among_all
        assert result["competing"] == 4
        assert [row["name"] for row in result["classes"]] == [str(number) for number in own]
        with path.open() as file:
            rows = list(csv.DictReader(file))
        assert "class4" in rows[0] and "class5" not in rows[0]
        counts = collections.Counter(row["class1"] for row in rows)
        assert counts == collections.Counter(str(own[answer]) for answer in answers)


def test_a_class_map_that_lacks_classes(with_some_classes, saved, tmp_path):
    config = with_some_classes
    (tmp_path / "map.csv").write_text("7,7\n1,one\n4,4\n0,0\n")
    with pytest.raises(UserError, match="the model has no class 'one'"):
        evaluate(config, class_map=str(tmp_path / "map.csv"))


def test_several_right_labels(config, saved, logits_and_labels, tmp_path):
    logits, _ = logits_and_labels
    order = evaluated_images(read_info(config), config, make_strategy(config), "validation")
    answers = logits.argmax(axis=1)[np.argsort(order[order >= 0])]
    names = list(file_names(read_info(config), "validation"))
    generator = np.random.default_rng(0)
    lists = [generator.choice(10, generator.integers(0, 4), False).tolist() for _ in names]
    right = [answer in own for answer, own in zip(answers, lists) if own]
    by_name = dict(zip(names, lists))
    for content in (by_name, [by_name[name] for name in sorted(names)]):
        (tmp_path / "real.json").write_text(json.dumps(content))
        result = evaluate(config, right_labels=str(tmp_path / "real.json"))
        assert result["any_label_top1"] == pytest.approx(np.mean(right), abs=1e-9)
        assert result["any_label_examples"] == len(right) < 359
        assert result["top1"] != pytest.approx(result["any_label_top1"], abs=0.01)
    with pytest.raises(UserError, match="class_map excludes right_labels"):
        evaluate(config, right_labels="a.json", class_map="same")


def test_right_labels_of_other_images_are_refused_before_the_evaluation(
    config, saved, tmp_path, monkeypatch
):
    (tmp_path / "real.json").write_text("[[1]]")
    monkeypatch.setattr(evaluation, "Evaluator", lambda *_, **__: pytest.fail("evaluated"))
    with pytest.raises(UserError, match="has 1 lists, but there are 359 images"):
        evaluate(config, right_labels=str(tmp_path / "real.json"))


def test_sigmoids_have_no_temperature(config, saved, tmp_path):
    sigmoids = config.replace(loss="binary_cross_entropy", model_dir=str(tmp_path))
    claim_model_dir(sigmoids, saved.labels)
    with pytest.raises(UserError, match="a fitted temperature is of a softmax"):
        evaluate(sigmoids, fit_temperature=True)


@pytest.mark.long
def test_command_prints_a_table(config, saved, expected, capfd):
    arguments = ["evaluate", f"--model_dir={config.model_dir}"]
    assert commands.run(arguments) == 0
    table = dict(line.split(maxsplit=1) for line in capfd.readouterr().out.splitlines())
    assert table == {
        "checkpoint": f"{config.model_dir}/checkpoints/ckpt-7",
        "top-1": f"{expected['top1']:.2%}  95% interval 9.3% to 16.1%",
        "top-5": f"{expected['top5']:.2%}  95% interval 47.2% to 57.5%",
        "loss": f"{expected['loss']:.4f}",
        "ECE": "53.52%  expected calibration error",
        "images": "359",
    }


@pytest.mark.long
def test_command_prints_the_metrics_of_each_class(config, saved, capfd, monkeypatch):
    """The confusion matrix is compared with NumPy, its metrics with scikit-learn."""
    arguments = ["evaluate", f"--model_dir={config.model_dir}", "--per_class"]
    assert commands.run([*arguments, "--json", "--eval_batch_size=50"]) == 0
    result = json.loads(capfd.readouterr().out)
    classes = result["classes"]
    assert [row["name"] for row in classes] == [str(digit) for digit in range(10)]
    assert sum(row["images"] for row in classes) == 359
    right = sum((row["recall"] or 0) * row["images"] for row in classes)
    assert right / 359 == pytest.approx(result["top1"])
    # The same as a table of the worst.
    monkeypatch.setattr("imagenet_fast.commands.evaluate._MAX_CLASSES", 4)
    monkeypatch.setattr(evaluation, "evaluate", lambda *_, **__: result)
    assert commands.run(arguments) == 0
    _, table, confused = capfd.readouterr().out.split("\n\n")
    lines = table.splitlines()
    assert lines[0].split() == ["class", "recall", "95%", "interval", "precision", "F1", "images"]
    recalls = [float(line.split()[1].rstrip("%")) for line in lines[1:5]]
    assert recalls == sorted(recalls)
    assert lines[5] == "... and 6 more; --json has all"
    assert lines[6].startswith("mean of the classes")
    assert lines[6].split()[-1] == "359"
    first = result["confused"][0]
    title, worst, *others = confused.splitlines()
    assert title == "most confused:" and len(others) == len(result["confused"]) - 1
    assert (
        worst
        == f"{first['label']} predicted as {first['prediction']}: {first['images']} of "
        + str(first["of"])
    )


@pytest.fixture(scope="module")
def with_test(config, saved, tmp_path_factory):
    """The same run, with data of which 20 images are for a test."""
    source = open_source("digits")
    arrays = {
        split: (np.stack([own.image for own in items]), np.array([own.label for own in items]))
        for split, items in {
            "train": [source.read("train", index) for index in range(40)],
            "validation": [source.read("validation", index) for index in range(30)],
            "test": [source.read("train", index) for index in range(100, 120)],
        }.items()
    }
    directory = tmp_path_factory.mktemp("test split") / "data"
    prepare(ArraySource("digits", "digits", source.labels, arrays), directory, progress=False)
    return config.replace(data_dir=str(directory))


@pytest.mark.long
@pytest.mark.parametrize("on_device", [False, True])
def test_the_test_split(with_test, saved, on_device):
    # As in the recipes with images on devices, where nothing else may be drawn in groups.
    config = with_test.replace(data_on_device=on_device, augment_in_groups=on_device)
    result = evaluate(config, "test")
    images, labels, weights = map(
        np.concatenate, zip(*make_dataset(with_test.replace(eval_batch_size=10), "test"))
    )
    assert (weights == 1).all() and len(weights) == 20
    right = saved(images, training=False).numpy().argmax(1) == labels
    assert (result["examples"], result["top1"]) == (20, pytest.approx(right.mean()))


@pytest.mark.long
def test_validation_images_where_there_is_a_test_split(with_test, saved):
    assert evaluate(with_test)["examples"] == 30


def test_training_images_are_evaluated_as_others(with_test, saved, tmp_path):
    """Each once, and not augmented."""
    config = with_test.replace(sampling="balanced", rand_augment="2,9")
    path = tmp_path / "train.csv"
    result = evaluate(config, "train", predictions=str(path))
    shards = read_info(config).splits["train"].paths
    records = [decode_example(record) for shard in shards for record in read_records(shard)]
    found = read_predictions(path)
    assert found.files == [fields[FILENAME][0].decode() for fields in records]
    assert found.labels.tolist() == [fields[LABEL][0] for fields in records]
    assert result["examples"] == len(found.files) == 40
    assert result["top1"] == pytest.approx((found.classes[:, 0] == found.labels).mean())
    assert result["loss"] == evaluate(with_test, "train")["loss"]


@pytest.mark.long
def test_a_notebook_evaluates_on_the_test_split(with_test, saved):
    told = saved.evaluate(make_dataset(with_test, "test"), verbose=0, return_dict=True)
    assert told["examples"] == 20
    with pytest.raises(UserError, match="data_on_device supports training and validation"):
        make_dataset(with_test.replace(data_on_device=True), "test")


@pytest.mark.long
def test_command_evaluates_on_the_test_split(config, saved, with_test, capfd, tmp_path):
    arguments = ["evaluate", f"--model_dir={config.model_dir}", "--json"]
    assert commands.run([*arguments, f"--data_dir={with_test.data_dir}", "--split=test"]) == 0
    assert json.loads(capfd.readouterr().out)["examples"] == 20
    path = tmp_path / "test.csv"
    others = [f"--data_dir={with_test.data_dir}", "--split=test", f"--predictions={path}"]
    assert commands.run([*arguments[:-1], *others]) == 0
    assert f"predictions of 20 images: {path}\n" in capfd.readouterr().out
    assert commands.run([*arguments, "--split=test"]) == 2
    assert "digits has no test shards, only those of train, validation" in capfd.readouterr().err
    assert commands.run([*arguments, "--split=tets"]) == 2
    assert "must be validation, test or train; did you mean 'test'?" in capfd.readouterr().err


@pytest.mark.long
def test_devices_that_do_not_divide_the_training_batch(
    config, saved, expected, run_python, tmp_path
):
    trained = config.replace(
        model_dir=str(tmp_path), batch_norm_batch_size=16, accumulation_steps=2
    )
    claim_model_dir(trained, saved.labels)
    Checkpoints(saved, trained).save(7, {"step": 7})
    flags = ["--strategy=mirrored", "--logical_cpus=3", f"--model_dir={tmp_path}", "--json"]
    told = json.loads(run_python(["-m", "imagenet_fast", "evaluate", *flags]).stdout)
    assert told["examples"] == 359
    assert {name: told[name] for name in expected} == pytest.approx(expected, rel=1e-5)


_PIPELINE = {
    **{"strategy": "auto", "accumulation_steps": 4, "logical_cpus": 2},
    **{"pipeline_stages": 4, "pipeline_balance": (1, 3, 3, 4)},
    **{"pipeline_schedule": "interleaved_1f1b", "pipeline_stages_per_device": 2},
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        ({"strategy": "tpu", "tpu": "a-pod", "logical_cpus": 2}, []),
        (_PIPELINE, ["--pipeline_stages=3"]),
    ],
    ids=["tpu", "pipeline"],
)
def test_another_machine_than_in_training(config, saved, expected, tmp_path, capfd, changes, flags):
    """Whose TPU or stages' devices are not here; and no device takes a batch for many."""
    pod = config.replace(model_dir=str(tmp_path), batch_size=1024, **changes)
    claim_model_dir(config.replace(model_dir=str(tmp_path)), saved.labels)
    (tmp_path / "config.json").write_text(pod.to_json())
    Checkpoints(saved, pod).save(7, {"step": 7})
    assert commands.run(["evaluate", f"--model_dir={tmp_path}", "--json", *flags]) == 0
    out, err = capfd.readouterr()
    printed = json.loads(out)
    assert printed["top1"] == pytest.approx(expected["top1"])
    assert printed["examples"] == 359
    warned = "pipeline_stages=3 needs 3 devices, but there is one, which gets all layers"
    assert err.count(warned) == ("pipeline_stages" in changes)


class SeenError(Exception):
    """Ends an evaluation whose batches have been seen."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "images"),
    [
        pytest.param({}, 32, marks=pytest.mark.long),
        ({"batch_size": 1024}, 256),
        pytest.param({"batch_size": 1024, "eval_batch_size": 300}, 300, marks=pytest.mark.long),
    ],
)
def test_default_batch_size(config, saved, monkeypatch, changes, images):
    make = evaluation.distributed_dataset

    def make_and_look(*arguments, **options):
        raise SeenError(make(*arguments, **options).element_spec[0].shape[0])

    monkeypatch.setattr(evaluation, "distributed_dataset", make_and_look)
    with pytest.raises(SeenError) as seen:
        evaluate(config.replace(**changes))
    assert seen.value.args == (images,)


@pytest.mark.long
@pytest.mark.parametrize("on_device", [False, True])
def test_evaluation_writes_nothing(config, saved, tmp_path, on_device):
    """Whose list of unreadable images is training's."""
    data = tmp_path / "data"
    shutil.copytree(config.data_dir, data)
    shard = data / "validation-00002-of-00004"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    before = sorted(pathlib.Path(config.model_dir).rglob("*"))
    result = evaluate(config.replace(data_dir=str(data), data_on_device=on_device))
    assert result["skipped"] >= 1
    assert sorted(pathlib.Path(config.model_dir).rglob("*")) == before


@pytest.mark.long
def test_loss_scale_and_another_precision(config, saved, tmp_path, capfd):
    half = config.replace(model_dir=str(tmp_path), precision="mixed_float16", loss_scale=128.0)
    claim_model_dir(half, saved.labels)
    Checkpoints(saved, half).save(7, {"step": 7})
    arguments = ["evaluate", f"--model_dir={tmp_path}", "--precision=float32", "--json"]
    assert commands.run(arguments) == 0
    assert json.loads(capfd.readouterr().out)["examples"] == 359


# --- What cannot be evaluated


def test_no_run(config, tmp_path):
    with pytest.raises(UserError, match=f"{tmp_path} holds no training run: "):
        evaluate(config.replace(model_dir=str(tmp_path)))


def test_no_checkpoint(config, saved, tmp_path):
    begun = config.replace(model_dir=str(tmp_path))
    claim_model_dir(begun, saved.labels)
    with pytest.raises(UserError, match=f"{tmp_path} holds no checkpoint: train there first"):
        evaluate(begun)


def test_no_model_dir(config):
    with pytest.raises(UserError, match="no model: give --model_dir"):
        evaluate(config.replace(model_dir=""))


def test_another_model(config, saved):
    with pytest.raises(UserError, match="model is resnet8 there, resnet14 here"):
        evaluate(config.replace(model="resnet14"))
    with pytest.raises(UserError, match="1,1,1 here"):
        evaluate(config.replace(pixel_std=(1.0, 1.0, 1.0)))


def test_data_of_the_run_is_elsewhere(config, saved, tmp_path, monkeypatch, capsys):
    moved = config.replace(data_dir="data/digits", model_dir=str(tmp_path / "run"))
    shutil.copytree(config.model_dir, moved.model_dir)
    pathlib.Path(moved.model_dir, "config.json").write_text(moved.to_json())
    monkeypatch.chdir(tmp_path)
    assert commands.run(["evaluate", "--model_dir=run"]) == 2
    assert capsys.readouterr().err.endswith(
        "data_dir data/digits, on which the run was trained, does not exist in "
        f"{tmp_path}: give --data_dir\n"
    )


@pytest.fixture(scope="module")
def with_some_classes(config, saved, tmp_path_factory):
    """The same run, with data of 30 images of four of the classes, in another order."""
    labels = ("7", "1", "4", "0")
    source = open_source("digits")
    items = [source.read("validation", index) for index in range(359)]
    items = [item for item in items if str(item.label) in labels][:30]
    images = np.stack([item.image for item in items])
    numbers = np.array([labels.index(str(item.label)) for item in items])
    splits = {"train": (images[:4], numbers[:4]), "validation": (images, numbers)}
    directory = tmp_path_factory.mktemp("some classes") / "data"
    prepare(ArraySource("digits", "some", labels, splits), directory, progress=False)
    return config.replace(data_dir=str(directory))


def logits_of_some_classes(config, saved):
    """Of its 30 images, with their classes in the run."""
    batches = [
        (saved(images, training=False).numpy(), labels)
        for images, labels, _ in make_dataset(config, "validation")
    ]
    logits, labels = map(np.concatenate, zip(*batches))
    assert len(labels) == 30
    return logits, np.array([7, 1, 4, 0])[labels]


@pytest.mark.parametrize("on_device", [False, True])
def test_data_that_lacks_classes_of_the_run(with_some_classes, saved, on_device, capfd):
    logits, labels = logits_of_some_classes(with_some_classes, saved)
    config = with_some_classes.replace(data_on_device=on_device, augment_in_groups=on_device)
    result = evaluate(config, per_class=True)
    answers = logits.argmax(1)
    assert result["examples"] == 30
    assert 0 < result["top1"] == pytest.approx((answers == labels).mean())
    counts = {row["name"]: row["images"] for row in result["classes"]}
    assert counts == {str(label): (labels == label).sum() for label in range(10)}
    recalls = {row["name"]: row["recall"] for row in result["classes"]}
    assert recalls["7"] == pytest.approx((answers[labels == 7] == 7).mean())
    assert recalls["2"] is None
    # The pairs with the most mistakes, as scikit-learn counts them.
    mistakes = confusion_matrix(labels, answers, labels=range(10))
    np.fill_diagonal(mistakes, 0)
    confused = result["confused"]
    numbers = [own["images"] for own in confused]
    assert numbers == sorted(mistakes[mistakes > 0], reverse=True)[:15] and numbers
    for own in confused:
        assert own["images"] == mistakes[int(own["label"]), int(own["prediction"])]
        assert own["of"] == (labels == int(own["label"])).sum()
    if not on_device:
        assert "lacks 6 of the 10 classes of the run in " in capfd.readouterr().err


def test_data_with_classes_that_the_run_does_not_have(config, saved, tmp_path):
    some = np.zeros([4, 32, 32], np.uint8), np.array([0, 1, 2, 0])
    source = ArraySource("digits", "more", ("7", "cat", "11"), {"train": some, "validation": some})
    prepare(source, tmp_path / "data", progress=False)
    message = f"data has classes that the run in {config.model_dir} does not: 'cat', '11'. "
    with pytest.raises(UserError, match=message):
        evaluate(config.replace(data_dir=str(tmp_path / "data")))


def test_no_readable_image(config, saved, monkeypatch):
    """As where all are above max_pixels: an accuracy of 0 would be one of no images."""
    sums = dict.fromkeys(("loss", "top1", "top5", "examples"), 0.0)
    found = SimpleNamespace(evaluate=lambda: {**sums, "skipped": 359.0})
    monkeypatch.setattr(evaluation, "build_for_evaluation", lambda *_, **__: None)
    monkeypatch.setattr(evaluation, "restore_weights", lambda *_: "")
    monkeypatch.setattr(evaluation, "Evaluator", lambda *_, **__: found)
    with pytest.raises(UserError, match=r"none of the 359 validation images .* max_pixels is 9"):
        evaluate(config.replace(max_pixels=9))


def test_no_validation_images(config, saved):
    with pytest.raises(UserError, match="synthetic has no validation shards"):
        evaluate(config.replace(synthetic=True, num_classes=10))


@pytest.mark.long
def test_needs_no_data_that_the_training_fits(config, saved, expected):
    """A batch may have more images, and a warmup more steps, than a run on what is evaluated."""
    # There are 1438 training images.
    other = config.replace(batch_size=1439, warmup="100000 steps", warmup_start=0.0)
    assert evaluate(other)["top1"] == pytest.approx(expected["top1"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (pathlib.Path.unlink, "No such file or directory"),
        (lambda shard: (shard.unlink(), shard.mkdir()), "Is a directory"),
    ],
)
def test_a_shard_that_cannot_be_read_any_more(
    config, saved, digits, tmp_path, monkeypatch, capfd, spoil, reason
):
    """It is there when evaluation starts, and gone when its turn comes."""
    data = tmp_path / "data"
    shutil.copytree(digits, data)
    shard = data / "validation-00002-of-00004"
    count_steps = evaluation.evaluation_steps

    def spoil_and_count(*arguments):  # what evaluation does last before it reads
        spoil(shard)
        return count_steps(*arguments)

    monkeypatch.setattr(evaluation, "evaluation_steps", spoil_and_count)
    arguments = ["evaluate", f"--model_dir={config.model_dir}", f"--data_dir={data}"]
    assert commands.run(arguments) == 2
    assert capfd.readouterr().err.splitlines()[-1] == (
        f"imagenet-fast evaluate: error: {shard}: cannot be read: {reason}; after fixing that, "
        "the same command evaluates again"
    )
