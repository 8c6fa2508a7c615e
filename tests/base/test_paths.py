"""Local paths and paths in buckets; test_buckets.py tests files in buckets."""

import errno
import os
import pathlib
import pickle
import pwd

import pytest
import tensorflow as tf

from imagenet_fast import Config, UserError, commands, export
from imagenet_fast.base.files import write_results
from imagenet_fast.base.paths import (
    BucketError,
    BucketPath,
    bucket_error,
    is_local,
    seconds_between_writes,
    to_local_path,
    to_path,
)
from imagenet_fast.data.info import read_info
from imagenet_fast.data.prepare.sources import open_source


@pytest.mark.parametrize("name", ["data/digits", "/data", "", "gs:", "gs/x", "s3:/x", "x/s3://y"])
def test_local_paths_are_pathlibs(name):
    assert to_path(name) == pathlib.Path(name)
    assert type(to_path(name)) is type(pathlib.Path())
    assert to_path(name, "a", pathlib.Path("b")) == pathlib.Path(name, "a", "b")
    assert is_local(name) and seconds_between_writes(to_path(name)) == 0


@pytest.mark.parametrize("name", ["s3://bucket/x", "hdfs://x", "file:///data", "GS://bucket/x"])
def test_other_schemes_are_refused_and_make_no_folder(name, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    scheme = name.partition("//")[0]
    message = f"{name}: {scheme}// is not supported, only local paths, without a scheme, and gs://"
    for action in (
        lambda: to_path(name, "a"),
        lambda: is_local(name),
        lambda: to_local_path(name, "data_dir"),
        lambda: write_results(name, {"a.csv": ""}),
        lambda: read_info(Config(data_dir=name)),
        lambda: export(Config(), name),
    ):
        with pytest.raises(UserError) as caught:
            action()
        assert str(caught.value).startswith(message)
        assert str(caught.value).endswith("in Google Cloud Storage: copy or mount the files")
    for arguments in (
        ["prepare", "--source=digits", f"--data_dir={name}"],
        ["prepare", "--verify", f"--data_dir={name}"],
        ["prepare", "--source=folders", f"--source_path={name}", "--data_dir=x"],
        ["train", f"--flagfile={name}"],
        ["train", "--synthetic", "--num_classes=3", "--duration=1 step", f"--model_dir={name}"],
        ["evaluate", f"--model_dir={name}"],
    ):
        assert commands.run(arguments) == 2
        assert message in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    home = pathlib.Path("/home/me")
    assert to_path("~") == home and to_path("~/data", "a") == home / "data" / "a"
    assert to_local_path("~/data", "data_dir") == home / "data"
    for name in ("~nobody-of-this-name/x", "./~", "data/~"):
        assert to_path(name) == pathlib.Path(name)
    assert to_path("data", "~") == pathlib.Path("data", "~")
    assert str(to_path("gs://bucket/~", "~")) == "gs://bucket/~/~"


def test_no_home(monkeypatch):
    def unknown(number):
        raise KeyError(number)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("~", "~/data"):
        with pytest.raises(UserError, match=f"^{name}: the home directory is unknown: set H"):
            to_path(name)
    for name in ("~nobody-of-this-name/x", "./~", "data/~", "~x"):
        assert to_path(name) == pathlib.Path(name)
    with pytest.raises(UserError, match="the home directory is unknown: set HOME"):
        open_source("cifar10")


def test_names_in_a_bucket():
    path = to_path("gs://bucket/runs/", "a")
    assert isinstance(path, BucketPath) and not is_local(path) and not is_local(str(path))
    assert str(path) == os.fspath(path) == f"{path}" == "gs://bucket/runs/a"
    assert repr(path) == "BucketPath('gs://bucket/runs/a')"
    assert str(path / "b" / pathlib.PurePath("c", "d.txt")) == "gs://bucket/runs/a/b/c/d.txt"
    assert (path / "b.txt").name == "b.txt" and (path / "b.txt").parent == path
    assert str(path.with_name("b")) == "gs://bucket/runs/b"
    assert str(path.parent.parent) == "gs://bucket"
    assert path.absolute() == path.resolve() == path
    assert seconds_between_writes(path) > 0


def test_paths_in_a_bucket_are_values():
    path = to_path("gs://bucket/runs", "a")
    for same in to_path(path), to_path("gs://bucket/runs/a"), pickle.loads(pickle.dumps(path)):
        assert same == path and hash(same) == hash(path) and str(same) == str(path)
    assert sorted([path / "b", path / "a"]) == [path / "a", path / "b"]
    assert path != to_path("gs://other/runs/a")


def test_to_local_path(tmp_path):
    assert to_local_path(str(tmp_path), "data_dir") == tmp_path
    with pytest.raises(UserError, match=r"^data_dir is gs://b/x, but must be a local path; y$"):
        to_local_path("gs://b/x", "data_dir", "; y")


def response(code, message):
    """TensorFlow's message about an error response of the service."""
    return (
        f"Error executing an HTTP request: HTTP response code {code} with body '{{\n"
        f' "error": {{\n  "code": {code},\n  "message": "{message}"\n }}\n}}\'\n'
        "\t when reading gs://b/x"
    )


@pytest.mark.parametrize(
    ("kind", "message", "expected", "text"),
    [
        (
            tf.errors.NotFoundError,
            "The specified path gs://b/x was not found.",
            FileNotFoundError,
            "gs://b/x: No such file or directory",
        ),
        (
            tf.errors.NotFoundError,
            response(404, "The specified bucket does not exist."),
            BucketError,
            "gs://b/x: there is no bucket gs://b",
        ),
        (
            tf.errors.PermissionDeniedError,
            response(401, "Invalid Credentials"),
            PermissionError,
            "gs://b/x: not authenticated to Google Cloud Storage (Invalid Credentials): log in",
        ),
        (
            tf.errors.PermissionDeniedError,
            response(403, "me@example.com does not have storage.objects.get access"),
            PermissionError,
            "gs://b/x: Permission denied (me@example.com does not have storage.objects.get access)",
        ),
        (
            tf.errors.AbortedError,
            "All 10 retry attempts failed. The last failure: libcurl code 6\n\t when reading",
            BucketError,
            "gs://b/x: Google Cloud Storage failed (All 10 retry attempts failed. The last "
            "failure: libcurl code 6)",
        ),
    ],
)
def test_errors_are_converted(kind, message, expected, text):
    error = bucket_error("gs://b/x", kind(None, None, message))
    assert isinstance(error, expected) and isinstance(error, OSError)
    assert str(error).startswith(text) and "\n" not in str(error)
    assert f"{error.filename}: {error.strerror}" == str(error)
    # If nothing catches it, the command prints it as the user's error.
    assert isinstance(error, UserError)


def test_a_missing_bucket_is_not_a_missing_file():
    missing = tf.errors.NotFoundError(
        None, None, response(404, "The specified bucket does not exist.")
    )
    error = bucket_error("gs://b/x", missing)
    assert not isinstance(error, FileNotFoundError) and error.errno == errno.ENOENT


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--data_dir=gs://bucket/digits", "--model_dir=run"],
        ["train", "--synthetic", "--num_classes=2", "--model=resnet8", "--model_dir=gs://bucket/r"],
        ["evaluate", "--model_dir=gs://bucket/run"],
        ["export", "--model_dir=gs://bucket/run", "--saved_model=exported"],
        ["predict", "--saved_model=gs://bucket/model", "cat.jpg"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_a_tensorflow_without_buckets(arguments, monkeypatch, capsys, tmp_path):
    """As in wheels for some platforms, where every call raises an UnimplementedError."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tf.io.gfile, "get_registered_schemes", lambda: ["", "file", "ram"])
    assert commands.run(arguments) == 2
    error = capsys.readouterr().err
    assert "this TensorFlow has no Google Cloud Storage: install the package " in error
    assert "pip install tensorflow-io-gcs-filesystem) and set TF_USE_MODULAR_FILESYSTEM=1" in error
    assert "Traceback" not in error and len(error.strip().splitlines()) <= 2


def test_tensorflow_loads_the_package_that_the_message_names():
    """TensorFlow's __init__.py imports it if this variable is set."""
    source = pathlib.Path(tf.__file__).read_text(encoding="utf-8")
    assert "TF_USE_MODULAR_FILESYSTEM" in source and "import tensorflow_io_gcs_filesystem" in source
