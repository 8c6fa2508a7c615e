import pytest

from imagenet_fast.base.errors import UserError
from imagenet_fast.data.sources import KINDS, open_source


def test_unknown_kind_suggests_the_nearest():
    with pytest.raises(UserError, match=r"no source 'cifar'; choose from .*did you mean 'cifar10'"):
        open_source("cifar")


def test_an_option_of_another_kind_is_refused(tmp_path):
    with pytest.raises(
        UserError, match="'idx' has no holdout: it has only source_path, name, pad_to"
    ):
        open_source("idx", tmp_path, holdout=0.5)
    with pytest.raises(UserError, match="'digits' has no source_path or other options"):
        open_source("digits", tmp_path)


def test_none_means_the_default(tmp_path):
    with pytest.raises(UserError, match="no such directory"):
        open_source("idx", tmp_path / "nowhere", holdout=None)


@pytest.mark.parametrize("kind", ["folders", "imagenet", "tfds"])
def test_path_is_required(kind):
    with pytest.raises(UserError, match=f"'{kind}' needs source_path"):
        open_source(kind)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"digits"}))
def test_no_such_path(kind, tmp_path):
    with pytest.raises(UserError, match="nowhere"):
        open_source(kind, tmp_path / "nowhere")
