"""Predictions of ONNX and TFLite files in their runtimes, without TensorFlow."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

# From a batch's pixels to its probabilities, [batch, classes].
Predict = Callable[[np.ndarray], np.ndarray]


def onnx(path: str, threads: int) -> Predict:
    """Loads an ONNX file."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda pixels: session.run(["probabilities"], {"pixels": pixels})[0]


def tflite(path: str, threads: int) -> Predict:
    """Loads a TFLite file."""
    from ai_edge_litert.interpreter import Interpreter

    classify = Interpreter(path, num_threads=threads).get_signature_runner()
    return lambda pixels: classify(pixels=pixels)["probabilities"]
