"""Damaged checkpoints: the one before is taken, and the run ends with the same bits."""

import json
import pathlib
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf
from model_weights import weights_in

from imagenet_fast import Config, UserError, train
from imagenet_fast.training.checkpoints import damaged as damaged_checkpoints
from imagenet_fast.training.checkpoints.checkpoint import Checkpoints, restore_weights
from imagenet_fast.training.step.classifier import Classifier

DATA = "data-00000-of-00001"


def make_model():
    inputs = keras.Input((40,))
    outputs = keras.layers.Dense(50, name="logits")(inputs)
    model = Classifier(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9))
    model.make_slots()
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run with checkpoints of the steps 4, 5 and 6, in which all weights are the step."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    config = Config(synthetic=True, num_classes=50, model_dir=str(folder), keep_checkpoints=3)
    model = make_model()
    checkpoints = Checkpoints(model, config)
    for step in (4, 5, 6):
        model.set_weights([np.full(value.shape, step) for value in model.get_weights()])
        checkpoints.save(step, {"step": step})
    return config


@pytest.fixture
def config(saved, tmp_path):
    shutil.copytree(saved.model_dir, tmp_path / "run")
    return saved.replace(model_dir=str(tmp_path / "run"))


def folder_of(config):
    return pathlib.Path(config.model_dir, "checkpoints")


def flip(path, place=None):
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if place is None else place] ^= 1
    path.write_bytes(data)


def flip_block(path):
    """Flips a bit of the index that TensorFlow tells of as "block checksum mismatch"."""
    good = path.read_bytes()
    for place in reversed(range(len(good) - 48)):  # before the footer
        flip(path, place)
        try:
            tf.train.load_checkpoint(str(path.with_suffix("")))
        except tf.errors.OpError as error:
            if "block checksum mismatch" in str(error):
                return
        path.write_bytes(good)
    raise AssertionError


def make_directory(path):
    path.unlink()
    path.mkdir()


# Each gets ckpt-N.
DAMAGES = {
    "data flipped": lambda own: flip(own(DATA)),
    "data cut": lambda own: own(DATA).write_bytes(own(DATA).read_bytes()[:-20]),
    "data empty": lambda own: own(DATA).write_bytes(b""),
    "data zeros": lambda own: own(DATA).write_bytes(bytes(own(DATA).stat().st_size)),
    "data missing": lambda own: own(DATA).unlink(),
    "data a directory": lambda own: make_directory(own(DATA)),
    "index missing": lambda own: own("index").unlink(),
    "index a directory": lambda own: make_directory(own("index")),
    "index block flipped": lambda own: flip_block(own("index")),
    "index flipped": lambda own: flip(own("index")),
    "index without its end": lambda own: own("index").write_bytes(own("index").read_bytes()[:-9]),
    "index end flipped": lambda own: flip(own("index"), -3),
    "index empty": lambda own: own("index").write_bytes(b""),
    "index zeros": lambda own: own("index").write_bytes(bytes(own("index").stat().st_size)),
}


def damage(config, step, how="data flipped"):
    DAMAGES[how](lambda ending: folder_of(config) / f"ckpt-{step}.{ending}")


def restored(config):
    """The state, and the step that all weights are of."""
    model = make_model()
    state = Checkpoints(model, config).restore()
    (value,) = {float(value) for weight in model.get_weights() for value in weight.ravel()}
    return state, value


@pytest.mark.parametrize("how", DAMAGES)
def test_the_previous_checkpoint_is_used(config, capsys, how):
    damage(config, 6, how)
    assert restored(config) == ({"step": 5}, 5.0)
    told = capsys.readouterr().err
    assert f"WARNING: checkpoint ckpt-6 in {config.model_dir} is damaged (" in told
    assert "set aside as damaged-ckpt-6; the run resumes from step 5" in told
    names = {path.name for path in folder_of(config).iterdir()}
    aside = {"damaged-ckpt-6.index", f"damaged-ckpt-6.{DATA}"}
    aside -= {
        "data missing": {f"damaged-ckpt-6.{DATA}"},
        "index missing": {"damaged-ckpt-6.index"},
    }.get(how, set())
    good = {f"ckpt-{step}.{ending}" for step in (4, 5) for ending in ("index", DATA)}
    assert names == {"checkpoint", *good, *aside}
    (row,) = damaged_checkpoints.damaged_checkpoints(config.model_dir)
    assert (row["step"], row["resumed_from"]) == (6, 5) and row["reason"]
    # A second time there is nothing to tell.
    assert restored(config) == ({"step": 5}, 5.0)
    assert "damaged" not in capsys.readouterr().err


def test_a_harmless_bit_is_not_damage(config):
    """Of the padding in the footer of the index, which TensorFlow does not read either."""
    flip(folder_of(config) / "ckpt-6.index", -20)
    assert restored(config) == ({"step": 6}, 6.0)


def test_a_damaged_checkpoint_does_not_count_as_kept(config):
    damage(config, 6)
    model = make_model()
    checkpoints = Checkpoints(model, config.replace(keep_checkpoints=2))
    checkpoints.restore()
    checkpoints.save(6, {"step": 6})
    checkpoints.save(7, {"step": 7})
    names = {path.name for path in folder_of(config).glob("*.index")}
    assert names == {"ckpt-6.index", "ckpt-7.index", "damaged-ckpt-6.index"}
    # Nor is it overwritten by another of the same step.
    damage(config, 7)
    damage(config, 6)
    with pytest.raises(UserError, match=r"ckpt-7 is damaged .*, and so are the 1 before it"):
        checkpoints.restore()
    assert (folder_of(config) / "ckpt-7.index").exists(), "nothing is set aside in vain"
    checkpoints.save(5, {"step": 5})
    checkpoints.save(7, {"step": 7})
    damage(config, 7)
    checkpoints.restore()
    checkpoints.save(7, {"step": 7})
    damage(config, 7)
    assert checkpoints.restore() == {"step": 5}
    names = {path.name for path in folder_of(config).glob("damaged*.index")}
    assert {"damaged-ckpt-7.index", "damaged-ckpt-7-2.index"} < names


def test_several_are_damaged(config, capsys):
    damage(config, 6, "index empty")
    damage(config, 5, "data missing")
    assert restored(config) == ({"step": 4}, 4.0)
    told = capsys.readouterr().err
    assert told.count("WARNING") == told.count("resumes from step 4") == 2


def test_all_are_damaged(config):
    for step in (4, 5, 6):
        damage(config, step)
    with pytest.raises(UserError, match=r"ckpt-6 is damaged \(.*, and so are the 2 before it; sta"):
        restored(config)
    for step in (4, 5):
        for path in folder_of(config).glob(f"ckpt-{step}.*"):
            path.unlink()
    with pytest.raises(UserError, match="and it is the only one; start a new run: choose another"):
        restored(config)
    assert (folder_of(config) / "ckpt-6.index").exists()


def test_the_index_of_all_is_missing(config):
    """The run does not begin anew without a word."""
    for step in (4, 5, 6):
        damage(config, step, "index missing")
    before = sorted(folder_of(config).iterdir())
    with pytest.raises(
        UserError, match=r"ckpt-6 is damaged \(its index is missing\), and so are the"
    ):
        restored(config)
    assert sorted(folder_of(config).iterdir()) == before


def test_an_unfinished_checkpoint_is_not_damage(config, capsys):
    """A kill came between TensorFlow's renaming of the data and its writing of the index."""
    (folder_of(config) / f"ckpt-7.{DATA}").write_bytes(b"data")
    assert restored(config) == ({"step": 6}, 6.0)
    # Of the first one nothing else is there.
    for path in folder_of(config).iterdir():
        if not path.name.startswith("ckpt-7"):
            path.unlink()
    assert Checkpoints(make_model(), config).restore() is None
    assert "damaged" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "state",
    [
        b"",
        b"\xff\xfe\x00",
        b"hello",
        b'model_checkpoint_path: "ckpt-9"\n',
        b'model_checkpoint_path: "best"\n',
    ],
    ids=repr,
)
def test_damaged_record_of_the_latest(config, state):
    """tf.train.latest_checkpoint raises a ValueError for some of these."""
    (folder_of(config) / "checkpoint").write_bytes(state)
    for ending in (DATA, "index"):  # of another program
        shutil.copy(folder_of(config) / f"ckpt-4.{ending}", folder_of(config) / f"best.{ending}")
    assert restored(config) == ({"step": 6}, 6.0)
    assert restore_weights(make_model(), config.model_dir).endswith("ckpt-6")
    Checkpoints(make_model(), config).save(7, {"step": 7})
    assert tf.train.latest_checkpoint(folder_of(config)).endswith("ckpt-7")


def test_other_errors_are_not_damage(config, monkeypatch):
    """As of a bucket that is away: a good checkpoint is not set aside for it."""

    class Reader:
        def get_variable_to_shape_map(self):
            raise tf.errors.OpError(None, None, "PERMISSION_DENIED: storage.objects.get", 7)

    monkeypatch.setattr(tf.train, "load_checkpoint", lambda _: Reader())
    assert restored(config) == ({"step": 6}, 6.0)


@pytest.mark.parametrize("how", ["data zeros", "data missing", "index empty", "index missing"])
def test_other_commands_stop(config, how):
    """What is evaluated or exported is the newest, or nothing."""
    damage(config, 6, how)
    message = r"/ckpt-6 is damaged \(.+\); the run's `train` command sets it aside and resumes from"
    with pytest.raises(UserError, match=message):
        restore_weights(make_model(), config.model_dir)
    assert (folder_of(config) / f"ckpt-6.{DATA}").exists() == (how != "data missing")


@pytest.mark.parametrize("line", [b'{"step": 1', b"null", b"{}", b"\xff", b"[" * 100_000])
def test_damaged_list_of_damaged_checkpoints(config, capsys, line):
    row = {"step": 3, "reason": "data", "resumed_from": 2}
    path = pathlib.Path(config.model_dir, damaged_checkpoints.DAMAGED_FILE)
    path.write_bytes(line + b"\n" + json.dumps(row).encode() + b"\n")
    damage(config, 6)
    assert restored(config) == ({"step": 5}, 5.0)
    assert f"{path}: 1 line is damaged and skipped; 1 can be read" in capsys.readouterr().err
    first, second = damaged_checkpoints.damaged_checkpoints(config.model_dir)
    assert first == row and (second["step"], second["resumed_from"]) == (6, 5)


# In the default run, other tests here restore the checkpoint before a damaged one, and
# test_train.py compares the weights of a resumed run.
@pytest.mark.long
def test_a_run_ends_with_the_same_bits(digits, tmp_path, capsys):
    options = {
        "data_dir": digits,
        "model": "resnet8",
        "image_size": 16,
        "train_crop": "pad",
        "batch_size": 64,
        "duration": "6 steps",
        "eval_every": "3 steps",
        "checkpoint_every": "2 steps",
        "log_every": "1 step",
        "warmup": "0 steps",
        "decay_at": "5 steps",
        "ema_decay": 0.9,
        "strategy": "one_device",
        "tensorboard": False,
        "examine": False,
    }
    whole = Config(model_dir=str(tmp_path / "whole"), **options)
    assert train(whole)["damaged_checkpoints"] == []
    damaged = whole.replace(model_dir=str(tmp_path / "damaged"))
    shutil.copytree(whole.model_dir, damaged.model_dir)
    damage(damaged, 6)
    capsys.readouterr()
    summary = train(damaged)

    (row,) = summary["damaged_checkpoints"]
    assert (row["step"], row["resumed_from"]) == (6, 4)
    assert "the run resumes from step 4" in capsys.readouterr().err
    page = (tmp_path / "damaged" / "report.html").read_text()
    assert "Damaged checkpoints, set aside" in page and "from step 4" in page
    assert "Damaged checkpoints" not in (tmp_path / "whole" / "report.html").read_text()
    found, expected = weights_in(damaged.model_dir), weights_in(whole.model_dir)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    rows = [
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (tmp_path / "whole", tmp_path / "damaged")
    ]
    told = [[(row["kind"], row["step"]) for row in own] for own in rows]
    assert told[0] == told[1]
    # Nothing is left to do, and the summary stays.
    assert train(damaged)["damaged_checkpoints"] == [row]
    # Nor does it end the run that its other files are damaged.
    (tmp_path / "damaged" / "summary.json").write_text("[]")
    with (tmp_path / "damaged" / "metrics.jsonl").open("a") as file:
        file.write('null\n{"kind": "train", "step": 6}\n')
    (tmp_path / "damaged" / "bad_images.jsonl").write_text("null\n")
    assert train(damaged)["damaged_checkpoints"] == [row]


@pytest.mark.slow
@pytest.mark.long
def test_all_workers_restore_the_same(digits, tmp_path, run_python):
    flags = {"model": "resnet8", "image_size": 16, "batch_size": 64, "duration": "4 steps"}
    flags |= {"train_crop": "none", "checkpoint_every": "2 steps", "examine": False}
    flags |= {"tensorboard": False, "warmup": "0 steps", "data_dir": digits, "decay_at": "3 steps"}
    run = tmp_path / "run"
    job = ["-m", "imagenet_fast", "train", f"--model_dir={run}"]
    job += [f"--{name}={value}" for name, value in flags.items()]
    run_python(job, workers=2)
    expected = weights_in(run)
    flip(run / "checkpoints" / f"ckpt-4.{DATA}")
    finished = run_python(job, workers=2)
    assert finished.stderr.count("the run resumes from step 2") == 1, "the chief's to tell"
    for name, value in weights_in(run).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
    for path in (run / "checkpoints").glob(f"ckpt-*.{DATA}"):
        flip(path)
    finished = run_python(job, workers=2, check=False)
    assert finished.returncode
    assert finished.stderr.count("so are the 1 before it; start a new run") == 2, finished.stderr
