import io

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from imagenet_fast import Config
from imagenet_fast.data.augmentation.crop_boxes import evaluation_crop_boxes, training_crop_boxes
from imagenet_fast.data.decode import decode_crop_and_resize, evaluation_image
from imagenet_fast.data.headers import image_size
from imagenet_fast.data.images import normalize_encoding
from imagenet_fast.data.jpeg.image_ops import with_resize_kernel

MAX_PIXELS = Config().max_pixels


def encode(pixels, format="JPEG", **options):
    """Returns the bytes of an image file, JPEGs without chroma subsampling by default."""
    if format == "JPEG":
        options = {"quality": 95, "subsampling": 0, **options}
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def noise(height, width, seed=0):
    return np.random.RandomState(seed).randint(0, 256, (height, width, 3)).astype(np.uint8)


def smooth(height, width):
    """Returns gradients, which JPEG with chroma subsampling hardly changes."""
    y, x = np.mgrid[:height, :width]
    red, green = 255 * y / max(height - 1, 1), 255 * x / max(width - 1, 1)
    return np.stack([red, green, 255 - red], -1).astype(np.uint8)


def decoded(encoded, **options):
    """Returns all pixels of a JPEG or PNG, with Pillow's accurate DCT."""
    return tf.io.decode_jpeg(encoded, 3, dct_method="INTEGER_ACCURATE", **options).numpy()


def rounded(pixels):
    """Returns float32 pixels rounded to the nearest level, halves up, and clipped to 0..255."""
    return np.clip(np.floor(np.asarray(pixels) + np.float32(0.5)), 0, 255)


def training_image(encoded, config, identity=(1, 2, 3)):
    """Returns a training image before augmentation of its colours."""
    sizes = image_size(encoded, MAX_PIXELS)[tf.newaxis]
    boxes = training_crop_boxes(sizes, tf.constant([identity], tf.int64), config)
    return decode_crop_and_resize(encoded, boxes[0], config)


def decode_crops(encoded, boxes, config):
    """Returns the resized crops of boxes [count, 4]: uint8 [count, size, size, 3]."""
    dataset = tf.data.Dataset.from_tensor_slices(boxes)
    dataset = dataset.map(lambda box: decode_crop_and_resize(encoded, box, config))
    return np.stack(list(dataset.as_numpy_iterator()))


# --- Evaluation -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("height", "width", "fraction", "side", "top", "left"),
    [
        (8, 8, 0.875, 7, 1, 1),
        (9, 9, 0.875, 8, 1, 1),
        (32, 32, 0.875, 28, 2, 2),
        (40, 61, 0.875, 35, 3, 13),
        (61, 40, 0.875, 35, 13, 3),
        (50, 37, 0.5, 18, 16, 10),
        (37, 50, 1.0, 37, 0, 7),
        (20, 20, 1.0, 20, 0, 0),
        (3, 200, 0.01, 1, 1, 100),
    ],
)
@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_evaluation_crops_the_centre_of_the_decoded_image(
    format, height, width, fraction, side, top, left
):
    encoded = encode(noise(height, width), format)
    # image_size is the crop's size, so that resizing changes nothing.
    config = Config(eval_crop_fraction=fraction, image_size=side)
    boxes = evaluation_crop_boxes(tf.constant([[height, width]]), config)
    np.testing.assert_array_equal(boxes, [[top, left, side, side]])
    crop = decoded(encoded)[top : top + side, left : left + side]
    np.testing.assert_array_equal(evaluation_image(encoded, config), crop)


def test_chroma_subsampling_changes_only_the_crops_border():
    encoded = encode(noise(64, 80), subsampling=2)
    whole = decoded(encoded)[4:60, 12:68]
    image = evaluation_image(encoded, Config(image_size=56)).numpy()
    np.testing.assert_array_equal(image[2:-2, 2:-2], whole[2:-2, 2:-2])


@pytest.mark.parametrize("size", [9, 24, 50])
@pytest.mark.parametrize("method", ["bicubic", "bilinear"])
def test_crops_are_resized_by_tensorflow_and_rounded(method, size):
    encoded = encode(noise(32, 32))
    image = evaluation_image(encoded, Config(image_size=size, resize_method=method)).numpy()
    resized = tf.image.resize(decoded(encoded)[2:30, 2:30], [size, size], method=method)
    assert image.shape == (size, size, 3) and image.dtype == np.uint8
    np.testing.assert_array_equal(image, rounded(resized))


@pytest.mark.parametrize("method", ["bicubic", "bilinear"])
def test_halves_are_rounded_up_as_pillow_does(method):
    # The only output pixel is the mean of two columns, 0.5 to 254.5.
    for level in (0, 1, 2, 101, 254):
        pixels = np.repeat(np.array([[[level], [level + 1]]] * 2, np.uint8), 3, axis=2)
        config = Config(image_size=1, eval_crop_fraction=1.0, resize_method=method)
        image = evaluation_image(encode(pixels, "PNG"), config).numpy()
        pillow = np.asarray(Image.fromarray(pixels).resize((1, 1), Image.Resampling.BOX))
        assert (image == level + 1).all() and (pillow == level + 1).all()


@pytest.mark.parametrize(("height", "width"), [(128, 160), (160, 128), (128, 128)])
def test_crop_then_resize_equals_resize_then_crop(height, width):
    """MLPerf's evaluation: resize the shorter side to 256, crop the central 224; here a quarter."""
    encoded = encode(noise(height, width))
    config = Config(image_size=56, eval_crop_fraction=0.875, resize_method="bilinear")
    resized = tf.image.resize(decoded(encoded), [height // 2, width // 2]).numpy()
    top, left = (height // 2 - 56) // 2, (width // 2 - 56) // 2
    np.testing.assert_array_equal(
        evaluation_image(encoded, config), rounded(resized[top : top + 56, left : left + 56])
    )


def test_bicubic_overshoot_is_clipped():
    pixels = np.zeros((16, 16, 3), np.uint8)
    pixels[:, 8:] = 255
    config = Config(image_size=64, eval_crop_fraction=1.0, resize_method="bicubic")
    image = evaluation_image(encode(pixels, "PNG"), config).numpy()
    assert (image[:, :28] == 0).all() and (image[:, 36:] == 255).all()


# --- Antialiasing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["native", "tensorflow"])
@pytest.mark.parametrize(("height", "width"), [(300, 300), (97, 211), (224, 96), (20, 30), (50, 5)])
def test_antialiased_crops_match_pillow(height, width, kernel):
    """Pillow, which torchvision uses, rounds after each axis, and so may differ by one level."""
    encoded = encode(noise(320, 340), "PNG")
    box = [7, 11, height, width]
    config = Config(image_size=50, antialias=True, resize_kernel=kernel)
    (image,) = decode_crops(encoded, [box], with_resize_kernel(config))
    cropped = Image.open(io.BytesIO(encoded)).crop((11, 7, 11 + width, 7 + height))
    expected = np.asarray(cropped.resize((50, 50), Image.Resampling.BILINEAR))
    difference = np.abs(image.astype(int) - expected)
    assert difference.max() <= 1 and difference.mean() < 0.3
    if min(height, width) > 60:  # else an axis is enlarged, without antialiasing
        plain = decode_crops(encoded, [box], config.replace(antialias=False))[0]
        assert np.abs(plain.astype(int) - expected).mean() > 5


def test_antialiasing_changes_only_smaller_images():
    encoded = encode(noise(30, 40), "PNG")
    config = Config(image_size=50, resize_method="bilinear")
    images = [
        evaluation_image(encoded, config.replace(antialias=on)).numpy().astype(int)
        for on in (False, True)
    ]
    assert np.abs(images[0] - images[1]).max() <= 1


@pytest.mark.parametrize("method", ["bilinear", "bicubic"])
def test_training_and_evaluation_are_antialiased(method):
    encoded = encode(smooth(90, 120) ^ noise(90, 120) // 4, "PNG")
    config = Config(
        image_size=32, train_crop="none", antialias=True, resize_method=method, eval_crop_fraction=1
    )
    whole = Image.open(io.BytesIO(encoded)).crop((15, 0, 105, 90))
    # Pillow does not round floats between the axes.
    colours = [
        colour.convert("F").resize((32, 32), Image.Resampling[method.upper()])
        for colour in whole.split()
    ]
    expected = rounded(np.stack(colours, -1))
    for decode in (evaluation_image, training_image):
        difference = np.abs(decode(encoded, config).numpy() - expected)
        assert difference.max() <= 1 and difference.mean() < 0.01


# --- Formats --------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_grey_images_get_three_equal_channels(format):
    grey = smooth(24, 24)[..., 0]
    config = Config(image_size=24, eval_crop_fraction=1.0)
    image = evaluation_image(encode(grey, format), config).numpy()
    assert (image == image[..., :1]).all()
    np.testing.assert_allclose(image[..., 0].astype(int), grey, atol=6)


def prepared(encoded):
    """Returns a file's pixels in the shards that ``prepare`` writes."""
    image = Image.open(io.BytesIO(normalize_encoding(encoded, "png").data))
    return np.asarray(image.convert("RGB")).astype(int)


@pytest.mark.parametrize("train", [False, True])
def test_other_formats_are_refused(train):
    """The format is that of the bytes: ImageNet has a PNG named .JPEG."""
    palette = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255], [9, 80, 200]], np.uint8)
    pixels = palette[np.random.RandomState(0).randint(0, 4, (16, 16))]
    config = Config(image_size=14, train_crop="none")
    image = training_image if train else evaluation_image
    np.testing.assert_array_equal(image(encode(pixels, "PNG"), config), pixels[1:15, 1:15])
    for format in ("GIF", "BMP", "WEBP", "TIFF", "PPM", "ICO"):
        encoded = encode(pixels, format)
        with pytest.raises(tf.errors.InvalidArgumentError):
            image(encoded, config)
        with pytest.raises(tf.errors.InvalidArgumentError):
            decode_crop_and_resize(encoded, tf.constant([0, 0, 16, 16]), config)


@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_images_above_the_limit_are_not_decoded(format):
    encoded = encode(noise(20, 30), format)
    config = Config(image_size=8, max_pixels=600)
    assert evaluation_image(encoded, config).shape[0] == 8
    with pytest.raises(tf.errors.InvalidArgumentError):
        evaluation_image(encoded, config.replace(max_pixels=599))
    if format == "PNG":  # Of a JPEG, training decodes the crop only.
        with pytest.raises(tf.errors.InvalidArgumentError):
            decode_crop_and_resize(
                encoded, tf.constant([0, 0, 8, 8]), config.replace(max_pixels=599)
            )


def test_transparent_png_and_palette_png_decode():
    config = Config(image_size=16, eval_crop_fraction=1.0)
    pixels = smooth(16, 16)
    opaque = Image.fromarray(np.dstack([pixels, np.full((16, 16), 255, np.uint8)]))
    np.testing.assert_array_equal(evaluation_image(encode(opaque, "PNG"), config), pixels)
    palette = Image.fromarray(pixels).convert("P")
    image = evaluation_image(encode(palette, "PNG"), config)
    np.testing.assert_array_equal(image, np.asarray(palette.convert("RGB")))


def test_transparent_pixels_of_a_png_become_white():
    colours = np.array([[0, 0, 0], [200, 10, 99], [0, 0, 0], [7, 77, 177]], np.uint8)
    alpha = np.array([0, 255, 128, 1], np.uint8)
    pixels = np.tile(np.column_stack([colours, alpha]), (4, 1, 1))
    config = Config(image_size=4, eval_crop_fraction=1.0)
    image = evaluation_image(encode(pixels, "PNG"), config).numpy()
    expected = [[255, 255, 255], [200, 10, 99], [127, 127, 127], [254, 254, 255]]
    np.testing.assert_array_equal(image, np.tile(np.array(expected, np.uint8), (4, 1, 1)))


@pytest.mark.parametrize("transparency", [None, 1])
@pytest.mark.parametrize("colours", [2, 4, 16, 256])
def test_palettes_of_few_bits(colours, transparency):
    image = Image.fromarray(np.random.RandomState(0).randint(0, colours, (8, 8), np.uint8), "P")
    image.putpalette(noise(colours, 1).tobytes())
    options = {} if transparency is None else {"transparency": transparency}
    encoded = encode(image, "PNG", **options)
    white = Image.new("RGBA", image.size, "white")
    own = Image.open(io.BytesIO(encoded)).convert("RGBA")
    expected = np.asarray(Image.alpha_composite(white, own))[..., :3]
    config = Config(image_size=8, eval_crop_fraction=1.0)
    np.testing.assert_array_equal(evaluation_image(encoded, config), expected)


@pytest.mark.long
def test_large_transparent_pngs_are_blended_in_parts():
    """More rows than one part has; the last part is smaller."""
    pixels = np.random.RandomState(0).randint(0, 256, (1031, 2050, 4)).astype(np.uint8)
    encoded = encode(pixels, "PNG", compress_level=1)
    config = Config(image_size=1031, eval_crop_fraction=1.0)
    expected = prepared(encoded)[:, 510:1541]
    np.testing.assert_array_equal(evaluation_image(encoded, config), expected)


def without_adobe(jpeg):
    start = jpeg.index(b"\xff\xee\x00\x0eAdobe")
    return jpeg[:start] + jpeg[start + 16 :]


@pytest.mark.parametrize("adobe", [True, False])
@pytest.mark.parametrize("train", [False, True])
def test_cmyk_jpeg_decodes_to_its_colours(adobe, train):
    pixels = smooth(32, 32)
    encoded = encode(Image.fromarray(pixels).convert("CMYK"))
    encoded = encoded if adobe else without_adobe(encoded)
    if train and not adobe:
        pytest.skip("prepare converts such JPEGs, and training does not check for them")
    config = Config(image_size=28, train_crop="none")
    image = training_image(encoded, config) if train else evaluation_image(encoded, config)
    np.testing.assert_allclose(image, prepared(encoded)[2:30, 2:30], rtol=0, atol=1)
    if adobe:
        np.testing.assert_allclose(image.numpy().astype(int), pixels[2:30, 2:30], atol=8)


def test_ycck_jpeg_matches_pillow():
    """The CMYK file's coefficients, with the marker that says YCCK."""
    cmyk = encode(Image.fromarray(noise(32, 32)).resize((32, 32)).convert("CMYK"))
    place = cmyk.index(b"Adobe") + 11
    encoded = cmyk[:place] + b"\x02" + cmyk[place + 1 :]
    image = evaluation_image(encoded, Config(image_size=28)).numpy()
    np.testing.assert_allclose(image, prepared(encoded)[2:30, 2:30], rtol=0, atol=1)
    assert np.abs(image - prepared(cmyk)[2:30, 2:30]).max() > 20


def with_orientation(image, format, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode(image, format, exif=exif)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_ignored_everywhere(orientation):
    """Evaluation, serving, training and prepare use pixels as they are stored."""
    image = Image.fromarray(smooth(16, 24))
    config = Config(image_size=14, train_crop="none")
    for format in ("JPEG", "PNG"):
        plain, turned = encode(image, format), with_orientation(image, format, orientation)
        assert Image.open(io.BytesIO(turned)).getexif()[0x0112] == orientation
        for decode in (evaluation_image, training_image):
            np.testing.assert_array_equal(decode(turned, config), decode(plain, config))
        np.testing.assert_array_equal(prepared(turned), prepared(plain))
    # A JPEG is copied into a shard unchanged, including its orientation.
    assert normalize_encoding(with_orientation(image, "JPEG", orientation)).converted_from is None


@pytest.mark.parametrize(
    "encoded",
    [b"", b"text", b"\xff\xd8\xff", encode(noise(40, 40))[:700], encode(noise(9, 9), "PNG")[:60]],
    ids=["empty", "text", "JPEG's first bytes", "truncated JPEG", "truncated PNG"],
)
def test_files_that_are_not_whole_images_raise(encoded):
    with pytest.raises(tf.errors.InvalidArgumentError):
        evaluation_image(encoded, Config(image_size=8))
    with pytest.raises(tf.errors.InvalidArgumentError):
        training_image(encoded, Config(image_size=8))


def test_jpeg_without_its_last_rows_raises_if_the_crop_has_them():
    encoded = encode(noise(64, 64))[:-200]
    with pytest.raises(tf.errors.InvalidArgumentError):
        evaluation_image(encoded, Config(image_size=8, eval_crop_fraction=1.0))
    assert evaluation_image(encoded, Config(image_size=8, eval_crop_fraction=0.5)).shape[0] == 8


# --- Training -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "crop", ["random_resized", pytest.param("inception", marks=pytest.mark.long)]
)
def test_random_crops_of_a_jpeg_equal_those_of_its_png(identities, crop):
    encoded = encode(noise(40, 48))
    png = encode(decoded(encoded), "PNG")
    config = Config(image_size=16, train_crop=crop)

    def images(encoded):
        sizes = tf.repeat(image_size(encoded, MAX_PIXELS)[tf.newaxis], 30, axis=0)
        return decode_crops(encoded, training_crop_boxes(sizes, identities(30), config), config)

    np.testing.assert_array_equal(images(encoded), images(png))
    assert len({image.tobytes() for image in images(png)}) == 30


@pytest.mark.parametrize("method", ["bicubic", "bilinear"])
@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_crop_is_decoded_and_resized(format, method):
    encoded = encode(noise(50, 60), format)
    config = Config(image_size=16, resize_method=method)
    for top, left, height, width in (
        (0, 0, 50, 60),
        (3, 5, 30, 21),
        (49, 59, 1, 1),
        (13, 0, 9, 60),
    ):
        crop = decoded(encoded)[top : top + height, left : left + width]
        image = decode_crop_and_resize(encoded, tf.constant([top, left, height, width]), config)
        assert image.shape == (16, 16, 3) and image.dtype == tf.uint8
        np.testing.assert_array_equal(image, rounded(tf.image.resize(crop, [16, 16], method)))


@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_crop_outside_the_image_raises(format):
    encoded = encode(noise(50, 60), format)
    for box in ([0, 0, 51, 60], [30, 10, 21, 10], [0, 55, 10, 6]):
        with pytest.raises(tf.errors.InvalidArgumentError):
            decode_crop_and_resize(encoded, tf.constant(box), Config(image_size=8))


@pytest.mark.parametrize("crop", ["none", "pad"])
def test_crops_that_are_not_random_equal_evaluations(crop):
    encoded = encode(noise(30, 50))
    config = Config(image_size=20, train_crop=crop)
    for place in range(3):
        np.testing.assert_array_equal(
            training_image(encoded, config, (1, 2, place)), evaluation_image(encoded, config)
        )


@pytest.mark.parametrize(
    "crop",
    [
        pytest.param("random_resized", marks=pytest.mark.long),
        pytest.param("inception", marks=pytest.mark.long),
        pytest.param("pad", marks=pytest.mark.long),
        "none",
    ],
)
def test_static_shapes(crop):
    config = Config(image_size=20, train_crop=crop)
    spec = tf.TensorSpec([20, 20, 3], tf.uint8)
    dataset = tf.data.Dataset.from_tensors(b"")
    assert dataset.map(lambda x: training_image(x, config)).element_spec == spec
    assert dataset.map(lambda x: evaluation_image(x, config)).element_spec == spec
    batches = tf.data.Dataset.from_tensors(np.ones([9, 3], np.int64)).unbatch().batch(4)
    batches = batches.map(
        lambda batch: training_crop_boxes(tf.ones([tf.shape(batch)[0], 2], tf.int32), batch, config)
    )
    assert batches.element_spec.shape[1] == 4
