#!/usr/bin/env python3
"""Shows that oneDNN corrupts the heap in the gradient of a strided 1x1 convolution.

    python tools/onednn_strided_conv.py

computes the gradient of the weights in processes of their own, with oneDNN, without it, and with
oneDNN but with the pixels taken by a slice in place of the convolution's stride, as AmoebaNets here
do. It compares the results with NumPy and prints a line for each. Nothing but TensorFlow and NumPy
is needed.

oneDNN (3.7.3 in TensorFlow 2.21) copies the pixels that a strided 1x1 convolution reads into a
buffer of ``pixels * input channels`` numbers, but places the copies of the second block of pixels
and those after it as if there were 16 input channels with AVX-512, or 8 with AVX2. With fewer
channels it writes past the buffer's end: github.com/uxlfoundation/oneDNN/issues/6035. This needs
float32 images in NHWC whose height and width are multiples of the stride, and about 800 output
pixels or more.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys

# By the name of the form: whether oneDNN computes, and whether a slice takes the pixels.
FORMS = {
    "strided convolution": (True, False),
    "strided convolution, without oneDNN": (False, False),
    "slice, then convolution": (True, True),
}
_CHANNELS, _SIZE, _BATCH, _OUTPUTS = 4, 224, 8, 8
_STEPS = 20


def gradient_error(sliced: bool) -> float:
    """Returns the largest error of the gradient, relative to its largest value.

    Args:
      sliced: whether a slice takes the pixels.
    """
    import numpy as np
    import tensorflow as tf

    rng = np.random.default_rng(0)
    images = rng.normal(size=[_BATCH, _SIZE, _SIZE, _CHANNELS]).astype(np.float32)
    gradients = rng.normal(size=[_BATCH, _SIZE // 2, _SIZE // 2, _OUTPUTS]).astype(np.float32)
    expected = np.einsum("bhwi,bhwo->io", images[:, ::2, ::2], gradients, dtype=np.float64)
    for _ in range(_STEPS):
        result = tf.raw_ops.Conv2DBackpropFilter(
            input=tf.constant(images)[:, ::2, ::2] if sliced else tf.constant(images),
            filter_sizes=[1, 1, _CHANNELS, _OUTPUTS],
            out_backprop=tf.constant(gradients),
            strides=[1, 1, 1, 1] if sliced else [1, 2, 2, 1],
            padding="SAME",
        )
    return float(np.abs(result[0, 0] - expected).max() / np.abs(expected).max())


def outcome(name: str) -> str:
    """Returns how a form ends in a process of its own: its error, or what killed it.

    Args:
      name: a key of ``FORMS``.
    """
    onednn, _ = FORMS[name]
    done = subprocess.run(
        [sys.executable, __file__, f"--form={name}"],
        env={**os.environ, "TF_ENABLE_ONEDNN_OPTS": str(int(onednn)), "TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode < 0:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return f"CRASHED: {signal.Signals(-done.returncode).name} {last}"
    return done.stdout.strip() or f"FAILED: {done.stderr.strip()}"


def main() -> None:
    """Prints the outcome of all forms, or computes the form that a flag names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--form", choices=FORMS, help="compute this form alone, in this process")
    form = parser.parse_args().form
    if form:
        print(f"correct, to {gradient_error(FORMS[form][1]):.0e}")
        return
    for name in FORMS:
        print(f"{name:37}{outcome(name)}", flush=True)


if __name__ == "__main__":
    main()
