import os
import re

import pytest

from imagenet_fast.base import native_ops
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.notices import warn_once
from imagenet_fast.config import Config
from imagenet_fast.data.jpeg import image_ops


@pytest.fixture
def source(tmp_path_factory):
    """A file that compiles fast."""
    file = tmp_path_factory.mktemp("source") / "tiny.cc"
    file.write_text('#include "native_ops.h"\n')
    return file


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """Makes the next use of the op look for its library in an empty folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native_ops.load_ops.cache_clear()
    yield tmp_path
    native_ops.load_ops.cache_clear()


@pytest.mark.long
def test_op_is_compiled_once(source, empty_cache, monkeypatch):
    library = native_ops._build(source)
    compiled_at = library.stat().st_mtime_ns
    assert list(empty_cache.rglob("*.so")) == [library]
    # The cached library needs no compiler.
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert native_ops._build(source) == library
    assert library.stat().st_mtime_ns == compiled_at


def test_machines_that_share_a_home_directory_have_their_own_library(
    source, empty_cache, monkeypatch
):
    libraries = set()
    avx2, avx512 = ({*group} for group in native_ops._INSTRUCTIONS)
    for features in (set(), {"avx2"}, avx512, avx2, avx2 | {"avx512f"}, avx2 | avx512):
        monkeypatch.setattr(native_ops, "cpu_model", lambda features=features: ("CPU", features))
        libraries.add((native_ops.machine_flags(), native_ops._build(source)))
    flags = [len(flags) for flags, _ in libraries]
    assert sorted(flags) == [0, 2, 8]
    assert ("-mavx2", "-mbmi2") in {flags for flags, _ in libraries}


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("no-such-compiler", "no C++ compiler found (no-such-compiler): install one"),
        ("false", "false cannot compile"),
        ("sh -c 'printf \"from x.h:\\nx.cc:1: error: bad\\n\" >&2; exit 1'", "x.cc:1: error: bad"),
        ("'g++", 'CXX is "\'g++": No closing quotation'),
    ],
)
def test_unavailable_native_kernel_warns_once_or_raises(
    empty_cache, monkeypatch, capfd, compiler, reason
):
    monkeypatch.setenv("CXX", compiler)
    warn_once.cache_clear()
    for _ in range(2):
        config = image_ops.with_resize_kernel(Config(resize_kernel="auto"))
        assert config.resize_kernel == "tensorflow"
    printed = capfd.readouterr().err
    assert (
        printed.count("resize_kernel=auto makes images by TensorFlow's slower ops, without JPEG ")
        == 1
    )
    assert reason in printed
    with pytest.raises(UserError, match=f"native is unavailable: .*{re.escape(reason)}"):
        image_ops.with_resize_kernel(Config(resize_kernel="native"))


@pytest.mark.long
def test_compiler_command_may_have_arguments(source, empty_cache, monkeypatch):
    log = empty_cache / "log"
    # Like ccache, it runs its arguments.
    wrapper = empty_cache / "my wrapper"
    wrapper.write_text(f'#!/bin/sh\necho "$1" >> {log}\nexec "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", f"'{wrapper}' g++ -DNOTHING")
    native_ops._build(source)
    assert log.read_text() == "g++\n"


@pytest.fixture
def new_process(monkeypatch):
    """As of a process that has compiled nothing."""
    warn_once.cache_clear()
    native_ops._folder_of_process.cache_clear()
    yield
    native_ops._folder_of_process.cache_clear()


def test_without_a_home_directory_each_process_compiles(
    source, empty_cache, new_process, monkeypatch, capfd
):
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    # As for users without an entry in passwd.
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    library = native_ops._build(source)
    assert library.parent.stat().st_mode & 0o777 == 0o700
    assert "the home directory is unknown: set HOME" in capfd.readouterr().err


def test_a_library_that_others_can_plant_is_not_loaded(source, empty_cache, new_process, capfd):
    library = native_ops._build(source)
    library.write_bytes(b"planted")
    library.parent.chmod(0o777)
    compiled = native_ops._build(source)
    assert compiled.parent != library.parent and compiled.read_bytes() != b"planted"
    assert "can be written by others" in capfd.readouterr().err
