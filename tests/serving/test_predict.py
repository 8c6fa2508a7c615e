"""Answers for image files, from Python and from the command line."""

import csv
import io
import json
import pathlib
import types

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from small_config import SMALL

from imagenet_fast import UserError, build_model, commands, export
from imagenet_fast.serving.predict import predict


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A SavedModel of a network that has learnt nothing, but is not undecided."""
    network = build_model(SMALL.replace(num_classes=4, zero_gamma=False))
    classifier = network.trainable_variables[-2]
    classifier.assign(classifier * 300)
    return export(network, tmp_path_factory.mktemp("predict") / "model", top_k=3)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Ten images, JPEG and PNG in turn."""
    folder = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    paths = []
    for index in range(10):
        pixels = generator.integers(0, 256, (20 + index, 30, 3), "uint8")
        paths.append(folder / f"{index}.{'png' if index % 2 else 'jpg'}")
        Image.fromarray(pixels).save(paths[-1])
    return [str(path) for path in paths]


@pytest.fixture
def bad(images, tmp_path):
    """Files that hold no whole image, and the reasons."""
    data = {name: tmp_path / name for name in ("empty.jpg", "text.jpg", "half.jpg", "half.png")}
    data["empty.jpg"].write_bytes(b"")
    data["text.jpg"].write_text("not an image")
    for path, whole in (("half.jpg", images[0]), ("half.png", images[1])):
        content = pathlib.Path(whole).read_bytes()
        data[path].write_bytes(content[: len(content) // 2])
    reasons = {str(path): "not a whole JPEG or PNG image" for path in data.values()}
    reasons[str(tmp_path / "none.jpg")] = "No such file or directory"
    reasons[str(tmp_path / "folder")] = "a folder without images"
    (tmp_path / "folder").mkdir()
    return reasons


@pytest.fixture(scope="module")
def answers(model, images):
    return list(predict(model, images))


def test_answers(model, images, answers):
    assert [answer["file"] for answer in answers] == images
    for answer in answers:
        best = answer["predictions"]
        assert len(best) == 3
        probabilities = [entry["probability"] for entry in best]
        assert probabilities == sorted(probabilities, reverse=True)
        assert 0 < sum(probabilities) <= 1 + 1e-6
        assert [entry["label"] for entry in best] == [str(entry["class"]) for entry in best]
        json.dumps(answer)
    signature = tf.saved_model.load(model).signatures["serving_default"]
    encoded = [pathlib.Path(path).read_bytes() for path in images]
    expected = signature(images=tf.constant(encoded))
    for answer, classes in zip(answers, expected["classes"].numpy()):
        assert [entry["class"] for entry in answer["predictions"]] == classes.tolist()


def flat(answers):
    return [
        (answer["file"], entry["class"], pytest.approx(entry["probability"], abs=1e-6))
        for answer in answers
        for entry in answer["predictions"]
    ]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_in_batches(model, images, answers, batch_size):
    assert flat(predict(model, images, batch_size)) == flat(answers)


@pytest.mark.long
def test_bad_files_do_not_affect_others(model, images, bad, answers):
    paths = [path for pair in zip(images, bad) for path in pair]
    found = list(predict(model, paths, batch_size=5))
    assert [answer["file"] for answer in found] == paths
    assert {answer["file"]: answer["error"] for answer in found[1::2]} == bad
    assert flat(found[::2]) == flat(answers[: len(bad)])


@pytest.mark.long
def test_other_formats_that_prepare_reads(model, images, answers, tmp_path):
    kinds = {"gif": 0, "tiff": 1, "bmp": 3, "webp": 5}  # of a JPEG, and of PNGs
    paths = {kind: str(tmp_path / f"image.{kind}") for kind in kinds}
    for kind, index in kinds.items():
        lossless = {"lossless": True} if kind == "webp" else {}
        Image.open(images[index]).save(paths[kind], **lossless)
    (tmp_path / "half.webp").write_bytes(pathlib.Path(paths["webp"]).read_bytes()[:100])
    (tmp_path / "phone.heic").write_bytes(b"\0\0\0\x18ftypheic" + bytes(100))
    gif, *same, half, heic = predict(
        model, [*paths.values(), str(tmp_path / "half.webp"), str(tmp_path / "phone.heic")]
    )
    assert "predictions" in gif  # with a palette of its own
    for answer, index in zip(same, list(kinds.values())[1:]):
        assert answer["predictions"] == [
            {**entry, "probability": pytest.approx(entry["probability"], abs=1e-6)}
            for entry in answers[index]["predictions"]
        ]
    assert half["error"].startswith("cannot be decoded: ")
    assert heic["error"].startswith("HEIC or AVIF cannot be decoded: convert it")


def test_no_files(model):
    with pytest.raises(UserError, match="no images: name image files"):
        list(predict(model, []))


def test_no_saved_model(images, tmp_path):
    with pytest.raises(UserError, match="saved_model /nowhere does not exist"):
        list(predict("/nowhere", images))
    with pytest.raises(UserError, match="no model: give --saved_model"):
        list(predict("", images))
    (tmp_path / "saved_model.pb").write_bytes(b"\xff half of one")
    with pytest.raises(UserError, match=f"cannot load {tmp_path}: "):
        list(predict(str(tmp_path), images))


def test_another_programs_saved_model(images, tmp_path):
    module = tf.Module()
    tf.saved_model.save(module, str(tmp_path / "plain"))
    double = tf.function(lambda x: {"y": 2 * x}, input_signature=[tf.TensorSpec([], tf.float32)])
    module.double = double
    tf.saved_model.save(module, str(tmp_path / "double"), signatures=double)
    for name in ("plain", "double"):
        with pytest.raises(UserError, match=f"{name} is not a SavedModel of `imagenet-fast export"):
            list(predict(str(tmp_path / name), images))


OUTPUTS = {
    "classes": tf.zeros([1, 2], tf.int32),
    "labels": tf.constant([["a", "b"]]),
    "probabilities": tf.zeros([1, 2]),
    "error": tf.constant([""]),
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"labels": None}, "is not a SavedModel of `imagenet-fast export`"),
        ({"classes": tf.zeros([1, 2])}, "is not a SavedModel of `imagenet-fast export`"),
        ({"error": tf.zeros([1])}, "is not a SavedModel of `imagenet-fast export`"),
        ({"labels": tf.constant([[b"\xff", b"b"]])}, "failed, .* can't decode byte 0xff"),
        ({"error": tf.constant([b"\xff"])}, "failed, .* can't decode byte 0xff"),
        ({"classes": tf.zeros([1, 3], tf.int32)}, "failed, .* answers for 1 images"),
        ({"error": tf.constant(["", ""])}, "failed, .* answers for 1 images"),
        ({"error": tf.constant("")}, "failed, "),
        ({"classes": tf.zeros([], tf.int32)}, "failed, "),
    ],
)
def test_outputs_of_a_program_of_others(images, tmp_path, changed, message):
    outputs = {name: value for name, value in {**OUTPUTS, **changed}.items() if value is not None}
    module = tf.Module()
    spec = tf.TensorSpec([None], tf.string, name="images")
    module.classify = tf.function(lambda images: outputs, input_signature=[spec])
    tf.saved_model.save(module, str(tmp_path / "other"), signatures=module.classify)
    with pytest.raises(UserError, match=f"{tmp_path / 'other'} {message}"):
        list(predict(str(tmp_path / "other"), images[:1]))


def test_program_that_fails(images, tmp_path):
    def fail(images):
        with tf.control_dependencies([tf.debugging.Assert(False, ["on purpose"])]):
            return {name: tf.identity(value) for name, value in OUTPUTS.items()}

    module = tf.Module()
    spec = tf.TensorSpec([None], tf.string, name="images")
    module.classify = tf.function(fail, input_signature=[spec])
    tf.saved_model.save(module, str(tmp_path / "other"), signatures=module.classify)
    with pytest.raises(UserError, match=f"the model in {tmp_path / 'other'} failed, "):
        list(predict(str(tmp_path / "other"), images[:1]))


def test_it_is_said_that_the_program_runs(images, tmp_path, capfd):
    (tmp_path / "saved_model.pb").write_bytes(b"\xff half of one")
    with pytest.raises(UserError):
        list(predict(str(tmp_path), images))
    assert f"predict: running the program in {tmp_path}; it can do" in capfd.readouterr().err


# --- The command


def run(capfd, *arguments):
    """Runs predict; returns status, and the lines of stdout and stderr."""
    status = commands.run(["predict", *arguments])
    out, err = capfd.readouterr()
    return types.SimpleNamespace(status=status, out=out.splitlines(), err=err.splitlines())


def test_table(model, images, answers, capfd):
    finished = run(capfd, f"--saved_model={model}", *images)
    assert finished.status == 0
    assert len(finished.out) == len(images)
    for line, answer in zip(finished.out, answers):
        told = [f"{e['label']} {e['probability']:.1%}" for e in answer["predictions"]]
        assert line == f"{answer['file']}  {', '.join(told)}"


def test_answers_are_aligned(model, images, capfd, monkeypatch):
    """Also behind the files of a folder, whose names are longer than the folder's."""
    folder = pathlib.Path(images[0]).parent
    monkeypatch.chdir(folder)
    finished = run(capfd, f"--saved_model={model}", "1.png", str(folder))
    names = ["1.png", *images]
    assert [line[: max(map(len, names)) + 2].rstrip() for line in finished.out] == names


def test_json(model, images, answers, capfd):
    finished = run(capfd, images[0], f"--saved_model={model}", "--json", images[1])
    assert finished.status == 0
    assert flat(map(json.loads, finished.out)) == flat(answers[:2])


@pytest.mark.long
def test_path_in_the_home_directory(model, images, answers, capfd, monkeypatch):
    monkeypatch.setenv("HOME", str(pathlib.Path(model).parent))
    finished = run(capfd, "--saved_model=~/model", "--json", images[0])
    assert flat(map(json.loads, finished.out)) == flat(answers[:1])


def test_bad_files_are_listed_and_give_status_2(model, images, bad, capfd):
    for form in ("--nojson", "--json"):
        finished = run(capfd, form, f"--saved_model={model}", *bad, images[0])
        assert finished.status == 2
        assert len(finished.out) == len(bad) + 1
        for line, (path, reason) in zip(finished.out, bad.items()):
            if form == "--json":
                assert json.loads(line) == {"file": path, "error": reason}
            else:
                assert line.startswith(path)
                assert line.endswith(f"  error: {reason}")
        assert images[0] in finished.out[-1]
        assert "error" not in finished.out[-1]
        assert finished.err[-1] == f"{len(bad) + 1} files, {len(bad)} unreadable"


@pytest.fixture
def folder(images, tmp_path):
    """Images in subfolders, beside other files; and their names, sorted."""
    names = ("b/2.png", "a/c/=1+1.jpg", "a/3.png", "b/1.jpeg")
    for name in names:
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pathlib.Path(images[0]).read_bytes())
    (tmp_path / "images/a/half.jpg").write_bytes(b"\xff\xd8\xff")
    for name in ("a/notes.txt", "a/.hidden.png", "b/Thumbs.db"):
        (tmp_path / "images" / name).write_text("no image")
    return tmp_path / "images", sorted([*names, "a/half.jpg"])


def test_folders_are_walked_in_order(model, folder, images, answers):
    root, names = folder
    found = list(predict(model, [images[1], str(root), images[2]], batch_size=2))
    files = [str(root / name) for name in names]
    assert [answer["file"] for answer in found] == [images[1], *files, images[2]]
    assert [answer["file"] for answer in found if "error" in answer] == [str(root / "a/half.jpg")]
    assert flat([{**answers[0], "file": files[0]}]) == flat(found[1:2])


@pytest.mark.parametrize("form", ["--output=new/out/a.csv", "--output=new/out/a.jsonl", "--csv"])
def test_files_of_predictions(model, folder, capfd, monkeypatch, form):
    root, names = folder
    monkeypatch.chdir(root.parent)
    finished = run(capfd, f"--saved_model={model}", form, "images")
    assert finished.status == 2
    assert finished.err[-1].endswith("5 files, 1 unreadable")
    expected = list(predict(model, ["images"]))
    assert [answer["file"] for answer in expected] == [f"images/{name}" for name in names]
    path = pathlib.Path("new/out/a.csv" if form == "--csv" else form.partition("=")[2])
    text = "\n".join(finished.out) if form == "--csv" else path.read_text()
    if path.suffix == ".jsonl":
        assert [json.loads(line) for line in text.splitlines()] == expected
        return
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == len(expected)
    for row, answer in zip(rows, expected):
        assert (row["file"], row["error"]) == (answer["file"], answer.get("error", ""))
        for rank in range(3):
            best = answer["predictions"][rank] if "predictions" in answer else None
            assert row[f"class{rank + 1}"] == (best["label"] if best else "")
            probability = row[f"probability{rank + 1}"]
            assert probability == (str(best["probability"]) if best else "")
    if path.exists():
        assert sorted(item.name for item in path.parent.iterdir()) == [path.name]
        again = run(capfd, f"--saved_model={model}", form, "images")
        assert "already exists" in again.err[-1]


def test_wrong_output(model, images, capfd):
    for flags, message in (
        (["--output=a.txt"], "output: a.txt must end with .csv or .jsonl"),
        (["--csv", "--json"], "json, csv and output exclude each other: give one of them"),
    ):
        finished = run(capfd, f"--saved_model={model}", *flags, images[0])
        assert (finished.status, finished.out) == (2, [])
        assert finished.err[-1].endswith(message)


def test_wrong_arguments(model, images, capfd):
    assert run(capfd, *images).err == [
        "imagenet-fast predict: error: no model: give --saved_model, a directory that `export` "
        "wrote"
    ]
    finished = run(capfd, f"--saved_model={model}")
    assert (finished.status, finished.out) == (2, [])
    assert finished.err == ["imagenet-fast predict: error: no images: name image files or folders"]
