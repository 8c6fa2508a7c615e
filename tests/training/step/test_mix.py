"""Mixup and cutmix: what is drawn, the mixed pixels, and the loss, against NumPy."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from model_weights import assert_close, weights_of
from small_config import SMALL

from imagenet_fast import Config, build_model
from imagenet_fast.base.errors import UserError
from imagenet_fast.training.step.classifier import Classifier
from imagenet_fast.training.step.mix import Mixer, beta_quantiles, boxes

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (8, 6, 9, 3), dtype=np.uint8)
LABELS = np.array([0, 1, 2, 0, 1, 2, 0, 1], np.int32)
# Two images that could not be read; the second is its own partner's partner.
WEIGHTS = np.array([1, 1, 0, 1, 1, 1, 0, 1], np.float32)
ONES = np.ones(8, np.float32)
# What draws gamma with this alpha is 0 or 1.
EXTREME = 1e-9
BELOW_1 = np.float32(1 - 2**-24)


def mix(mixer, images=IMAGES, labels=LABELS, weights=ONES, numbers=None):
    if numbers is None:
        numbers = mixer.draw(len(images), 0, 0)
    return [part.numpy() for part in mixer.mix(tf.constant(images), labels, weights, numbers)]


def numbers_with_quantile(quantile, count=8):
    numbers = np.random.default_rng(1).random((count, 4), np.float32)
    numbers[:, 1] = quantile
    return numbers


# --- The shares -----------------------------------------------------------------------------------


def beta_variance(alpha):
    return 1 / (4 * (2 * alpha + 1))


@pytest.mark.parametrize("alpha", [0.1, 0.2, 1.0, 3.0])
def test_mixup_fractions_have_the_beta_distribution(alpha):
    count = 40000
    images = np.zeros([count, 1, 1, 1], np.float32)
    _, _, shares = mix(Mixer(alpha, 0.0, seed=3), images, np.zeros(count), np.ones(count))
    assert 0 <= shares.min() < shares.max() <= 1
    assert shares.mean() == pytest.approx(0.5, abs=0.01)
    assert shares.var() == pytest.approx(beta_variance(alpha), rel=0.03)
    expected = np.random.default_rng(0).beta(alpha, alpha, count)
    deciles = np.linspace(0.1, 0.9, 9)
    # In probability: of small alphas, quantiles lie where there are hardly any shares.
    found = (shares[:, np.newaxis] < np.quantile(expected, deciles)).mean(axis=0)
    np.testing.assert_allclose(found, deciles, atol=0.015)


@pytest.mark.parametrize("alpha", [0.2, 1.0, 5.0])
def test_quantiles_are_exact(alpha):
    quantiles = beta_quantiles(alpha)
    assert quantiles.shape == (1025,) and (quantiles[0], quantiles[-1]) == (0, 1)
    assert (np.diff(quantiles) >= 0).all()
    np.testing.assert_allclose(quantiles + quantiles[::-1], 1, atol=1e-6)
    if alpha == 1:
        np.testing.assert_allclose(quantiles, np.linspace(0, 1, 1025), atol=1e-7)
    drawn = np.random.default_rng(0).beta(alpha, alpha, 200_000)
    expected = np.quantile(drawn, np.arange(1, 16) / 16)
    np.testing.assert_allclose(quantiles[64:-1:64], expected, atol=0.01)


def test_random_numbers_depend_on_seed_step_and_position_only():
    mixer = Mixer(0.2, 1.0, seed=5)
    first = mixer.draw(64, 7, 1).numpy()
    assert first.shape == (64, 4) and first.min() >= 0 and first.max() < 1
    tf.random.set_seed(4)
    np.testing.assert_array_equal(first, Mixer(0.5, 0.0, seed=5).draw(64, 7, 1))
    # As on a TPU, which compiles all of the step.
    compiled = tf.function(lambda step: mixer.draw(64, step, 1), jit_compile=True)
    np.testing.assert_array_equal(first, compiled(tf.constant(7, tf.int64)))
    others = [mixer.draw(64, 8, 1), mixer.draw(64, 7, 0), Mixer(0.2, 1.0, seed=6).draw(64, 7, 1)]
    for other in others:
        assert np.abs(np.corrcoef(first.ravel(), other.numpy().ravel())[0, 1]) < 0.25
    both = np.concatenate([mixer.draw(32, 7, 2), mixer.draw(32, 7, 3)])
    np.testing.assert_array_equal(both, first)
    assert np.abs(np.corrcoef(mixer.draw(5000, 7, 1).numpy().T) - np.eye(4)).max() < 0.06


def test_seed_and_step_may_be_large():
    assert np.isfinite(Mixer(1.0, 0.0, seed=2**32 - 1).draw(2, tf.constant(2**40), 4095)).all()


# --- Boxes ----------------------------------------------------------------------------------------


def test_boxes_equal_numpy():
    height, width = 30, 41
    areas, y, x = np.random.default_rng(2).random((3, 300), np.float32)
    found = boxes(areas, y, x, tf.constant(height), tf.constant(width)).numpy()
    assert found.shape == (300, height, width)
    clipped = 0
    for box, area, *centre in zip(found, areas, y, x):
        expected = np.zeros([height, width], bool)
        ranges = []
        for size, place in zip((height, width), centre):
            length = round(np.sqrt(area) * np.float32(size))
            first = round(place * np.float32(size) - length / 2)
            clipped += first < 0 or first + length > size
            ranges.append(slice(max(first, 0), max(first + length, 0)))
        expected[tuple(ranges)] = True
        np.testing.assert_array_equal(box, expected)
    assert clipped > 100


def test_boxes_have_the_given_area_and_the_images_aspect_ratio():
    areas = np.array([0, 0.25, 0.5, 1], np.float32)
    found = boxes(areas, *[np.full(4, 0.5, np.float32)] * 2, tf.constant(100), tf.constant(200))
    np.testing.assert_allclose(found.numpy().mean(axis=(1, 2)), areas, atol=0.01)
    rows, columns = found.numpy()[1].any(axis=1).sum(), found.numpy()[1].any(axis=0).sum()
    assert (rows, columns) == (50, 100)


# --- Pixels ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_mixup_blends_with_the_reversed_batch(dtype):
    images = IMAGES.astype(dtype)
    mixed, partners, shares = mix(Mixer(1.0, 0.0, seed=1), images)
    assert mixed.dtype == dtype and len(set(shares)) == 8
    own = shares[:, None, None, None].astype(np.float64)
    expected = own * IMAGES + (1 - own) * IMAGES[::-1]
    np.testing.assert_allclose(mixed, expected, atol=0.501 if dtype == "uint8" else 1e-4)
    np.testing.assert_array_equal(partners, LABELS[::-1])
    if dtype == "uint8":  # rounded, not cut off
        assert abs((mixed - expected).mean()) < 0.03


def test_cutmix_pastes_a_box_from_the_reversed_batch():
    mixed, partners, shares = mix(Mixer(0.0, 1.0, seed=1))
    np.testing.assert_array_equal(partners, LABELS[::-1])
    own = (mixed == IMAGES).all(axis=-1)
    others = (mixed == IMAGES[::-1]).all(axis=-1)
    assert (own | others).all()
    np.testing.assert_allclose(shares, own.mean(axis=(1, 2)), atol=1e-6)
    assert len(set(shares)) > 3


def test_cutmix_fractions_are_those_of_the_remaining_pixels():
    count = 20000
    images = np.zeros([count, 20, 20, 1], np.uint8)
    images[count // 2 :] = 1
    mixed, _, shares = mix(Mixer(0.0, 1.0, seed=2), images, np.zeros(count), np.ones(count))
    own = (mixed == images).mean(axis=(1, 2, 3))
    np.testing.assert_allclose(shares, own, atol=1e-6)
    # Of a box with sides a, uniform in area: E[a^2] = 1/2; along each side a share of
    # 1 - a / 4 lies inside, on average, of boxes with centres inside.
    sides = np.sqrt(np.linspace(0, 1, 10001))
    expected = 1 - np.mean((sides * (1 - sides / 4)) ** 2)
    assert shares.mean() == pytest.approx(expected, abs=0.01)
    # Centres are anywhere.
    taken = (mixed != images).mean(axis=(0, 3))
    np.testing.assert_allclose(taken, taken[::-1, ::-1], atol=0.015)


def test_with_both_each_gets_half_of_the_images():
    count = 4000
    images = np.zeros([count, 8, 8, 1], np.float32)
    images[count // 2 :] = 1
    mixed, _, shares = mix(Mixer(1.0, 1.0, seed=2), images, np.zeros(count), np.ones(count))
    blended = np.ptp(mixed, axis=(1, 2, 3)) == 0
    # Boxes that are empty or the whole image look alike.
    cut = ~blended | (shares == 0) | (shares == 1)
    assert 0.47 < cut.mean() < 0.53
    assert shares[~cut].var() == pytest.approx(beta_variance(1.0), rel=0.1)
    # Each has its own alpha.
    _, _, shares = mix(Mixer(EXTREME, 1000.0, seed=2), images, np.zeros(count), np.ones(count))
    assert 0.47 < np.isin(shares, (0, 1)).mean() < 0.53


@pytest.mark.parametrize("alphas", [(EXTREME, 0.0), (0.0, EXTREME), (EXTREME, EXTREME)])
def test_fraction_1_keeps_the_image_and_0_replaces_it(alphas):
    mixer = Mixer(*alphas, seed=0)
    mixed, _, shares = mix(mixer, numbers=numbers_with_quantile(BELOW_1))
    np.testing.assert_array_equal(mixed, IMAGES)
    np.testing.assert_array_equal(shares, 1)
    if alphas[1] == 0:  # a box of the image's size is clipped unless in its centre
        mixed, _, shares = mix(mixer, numbers=numbers_with_quantile(0))
        np.testing.assert_array_equal(mixed, IMAGES[::-1])
        np.testing.assert_array_equal(shares, 0)


@pytest.mark.parametrize("alphas", [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0)])
def test_images_of_weight_0_are_not_mixed_in(alphas):
    mixer = Mixer(*alphas, seed=4)
    mixed, _, shares = mix(mixer, weights=WEIGHTS, numbers=numbers_with_quantile(0.4))
    alone = WEIGHTS[::-1] == 0
    np.testing.assert_array_equal(shares[alone], 1)
    np.testing.assert_array_equal(mixed[alone], IMAGES[alone])
    assert (shares[~alone] < 1).all()
    assert (mixed[~alone] != IMAGES[~alone]).any(axis=(1, 2, 3)).all()


def test_the_middle_image_is_unchanged():
    mixed, partners, _ = mix(Mixer(1.0, 0.0, 0), IMAGES[:3], LABELS[:3], ONES[:3])
    np.testing.assert_array_equal(mixed[1], IMAGES[1])
    assert partners[1] == LABELS[1]


# --- In the training step -------------------------------------------------------------------------


def classifier(mixer, rate=0.5, optimizer=None, **options):
    """A linear model: the same weights each time."""
    keras.utils.set_random_seed(1)
    images = keras.Input((6, 9, 3), dtype="uint8")
    x = keras.layers.Rescaling(1 / 255)(images)
    x = keras.layers.Flatten()(x)
    logits = keras.layers.Dense(3, dtype="float32")(x)
    model = Classifier(images, logits, mixer=mixer, **options)
    model.compile(optimizer or keras.optimizers.SGD(rate))
    return model


def step(model, weights=WEIGHTS):
    return model.train_on_batch(IMAGES, LABELS, weights, return_dict=True)


def log_softmax(logits):
    logits = logits.astype("float64")
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def reference(model, numbers, smoothing=0.0, parts=1):
    """The loss of each image, and top 1, by way of soft labels."""
    kernel, bias = (weight.numpy() for weight in model.trainable_variables)
    losses, right = [], []
    for part in np.split(np.arange(8), parts):
        mixed, partners, shares = mix(
            model.mixer, IMAGES[part], LABELS[part], WEIGHTS[part], numbers[part]
        )
        logits = (mixed / 255).reshape(len(part), -1) @ kernel + bias
        own = shares[:, None].astype("float64")
        soft = own * np.eye(3)[LABELS[part]] + (1 - own) * np.eye(3)[partners]
        soft = (1 - smoothing) * soft + smoothing / 3
        losses.append(-(soft * log_softmax(logits)).sum(axis=1))
        right.append(logits.argmax(axis=1) == LABELS[part])
    return np.concatenate(losses), np.concatenate(right)


@pytest.mark.parametrize(
    ("alphas", "smoothing", "parts"),
    [
        ((1.0, 0.0), 0.0, 1),
        ((0.0, 1.0), 0.1, 2),
        pytest.param((0.4, 1.0), 0.1, 2, marks=pytest.mark.long),
        pytest.param((1.0, 0.0), 0.1, 2, marks=pytest.mark.long),
        pytest.param((0.0, 1.0), 0.0, 1, marks=pytest.mark.long),
        pytest.param((0.4, 1.0), 0.0, 1, marks=pytest.mark.long),
    ],
)
def test_the_loss_is_that_of_both_labels(alphas, smoothing, parts):
    mixer = Mixer(*alphas, seed=2)
    model = classifier(mixer, label_smoothing=smoothing, accumulation_steps=parts)
    numbers = mixer.draw(8, 0, 0).numpy()
    losses, right = reference(model, numbers, smoothing, parts)
    plain, _ = reference(model, numbers_with_quantile(BELOW_1), smoothing, parts)
    told = step(model)
    assert told["loss"] == pytest.approx(losses[WEIGHTS == 1].mean(), rel=1e-5)
    assert told["loss"] != pytest.approx(plain[WEIGHTS == 1].mean(), rel=5e-5)
    assert told["top1"] == pytest.approx(right[WEIGHTS == 1].mean())
    assert (told["examples"], told["skipped"]) == (6, 2)


@pytest.mark.parametrize("parts", [pytest.param(1, marks=pytest.mark.long), 4])
def test_the_gradient_is_that_of_the_loss(parts):
    model = classifier(Mixer(1.0, 1.0, seed=2), accumulation_steps=parts)
    numbers = model.mixer.draw(8, 0, 0).numpy()
    before = weights_of(model)
    step(model)
    kernel, bias = (weight.copy() for weight in before)
    for part in np.split(np.arange(8), parts):
        mixed, partners, shares = mix(
            model.mixer, IMAGES[part], LABELS[part], WEIGHTS[part], numbers[part]
        )
        x = (mixed / 255).reshape(len(part), -1)
        own = shares[:, None]
        soft = own * np.eye(3)[LABELS[part]] + (1 - own) * np.eye(3)[partners]
        error = np.exp(log_softmax(x @ before[0] + before[1])) - soft
        error *= WEIGHTS[part, None] / 8
        kernel -= 0.5 * x.T @ error
        bias -= 0.5 * error.sum(axis=0)
    assert_close(weights_of(model), [kernel, bias], 1e-5)


class Unmixing(Mixer):
    """Draws shares of 1."""

    def draw(self, count, step, replica):
        return tf.constant(numbers_with_quantile(BELOW_1))


@pytest.mark.long
@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_fractions_of_1_train_as_without_mixing(accumulation_steps):
    options = {"accumulation_steps": accumulation_steps, "label_smoothing": 0.1}
    unmixed = classifier(Unmixing(EXTREME, EXTREME, 0), **options)
    plain = classifier(None, **options)
    for _ in range(3):
        assert step(unmixed) == pytest.approx(step(plain), rel=1e-6)
    assert_close(weights_of(unmixed), weights_of(plain))


def test_images_of_weight_0_have_no_effect():
    models = [classifier(Mixer(1.0, 1.0, seed=3)) for _ in range(2)]
    other = np.where(WEIGHTS[:, None, None, None] == 0, 255, IMAGES).astype(np.uint8)
    labels = np.where(WEIGHTS == 0, -1, LABELS)
    told = models[0].train_on_batch(IMAGES, LABELS, WEIGHTS, return_dict=True)
    same = models[1].train_on_batch(other, labels, WEIGHTS, return_dict=True)
    assert told["loss"] == same["loss"]
    assert_close(weights_of(models[0]), weights_of(models[1]), 0)


def test_each_step_mixes_differently_and_a_resumed_run_repeats_it():
    model = classifier(Mixer(1.0, 1.0, seed=3), rate=0.0)
    losses = []
    for _ in range(4):
        model.reset_metrics()
        losses.append(step(model)["loss"])
    assert len(set(losses)) == 4
    resumed = classifier(Mixer(1.0, 1.0, seed=3), rate=0.0)
    resumed.optimizer.iterations.assign(2)
    for expected in losses[2:]:
        resumed.reset_metrics()
        assert step(resumed)["loss"] == expected


def test_evaluation_and_prediction_do_not_mix():
    mixed, plain = classifier(Mixer(1.0, 1.0, seed=3)), classifier(None)
    told = [model.test_on_batch(IMAGES, LABELS, return_dict=True) for model in (mixed, plain)]
    assert told[0] == told[1]
    np.testing.assert_array_equal(
        mixed.predict(IMAGES, verbose=0), plain.predict(IMAGES, verbose=0)
    )


@pytest.mark.long
@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_xla_takes_the_same_steps(accumulation_steps):
    plain, compiled = (
        classifier(Mixer(0.4, 1.0, 3), xla=xla, accumulation_steps=accumulation_steps)
        for xla in (False, True)
    )
    before = weights_of(plain)
    for _ in range(3):
        assert step(compiled) == pytest.approx(step(plain), rel=1e-4)
    assert_close(weights_of(compiled), weights_of(plain), 1e-4)
    assert np.abs(weights_of(plain)[0] - before[0]).max() > 0.01


REPLICAS = """
import numpy as np
import tensorflow as tf
import keras
from imagenet_fast import Config, make_strategy
from imagenet_fast.training.step.classifier import Classifier
from imagenet_fast.training.step.mix import Mixer

images = np.random.default_rng(0).integers(0, 256, (8, 4, 4, 3), dtype=np.uint8)
labels = np.arange(8) % 3

with make_strategy(Config(logical_cpus=2)).scope():
    mixer = Mixer(0.4, 1.0, seed=3)
    inputs = keras.Input((4, 4, 3), dtype="uint8")
    x = keras.layers.Flatten()(keras.layers.Rescaling(1 / 255)(inputs))
    dense = keras.layers.Dense(3)
    model = Classifier(inputs, dense(x), mixer=mixer, accumulation_steps=2)
    model.compile(keras.optimizers.SGD(0.0))
kernel = dense.kernel.numpy()
data = tf.data.Dataset.from_tensor_slices((images, labels)).batch(8)
told = [model.fit(data, epochs=1, verbose=0).history["loss"][0] for _ in range(2)]

for step in range(2):
    losses = []
    for replica in range(2):
        numbers = mixer.draw(4, step, replica).numpy()
        for part in range(2):
            here = slice(4 * replica + 2 * part, 4 * replica + 2 * part + 2)
            mixed, partners, shares = mixer.mix(
                tf.constant(images[here]), labels[here], np.ones(2), numbers[2 * part :][:2]
            )
            logits = (mixed.numpy() / 255).reshape(2, -1) @ kernel
            losses_of = np.log(np.exp(logits).sum(1, keepdims=True)) - logits
            rows = np.arange(2)
            own, other = losses_of[rows, labels[here]], losses_of[rows, partners.numpy()]
            losses.append(shares.numpy() * own + (1 - shares.numpy()) * other)
    np.testing.assert_allclose(told[step], np.mean(losses), rtol=1e-5)
assert told[0] != told[1]
"""


def test_each_of_two_replicas_mixes_its_own_images(run_python):
    run_python(["-c", REPLICAS])


# --- From a configuration -------------------------------------------------------------------------


def random_batches(config):
    rng = np.random.default_rng(0)
    shape = (config.batch_size, config.image_size, config.image_size, 3)
    images = rng.integers(0, 256, shape, dtype=np.uint8)
    labels = rng.integers(0, config.num_classes, config.batch_size)
    return tf.data.Dataset.from_tensors((images, labels)).repeat()


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"mixup_alpha": 0.2},
        {"mixup_alpha": 0.2, "cutmix_alpha": 1.0, "precision": "mixed_float16"},
        {"cutmix_alpha": 1.0, "precision": "mixed_bfloat16"},
        {"mixup_alpha": 0.2, "cutmix_alpha": 1.0, "xla": True, "accumulation_steps": 2},
    ],
    ids=str,
)
def test_a_network_trains_with_mixing(options):
    config = SMALL.replace(batch_size=8, label_smoothing=0.1, **options)
    model = build_model(config)
    before = model.trainable_variables[0].numpy()
    history = model.fit(random_batches(config), epochs=1, steps_per_epoch=2, verbose=0).history
    assert np.isfinite(history["loss"]).all() and history["examples"] == [16]
    assert np.abs(model.trainable_variables[0].numpy() - before).max() > 0


def test_no_alpha_no_mixing():
    assert build_model(SMALL).mixer is None


@pytest.mark.parametrize("name", ["mixup_alpha", "cutmix_alpha"])
def test_alpha_is_not_negative(name):
    with pytest.raises(UserError, match=f"{name} is -0.1, but must not be negative"):
        Config(**{name: -0.1})


def test_an_image_needs_a_partner():
    with pytest.raises(UserError, match="mix the images of a replica's micro-batch"):
        build_model(SMALL.replace(batch_size=4, accumulation_steps=4, cutmix_alpha=1.0))
