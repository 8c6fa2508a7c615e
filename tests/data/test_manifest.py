import dataclasses
import json
import os
import re
import struct
import subprocess
import sys

import pytest

from imagenet_fast.base.errors import UserError
from imagenet_fast.data import records
from imagenet_fast.data.examples import encode_example
from imagenet_fast.data.manifest import (
    FILE,
    Manifest,
    Shard,
    Skipped,
    Split,
    check_sizes,
    read_manifest,
    verify,
    write_manifest,
)

LABELS = {
    "train-00000-of-00002": [0, 1, 1],
    "train-00001-of-00002": [2],
    "validation-00000-of-00001": [0, 2],
}


def examples(labels):
    for label in labels:
        yield encode_example(
            b"jpeg", label=label, text="x", filename="f", height=1, width=1, channels=3
        )


@pytest.fixture
def directory(tmp_path):
    """A data set of three classes in three shards."""
    shards = {
        file: Shard(file, *records.write_records(tmp_path / file, examples(labels)))
        for file, labels in LABELS.items()
    }
    train, more, validation = shards.values()
    manifest = Manifest(
        name="toy",
        labels=("a", "b", "c"),
        splits={
            "train": Split((train, more), (1, 2, 1)),
            "validation": Split((validation,), (1, 0, 1)),
        },
        source={"kind": "toy", "seed": 3},
        converted={"PNG": 2},
        skipped=(Skipped("train", "x.jpg", "empty"),),
        warnings=("odd",),
    )
    write_manifest(manifest, tmp_path)
    return tmp_path


def change(directory, **values):
    content = json.loads((directory / FILE).read_text())
    (directory / FILE).write_text(json.dumps({**content, **values}))


def test_a_manifest_is_read_as_it_was_written(directory):
    manifest = read_manifest(directory)
    write_manifest(manifest, directory)
    assert read_manifest(directory) == manifest
    assert manifest.num_classes == 3
    assert manifest.splits["train"].examples == 4
    assert manifest.skipped[0].reason == "empty"
    assert {path.name for path in directory.iterdir()} == {FILE, *LABELS}


def test_no_directory_and_no_manifest(directory):
    with pytest.raises(UserError, match=r"nowhere: no such directory.*prepare"):
        read_manifest(directory / "nowhere")
    (directory / FILE).unlink()
    with pytest.raises(UserError, match=f"no {FILE}.*prepare"):
        read_manifest(directory)


@pytest.mark.parametrize("content", ["", "{", "[1]", "{}", '{"version": 1}', '{"version": "x"}'])
def test_invalid_manifests_are_refused(directory, content):
    (directory / FILE).write_text(content)
    with pytest.raises(UserError, match=FILE):
        read_manifest(directory)


def test_a_newer_version_is_refused(directory):
    change(directory, version=99)
    with pytest.raises(UserError, match=r"version 99.*update"):
        read_manifest(directory)


@pytest.mark.parametrize("labels", [["a", "b"], ["a", "b", "c", "d"]])
def test_labels_and_counts_must_agree(directory, labels):
    change(directory, labels=labels)
    with pytest.raises(UserError, match=f"3 class counts, but {len(labels)} labels"):
        read_manifest(directory)


def test_counts_by_class_and_by_shard_must_agree(directory):
    splits = json.loads((directory / FILE).read_text())["splits"]
    splits["train"]["class_counts"] = [1, 2, 3]
    change(directory, splits=splits)
    with pytest.raises(UserError, match="6 examples by class, 4 by shard"):
        read_manifest(directory)


def test_a_shard_must_lie_in_the_directory(directory):
    splits = json.loads((directory / FILE).read_text())["splits"]
    splits["train"]["shards"][0]["file"] = "../../secret"
    change(directory, splits=splits)
    with pytest.raises(UserError, match="not the name of a file"):
        read_manifest(directory)


def test_good_sizes_pass(directory):
    for split in ("train", "validation"):
        check_sizes(read_manifest(directory), directory, split)


@pytest.mark.parametrize("state", ["missing", "empty", "truncated", "too long"])
def test_wrong_sizes_are_named(directory, state):
    shard = directory / "train-00001-of-00002"
    content = shard.read_bytes()
    if state == "missing":
        shard.unlink()
    else:
        shard.write_bytes({"empty": b"", "truncated": content[:-1], "too long": content * 2}[state])
    with pytest.raises(UserError, match=f"00001-of-00002: is {state}.*prepare.*--verify") as caught:
        check_sizes(read_manifest(directory), directory, "train")
    if state == "truncated":
        assert f"has {len(content) - 1} bytes, not {len(content)}" in str(caught.value)
    check_sizes(read_manifest(directory), directory, "validation")
    assert any(f"is {state}" in problem for problem in verify(directory, progress=False))


def test_unknown_split_suggests_the_nearest(directory):
    with pytest.raises(UserError, match="did you mean 'validation'"):
        check_sizes(read_manifest(directory), directory, "validaton")


def test_verify_finds_nothing_wrong_with_a_good_directory(directory, capsys):
    assert verify(directory, progress=False) == []
    assert capsys.readouterr().err == ""
    verify(directory)
    assert "verify" in capsys.readouterr().err


def test_verify_finds_a_flipped_bit(directory):
    shard = directory / "train-00000-of-00002"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    check_sizes(read_manifest(directory), directory, "train")
    problems = "\n".join(verify(directory, progress=False))
    assert "train-00000-of-00002: its SHA-256" in problems
    assert "record 1, at byte" in problems
    assert "train: class 'b' has 1 readable record, but 2 in the manifest" in problems


def test_verify_names_damaged_records_and_counts_those_after(directory):
    file = "train-00000-of-00002"
    labels = [0, 1, 2, 0, 1]
    written = records.write_records(directory / file, examples(labels))
    splits = json.loads((directory / FILE).read_text())["splits"]
    splits["train"]["shards"][0] |= written._asdict()
    splits["train"]["class_counts"] = [2, 2, 2]
    change(directory, splits=splits)
    offsets = list(records.locate_records(directory / file))
    content = bytearray((directory / file).read_bytes())
    content[offsets[1] + 20] ^= 1  # data
    content[offsets[3] + 2] ^= 1  # length
    (directory / file).write_bytes(content)
    assert verify(directory, progress=False) == [
        f"{directory / file}: its SHA-256 differs from the manifest's: delete it and "
        "rerun `imagenet-fast prepare`",
        f"{directory / file}: record 1, at byte {offsets[1]}, is corrupt: the checksum of its data "
        "is wrong",
        f"{directory / file}: record 3, at byte {offsets[3]}, is corrupt: the checksum of its "
        "length is wrong, or the file ends within it",
        "train: class 'a' has 1 readable record, but 2 in the manifest",
        "train: class 'b' has 1 readable record, but 2 in the manifest",
    ]


def test_verify_counts_readable_records_of_a_shard_of_the_wrong_size(directory):
    file = directory / "train-00000-of-00002"
    whole = file.read_bytes()
    file.write_bytes(whole + b"garbage")
    assert verify(directory, progress=False) == [
        f"{file}: is too long: has {len(whole) + 7} bytes, not {len(whole)}"
    ]
    start = len(whole) - len(whole) // 3  # of the last of three records of one size
    file.write_bytes(whole[: start + 5])
    assert verify(directory, progress=False) == [
        f"{file}: is truncated: has {start + 5} bytes, not {len(whole)}",
        f"{file}: record 2, at byte {start}, is corrupt: the checksum of its length is wrong, or "
        "the file ends within it",
        "train: class 'b' has 1 readable record, but 2 in the manifest",
    ]


def test_verify_lists_a_shard_without_permission(directory, monkeypatch):
    closed = directory / "train-00001-of-00002"
    stat = type(closed).stat

    def refuse(path, **options):
        if path == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(type(closed), "stat", refuse)
    assert verify(directory, progress=False) == [
        f"{closed}: cannot be read: Permission denied",
        "train: class 'c' has 0 readable records, but 1 in the manifest",
    ]


def test_verify_finds_invalid_labels(directory):
    file = "validation-00000-of-00001"
    written = records.write_records(directory / file, examples([0, 3]))
    manifest = read_manifest(directory)
    split = dataclasses.replace(manifest.splits["validation"], shards=(Shard(file, *written),))
    write_manifest(
        dataclasses.replace(manifest, splits={**manifest.splits, "validation": split}), directory
    )
    assert verify(directory, progress=False) == [
        "validation: class 'c' has 0 readable records, but 1 in the manifest",
        "validation: label 3 of 1 record is outside 0..2",
    ]


def test_verify_accepts_labels_that_start_at_one(directory):
    change(directory, label_offset=-1)
    problems = "\n".join(verify(directory, progress=False))
    assert "label 0 of 1 record is outside 1..3" in problems


def test_verify_finds_a_wrong_number_of_records(directory):
    splits = json.loads((directory / FILE).read_text())["splits"]
    splits["train"]["shards"][1]["examples"] = 2
    splits["train"]["class_counts"] = [1, 2, 2]
    change(directory, splits=splits)
    assert verify(directory, progress=False) == [
        f"{directory / 'train-00001-of-00002'}: has 1 record, but 2 in the manifest",
        "train: class 'c' has 1 readable record, but 2 in the manifest",
    ]


def test_reading_a_manifest_needs_no_tensorflow(directory):
    program = (
        "import sys\n"
        "from imagenet_fast.data import manifest\n"
        f"found = manifest.read_manifest({str(directory)!r})\n"
        f"manifest.check_sizes(found, {str(directory)!r}, 'train')\n"
        "assert 'tensorflow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# --- Of others ------------------------------------------------------------------------------------


def with_split(name):
    def changed(values):
        values["splits"][name] = values["splits"].pop("validation")
        return values

    return changed


def with_shard(**change):
    def changed(values):
        values["splits"]["train"]["shards"][0].update(change)
        return values

    return changed


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (lambda values: {**values, "labels": ["a", "b\n", "c"]}, "does not fit on a line"),
        (lambda values: {**values, "labels": ["a", "\udcff", "c"]}, "does not fit on a line"),
        (lambda values: {**values, "labels": ["a", "b\0", "c"]}, "does not fit on a line"),
        (lambda values: {**values, "labels": "abc"}, "Expected `array`, got `str`"),
        (lambda values: {**values, "name": None}, "Expected `str`, got `null`"),
        (lambda values: {**values, "label_offset": 2**40}, "Expected `int` <="),
        (lambda values: {**values, "label_offset": 0.5}, "Expected `int`, got `float`"),
        (lambda values: {**values, "source": []}, "Expected `object`"),
        (lambda values: {**values, "skipped": [{"file": 1}]}, "skipped"),
        (with_split("<script>alert(1)</script>"), "there is no split '<script>"),
        (with_split(""), "there is no split ''"),
        (with_shard(examples=-1), "Expected `int` >= 0"),
        (with_shard(examples=2**40), "too few for 1099511627776 records"),
        (with_shard(file="*"), "not the name of a file"),
        (with_shard(file="\ud800"), "not the name of a file"),
        (with_shard(bytes=2**60), "Expected `int` <="),
        (with_shard(bytes="1"), "Expected `int`, got `str`"),
        (with_shard(file="..\\secret"), "not the name of a file"),
        (with_shard(file="a\0b"), "not the name of a file"),
        (with_shard(file="\x1b[2J"), "not the name of a file"),
        (with_shard(file=".hidden"), "not the name of a file"),
        (with_shard(file=""), "not the name of a file"),
        (with_shard(file="a" * 256), "not the name of a file"),
        (with_shard(file=["a"]), "Expected `str`, got `array`"),
    ],
)
def test_hostile_manifests_are_refused(directory, changed, reason):
    values = changed(json.loads((directory / FILE).read_text()))
    (directory / FILE).write_text(json.dumps(values))
    with pytest.raises(UserError, match=re.escape(reason)) as caught:
        read_manifest(directory)
    assert str(directory / FILE) in str(caught.value)


def test_deep_and_large_manifests_are_refused(directory):
    for content, reason in ((b"[" * 10**6, "nested too deeply"), (b" " * 2**26, "may have")):
        (directory / FILE).write_bytes(content)
        with pytest.raises(UserError, match=reason):
            read_manifest(directory)


def test_names_of_skipped_files_may_be_no_text(directory):
    """Of a file system, such names come with surrogates."""
    change(directory, skipped=[{"split": "train", "file": "caf\udce9.jpg", "reason": "empty"}])
    assert read_manifest(directory).skipped[0].file == "caf\udce9.jpg"


def test_planted_links_are_not_written_through(directory, tmp_path_factory):
    precious = tmp_path_factory.mktemp("elsewhere") / "precious"
    precious.write_text("precious")
    manifest = read_manifest(directory)
    for name in (FILE, f".{FILE}.tmp"):
        (directory / name).unlink(missing_ok=True)
        (directory / name).symlink_to(precious)
        write_manifest(manifest, directory)
    assert precious.read_text() == "precious"
    assert read_manifest(directory) == manifest


def test_verify_survives_a_record_that_claims_terabytes(run_python, directory):
    length = struct.pack("<Q", 2**40)
    data = length + records._checksum(length) + b"jpeg"
    file = next(iter(LABELS))
    (directory / file).write_bytes(data)
    command = ["-m", "imagenet_fast", "prepare", "--verify", f"--data_dir={directory}"]
    done = run_python(command, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert file in done.stderr + done.stdout


def test_a_shard_named_twice_is_refused(directory):
    splits = json.loads((directory / FILE).read_text())["splits"]
    splits["validation"]["shards"][0]["file"] = splits["train"]["shards"][0]["file"]
    change(directory, splits=splits)
    with pytest.raises(UserError, match="names a shard twice"):
        read_manifest(directory)


def test_a_shard_that_is_no_file_is_told(directory):
    splits = json.loads((directory / FILE).read_text())["splits"]
    file = directory / splits["train"]["shards"][0]["file"]
    file.unlink()
    os.mkfifo(file)
    assert f"{file}: is not a regular file" in verify(directory, progress=False)
