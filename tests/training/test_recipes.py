"""The published recipes: lengths, rates and optimizers against their sources.

Rates are compared with the published formulas, written down here once more and in Python's floats.
"""

import math
import pathlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast.base.durations import Duration
from imagenet_fast.config import Config
from imagenet_fast.data.steps import training_image_size
from imagenet_fast.optimizers import LARS
from imagenet_fast.optimizers.batch_tables import values_for_batch
from imagenet_fast.training.build.schedule import build_schedule

ROOT = pathlib.Path(__file__).parents[2]
PATHS = sorted((ROOT / "imagenet_fast" / "flags").glob("*.flags"))
IMAGES = 1_281_167

# Batch, steps per epoch, steps, steps of warmup.
LENGTHS = {
    "facebook_1h_256": (256, 5004, 450_360, 25_020),
    "facebook_1h_8k": (8192, 156, 14_040, 780),
    "google_tpu_pod_4k": (4096, 312, 28_464, 1564),
    "google_tpu_pod_16k": (16384, 78, 7116, 391),
    "google_tpu_pod_32k": (32768, 39, 3558, 547),
    "mlperf_3k": (3200, 400, 14_837, 802),
    "mlperf_4k": (4096, 312, 13_104, 1560),
    "mlperf_32k": (32768, 39, 2983, 977),
    "mlperf_64k": (65536, 19, 1738, 606),
    "tencent_4min_resnet50": (65536, 19, 1710, 589),
    "tencent_4min_alexnet": (65536, 19, 1805, 95),
    "gpipe_amoebanet": (256, 5004, 240_192, 15_012),
    "ffcv_rn50_16": (4096, 312, 4992, 624),
    "ffcv_rn50_32": (4096, 312, 9984, 624),
    "ffcv_rn50_88": (4096, 312, 27_456, 624),
    "ffcv_rn18_16": (1024, 1251, 20_016, 2502),
    "ffcv_rn18_88": (1024, 1251, 110_088, 2502),
    "mosaic_mild": (2048, 625, 20_000, 5000),
}
FFCV = [name for name in LENGTHS if name.startswith("ffcv")]


def load(name):
    return Config.from_flagfile(ROOT / "imagenet_fast" / "flags" / f"{name}.flags")


def rates(name, steps):
    """Returns a recipe's rates at ``steps``, on ImageNet."""
    config = load(name)
    return rates_of(config, steps, IMAGES // config.batch_size)


def rates_of(config, steps, steps_per_epoch):
    schedule = build_schedule(config, steps_per_epoch)
    return np.array([float(schedule(int(step))) for step in steps])


def steps_around(*boundaries, last):
    """Returns steps from 0 to ``last``, and all that are near one of ``boundaries``."""
    near = [boundary + offset for boundary in boundaries for offset in (-2, -1, 0, 1, 2)]
    return sorted({*near, *np.linspace(0, last, 25, dtype=int)})


# --- Lengths


@pytest.mark.parametrize("name", LENGTHS)
def test_lengths(name):
    config = load(name)
    batch, steps_per_epoch, steps, warmup = LENGTHS[name]
    assert config.batch_size == batch
    assert IMAGES // batch == steps_per_epoch
    assert config.duration.steps(steps_per_epoch, batch) == steps
    assert config.warmup.steps(steps_per_epoch, batch) == warmup


def test_mlperf_3k_counts_epochs_whose_last_step_is_not_full():
    assert load("mlperf_3k").duration == Duration(37 * math.ceil(IMAGES / 3200), "steps")


@pytest.mark.parametrize(
    ("name", "epochs"),
    [("google_tpu_pod_16k", 5), ("google_tpu_pod_32k", 14), ("mlperf_32k", 25)],
)
def test_google_counts_epochs_by_the_image(name, epochs):
    assert load(name).warmup == Duration(epochs * IMAGES, "examples")


# --- Rates


def polynomial(step, rate, warmup, first_decay, steps):
    """Google's and MLPerf's rate: up from 0, then down with power 2 to 1e-4.

    Args:
      warmup: its length in steps, which may have a fraction.
      first_decay: the step from which decay is counted.
      steps: of the run.
    """
    if step <= warmup:
        return rate * step / warmup
    length = steps - first_decay + 1
    passed = min(max(1, step - first_decay), length)
    return (rate - 1e-4) * (1 - passed / length) ** 2 + 1e-4


@pytest.mark.parametrize(
    ("name", "rate", "epochs"),
    [
        ("google_tpu_pod_16k", 25.0, 5),
        ("google_tpu_pod_32k", 32.0, 14),
        ("mlperf_32k", 31.2, 25),
    ],
)
def test_learning_rates_of_google_tpu_pod_with_lars(name, rate, epochs):
    batch, _, length, _ = LENGTHS[name]
    warmup = epochs * IMAGES / batch
    first_decay = epochs * IMAGES // batch
    steps = steps_around(first_decay, last=length)
    expected = [polynomial(step, rate, warmup, first_decay, length) for step in steps]
    np.testing.assert_allclose(rates(name, steps), expected, rtol=2e-6, atol=1e-6)


def test_learning_rates_of_google_tpu_pod_4k():
    """Its get_lr_schedule and learning_rate_schedule, which go by epochs of 1,281,167 images."""
    run = 28464 / (IMAGES // 4096)
    starts = [math.floor(part / 90 * run) for part in (5, 30, 60, 80)]
    assert starts == [5, 30, 60, 81]

    def expected(step):
        epoch = step * 4096 / IMAGES
        if epoch < starts[0]:
            return 1.6 * epoch / starts[0]
        return 1.6 * 0.1 ** sum(epoch >= start for start in starts[1:])

    boundaries = [math.ceil(start * IMAGES / 4096) for start in starts]
    steps = steps_around(*boundaries, last=28463)
    np.testing.assert_allclose(
        rates("google_tpu_pod_4k", steps), [expected(step) for step in steps], rtol=2e-6, atol=1e-9
    )


def test_learning_rates_of_mlperf_3k():
    """The formula of NVIDIA's PolySchedule, whose steps count from 1."""
    epoch = math.ceil(IMAGES // 8 / 400)
    warmup, length = 2 * epoch, 37 * epoch

    def expected(step):
        if step <= warmup:
            return 11 * step / warmup
        return 1e-4 + (11 - 1e-4) * (1 - (step - warmup) / (length - warmup)) ** 2

    steps = steps_around(warmup, last=length - 1)
    assert (warmup, length) == LENGTHS["mlperf_3k"][3:1:-1]
    # Ours has one step more from the end of the warmup to the end learning rate.
    np.testing.assert_allclose(
        rates("mlperf_3k", steps), list(map(expected, steps)), rtol=2e-4, atol=2e-3
    )


def test_momentum_of_mlperf_3k():
    """NVIDIA's SGDwFASTLARS, whose momentum is scaled by the ratio of successive rates."""
    config = load("mlperf_3k")
    lars = LARS(
        build_schedule(config, 400),
        config.momentum,
        config.weight_decay,
        nesterov=config.nesterov,
        rate_in_momentum=config.rate_in_momentum != "no",
    )
    weight, gradient = np.array([3.0, -4.0]), np.array([0.6, 0.8])
    variable = tf.Variable(weight, dtype=tf.float32)
    lars.build([variable])
    first = 4  # of the warmup, in which successive rates differ most
    lars.iterations.assign(first)
    buffer, last = np.zeros(2), 11 * first / 802
    for step in range(first, first + 4):
        rate = 11 * step / 802
        norm = np.linalg.norm(weight)
        trust = 0.001 * norm / (1 + 5e-5 * norm)
        buffer = 0.9 * rate / last * buffer + rate * trust * (gradient + 5e-5 * weight)
        weight, last = weight - buffer, rate
        lars.apply_gradients([(tf.constant(gradient, tf.float32), variable)])
    np.testing.assert_allclose(variable.numpy(), weight, rtol=1e-6)


@pytest.mark.parametrize(("name", "rate"), [("mlperf_4k", 10.0), ("mlperf_64k", 24.699)])
def test_learning_rates_of_mlperf(name, rate):
    _, _, length, warmup = LENGTHS[name]
    steps = steps_around(warmup, last=length)
    expected = [polynomial(step, rate, warmup, warmup, length) for step in steps]
    np.testing.assert_allclose(rates(name, steps), expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "rate"), [("tencent_4min_resnet50", 24.699), ("tencent_4min_alexnet", 22.0)]
)
def test_learning_rates_of_tencent_4min(name, rate):
    _, _, length, warmup = LENGTHS[name]
    first, half, top, last = rates(name, [0, warmup // 2, warmup, length - 1])
    assert (first, top) == (0.0, pytest.approx(rate))
    assert half == pytest.approx(rate * (warmup // 2) / warmup)
    # Power 2: half-way down, a quarter.
    middle = rates(name, [(warmup + length) // 2])[0]
    assert middle == pytest.approx(rate / 4, rel=0.01)
    assert 0 <= last < 1e-3


def test_learning_rates_of_facebook_1h():
    epochs = np.array([0, 2.5, 5, 29, 30, 59, 60, 79, 80, 89])
    large = [0.1, 1.65, 3.2, 3.2, 0.32, 0.32, 0.032, 0.032, 0.0032, 0.0032]
    np.testing.assert_allclose(rates("facebook_1h_8k", epochs * 156), large, rtol=1e-6)
    small = [0.1, 0.1, 0.1, 0.1, 0.01, 0.01, 0.001, 0.001, 0.0001, 0.0001]
    np.testing.assert_allclose(rates("facebook_1h_256", epochs * 5004), small, rtol=1e-6)


@pytest.mark.parametrize("name", FFCV)
def test_learning_rates_of_ffcv(name):
    """Its get_cyclic_lr, between whose values at whole epochs it interpolates."""
    _, per_epoch, length, warmup = LENGTHS[name]
    peak = {"ffcv_rn50": 1.7, "ffcv_rn18": 0.5}[name.rpartition("_")[0]]
    steps = steps_around(warmup, last=length - 1)
    epochs = [0, 2, length // per_epoch]
    expected = np.interp(np.array(steps) / per_epoch, epochs, [1e-4 * peak, peak, 0])
    # Ours decays over one step more.
    decrement = peak / (length - warmup)
    np.testing.assert_allclose(rates(name, steps), expected, rtol=1e-6, atol=decrement)


# Also with the first epoch on 192 pixels in the logs of these runs (assets/agg.csv).
@pytest.mark.parametrize(
    ("epochs", "begin", "end", "first"), [(16, 11, 13, 12), (32, 23, 27, 25), (88, 65, 76, 71)]
)
def test_image_sizes_of_ffcv(epochs, begin, end, first):
    """Its get_resolution, at each epoch."""

    def size(epoch):
        if epoch <= begin or epoch >= end:
            return 160 if epoch <= begin else 192
        return round(np.interp(epoch, [begin, end], [160, 192]) / 32) * 32

    expected = [size(epoch) for epoch in range(epochs)]
    assert expected == [160] * first + [192] * (epochs - first)
    for name in (name for name in FFCV if name.endswith(f"_{epochs}")):
        config, (_, per_epoch, _, _) = load(name), LENGTHS[name]
        for step in (0, per_epoch - 1):  # of an epoch
            sizes = [
                training_image_size(config, epoch * per_epoch + step, per_epoch)
                for epoch in range(epochs)
            ]
            assert sizes == expected


@pytest.mark.parametrize("name", FFCV)
def test_network_and_evaluation_of_ffcv(name):
    config = load(name)
    assert config.model == {"rn50": "resnet50", "rn18": "resnet18"}[name.split("_")[1]]
    assert (config.blur_pool, config.eval_image_size) == ("convolutions", 256)
    assert (config.eval_crop_fraction, config.test_time_augmentation) == (224 / 256, "flip")


def test_learning_rates_of_mosaic_mild():
    """composer's CosineAnnealingWithWarmupScheduler, whose warmup does not scale with the run."""

    def expected(step):
        if step < 5000:
            return 2.048 * step / 5000
        return 2.048 * (1 + math.cos(math.pi * (step - 5000) / 15_000)) / 2

    steps = steps_around(5000, last=19_999)
    # Ours decays over one step more.
    np.testing.assert_allclose(
        rates("mosaic_mild", steps), list(map(expected, steps)), rtol=1e-6, atol=3e-4
    )


def test_image_sizes_of_mosaic_mild():
    """composer's ProgressiveResizing of batches of 176 pixels: it counts elapsed epochs."""
    config = load("mosaic_mild")

    def expected(epoch):
        part = (epoch / 32 - 0.4) / (1 - 0.2 - 0.4) if epoch / 32 >= 0.4 else 0
        return round(176 * (0.5 + 0.5 * min(part, 1)) / 4) * 4

    steps = [epoch * 625 + step for epoch in range(32) for step in (0, 312, 624)]
    sizes = [training_image_size(config, step, 625) for step in steps]
    assert sizes == [expected(step // 625) for step in steps]
    assert len(set(sizes)) == 14


# --- Optimizers and the rest


def test_weight_decay_of_mlperf_32k_is_that_of_both_terms():
    """The submission's gradient has weight_decay * w from the loss, and its LARS adds it again."""
    config = load("mlperf_32k")
    lars = LARS(
        10.0,
        config.momentum,
        config.weight_decay,
        eeta=config.lars_eeta,
        epsilon=config.optimizer_epsilon,
        nesterov=config.nesterov,
    )
    random = np.random.default_rng(0)
    weight, gradient = random.normal(size=10_000), random.normal(size=10_000)
    gradient *= 0.001
    variable = tf.Variable(weight, dtype=tf.float32)
    lars.build([variable])
    lars.apply_gradients([(tf.constant(gradient, tf.float32), variable)])
    norm, decay = np.linalg.norm, 1e-4  # the submission's flag
    in_loss = gradient + decay * weight
    trust = 0.001 * norm(weight) / (norm(in_loss) + decay * norm(weight) + 1e-5)
    expected = weight - 10 * trust * (in_loss + decay * weight)
    # The same direction: both terms of the decay. Only the norm of a sum is less than the sum of
    # norms, as the header says.
    ratio = (norm(in_loss) + decay * norm(weight) + 1e-5) / (
        norm(gradient) + 2 * decay * norm(weight) + 1e-5
    )
    assert 0.9 < ratio < 1
    update = weight - variable.numpy().astype(float)
    np.testing.assert_allclose(update, ratio * (weight - expected), rtol=0, atol=1e-6)
    # The part of the update along the weights that the gradient has not.
    decayed = (update - 10 * ratio * trust * gradient) / weight
    np.testing.assert_allclose(decayed.mean(), 10 * ratio * trust * 2e-4, rtol=1e-3)


def test_alexnet():
    config = load("tencent_4min_alexnet")
    assert (config.model, config.batch_norm_after_pool5) == ("alexnet_bn", True)
    # 227 pixels of 256.
    assert round(config.image_size / config.eval_crop_fraction) == 256
    assert load("tencent_4min_resnet50").model == "resnet50"


def test_mosaic_mild():
    """resnet50_mild.yaml."""
    config = load("mosaic_mild")
    assert (config.optimizer, config.momentum, config.nesterov) == ("sgd", 0.875, False)
    assert (config.weight_decay, config.weight_decay_on) == (5e-4, "all")
    assert (config.decoupled_weight_decay, config.rate_in_momentum) == (True, "no")
    assert (config.loss, config.label_smoothing) == ("binary_cross_entropy", 0.08)
    assert (config.blur_pool, config.gamma_init) == ("convolutions_and_pools", "uniform")
    assert (config.image_size, config.eval_image_size) == (176, 224)
    assert round(config.eval_image_size / config.eval_crop_fraction) == 232
    # A half-life of 100 steps.
    assert config.ema_decay**100 == pytest.approx(0.5)
    assert config.ema_every == 20


def test_gpipe_amoebanet():
    config = load("gpipe_amoebanet")
    assert (config.model, config.normal_cells, config.cell_filters) == ("amoebanet_b", 18, 512)
    assert (config.image_size, config.pipeline_stages) == (480, 4)
    assert (config.optimizer, config.optimizer_epsilon) == ("rmsprop", 1.0)
    # Of 4e-5 in the gradient, as momentum adds it up over the steps.
    np.testing.assert_allclose(config.weight_decay * (1 - config.momentum), 4e-5)
    steps = steps_around(15_012, 20_016, last=100_000)
    epochs = np.array(steps) / 5004
    expected = 0.64 * 0.9 ** np.floor(np.maximum(epochs, 3)) * np.minimum(1, epochs / 3)
    np.testing.assert_allclose(rates("gpipe_amoebanet", steps), expected, rtol=1e-5)


@pytest.mark.parametrize("name", [name for name in LENGTHS if name.startswith("mlperf")])
def test_mlperf_ends_at_its_target(name):
    assert load(name).stop_at_accuracy == 0.759


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("google_tpu_pod_16k", "google_tpu_pod"),
        ("google_tpu_pod_32k", "google_tpu_pod"),
        ("mlperf_4k", "mlperf"),
        ("mlperf_32k", "mlperf"),
        ("mlperf_64k", "mlperf"),
        # MLPerf's values, as its header says.
        ("tencent_4min_resnet50", "mlperf"),
    ],
)
def test_recipes_have_the_values_of_their_family(name, table):
    config = load(name)
    values = values_for_batch(table, config.batch_size)
    assert config.scaled_learning_rate == values.learning_rate
    assert (config.momentum, config.weight_decay) == (values.momentum, values.weight_decay)
    assert config.warmup_first_rate == 0
    steps = config.warmup.steps(IMAGES // config.batch_size, config.batch_size)
    least, most = IMAGES // config.batch_size, math.ceil(IMAGES / config.batch_size)
    assert least <= steps / values.warmup_epochs <= most


@pytest.mark.parametrize(
    ("name", "images", "all_reduce", "dtype", "segments"),
    [
        # MLPerf 0.6 on 2048 cores, and the reference convergence points of Google.
        ("google_tpu_pod_32k", 128, "torus_2d", "float32", ()),
        ("mlperf_32k", 128, "auto", "float32", ()),
        ("mlperf_64k", 128, "auto", "float32", ()),
        # Jia et al. 2018: two segments, after 76 and after 20 gradients.
        ("tencent_4min_resnet50", 0, "hierarchical", "float16", (76,)),
        ("tencent_4min_alexnet", 0, "hierarchical", "float16", (20,)),
    ],
)
def test_devices_and_batch_norm_groups(name, images, all_reduce, dtype, segments):
    config = load(name)
    assert config.batch_norm_batch_size == images
    assert (config.all_reduce, config.all_reduce_dtype) == (all_reduce, dtype)
    assert config.fusion_segments == segments


# --- Fine-tuning


def test_fine_tune_is_in_the_grid_of_chen_et_al():
    config = load("fine_tune")
    assert (config.batch_size, config.momentum, config.nesterov) == (256, 0.9, True)
    rate, decay = config.scaled_learning_rate, config.weight_decay
    assert np.isclose(rate, np.logspace(-4, -1, 7)).any()
    assert np.isclose(decay * rate, np.logspace(-6, -3, 7)).any()
    assert round(config.image_size / config.eval_crop_fraction) == 256


@pytest.mark.parametrize("name", ["fine_tune", "fine_tune_digits"])
def test_fine_tuning_ends_at_learning_rate_0(name):
    config = load(name)
    steps_per_epoch = 100
    steps = config.duration.steps(steps_per_epoch, config.batch_size)
    first, half, last = rates_of(config, [0, steps // 2, steps - 1], steps_per_epoch)
    assert first == pytest.approx(config.learning_rate)
    assert half == pytest.approx(config.learning_rate / 2)
    assert 0 < last < 1e-4


@pytest.mark.long
def test_fine_tune_takes_what_its_header_says_of_keras_weights():
    header = (ROOT / "imagenet_fast" / "flags" / "fine_tune.flags").read_text()
    network = keras.applications.ResNet50(weights=None, include_top=False)
    epsilon = re.search(r"--batch_norm_epsilon=(\S+)", header)[1]
    assert float(epsilon) == pytest.approx(network.get_layer("conv1_bn").epsilon)
    assert network.get_layer("conv3_block1_1_conv").strides == (2, 2)
    assert "--stride_on_1x1" in header
    black = keras.applications.resnet50.preprocess_input(np.zeros([1, 1, 3]))
    mean = re.search(r"--pixel_mean=(\S+)", header)[1].split(",")
    np.testing.assert_allclose(np.float64(mean), -black[0, 0, ::-1])


# --- What their readers see


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_headers(path):
    header = path.read_text().split("\n\n")[0]
    assert all(line.startswith("#") for line in header.splitlines())
    for part in ("Hardware:", "Expected:", "Measured:"):
        assert f"# {part}  " in header
    command = re.search(r"imagenet-fast train --flagfile=(\S+)|launch_local", header)
    assert command and f"--flagfile={path.stem} " in header


# TPUClusterResolver.cluster_spec (tpu_cluster_resolver.py) names a server on each host, to all of
# which the process that makes a TPUStrategy connects. Google's own tests start it on worker 0 of a
# slice (GoogleCloudPlatform/ml-auto-solutions: all_workers=not is_pod).
PROCESSES = "On a TPU slice of several hosts: one process, on host 0"


def test_one_statement_of_how_many_processes_a_tpu_slice_needs():
    texts = {path.name: path.read_text().split("\n\n")[0] for path in PATHS}
    of_slices = [name for name, text in texts.items() if "TPU v3 cores" in text]
    assert len(of_slices) == 6
    pages = [ROOT / "README.md", ROOT / "gcp" / "README.md"]
    texts |= {str(page.relative_to(ROOT)): page.read_text() for page in pages}
    assert [name for name in texts if texts[name].replace("\n", " ").count(PROCESSES) == 1] == [
        *sorted(of_slices),
        "README.md",
        "gcp/README.md",
    ]
    other = re.compile(
        r"(on|of) (each|every|all) hosts? of a (TPU|slice|pod)|process (on|for) each"
    )
    for name, text in texts.items():
        assert not other.search(text.replace("\n# ", " ").replace("\n", " ")), name


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_readme_has_all_recipes_with_their_batch_size_and_accuracy(path):
    link = re.escape(f"[{path.stem}](imagenet_fast/flags/{path.name})")
    rows = re.findall(
        rf"^\| (.*{link}.*?) \| (.+?) \| (.+?) \|", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    assert len(rows) == 1, f"rows of README's table with {path.name}: {len(rows)}"
    recipes, network, expected = rows[0]
    batches = [int(number) for number in re.findall(r"\b\d+\b", network)]
    assert load(path.stem).batch_size in batches
    header = path.read_text().split("\n\n")[0]
    accuracies = re.findall(r"([\d.]+)(?=[\d., ]*% top-1)", expected)
    names = re.findall(r"\[(\w+)\]", recipes)
    if len(accuracies) > 1:  # one for each recipe of the row
        assert len(accuracies) == len(names)
        accuracies = [accuracies[names.index(path.stem)]]
    for accuracy in accuracies:
        error = f"{100 - float(accuracy):.2f}"
        assert re.search(rf"\b({re.escape(accuracy)}|{re.escape(error)})\b", header)


def test_all_publications_are_tested_here():
    ours = {"digits", "distill_fashion_mnist", "fashion_mnist", "photos"}
    ours |= {"fine_tune", "fine_tune_digits"}
    names = {path.stem for path in PATHS}
    cifar = {name for name in names if "cifar10" in name or name.startswith("myrtle")}
    assert names - ours - cifar == set(LENGTHS), "add a publication to LENGTHS, others to ours"
