"""A benchmark of a training step of Keras applications' networks, here and under ``fit``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator

import keras
import tensorflow as tf

from imagenet_fast.base.errors import UserError, choices_hint
from imagenet_fast.config import Config
from imagenet_fast.data.dataset import distributed_dataset
from imagenet_fast.data.options import InputOptions
from imagenet_fast.distribute.strategy import make_strategy
from imagenet_fast.lab.benchmarks.timing import Comparison, TimedCall, time_interleaved, timed
from imagenet_fast.layers import PixelNormalization
from imagenet_fast.training.build.model import build_model
from imagenet_fast.training.build.network import precision_policy
from imagenet_fast.training.step.classifier import Classifier

# Keras applications' names of our networks.
_PEERS = {"resnet50": "ResNet50", "resnet101": "ResNet101", "resnet152": "ResNet152"}


def compare_steps(
    config: Config, *, network: str = "", warmup: int, repeats: int, steps: int = 1
) -> Comparison:
    """Times interleaved training steps of a network of Keras applications, here and under ``fit``.

    Each step is a call of the function that training, or ``fit``, calls for a step, on one device,
    on the same batch of random images, with XLA if ``config`` says so. ``fit`` gets normalized
    float32 images; this package normalizes uint8 ones itself, computes top-5 accuracy, too, and
    decays weights if ``config`` says so.

    Args:
      config: of the model, its precision, the image size and the batch size.
      network: of Keras applications, such as "EfficientNetV2B0". "": the one that is
        ``config.model``, which is timed as well.
      warmup: untimed samples of each at the start.
      repeats: timed samples of each.
      steps: training steps in a sample, which ends when the device has finished.

    Raises:
      UserError: if Keras applications does not have the network.
    """
    with_ours = not network
    network = network or _peer(config.model)
    build = keras_application(network)
    config = config.replace(
        synthetic=True,
        num_classes=1000,
        strategy="one_device",
        # Keras applications' initialization; it affects values, not time.
        zero_gamma=False,
    )
    images, labels = _batch(config)
    batches = tf.data.Dataset.from_tensors(
        (PixelNormalization(config.pixel_mean, config.pixel_std)(images), labels)
    )
    models = {
        **({"imagenet_fast": build_model(config)} if with_ours else {}),
        f"{network} in imagenet_fast": build_model(config, model=build),
        f"{network} under fit": compiled(build, config),
    }
    calls = []
    for model in models.values():
        here = isinstance(model, Classifier)
        data = distributed_dataset(config, "train") if here else batches.repeat().prefetch(2)
        calls.append(timed(stepper(model, iter(data), steps)))
    times = time_interleaved(calls, warmup=warmup, repeats=repeats)
    notes = _notes(config, with_ours)
    return Comparison(
        title(network, config, steps), notes, tuple(models), times, steps * images.shape[0]
    )


def keras_application(name: str) -> Callable[[int, tuple[int, int, int]], keras.Model]:
    """Returns the function that builds a network of Keras applications, with random weights.

    Raises:
      UserError: if Keras applications does not have the network.
    """
    networks = {
        other: function
        for other, function in vars(keras.applications).items()
        if inspect.isfunction(function)
    }
    if name not in networks:
        raise UserError(f"Keras applications has no {name!r}{choices_hint(name, networks)}")
    # Images are normalized before.
    known = inspect.signature(networks[name]).parameters
    others = {"include_preprocessing": False} if "include_preprocessing" in known else {}

    def build(num_classes: int, image_shape: tuple[int, int, int]) -> keras.Model:
        return networks[name](
            weights=None,
            input_shape=image_shape,
            classes=num_classes,
            classifier_activation=None,
            **others,
        )

    return build


def compiled(
    build: Callable[[int, tuple[int, int, int]], keras.Model], config: Config
) -> keras.Model:
    """Returns a network compiled for ``fit`` in the usual way, with the recipe's SGD."""
    with precision_policy(config.precision):
        network = build(config.num_classes, (config.image_size, config.image_size, 3))
        # As Keras' guide to mixed precision recommends.
        logits = keras.layers.Activation("linear", dtype="float32")(network.output)
        model = keras.Model(network.input, logits)
    model.compile(
        optimizer=keras.optimizers.SGD(config.scaled_learning_rate, momentum=config.momentum),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=config.xla,
    )
    return model


def stepper(model: keras.Model, batches: Iterator, steps: int) -> Callable[[], float]:
    """Returns a function that takes ``steps`` training steps as ``fit`` does, one batch each.

    It waits until they are done and returns the last loss.
    """
    with model.distribute_strategy.scope():
        model.make_train_function()

    def take_steps() -> float:
        for _ in range(steps):
            logs = model.train_function(batches)
        return float(logs["loss"])

    return take_steps


def on_new_iterators(model: keras.Model, batches: Iterable, steps: int) -> TimedCall:
    """Returns a timed call of ``steps`` training steps, each time on a new iterator.

    A running iterator would prefetch batches during the other variants' repeats, and slow these.
    """

    def sample() -> tuple[float, float]:
        iterator = iter(batches)
        # Fills the prefetch buffer, which will be as full after the timed steps.
        stepper(model, iterator, 1)()
        return timed(stepper(model, iterator, steps))()

    return sample


def title(network: str, config: Config, steps: int) -> str:
    """Returns the title of a comparison of samples of ``steps`` training steps of a network."""
    count = "training step" if steps == 1 else f"{steps} training steps"
    work = f"batch {config.batch_size}, {config.image_size} px, {config.precision}"
    return f"{network}, {count}: {work}{', XLA' if config.xla else ''}"


def _peer(model: str) -> str:
    if model not in _PEERS:
        raise UserError(
            f"Keras applications has no {model!r} to compare with{choices_hint(model, _PEERS)}; "
            "--network names another one"
        )
    return _PEERS[model]


def _batch(options: InputOptions) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns uint8 [batch, height, width, 3] images and int32 [batch] labels."""
    batch = next(iter(distributed_dataset(options, "train")))
    images, labels, _ = make_strategy(options).experimental_local_results(batch)[0]
    return images, labels


def _notes(config: Config, with_ours: bool) -> tuple[str, ...]:
    decay = " and weight decay" if config.weight_decay else ""
    versions = (
        "stride on the 1x1 (ResNet v1), as in Keras applications."
        if config.stride_on_1x1
        else "NOT the same network: stride on the 3x3 (v1.5); Keras applications has it on the "
        "1x1 (v1), which is less work."
    )
    return (
        *((f"imagenet_fast: {config.model}, {versions}",) if with_ours else ()),
        "fit: compile(SGD with momentum, sparse cross-entropy, accuracy), normalized float32 "
        f"images. imagenet_fast: uint8 images, also top-5{decay}.",
    )
