import os
import re

import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast.base import native_ops
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.notices import warn_once
from imagenet_fast.config import Config
from imagenet_fast.data.decode import evaluation_image, resize
from imagenet_fast.data.jpeg import resize_op

pytestmark = pytest.mark.usefixtures("native_ops")


def noise(height, width, seed=0):
    return np.random.RandomState(seed).randint(0, 256, (height, width, 3)).astype(np.uint8)


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("method", ["bilinear", "bicubic"])
def test_pixels_are_bit_equal_to_tensorflows(method, antialias):
    sizes = np.random.RandomState(0).randint(1, 500, (15 if antialias else 60, 2)).tolist()
    # Single pixels and rows, equal sizes, and exactly half and double the size.
    sizes += [[1, 1], [1, 40], [40, 1], [32, 32], [64, 64], [16, 16], [32, 300]]
    for seed, (height, width) in enumerate(sizes):
        image = noise(height, width, seed)
        for size in (1, 32, 97):
            config = Config(image_size=size, resize_method=method, antialias=antialias)
            native = resize(tf.constant(image), config.replace(resize_kernel="native"))
            expected = resize(tf.constant(image), config.replace(resize_kernel="tensorflow"))
            np.testing.assert_array_equal(native, expected, err_msg=f"{height} x {width} to {size}")


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("method", ["bilinear", "bicubic"])
@pytest.mark.parametrize("kernel", ["native", "tensorflow"])
def test_flipped_equals_the_plain_result_flipped(method, kernel, antialias):
    config = Config(image_size=24, resize_method=method, resize_kernel=kernel, antialias=antialias)
    image = tf.constant(noise(37, 52))
    plain = resize(image, config).numpy()
    np.testing.assert_array_equal(resize(image, config, tf.constant(True)), plain[:, ::-1])
    np.testing.assert_array_equal(resize(image, config, tf.constant(False)), plain)
    assert (plain != plain[:, ::-1]).any()


@pytest.mark.parametrize("antialias", [False, True])
def test_bicubic_overshoot_is_clipped(antialias):
    stripes = np.zeros([16, 16, 3], np.uint8)
    stripes[:, 5:9] = 255
    resized = resize_op.resize(tf.constant(stripes), 45, "bicubic", False, antialias).numpy()
    assert resized.min() == 0 and resized.max() == 255
    # Without clipping, values above 255 would wrap around to small ones.
    assert (resized[:, 19:21] == 255).all()


@pytest.mark.parametrize("shape", [(0, 5, 3), (5, 5, 1), (5, 5)])
def test_wrong_shapes_raise(shape):
    with pytest.raises(tf.errors.InvalidArgumentError, match="height, width, 3"):
        resize_op.resize(tf.zeros(shape, tf.uint8), 8, "bilinear", False)


def test_evaluation_image_has_no_native_op():
    config = Config(image_size=8, resize_kernel="native")
    spec = tf.TensorSpec([], tf.string)
    graph = tf.function(lambda one: evaluation_image(one, config)).get_concrete_function(spec).graph
    names = {op.type for op in graph.get_operations()}
    functions = graph.as_graph_def().library.function
    names |= {node.op for function in functions for node in function.node_def}
    assert "ResizeBilinear" in names
    assert "ImagenetFastResize" not in names


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """Makes the next use of the op look for its library in an empty folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native_ops.load_ops.cache_clear()
    yield tmp_path
    native_ops.load_ops.cache_clear()


@pytest.mark.long
def test_op_is_compiled_once(empty_cache, monkeypatch):
    library = native_ops._build(resize_op._SOURCE)
    compiled_at = library.stat().st_mtime_ns
    assert list(empty_cache.rglob("*.so")) == [library]
    # The cached library needs no compiler.
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert native_ops._build(resize_op._SOURCE) == library
    assert library.stat().st_mtime_ns == compiled_at


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("no-such-compiler", "no C++ compiler found (no-such-compiler): install one"),
        ("false", "false cannot compile"),
        ("'g++", 'CXX is "\'g++": No closing quotation'),
    ],
)
def test_unavailable_native_kernel_warns_once_or_raises(
    empty_cache, monkeypatch, capfd, compiler, reason
):
    monkeypatch.setenv("CXX", compiler)
    warn_once.cache_clear()
    for _ in range(2):
        config = resize_op.with_resize_kernel(Config(resize_kernel="auto"))
        assert config.resize_kernel == "tensorflow"
    printed = capfd.readouterr().err
    assert printed.count("resize_kernel=auto uses TensorFlow's slower resize, without JPEG ") == 1
    assert reason in printed
    with pytest.raises(UserError, match=f"native is unavailable: .*{re.escape(reason)}"):
        resize_op.with_resize_kernel(Config(resize_kernel="native"))


@pytest.mark.long
def test_compiler_command_may_have_arguments(empty_cache, monkeypatch):
    log = empty_cache / "log"
    # Like ccache, it runs its arguments.
    wrapper = empty_cache / "my wrapper"
    wrapper.write_text(f'#!/bin/sh\necho "$1" >> {log}\nexec "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", f"'{wrapper}' g++ -DNOTHING")
    native_ops._build(resize_op._SOURCE)
    assert log.read_text() == "g++\n"


@pytest.fixture
def new_process(monkeypatch):
    """As of a process that has compiled nothing."""
    warn_once.cache_clear()
    native_ops._folder_of_process.cache_clear()
    yield
    native_ops._folder_of_process.cache_clear()


def test_without_a_home_directory_each_process_compiles(
    empty_cache, new_process, monkeypatch, capfd
):
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    # As for users without an entry in passwd.
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    library = native_ops._build(resize_op._SOURCE)
    assert library.parent.stat().st_mode & 0o777 == 0o700
    assert "the home directory is unknown: set HOME" in capfd.readouterr().err


def test_a_library_that_others_can_plant_is_not_loaded(empty_cache, new_process, capfd):
    library = native_ops._build(resize_op._SOURCE)
    library.write_bytes(b"planted")
    library.parent.chmod(0o777)
    compiled = native_ops._build(resize_op._SOURCE)
    assert compiled.parent != library.parent and compiled.read_bytes() != b"planted"
    assert "can be written by others" in capfd.readouterr().err
