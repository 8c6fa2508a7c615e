import contextlib
import gzip
import io
import os
import pathlib
import signal
import struct
import subprocess
import sys
import tarfile
import time
import types

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from imagenet_fast import Config, commands, make_dataset
from imagenet_fast.base.errors import UserError
from imagenet_fast.data import records
from imagenet_fast.data.examples import ENCODED, FILENAME, LABEL, SYNSET, decode_example
from imagenet_fast.data.manifest import FILE, JOURNAL, read_manifest
from imagenet_fast.data.prepare.sources import imagenet, open_source

SYNSETS = ("n01440764", "n01443537", "n02011460")
WORDS = ("tench, Tinca tinca", "goldfish", "bittern")
# ILSVRC's own numbers follow no alphabet.
DEVKIT_SYNSETS = {SYNSETS[i]: WORDS[i] for i in (2, 0, 1)}
TRAIN = {synset: [f"{synset}_{i}.JPEG" for i in (10, 2, 33)] for synset in SYNSETS}
ANSWERS = ("n02011460", "n01440764", "n01440764", "n01443537")


def content(name):
    return f"image {name}".encode(errors="surrogateescape") * (len(name) % 7 + 40)


def tar(members):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def write_devkit(directory, synsets, answers, **changes):
    """Writes a development kit, whose synsets are numbered and listed in the order given.

    Args:
      directory: Where to.
      synsets: The words of each class, by synset.
      answers: The synset of each validation image.
      **changes: What to write in place of the two files: ``meta`` bytes or rows, ``truth`` text.
    """
    fields = (
        *("ILSVRC2012_ID", "WNID", "words", "gloss"),
        *("num_children", "children", "wordnet_height", "num_train_images"),
    )
    classes = [
        (number, synset, words, "what it is", 0, [], 0, 1300)
        for number, (synset, words) in enumerate(synsets.items(), 1)
    ]
    children = [float(row[0]) for row in classes]
    ancestors = [
        (1001, "n00001740", "entity", "all there is", 1, [1002.0], 19, 0),
        (1002, "n00001930", "physical entity", "", len(children), children, 18, 0),
    ]
    meta = changes.get("meta", [*classes, *ancestors])
    if not isinstance(meta, bytes):
        table = np.zeros((len(meta), 1), [(field, object) for field in fields])
        for row, values in zip(table, meta):
            row[0] = values
        buffer = io.BytesIO()
        savemat(buffer, {"synsets": table}, do_compression=True)
        meta = buffer.getvalue()
    numbers = {synset: number for number, synset in enumerate(synsets, 1)}
    truth = changes.get("truth", "".join(f"{numbers[synset]}\n" for synset in answers))
    files = {
        "readme.txt": b"ILSVRC2012",
        "data/._meta.mat": b"of another system",
        "data/meta.mat": meta,
        "data/ILSVRC2012_validation_ground_truth.txt": truth.encode(),
    }
    members = {f"ILSVRC2012_devkit_t12/{name}": data for name, data in files.items()}
    (directory / imagenet.DEVKIT).write_bytes(gzip.compress(tar(members)))


def write_train(directory, train):
    outer = {
        f"{synset}.tar": tar({name: content(name) for name in names})
        for synset, names in train.items()
    }
    (directory / imagenet.TRAIN_TAR).write_bytes(tar(outer))


@pytest.fixture
def tars(tmp_path):
    """A directory of ImageNet's two tars, of three classes; they hold their members in no order."""
    write_train(tmp_path, dict(reversed(TRAIN.items())))
    names = [f"ILSVRC2012_val_{i:08d}.JPEG" for i in (3, 1, 4, 2)]
    (tmp_path / imagenet.VALIDATION_TAR).write_bytes(tar({name: content(name) for name in names}))
    return tmp_path


@pytest.fixture
def directory(tars):
    """The two tars and the two lists as text."""
    lines = [f"{synset} {word}\n" for synset, word in zip(SYNSETS, WORDS)]
    (tars / "synset_words.txt").write_text("".join(lines))
    answers = tars / "imagenet_2012_validation_synset_labels.txt"
    answers.write_text("\n".join(ANSWERS) + "\n")
    return tars


@pytest.fixture
def downloads(tars):
    """What image-net.org gives out: the two tars and the development kit."""
    write_devkit(tars, DEVKIT_SYNSETS, ANSWERS)
    return tars


@pytest.mark.parametrize("files", ["directory", "downloads"])
def test_images_labels_and_names(files, request):
    source = open_source("imagenet", request.getfixturevalue(files))
    assert source.name == "imagenet2012"
    assert source.synsets == SYNSETS
    assert source.labels == WORDS
    assert source.splits == {"train": 9, "validation": 4}
    assert source.warnings == ()
    names = []
    for index in range(9):
        image, label, name = source.read("train", index)
        assert image == content(name)
        assert name.startswith(SYNSETS[label])
        names.append(name)
    assert sorted(names) == sorted(name for names in TRAIN.values() for name in names)
    for index, synset in enumerate(ANSWERS):
        image, label, name = source.read("validation", index)
        assert name == f"ILSVRC2012_val_{index + 1:08d}.JPEG"
        assert image == content(name)
        assert SYNSETS[label] == synset


def test_lists_with_other_names_and_without_class_names(directory):
    (directory / "synset_words.txt").unlink()
    (directory / "mine.txt").write_text("\n".join(SYNSETS))
    source = open_source("imagenet", directory, synsets=directory / "mine.txt")
    assert source.labels == SYNSETS
    message = r"devkit_t12.tar.gz: no such file; download it from image-net.org, or give both lists"
    with pytest.raises(UserError, match=message):
        open_source("imagenet", directory)


def test_text_is_preferred_to_the_devkit(downloads):
    source = open_source("imagenet", downloads)
    (downloads / "synset_words.txt").write_text("\n".join(SYNSETS))
    mine = downloads / "mine.txt"
    mine.write_text("\n".join(reversed(ANSWERS)))
    mixed = open_source("imagenet", downloads)
    assert mixed.labels == SYNSETS
    assert [mixed.read("validation", i) for i in range(4)] == [
        source.read("validation", i) for i in range(4)
    ]
    other = open_source("imagenet", downloads, validation_labels=str(mine))
    assert [SYNSETS[other.read("validation", i).label] for i in range(4)] == [*reversed(ANSWERS)]


def test_text_and_devkit_give_the_same_description(directory):
    text = open_source("imagenet", directory).describe()
    write_devkit(directory, DEVKIT_SYNSETS, ANSWERS)
    for path in directory.glob("*.txt"):
        path.unlink()
    assert open_source("imagenet", directory).describe() == text


def test_the_devkit_without_scipy(downloads, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(UserError, match=r"needs SciPy: `pip install -e '\.\[imagenet\]'`"):
        open_source("imagenet", downloads)


def test_damaged_truncated_and_other_devkits(downloads):
    path = downloads / imagenet.DEVKIT
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[-8] ^= 1  # of the checksum, as damage within the files would make it differ
    for data in (bytes(damaged), whole[:-20], whole[:60], b"<html>", gzip.compress(b"rubbish")):
        path.write_bytes(data)
        with pytest.raises(UserError, match=r"devkit_t12.tar.gz: is not a complete .tar.gz file"):
            open_source("imagenet", downloads)
    path.write_bytes(gzip.compress(tar({"ILSVRC2010_devkit/data/meta.mat": b""})))
    with pytest.raises(UserError, match="has no data/ILSVRC2012_validation_ground_truth"):
        open_source("imagenet", downloads)


def saved(**variables):
    buffer = io.BytesIO()
    savemat(buffer, variables)
    return buffer.getvalue()


def nested(depth):
    """A MAT-file of a cell in a cell in a cell ..., which SciPy reads by a function for each."""

    def element(kind, data):
        return struct.pack("<II", kind, len(data)) + data + bytes(-len(data) % 8)

    def of_one(name):  # flags, dimensions and name of a 1 x 1 cell array
        flags = element(6, struct.pack("<II", 1, 0))
        return flags + element(5, struct.pack("<ii", 1, 1)) + element(1, name)

    header = b"MATLAB 5.0 MAT-file".ljust(124) + struct.pack("<HH", 0x0100, 0x4D49)
    inner = of_one(b"")
    sizes = [len(inner) + (len(inner) + 8) * below for below in range(depth)]
    cells = b"".join(struct.pack("<II", 14, size) + inner for size in reversed(sizes))
    return header + element(14, of_one(b"synsets") + cells)


def test_arrays_that_are_nested_too_deeply_for_scipy(downloads):
    """Its reader ends the process."""
    write_devkit(downloads, DEVKIT_SYNSETS, ANSWERS, meta=nested(100_000))
    with pytest.raises(
        UserError, match=r"meta.mat: is not ILSVRC 2012's: reading it ends .* by SIG"
    ):
        open_source("imagenet", downloads)


def test_scipy_reads_in_a_new_process(downloads, monkeypatch):
    """A fork waits forever for what threads of this process held when it was made."""

    def fork():
        raise AssertionError("forked")

    monkeypatch.setattr(os, "fork", fork)
    assert open_source("imagenet", downloads).labels


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        (b"MATLAB 7.3 MAT-file" * 20, "is not ILSVRC 2012's: "),
        (saved(classes=[1, 2]), "is not ILSVRC 2012's: KeyError: 'synsets'"),
        (saved(synsets={"ILSVRC2010_ID": 1.0, "WNID": "n01440764"}), "ILSVRC2012_ID"),
        ([(1001, "n00001740", "entity", "", 0, [], 19, 0)], "its classes are not"),
        ([(2, "n01440764", "tench", "", 0, [], 0, 1)], "its classes are not"),
        ([(1, "tench", "n01440764", "", 0, [], 0, 1)], "its classes are not"),
        ([(i, "n01440764", "tench", "", 0, [], 0, 1) for i in (1, 2)], "its classes are not"),
        ([("one", "n01440764", "tench", "", 0, [], 0, 1)], "ValueError: invalid literal"),
    ],
)
def test_invalid_synsets_in_the_devkit(downloads, meta, message):
    write_devkit(downloads, DEVKIT_SYNSETS, ANSWERS, meta=meta)
    with pytest.raises(UserError, match=f"devkit_t12.tar.gz/data/meta.mat: .*{message}"):
        open_source("imagenet", downloads)


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        ("1\n2\n4\n1\n", "_ground_truth.txt, line 3: '4' is not a class number"),
        ("1\n1001\n1\n1\n", "line 2: '1001' is not a class number"),
        ("1\nn01440764\n1\n1\n", "line 2: 'n01440764' is not a class number"),
        ("1\n2\n3\n", r"has 4 images, but .*devkit_t12.tar.gz/data/.*_ground_truth.txt 3 lines"),
    ],
)
def test_invalid_validation_labels_in_the_devkit(downloads, truth, message):
    write_devkit(downloads, DEVKIT_SYNSETS, ANSWERS, truth=truth)
    with pytest.raises(UserError, match=message):
        open_source("imagenet", downloads)


def test_a_devkit_of_one_class(tmp_path):
    synset = SYNSETS[0]
    write_train(tmp_path, {synset: TRAIN[synset]})
    (tmp_path / imagenet.VALIDATION_TAR).write_bytes(tar({"ILSVRC2012_val_00000001.JPEG": b"1"}))
    write_devkit(
        tmp_path, {synset: "tench"}, [synset], meta=[(1, synset, "tench", "", 0, [], 0, 3)]
    )
    source = open_source("imagenet", tmp_path)
    assert (source.synsets, source.labels) == ((synset,), ("tench",))


def test_a_synset_list_in_another_order(directory):
    (directory / "synset_words.txt").write_text("\n".join(reversed(SYNSETS)))
    with pytest.raises(UserError, match="alphabetical order"):
        open_source("imagenet", directory)


def test_classes_that_are_in_the_list_or_the_tar_only(directory):
    write_train(directory, {**TRAIN, "n09999999": ["n09999999_1.JPEG"]})
    with pytest.raises(UserError, match=r"n09999999.tar is not a synset in .*synset_words.txt"):
        open_source("imagenet", directory)
    write_train(directory, {synset: TRAIN[synset] for synset in SYNSETS[:2]})
    with pytest.raises(UserError, match="has no image of n02011460"):
        open_source("imagenet", directory)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (ANSWERS[:3], "has 4 images, but .* 3 lines"),
        ((*ANSWERS[:3], "n00000000"), "line 4: 'n00000000' is not in"),
        (("490", "361", "171", "822"), "has numbers"),
    ],
)
def test_invalid_validation_labels(directory, answers, message):
    (directory / "imagenet_2012_validation_synset_labels.txt").write_text("\n".join(answers))
    with pytest.raises(UserError, match=message):
        open_source("imagenet", directory)


@pytest.mark.parametrize("name", [imagenet.TRAIN_TAR, imagenet.VALIDATION_TAR])
def test_missing_truncated_and_other_tars(directory, name):
    path = directory / name
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 3], whole[: len(whole) // 2 + 700], b"rubbish" * 100):
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"{name}: is not a complete, uncompressed tar file"):
            open_source("imagenet", directory)
    path.unlink()
    with pytest.raises(UserError, match=f"{name}: no such file"):
        open_source("imagenet", directory)


def test_the_real_counts_are_checked_for_the_real_number_of_classes(directory):
    synsets = [f"n{i:08d}" for i in range(1000)]
    write_train(directory, {synset: [f"{synset}_1.JPEG"] for synset in synsets})
    (directory / "synset_words.txt").write_text("\n".join(synsets))
    answers = directory / "imagenet_2012_validation_synset_labels.txt"
    answers.write_text("\n".join(synsets[:4]))
    train, validation = open_source("imagenet", directory).warnings
    assert "has 1,000 images, but ImageNet 1,281,167" in train
    assert "has 4 images, but ImageNet 50,000" in validation


# --- A miniature of ImageNet, through the prepare command to batches of training

COLOURS = {  # of the images of each class, which tell later whose they are
    "n01440764": (200, 60, 40),
    "n02105855": (60, 190, 70),
    "n02447366": (50, 80, 200),
    "n07583066": (200, 190, 60),
}
IDS = tuple(COLOURS)
IMAGES, VALIDATION_IMAGES = 160, 24
PNG, CMYK = "n02105855_2933.JPEG", "n02447366_23489.JPEG"  # what they are in ImageNet itself
SHARDS, VALIDATION_SHARDS = 16, 4


def picture(synset, seed, name):
    generator = np.random.RandomState(seed)
    height, width = generator.randint(350, 500, 2)
    noise = generator.randint(-40, 41, (height, width, 3))
    pixels = (np.array(COLOURS[synset]) + noise).astype(np.uint8)
    buffer = io.BytesIO()
    image = Image.fromarray(pixels).convert("CMYK" if name == CMYK else "RGB")
    image.save(buffer, "PNG" if name == PNG else "JPEG")
    return buffer.getvalue()


def write_miniature(directory):
    """Writes image-net.org's three files; returns the images by name, and their synsets."""
    outer, images, synsets = {}, {}, {}
    for label, synset in enumerate(IDS):
        numbers = range(100 * label, 100 * label + IMAGES // len(IDS) - 1)
        odd = {"n02105855": PNG, "n02447366": CMYK}.get(synset, f"{synset}_99999.JPEG")
        names = [odd, *(f"{synset}_{number}.JPEG" for number in numbers)]
        inner = {name: picture(synset, 1000 * label + i, name) for i, name in enumerate(names)}
        outer[f"{synset}.tar"] = tar(inner)
        images.update(inner)
        synsets.update(dict.fromkeys(inner, synset))
    answers = [IDS[number * 7 % 4] for number in range(VALIDATION_IMAGES)]
    validation = {
        name: picture(synset, 9000 + i, name)
        for i, synset in enumerate(answers)
        for name in [f"ILSVRC2012_val_{i + 1:08d}.JPEG"]
    }
    (directory / imagenet.TRAIN_TAR).write_bytes(tar(outer))
    (directory / imagenet.VALIDATION_TAR).write_bytes(tar(validation))
    write_devkit(directory, dict.fromkeys(reversed(IDS), "word"), answers)
    images.update(validation)
    synsets.update(zip(validation, answers))
    return images, synsets


def command(downloads, directory, threads):
    return [
        "prepare",
        "--source=imagenet",
        f"--source_path={downloads}",
        f"--data_dir={directory}",
        f"--train_shards={SHARDS}",
        f"--validation_shards={VALIDATION_SHARDS}",
        f"--threads={threads}",
    ]


def kill_in_the_middle(arguments, journal):
    """Runs a command and kills it after a few shards; returns those that were done."""
    process = subprocess.Popen(
        [sys.executable, "-m", "imagenet_fast", *arguments],
        cwd=pathlib.Path(__file__).parents[4],
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
    )
    try:
        deadline = time.monotonic() + 120
        while not journal.exists() or journal.read_bytes().count(b"\n") < 4:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.002)
    finally:
        process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    return journal.read_bytes().count(b"\n") - 1


@pytest.fixture(scope="module")
def miniature(tmp_path_factory):
    """What became of a run that was killed and went on, and of one that was left alone."""
    folder = tmp_path_factory.mktemp("miniature")
    downloads, whole, killed = (folder / name for name in ("downloads", "whole", "killed"))
    downloads.mkdir()
    images, synsets = write_miniature(downloads)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert commands.run(command(downloads, whole, threads=3)) == 0
    done = kill_in_the_middle(command(downloads, killed, threads=1), killed / JOURNAL)
    kept = {path: path.stat().st_mtime_ns for path in killed.glob("[tv]*-of-*")}
    unfinished = not (killed / FILE).exists()
    with contextlib.redirect_stdout(io.StringIO()):
        assert commands.run(command(downloads, killed, threads=2)) == 0
    return types.SimpleNamespace(
        images=images,
        synsets=synsets,
        whole=whole,
        killed=killed,
        printed=printed.getvalue(),
        done=done,
        kept=kept,
        unfinished=unfinished,
    )


# In the default run, test_prepare.py kills one.
@pytest.mark.long
def test_killed_run_resumes_to_the_same_bytes(miniature):
    assert miniature.unfinished
    assert 3 <= miniature.done < SHARDS + VALIDATION_SHARDS
    whole, killed = (
        {path.name: path.read_bytes() for path in directory.iterdir()}
        for directory in (miniature.whole, miniature.killed)
    )
    assert sorted(whole) == sorted(
        [FILE, "data.html", "data.npz", "duplicates.jsonl"]
        + [f"train-{shard:05d}-of-00016" for shard in range(SHARDS)]
        + [f"validation-{shard:05d}-of-00004" for shard in range(VALIDATION_SHARDS)]
    )
    assert killed == whole
    again = [path for path, time in miniature.kept.items() if path.stat().st_mtime_ns != time]
    assert len(again) <= len(miniature.kept) - miniature.done


@pytest.mark.long
def test_unusual_images_are_converted_and_reported_and_others_unchanged(miniature):
    manifest = read_manifest(miniature.killed)
    assert manifest.converted == {"CMYK JPEG": 1, "PNG": 1}
    assert manifest.skipped == manifest.warnings == ()
    assert manifest.splits["train"].class_counts == (40, 40, 40, 40)
    assert miniature.printed.splitlines() == [
        "converted 1 image: CMYK JPEG",
        "converted 1 image: PNG",
        f"a page on the images: {miniature.whole / 'data.html'}",
        f"{miniature.whole}: imagenet2012, 4 classes, 160 train images, 24 validation images",
    ]
    found = {}
    for path in miniature.killed.glob("*-of-*"):
        for example in map(decode_example, records.read_records(path)):
            found[example[FILENAME][0].decode()] = example
    assert found.keys() == miniature.images.keys()
    for name, example in found.items():
        synset = miniature.synsets[name]
        assert example[SYNSET] == [synset.encode()]
        assert example[LABEL] == [IDS.index(synset)]
        same = example[ENCODED][0] == miniature.images[name]
        assert same == (name not in (PNG, CMYK))
    assert commands.run(["prepare", "--verify", f"--data_dir={miniature.killed}"]) == 0


@pytest.mark.long
def test_training_and_evaluation_see_each_image_with_its_label(miniature):
    config = Config(
        data_dir=str(miniature.killed),
        image_size=32,
        train_crop="none",
        batch_size=20,
        shuffle_buffer=50,
        strategy="one_device",
    )
    for split, batches, count in (("train", IMAGES // 20, IMAGES), ("validation", 2, 24)):
        labels, colours, weights = [], [], []
        for (images, some_labels, some_weights), _ in zip(
            make_dataset(config, split), range(batches)
        ):
            labels += some_labels.numpy().tolist()
            colours += images.numpy().mean((1, 2)).tolist()
            weights += some_weights.numpy().tolist()
        labels, weights = np.array(labels), np.array(weights)
        assert (labels >= 0).sum() == count
        assert (weights[labels >= 0] == 1).all()
        assert np.bincount(labels[labels >= 0]).tolist() == [count // 4] * 4
        expected = np.array(list(COLOURS.values()))[labels[labels >= 0]]
        np.testing.assert_allclose(np.array(colours)[labels >= 0], expected, atol=8)


def test_names_in_a_tar_that_are_not_utf_8(directory):
    """tarfile gives their bytes as surrogates, which cannot be encoded."""
    train = {synset: [*names, "caf\udce9.JPEG"] for synset, names in TRAIN.items()}
    write_train(directory, train)
    source = open_source("imagenet", directory)
    names = {source.read("train", index).filename for index in range(source.splits["train"])}
    assert "caf\ufffd.JPEG" in names
    assert all(name.encode() for name in names)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_links_and_pipes_in_a_tar_are_no_images(directory, kind):
    def inner(synset, names):
        info = tarfile.TarInfo(f"{synset}_9.JPEG")
        info.type, info.linkname = kind, f"{synset}_10.JPEG"
        return info.tobuf() + tar({name: content(name) for name in names})

    outer = {f"{synset}.tar": inner(synset, names) for synset, names in TRAIN.items()}
    (directory / imagenet.TRAIN_TAR).write_bytes(tar(outer))
    assert open_source("imagenet", directory).splits["train"] == 9


@pytest.mark.parametrize(
    ("name", "limit", "message"),
    [
        ("MAX_IMAGE", 400, r"ILSVRC2012_img_.*\.JPEG has \d+ bytes, but may have 400"),
        ("_MAX_IMAGES", 2, "ILSVRC2012_img_train.tar: .* it has more than 2 members"),
        ("_MAX_IMAGES", 8, "ILSVRC2012_img_train.tar: has more than 8 images"),
    ],
)
def test_sizes_and_numbers_of_images_are_limited(directory, monkeypatch, name, limit, message):
    monkeypatch.setattr(imagenet, name, limit)
    with pytest.raises(UserError, match=message):
        open_source("imagenet", directory)


def test_a_tar_may_not_claim_more_than_it_has(directory):
    path = directory / imagenet.VALIDATION_TAR
    info = tarfile.TarInfo("ILSVRC2012_val_00000005.JPEG")
    info.size = 2**50
    path.write_bytes(path.read_bytes().rstrip(b"\0") + bytes(1024))
    with path.open("r+b") as file:
        file.seek(0)
        whole = file.read()
        file.seek(0)
        file.write(info.tobuf(tarfile.GNU_FORMAT) + whole)
    with pytest.raises(UserError, match=r"00005.JPEG' has 1,125,899,906,842,624 bytes, but can"):
        open_source("imagenet", directory)


def test_what_a_devkit_unpacks_to_is_limited(downloads, monkeypatch):
    monkeypatch.setattr(imagenet, "_MAX_DEVKIT", 10_000)
    with pytest.raises(UserError, match=r"devkit_t12.tar.gz: .* it has more than 10,000 bytes"):
        open_source("imagenet", downloads)


def test_pipes_do_not_block(directory):
    for name in (imagenet.TRAIN_TAR, imagenet.VALIDATION_TAR):
        (directory / name).rename(directory / "other")
        os.mkfifo(directory / name)
        with pytest.raises(UserError, match=f"{name}: .*it is not a regular file"):
            open_source("imagenet", directory)
        (directory / name).unlink()
        (directory / "other").rename(directory / name)
    os.mkfifo(directory / "pipe")
    for option in ("synsets", "validation_labels"):
        with pytest.raises(UserError, match=r"pipe: cannot be read: .*not a regular file"):
            open_source("imagenet", directory, **{option: directory / "pipe"})
    (directory / "synset_words.txt").unlink()
    os.mkfifo(directory / imagenet.DEVKIT)
    with pytest.raises(UserError, match=f"{imagenet.DEVKIT}: no such file"):
        open_source("imagenet", directory)
