import io
import tarfile

import pytest

from imagenet_fast.data.sources import imagenet, open_source
from imagenet_fast.errors import UserError

SYNSETS = ("n01440764", "n01443537", "n02011460")
TRAIN = {synset: [f"{synset}_{i}.JPEG" for i in (10, 2, 33)] for synset in SYNSETS}
ANSWERS = ("n02011460", "n01440764", "n01440764", "n01443537")


def content(name):
    return f"image {name}".encode() * (len(name) % 7 + 40)


def tar(members):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def write_train(directory, train):
    outer = {
        f"{synset}.tar": tar({name: content(name) for name in names})
        for synset, names in train.items()
    }
    (directory / imagenet.TRAIN_TAR).write_bytes(tar(outer))


@pytest.fixture
def directory(tmp_path):
    """ImageNet's own files, of three classes; the tars hold their members in no order."""
    write_train(tmp_path, dict(reversed(TRAIN.items())))
    names = [f"ILSVRC2012_val_{i:08d}.JPEG" for i in (3, 1, 4, 2)]
    (tmp_path / imagenet.VALIDATION_TAR).write_bytes(tar({name: content(name) for name in names}))
    words = ("tench, Tinca tinca", "goldfish", "bittern")
    lines = [f"{synset} {word}\n" for synset, word in zip(SYNSETS, words)]
    (tmp_path / "synset_words.txt").write_text("".join(lines))
    answers = tmp_path / "imagenet_2012_validation_synset_labels.txt"
    answers.write_text("\n".join(ANSWERS) + "\n")
    return tmp_path


def test_images_labels_and_names(directory):
    source = open_source("imagenet", directory)
    assert source.name == "imagenet2012"
    assert source.synsets == SYNSETS
    assert source.labels == ("tench, Tinca tinca", "goldfish", "bittern")
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


def test_lists_under_other_names_and_without_words(directory):
    (directory / "synset_words.txt").unlink()
    (directory / "mine.txt").write_text("\n".join(SYNSETS))
    source = open_source("imagenet", directory, synsets=directory / "mine.txt")
    assert source.labels == SYNSETS
    with pytest.raises(UserError, match=r"no synset_words.txt in it; name .* with synsets="):
        open_source("imagenet", directory)


def test_a_synset_list_in_another_order(directory):
    (directory / "synset_words.txt").write_text("\n".join(reversed(SYNSETS)))
    with pytest.raises(UserError, match="alphabetical order"):
        open_source("imagenet", directory)


def test_classes_that_are_in_the_list_or_the_tar_only(directory):
    write_train(directory, {**TRAIN, "n09999999": ["n09999999_1.JPEG"]})
    with pytest.raises(UserError, match=r"n09999999.tar is of no synset in .*synset_words.txt"):
        open_source("imagenet", directory)
    write_train(directory, {synset: TRAIN[synset] for synset in SYNSETS[:2]})
    with pytest.raises(UserError, match="has no image of n02011460"):
        open_source("imagenet", directory)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (ANSWERS[:3], "has 4 images but .* 3 lines"),
        ((*ANSWERS[:3], "n00000000"), "line 4: 'n00000000' is not in"),
        (("490", "361", "171", "822"), "holds numbers"),
    ],
)
def test_validation_labels_that_cannot_be(directory, answers, message):
    (directory / "imagenet_2012_validation_synset_labels.txt").write_text("\n".join(answers))
    with pytest.raises(UserError, match=message):
        open_source("imagenet", directory)


@pytest.mark.parametrize("name", [imagenet.TRAIN_TAR, imagenet.VALIDATION_TAR])
def test_tars_that_are_missing_cut_short_or_none(directory, name):
    path = directory / name
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 3], whole[: len(whole) // 2 + 700], b"rubbish" * 100):
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"{name}: is not a whole, uncompressed tar file"):
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
    assert "has 1000 images, where ImageNet has 1281167" in train
    assert "has 4 images, where ImageNet has 50000" in validation
