"""Images/s of others' ResNet-50 on one device: torchvision's, and Keras Applications' under `fit`.

    python tools/gpu/peers.py torch compile
    python tools/gpu/peers.py keras XLA

in mixed float16, on random images that stay on the device. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

_WINDOWS = 5


def torch_steps(given: argparse.Namespace) -> Callable[[int], None]:
    """Returns a function that trains for so many steps, and waits for them."""
    import torch
    import torchvision

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cudnn.benchmark = True
    model = torchvision.models.resnet50().to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler(device)
    shape = (given.batch_size, 3, given.size, given.size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (given.batch_size,), device=device)

    def loss() -> Any:
        with torch.autocast(device, torch.float16):
            return torch.nn.functional.cross_entropy(model((images.half() - 120) / 60), labels)

    loss = torch.compile(loss) if "compile" in given.how else loss

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss()).backward()
            scaler.step(optimizer)
            scaler.update()
        if device == "cuda":
            torch.cuda.synchronize()

    return train


def keras_steps(given: argparse.Namespace) -> Callable[[int], None]:
    """Returns a function that trains for so many steps of `fit`, and waits for them."""
    import keras
    import tensorflow as tf

    keras.mixed_precision.set_global_policy("mixed_float16")
    network = keras.applications.ResNet50(
        weights=None, classifier_activation=None, input_shape=(given.size, given.size, 3)
    )
    logits = keras.layers.Activation("linear", dtype="float32")(network.output)
    model = keras.Model(network.input, logits)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer, loss, jit_compile="XLA" in given.how)
    images = tf.random.normal([given.batch_size, given.size, given.size, 3])
    labels = tf.random.uniform([given.batch_size], 0, 1000, tf.int32)
    data = tf.data.Dataset.from_tensors((images, labels)).repeat()
    return lambda steps: model.fit(data, steps_per_epoch=steps, verbose=0) and None


def main(arguments: Sequence[str]) -> int:
    """Times windows of steps after some that compile."""
    parser = argparse.ArgumentParser("peers.py", description=__doc__)
    parser.add_argument("library", choices=("torch", "keras"))
    parser.add_argument("how", nargs="*", choices=("compile", "XLA", []))
    parser.add_argument("--batch_size", type=int, default=256)
    parser.add_argument("--size", type=int, default=224, help="height and width")
    parser.add_argument("--steps", type=int, default=20, help="of a window")
    given = parser.parse_args(arguments)
    start = time.perf_counter()
    train = {"torch": torch_steps, "keras": keras_steps}[given.library](given)
    train(1)
    compile_seconds = time.perf_counter() - start
    train(given.steps)
    speeds = []
    for _ in range(_WINDOWS):
        start = time.perf_counter()
        train(given.steps)
        speeds.append(given.steps * given.batch_size / (time.perf_counter() - start))
    result = {"images_per_second": statistics.median(speeds), "rows_images_per_second": speeds}
    print(json.dumps({**result, "compile_seconds": compile_seconds}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
