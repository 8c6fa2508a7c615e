import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast.base import native_ops
from imagenet_fast.base.errors import UserError
from imagenet_fast.config import Config
from imagenet_fast.data import resize_op
from imagenet_fast.data.decode import evaluation_image, resize


@pytest.fixture(scope="module", autouse=True)
def _native():
    if resize_op.with_resize_kernel(Config()).resize_kernel != "native":
        pytest.skip("no C++ compiler")


def noise(height, width, seed=0):
    return np.random.RandomState(seed).randint(0, 256, (height, width, 3)).astype(np.uint8)


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("method", ["bilinear", "bicubic"])
def test_pixels_are_those_of_tensorflow_to_the_bit(method, antialias):
    sizes = np.random.RandomState(0).randint(1, 500, (15 if antialias else 60, 2)).tolist()
    # Without neighbours, of equal size, and of exactly half and double the size.
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
def test_flipped_image_is_the_flipped_result(method, kernel, antialias):
    config = Config(image_size=24, resize_method=method, resize_kernel=kernel, antialias=antialias)
    image = tf.constant(noise(37, 52))
    plain = resize(image, config).numpy()
    np.testing.assert_array_equal(resize(image, config, tf.constant(True)), plain[:, ::-1])
    np.testing.assert_array_equal(resize(image, config, tf.constant(False)), plain)
    assert (plain != plain[:, ::-1]).any()


@pytest.mark.parametrize("antialias", [False, True])
def test_bicubic_is_clipped_where_it_overshoots(antialias):
    stripes = np.zeros([16, 16, 3], np.uint8)
    stripes[:, 5:9] = 255
    resized = resize_op.resize(tf.constant(stripes), 45, "bicubic", False, antialias).numpy()
    assert resized.min() == 0 and resized.max() == 255
    # Without clipping, values around 255 would have become small ones.
    assert (resized[:, 19:21] == 255).all()


@pytest.mark.parametrize("shape", [(0, 5, 3), (5, 5, 1), (5, 5)])
def test_what_is_no_image_is_an_error_and_no_crash(shape):
    with pytest.raises(tf.errors.InvalidArgumentError, match="height, width, 3"):
        resize_op.resize(tf.zeros(shape, tf.uint8), 8, "bilinear", False)


def test_exported_image_needs_no_native_op():
    config = Config(image_size=8, resize_kernel="native")
    spec = tf.TensorSpec([], tf.string)
    graph = tf.function(lambda one: evaluation_image(one, config)).get_concrete_function(spec).graph
    names = {op.type for op in graph.get_operations()}
    functions = graph.as_graph_def().library.function
    names |= {node.op for function in functions for node in function.node_def}
    assert "ResizeBilinear" in names
    assert "ImagenetFastResize" not in names


def run(tmp_path, kernel, **environment):
    code = (
        "from imagenet_fast.config import Config\n"
        "from imagenet_fast.data.resize_op import with_resize_kernel\n"
        f"config = Config(resize_kernel={kernel!r})\n"
        "print([with_resize_kernel(config).resize_kernel for _ in range(2)])\n"
    )
    variables = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), **environment}
    return subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=120
    )


def test_it_is_compiled_once(tmp_path):
    first = run(tmp_path, "auto")
    assert "native" in first.stdout, first.stderr
    (library,) = tmp_path.rglob("*.so")
    made = library.stat().st_mtime_ns
    # No compiler is needed for what is there.
    second = run(tmp_path, "native", CXX="no-such-compiler")
    assert "native" in second.stdout, second.stderr
    assert [path.stat().st_mtime_ns for path in tmp_path.rglob("*.so")] == [made]


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        pytest.param(
            "no-such-compiler",
            "there is no C++ compiler (no-such-compiler): install one",
            marks=pytest.mark.long,
        ),
        ("false", "false does not compile"),
        pytest.param("'g++", 'CXX is "\'g++": No closing quotation', marks=pytest.mark.long),
    ],
)
def test_without_a_compiler_tensorflow_resizes_and_the_reason_is_told_once(
    tmp_path, compiler, reason
):
    done = run(tmp_path, "auto", CXX=compiler)
    assert "['tensorflow', 'tensorflow']" in done.stdout, done.stderr
    assert done.stderr.count("resize_kernel: TensorFlow's, which is slower, since") == 1
    assert reason in done.stderr


@pytest.mark.long
def test_the_compilers_command_may_have_arguments(tmp_path):
    log = tmp_path / "log"
    # As ccache: it runs what follows.
    wrapper = tmp_path / "my wrapper"
    wrapper.write_text(f'#!/bin/sh\necho "$1" >> {log}\nexec "$@"\n')
    wrapper.chmod(0o755)
    done = run(tmp_path, "native", CXX=f"'{wrapper}' g++ -DNOTHING")
    assert "native" in done.stdout, done.stderr
    assert log.read_text() == "g++\n"


def test_without_a_home_tensorflow_resizes(monkeypatch, capfd):
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as of users without a name
    native_ops.load_ops.cache_clear()
    try:
        config = resize_op.with_resize_kernel(Config(resize_kernel="auto"))
        with pytest.raises(UserError, match="no home directory is known: set HOME"):
            resize_op.with_resize_kernel(Config(resize_kernel="native"))
    finally:
        native_ops.load_ops.cache_clear()
    assert config.resize_kernel == "tensorflow"


def test_native_kernel_that_cannot_be_had_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    native_ops.load_ops.cache_clear()
    try:
        with pytest.raises(UserError, match=r"resize_kernel=native .* install one"):
            resize_op.with_resize_kernel(Config(resize_kernel="native"))
    finally:
        native_ops.load_ops.cache_clear()
