"""What ``prepare`` did to the images of training is done to those that the model gets."""

import functools
import io

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from small_network import small_network

from imagenet_fast import Config, build_model, export, make_dataset
from imagenet_fast.data.examples import FILENAME, decode_example
from imagenet_fast.data.images import to_grey_or_rgb
from imagenet_fast.data.info import read_info
from imagenet_fast.data.manifest import read_manifest
from imagenet_fast.data.preparation import Preparation
from imagenet_fast.data.prepare.job import prepare
from imagenet_fast.data.prepare.sources import open_source
from imagenet_fast.data.records import read_records
from imagenet_fast.serving.as_in_shard import as_in_shard
from imagenet_fast.serving.predict import predict
from imagenet_fast.serving.prepare import prepare_image
from imagenet_fast.training.checkpoints.model_dir import read_preparation

_ORIENTATION = 0x0112
# Arguments of ``prepare``.
CHOICES = [
    {},
    {"encoding": "png"},
    {"exif": "apply"},
    {"max_side": 50},
    {"shorter_side": 30, "exif": "apply", "encoding": "png"},
]


def photo(width, height, mode="RGB"):
    generator = np.random.default_rng(width * height)
    colours = Image.fromarray(generator.integers(0, 256, (5, 6, 3), "uint8"))
    pixels = np.asarray(colours.resize((width, height), Image.Resampling.BICUBIC), "int16")
    pixels = pixels + generator.integers(-9, 10, pixels.shape)
    return Image.fromarray(np.clip(pixels, 0, 255).astype("uint8")).convert(mode)


def encoded(image, kind, orientation=0, **options):
    if orientation:
        exif = Image.Exif()
        exif[_ORIENTATION] = orientation
        options["exif"] = exif
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def pixels(data):
    return np.asarray(to_grey_or_rgb(Image.open(io.BytesIO(data))).convert("RGB"), "int16")


FILES = {
    "jpeg": encoded(photo(90, 61), "JPEG"),
    "grey.jpeg": encoded(photo(61, 90, "L"), "JPEG"),
    "large.jpeg": encoded(photo(901, 603), "JPEG"),
    "cmyk.jpeg": encoded(photo(90, 60, "CMYK"), "JPEG"),
    "progressive.jpeg": encoded(photo(91, 63), "JPEG", 3, progressive=True),
    "large_turned.jpeg": encoded(photo(901, 603), "JPEG", 5),
    "png": encoded(photo(90, 61), "PNG"),
    "grey.png": encoded(photo(55, 56, "L"), "PNG"),
    "small.png": encoded(photo(27, 20, "L"), "PNG"),
    "alpha.png": encoded(Image.merge("LA", (photo(70, 50, "L"), photo(70, 50, "L"))), "PNG"),
    "palette.png": encoded(photo(70, 50, "P"), "PNG"),
    **{f"turned_{n}.jpeg": encoded(photo(64, 41), "JPEG", n) for n in range(1, 9)},
}


@pytest.mark.parametrize(
    "values",
    [*CHOICES, {"pad_to": 64}, {"pad_to": 64, "exif": "apply", "encoding": "png"}],
    ids=str,
)
def test_a_graph_does_what_prepare_does(values):
    preparation = Preparation(**values)
    spec = tf.TensorSpec([], tf.string)
    convert = tf.function(
        functools.partial(as_in_shard, preparation=preparation, max_pixels=10**7),
        input_signature=[spec],
    )
    shrinks = preparation.max_side or preparation.shorter_side
    for name, data in FILES.items():
        found, expected = pixels(convert(data).numpy()), pixels(preparation.encoded(data).data)
        assert found.shape == expected.shape, name
        differences = np.abs(found - expected)
        # Pillow rounds the filter's weights, and JPEG spreads a difference over its block.
        assert differences.max() <= (4 if shrinks else 0), name
        assert differences.mean() < 0.1, name


def test_images_that_are_as_in_shards_stay():
    convert = functools.partial(as_in_shard, max_pixels=10**7)
    for values, name in (({}, "jpeg"), ({"exif": "apply"}, "jpeg"), ({"max_side": 90}, "jpeg")):
        assert (
            convert(tf.constant(FILES[name]), preparation=Preparation(**values)).numpy()
            == FILES[name]
        )
    plain = Preparation(encoding="png")
    assert convert(tf.constant(FILES["alpha.png"]), preparation=plain).numpy() == FILES["alpha.png"]


@pytest.mark.parametrize(
    "values",
    [
        # In the default run, the graph does what prepare does with the others, above.
        value if n < 1 else pytest.param(value, marks=pytest.mark.long)
        for n, value in enumerate(
            [{"shorter_side": 30, "exif": "apply"}, {"encoding": "png"}, {}, {"exif": "apply"}]
        )
    ],
)
def test_predictions_for_files_are_those_of_evaluation_on_shards(values, tmp_path):
    files = {**FILES, "webp": encoded(photo(80, 60), "WEBP"), "gif": encoded(photo(50, 60), "GIF")}
    files["turned.png"] = encoded(photo(50, 60), "PNG", 6)
    for split in ("train", "validation"):
        for number, (name, data) in enumerate(files.items()):
            path = tmp_path / "images" / split / "ab"[number % 2] / f"{number}.{name}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    source = open_source("folders", tmp_path / "images")
    data_dir = tmp_path / "data"
    prepare(source, data_dir, validation_shards=1, progress=False, jpeg_index=False, **values)
    config = Config(
        data_dir=str(data_dir), image_size=32, batch_size=8, strategy="one_device", seed=3
    )
    assert read_preparation(config) == Preparation(**values)
    model = build_model(config, model=small_network)
    (shard,) = read_info(config).splits["validation"].paths
    names = [decode_example(record)[FILENAME][0].decode() for record in read_records(shard)]
    evaluated = dict(zip(names, model.predict(make_dataset(config, "validation"), verbose=0)))
    directory = export(model, tmp_path / "model")
    paths = [str(tmp_path / "images" / name) for name in names]
    assert np.ptp(list(evaluated.values()), axis=0).min() > 0.01  # They depend on the image.
    for name, answer in zip(names, predict(directory, paths)):
        found = {p["class"]: p["probability"] for p in answer["predictions"]}
        np.testing.assert_allclose([found[0], found[1]], evaluated[name], atol=1e-5, err_msg=name)


def test_prepare_image_does_it_too():
    """For ONNX and TFLite files, which contain the arguments."""
    values = {"exif": "apply", "shorter_side": 30, "max_side": None, "encoding": "png"}
    for name, data in FILES.items():
        in_shard = Preparation(**values).encoded(data).data
        np.testing.assert_array_equal(
            prepare_image(data, 16, as_in_shards=values), prepare_image(in_shard, 16), name
        )


def test_padding_is_recorded(tmp_path):
    """A source of arrays pads itself; files get the same later."""
    source = open_source("digits")
    source.pad_to = 40
    prepare(source, tmp_path, progress=False, jpeg_index=False)
    assert read_manifest(tmp_path).preparation == Preparation(pad_to=40)
