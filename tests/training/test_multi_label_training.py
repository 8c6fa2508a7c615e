"""Training, evaluation and metrics of images with several labels."""

import csv
import io
import json
import pathlib
import zipfile

import numpy as np
import pytest
import tensorflow as tf
from multi_label_job import network
from PIL import Image
from sklearn.metrics import average_precision_score, f1_score

from imagenet_fast import Config, build_model, evaluate, export, make_dataset, train
from imagenet_fast.base.errors import UserError
from imagenet_fast.commands.evaluate import _table
from imagenet_fast.data.prepare.job import prepare
from imagenet_fast.data.prepare.sources import open_source
from imagenet_fast.serving.answer_files import write_answers
from imagenet_fast.serving.compare import compare_files
from imagenet_fast.serving.convert import export_tflite
from imagenet_fast.serving.predict import predict
from imagenet_fast.serving.quantize import calibration_images, prepared_images
from imagenet_fast.serving.runtimes import tflite
from imagenet_fast.training.checkpoints.checkpoint import restore_weights
from imagenet_fast.training.checkpoints.model_dir import claim_model_dir
from imagenet_fast.training.checkpoints.thresholds import FILE, read_thresholds
from imagenet_fast.training.evaluate import Evaluator
from imagenet_fast.training.run import make_run

JOB = pathlib.Path(__file__).with_name("multi_label_job.py")
CLASSES = 5
OPTIONS = {
    "image_size": 16,
    "eval_crop_fraction": 1.0,
    "train_crop": "none",
    "flip": False,
    "batch_size": 16,
    "eval_batch_size": 10,
    "learning_rate": 0.05,
    "rate_scaling": "none",
    "warmup": "0 epochs",
    "decay_at": "12 steps",
    "duration": "16 steps",
    "eval_every": "8 steps",
    "loss": "binary_cross_entropy",
    "label_smoothing": 0.1,
    "seed": 3,
    "tensorboard": False,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """96 training and 37 validation images; a class is a bright stripe; one image has none."""
    folder, random = tmp_path_factory.mktemp("stripes"), np.random.RandomState(0)
    rows = ["image,labels,split"]
    for number in range(133):
        labels = np.flatnonzero(random.rand(CLASSES) < 0.4) if number else []
        pixels = random.randint(0, 200, (16, 16, 3)).astype(np.uint8)
        for label in labels:
            pixels[:, 3 * label : 3 * label + 3, label % 3] += 55
        Image.fromarray(pixels).save(folder / f"{number}.png")
        names = "|".join(f"stripe {label}" for label in labels)
        rows.append(f"{number}.png,{names},{'train' if number < 96 else 'validation'}")
    (folder / "list.csv").write_text("\n".join(rows) + "\n")
    source = open_source("list", folder / "list.csv", label_separator="|", allow_unlabelled=True)
    prepare(source, folder / "data", encoding="png", progress=False)
    return str(folder / "data")


@pytest.fixture(scope="module")
def config(data):
    return Config(data_dir=data, strategy="one_device", **OPTIONS)


# Name -> changed options, worker processes.
JOBS = {
    "replicas_and_micro_batches": (
        {"strategy": "mirrored", "logical_cpus": 2, "accumulation_steps": 2},
        0,
    ),
    "two_workers": ({"strategy": "multi_worker"}, 2),
}


@pytest.fixture(scope="module")
def run(config, tmp_path_factory):
    """A run on one device."""
    config = config.replace(model_dir=str(tmp_path_factory.mktemp("run")), keep_best=True)
    return train(config, model=network), config


def validations(directory):
    lines = (pathlib.Path(directory) / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == "validation"]


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_same_metrics_on_replicas_and_workers(run, config, name, tmp_path, run_python):
    changes, workers = JOBS[name]
    options = {**OPTIONS, "data_dir": config.data_dir, "model_dir": str(tmp_path / "run")}
    run_python([JOB, json.dumps({**options, **changes})], workers=workers)
    one, other = validations(run[1].model_dir), validations(tmp_path / "run")
    assert [row["step"] for row in other] == [8, 16]
    for first, second in zip(one, other):
        for metric in ("loss", "map", "f1_micro", "f1_macro", "examples"):
            assert second[metric] == pytest.approx(first[metric], rel=1e-5), metric
    # After the run, in another evaluation.
    again = json.loads((tmp_path / "run" / "evaluated.json").read_text())
    assert again["map"] == pytest.approx(other[-1]["map"], abs=1e-6)
    chosen, others = read_thresholds(run[1].model_dir), read_thresholds(str(tmp_path / "run"))
    pairs = zip(chosen["last"].thresholds.values(), others["last"].thresholds.values())
    assert all(one == pytest.approx(other, abs=1e-5) for one, other in pairs)


def test_metrics_are_those_of_scikit_learn(run):
    summary, config = run
    result = evaluate(config, per_class=True, model=network)
    assert result["examples"] == 37 and "top1" not in result
    model = build_model(config, model=network)
    restore_weights(model, config.model_dir, "last")
    labels, probabilities = [], []
    for images, own, _ in make_dataset(config, "validation"):
        labels.append(own.numpy())
        probabilities.append(tf.sigmoid(model(images, training=False)).numpy())
    labels, probabilities = np.concatenate(labels), np.concatenate(probabilities)
    assert len(labels) == 37
    each = average_precision_score(labels, probabilities, average=None)
    assert result["map"] == pytest.approx(each.mean(), abs=1e-6)
    assert summary["map"] == pytest.approx(each.mean(), abs=1e-6)
    assert [own["average_precision"] for own in result["classes"]] == pytest.approx(each, abs=1e-6)
    predicted = probabilities >= 0.5
    assert result["f1_micro"] == pytest.approx(f1_score(labels, predicted, average="micro"))
    assert result["f1_macro"] == pytest.approx(f1_score(labels, predicted, average="macro"))
    thresholds = list(read_thresholds(config.model_dir)["last"].thresholds.values())
    chosen = f1_score(labels, probabilities >= np.array(thresholds) - 1e-6, average="macro")
    assert result["thresholds_f1_macro"] == pytest.approx(chosen)
    assert chosen >= result["f1_macro"]


def test_table_of_the_command(run):
    _, config = run
    classes = evaluate(config, per_class=True, model=network)["classes"]
    head, first, *others = _table(classes).splitlines()
    assert head.split() == ["class", "AP", "threshold", "recall", "precision", "F1", "images"]
    worst = min(classes, key=lambda row: row["average_precision"])
    assert first.startswith(worst["name"]) and f"{worst['average_precision']:.2%}" in first
    assert len(others) == CLASSES - 1


def test_summary_and_best(run):
    summary, config = run
    best = max(validations(config.model_dir), key=lambda row: row["map"])
    assert summary["best_map"] == best["map"] and summary["best_step"] == best["step"]
    assert read_thresholds(config.model_dir)["best"].step == best["step"]
    lines = pathlib.Path(config.model_dir, "metrics.jsonl").read_text().splitlines()
    assert summary["top1"] is None and not any("top1" in json.loads(line) for line in lines)


def test_the_table_begins_with_the_worst_class():
    """Even with an average precision of 0; classes that have none come last."""
    others = dict.fromkeys(("threshold", "recall", "precision", "f1"))
    values = {"a": 0.5, "b": None, "c": 0.0, "d": None}
    classes = [
        {"name": name, "average_precision": value, **others, "images": 1}
        for name, value in values.items()
    ]
    assert [line.split()[0] for line in _table(classes).splitlines()[1:]] == ["c", "a", "b", "d"]


def test_report_has_the_average_precisions(run):
    summary, config = run
    page = pathlib.Path(config.model_dir, "report.html").read_text()
    assert f"{summary['map']:.2%}" in page and "Mean average precision" in page
    assert "Average precision of the classes" in page and "stripe 4" in page
    assert "Top-1" not in page and "Top-5" not in page


def test_exported_models_predict_from_the_thresholds_on(run, data, tmp_path):
    _, config = run
    directory = export(config, tmp_path / "model", model=network)
    thresholds = read_thresholds(config.model_dir)["last"].thresholds
    files = [str(pathlib.Path(data).parent / f"{number}.png") for number in range(96, 106)]
    probabilities = []
    model = build_model(config, model=network)
    restore_weights(model, config.model_dir, "last")
    for images, _, _ in make_dataset(config.replace(eval_batch_size=37), "validation"):
        probabilities.append(tf.sigmoid(model(images, training=False)).numpy())
    known = np.concatenate(probabilities).round(5)
    seen = 0
    for answer in predict(directory, files):
        labels = [own["label"] for own in answer["predictions"]]
        for own in answer["predictions"]:
            assert own["threshold"] == pytest.approx(thresholds[own["label"]])
            assert own["probability"] >= own["threshold"]
            assert np.abs(own["probability"] - known[:, own["class"]]).min() < 1e-4
        seen += len(labels)
    assert 0 < seen < 10 * CLASSES


def test_exported_models_of_python_have_thresholds(config, tmp_path, capfd):
    """Those of 1/2, because no evaluation has chosen any."""
    directory = export(build_model(config, model=network), tmp_path / "model")
    outputs = tf.saved_model.load(directory).signatures["serving_default"].structured_outputs
    assert outputs["thresholds"].shape[1] == outputs["classes"].shape[1] == CLASSES
    assert "no evaluation: its thresholds are 0.5, not those with" in capfd.readouterr().err
    file = str(pathlib.Path(config.data_dir).parent / "96.png")
    (answer,) = predict(directory, [file])
    assert all(own["threshold"] == 0.5 for own in answer["predictions"])


def test_files_in_int8_of_several_labels(run, tmp_path):
    """Their thresholds are in the file, and mean average precision is what scikit-learn says."""
    _, config = run
    given = {"model": network, "precision": "int8", "calibration": calibration_images(config)}
    path = export_tflite(config, tmp_path / "model.tflite", **given)
    about = json.loads(zipfile.ZipFile(path).read("imagenet_fast.json"))
    thresholds = read_thresholds(config.model_dir)["last"].thresholds
    assert about["thresholds"] == pytest.approx(list(thresholds.values()))
    result = compare_files(config, {"tflite_int8": path})["tflite_int8"]
    batches = zip(*prepared_images(config, "validation"))
    pixels, labels = (np.concatenate(parts) for parts in batches)
    probabilities = tflite(path, 1)(pixels)
    assert result["images"] == len(labels) == 37 and "top1" not in result
    assert result["map"] == pytest.approx(average_precision_score(labels, probabilities))
    assert result["f1_micro"] == pytest.approx(
        f1_score(labels, probabilities >= 0.5, average="micro")
    )
    assert result["map"] == pytest.approx(run[0]["map"], abs=0.05)


def test_answers_with_several_labels_as_a_table():
    """The same columns, whatever the first image shows."""
    known = {"label": "cat", "probability": 0.75, "threshold": 0.5}
    predictions = [known, {**known, "label": "dog"}]
    answers = [
        {"file": "a.png", "multi_label": True, "predictions": []},
        {"file": "b.png", "multi_label": True, "predictions": predictions},
    ]
    file = io.StringIO()
    assert write_answers(file, iter(answers), "csv") == (2, 0)
    assert list(csv.reader(file.getvalue().splitlines())) == [
        ["file", "error", "classes", "probabilities"],
        ["a.png", "", "", ""],
        ["b.png", "", "cat;dog", "0.75;0.75"],
    ]


@pytest.mark.parametrize("name", ["predictions", "class_map", "right_labels"])
def test_evaluations_of_one_label(run, name):
    value = "labels.csv" if name == "predictions" else "same"
    with pytest.raises(UserError, match=f"{name}: images of .* have several labels") as raised:
        evaluate(run[1], model=network, **{name: value})
    assert ("predict --output" in str(raised.value)) == (name == "predictions")


def test_a_run_of_one_label_is_not_evaluated_on_several(run, tmp_path):
    """The error named losses, which are training's."""
    config = run[1].replace(loss="cross_entropy", model_dir=str(tmp_path))
    claim_model_dir(config, [f"stripe {number}" for number in range(5)])
    with pytest.raises(UserError, match=r"the run in .* has learned one class an image: give data"):
        evaluate(config)


def test_thresholds_of_another_model(run, tmp_path):
    _, config = run
    path = pathlib.Path(config.model_dir, FILE)
    kept = path.read_text()
    path.write_text(kept.replace("stripe 0", "stripe 9"))
    try:
        with pytest.raises(UserError, match="thresholds of other classes than the model's 5"):
            evaluate(config, model=network)
        with pytest.raises(UserError, match="thresholds of other classes than the model's 5"):
            export(config, tmp_path / "model", model=network)
        path.write_text("{")  # `evaluate` writes none, and deleting it would leave none
        with pytest.raises(UserError, match=r"cannot be read: .*; bring it back from a copy, or"):
            evaluate(config, model=network)
    finally:
        path.write_text(kept)


@pytest.mark.parametrize(
    "changes",
    [
        {"mixup_alpha": 0.4, "cutmix_alpha": 1.0, "loss": "focal"},
        {"select_by_loss": 0.5, "loss": "asymmetric", "class_weights": "balanced"},
        {"data_on_device": True, "test_time_augmentation": "flip"},
        {"resize_kernel": "tensorflow", "cache": "decoded", "color_jitter": 0.4},
    ],
)
def test_other_modes_train(config, tmp_path, changes):
    config = config.replace(model_dir=str(tmp_path), duration="8 steps", **changes)
    summary = train(config, model=network)
    assert np.isfinite(summary["train_loss"]) and summary["map"] > 0.3


def test_images_on_the_device_give_the_same_metrics(config, run):
    model = build_model(config, model=network)
    results = [
        Evaluator(make_run(own, network), model).evaluate()
        for own in (config, config.replace(eval_batch_size=37))
    ]
    on_device = config.replace(data_on_device=True)
    other = build_model(on_device, model=network)
    other.set_weights(model.get_weights())
    results.append(Evaluator(make_run(on_device, network), other).evaluate())
    for result in results[1:]:
        assert float(result["map"]) == pytest.approx(float(results[0]["map"]), abs=1e-6)
        assert float(result["examples"]) == 37


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "cross_entropy"}, "give --loss=binary_cross_entropy, focal or asymmetric"),
        ({"best_metric": "top1"}, "have several labels: give one of map"),
    ],
)
def test_options_that_need_one_label(config, changes, message):
    with pytest.raises(UserError, match=message):
        make_run(config.replace(**changes))


def test_metrics_of_several_labels_need_them(digits):
    config = Config(data_dir=digits, best_metric="map")
    with pytest.raises(UserError, match="have one label: give one of top1, top5, loss"):
        make_run(config)
