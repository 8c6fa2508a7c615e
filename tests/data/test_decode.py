import io

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from imagenet_fast import Config
from imagenet_fast.data.decode import evaluation_image, training_image


def encode(pixels, format="JPEG", **options):
    """Returns the bytes of an image file, JPEGs without chroma subsampling unless told."""
    if format == "JPEG":
        options = {"quality": 95, "subsampling": 0, **options}
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def noise(height, width, seed=0):
    return np.random.RandomState(seed).randint(0, 256, (height, width, 3)).astype(np.uint8)


def smooth(height, width):
    """Colours that change slowly, which chroma subsampling and JPEG leave nearly as they are."""
    y, x = np.mgrid[:height, :width]
    red, green = 255 * y / max(height - 1, 1), 255 * x / max(width - 1, 1)
    return np.stack([red, green, 255 - red], -1).astype(np.uint8)


def training_images(encoded, config, seeds):
    """Returns training_image for each of ``seeds``, uint8 [seeds, size, size, 3]."""
    dataset = tf.data.Dataset.range(seeds).map(
        lambda seed: training_image(encoded, tf.stack([tf.cast(seed, tf.int32), 5]), config)
    )
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
def test_evaluation_takes_the_centre_of_the_decoded_image(
    format, height, width, fraction, side, top, left
):
    encoded = encode(noise(height, width), format)
    # As large as the window, so that resizing changes nothing.
    config = Config(eval_crop_fraction=fraction, image_size=side)
    whole = tf.io.decode_image(encoded, channels=3).numpy()
    window = whole[top : top + side, left : left + side]
    np.testing.assert_array_equal(evaluation_image(encoded, config), window)


def test_evaluation_of_subsampled_colours_differs_at_the_windows_edge_only():
    encoded = encode(noise(64, 80), subsampling=2)
    whole = tf.io.decode_jpeg(encoded).numpy()[4:60, 12:68]
    image = evaluation_image(encoded, Config(image_size=56)).numpy()
    np.testing.assert_array_equal(image[2:-2, 2:-2], whole[2:-2, 2:-2])


@pytest.mark.parametrize("size", [9, 24, 50])
@pytest.mark.parametrize("method", ["bicubic", "bilinear"])
def test_windows_are_resized_as_tensorflow_does_and_rounded(method, size):
    encoded = encode(noise(32, 32))
    image = evaluation_image(encoded, Config(image_size=size, resize_method=method)).numpy()
    window = tf.cast(tf.io.decode_jpeg(encoded)[2:30, 2:30], tf.float32)
    resized = tf.image.resize(window, [size, size], method=method).numpy()
    assert image.shape == (size, size, 3) and image.dtype == np.uint8
    np.testing.assert_array_equal(image, np.clip(np.rint(resized), 0, 255))


@pytest.mark.parametrize(("height", "width"), [(128, 160), (160, 128), (128, 128)])
def test_crop_then_resize_is_resize_then_crop(height, width):
    """MLPerf's evaluation: the shorter side to 256, then the middle 224; here a quarter of each."""
    encoded = encode(noise(height, width))
    config = Config(image_size=56, eval_crop_fraction=0.875, resize_method="bilinear")
    resized = tf.image.resize(tf.io.decode_jpeg(encoded), [height // 2, width // 2]).numpy()
    top, left = (height // 2 - 56) // 2, (width // 2 - 56) // 2
    np.testing.assert_array_equal(
        evaluation_image(encoded, config), np.rint(resized[top : top + 56, left : left + 56])
    )


def test_bicubic_overshoot_is_clipped():
    pixels = np.zeros((16, 16, 3), np.uint8)
    pixels[:, 8:] = 255
    config = Config(image_size=64, eval_crop_fraction=1.0)
    image = evaluation_image(encode(pixels, "PNG"), config).numpy()
    assert (image[:, :28] == 0).all() and (image[:, 36:] == 255).all()


# --- Formats --------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_grey_images_get_three_equal_channels(format):
    grey = smooth(24, 24)[..., 0]
    config = Config(image_size=24, eval_crop_fraction=1.0)
    image = evaluation_image(encode(grey, format), config).numpy()
    assert (image == image[..., :1]).all()
    np.testing.assert_allclose(image[..., 0].astype(int), grey, atol=6)


@pytest.mark.parametrize("format", ["PNG", "GIF", "BMP"])
@pytest.mark.parametrize("train", [False, True])
def test_other_formats_decode_whatever_the_file_is_called(format, train):
    # Nothing here sees a file's name: ImageNet has a PNG named .JPEG.
    palette = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255], [9, 80, 200]], np.uint8)
    pixels = palette[np.random.RandomState(0).randint(0, 4, (16, 16))]
    config = Config(image_size=14, train_crop="none")
    encoded = encode(pixels, format)
    image = training_image(encoded, [1, 2], config) if train else evaluation_image(encoded, config)
    np.testing.assert_array_equal(image, pixels[1:15, 1:15])


def test_transparent_png_and_palette_png_decode():
    config = Config(image_size=16, eval_crop_fraction=1.0)
    pixels = smooth(16, 16)
    opaque = Image.fromarray(np.dstack([pixels, np.full((16, 16), 255, np.uint8)]))
    np.testing.assert_array_equal(evaluation_image(encode(opaque, "PNG"), config), pixels)
    palette = Image.fromarray(pixels).convert("P")
    image = evaluation_image(encode(palette, "PNG"), config)
    np.testing.assert_array_equal(image, np.asarray(palette.convert("RGB")))


def test_cmyk_jpeg_decodes_to_its_colours():
    pixels = smooth(32, 32)
    encoded = encode(Image.fromarray(pixels).convert("CMYK"))
    image = evaluation_image(encoded, Config(image_size=28)).numpy()
    np.testing.assert_allclose(image.astype(int), pixels[2:30, 2:30], atol=8)


def test_animated_gif_gives_its_first_frame():
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue")]
    encoded = encode(frames[0], "GIF", save_all=True, append_images=frames[1:])
    image = evaluation_image(encoded, Config(image_size=8)).numpy()
    assert (image == [255, 0, 0]).all()


@pytest.mark.parametrize(
    "encoded",
    [b"", b"text", b"\xff\xd8\xff", encode(noise(40, 40))[:700], encode(noise(9, 9), "PNG")[:60]],
    ids=["empty", "text", "JPEG's first bytes", "truncated JPEG", "truncated PNG"],
)
def test_what_is_no_whole_image_is_an_error(encoded):
    with pytest.raises(tf.errors.InvalidArgumentError):
        evaluation_image(encoded, Config(image_size=8))
    with pytest.raises(tf.errors.InvalidArgumentError):
        training_image(encoded, [1, 2], Config(image_size=8))


def test_jpeg_that_lacks_its_last_rows_is_an_error_where_they_are_seen():
    encoded = encode(noise(64, 64))[:-200]
    with pytest.raises(tf.errors.InvalidArgumentError):
        evaluation_image(encoded, Config(image_size=8, eval_crop_fraction=1.0))
    assert evaluation_image(encoded, Config(image_size=8, eval_crop_fraction=0.5)).shape[0] == 8


# --- Training -------------------------------------------------------------------------------------

_HEIGHT, _WIDTH, _SIZE = 200, 240, 32


def drawn_windows(count, **changes):
    """Returns windows of random crops: float [count, 4] of top, left, height, width.

    They are read from the crops of an image whose colours are its coordinates; because colours are
    whole numbers, to one pixel.
    """
    y, x = np.mgrid[:_HEIGHT, :_WIDTH]
    encoded = encode(np.stack([y, x, 0 * x], -1).astype(np.uint8), "PNG")
    config = Config(image_size=_SIZE, resize_method="bilinear", **changes)
    images = training_images(encoded, config, count).astype(float)[..., :2]
    first, last = images[:, 0, 0], images[:, -1, -1]
    shape = (last - first) * _SIZE / (_SIZE - 1)
    corner = first + 0.5 - shape / _SIZE / 2
    return np.concatenate([corner, shape], axis=1)


@pytest.fixture(scope="module")
def windows():
    """Windows of 1000 random_resized crops."""
    return drawn_windows(1000)


@pytest.fixture(scope="module")
def inception_windows():
    """Windows of 1000 inception crops."""
    return drawn_windows(1000, train_crop="inception")


@pytest.mark.parametrize("crop", ["windows", "inception_windows"])
def test_random_windows_lie_within_the_image(crop, request):
    top, left, height, width = request.getfixturevalue(crop).T
    assert top.min() > -1.5 and (top + height).max() < _HEIGHT + 1.5
    assert left.min() > -1.5 and (left + width).max() < _WIDTH + 1.5


def test_random_windows_have_areas_from_the_least_to_the_whole(windows):
    area = windows[:, 2] * windows[:, 3] / (_HEIGHT * _WIDTH)
    assert 0.075 < area.min() < 0.1
    assert 0.9 < area.max() <= 1.01
    # Below 0.45 each window fits, whatever its shape, and none is drawn more often than another.
    fitting = area[area < 0.45]
    assert 0.44 < np.mean(fitting < (0.08 + 0.45) / 2) < 0.56


def test_roots_of_aspects_are_uniform_from_three_quarters_to_four_thirds(windows):
    ratio = (windows[:, 3] / windows[:, 2])[windows[:, 2] * windows[:, 3] < 0.45 * _HEIGHT * _WIDTH]
    root = np.sqrt(ratio)
    assert 0.73 < root.min() < 0.77
    assert 1.30 < root.max() < 1.36
    # Half of the windows are turned, so that the root lies in [3/4, 1] as often as its inverse:
    # (1/4 + 1/3) / (7/12) / 2.
    assert 0.44 < np.mean(root < 1) < 0.56


def test_inception_windows_have_areas_from_a_tenth_and_small_ones_more_often(inception_windows):
    area = inception_windows[:, 2] * inception_windows[:, 3] / (_HEIGHT * _WIDTH)
    assert 0.09 < area.min() < 0.13
    assert 0.8 < area.max() <= 1.01
    # Below 0.45 each window fits. Not areas are uniform, but their roots: below the middle lie
    # (sqrt(0.275) - sqrt(0.1)) / (sqrt(0.45) - sqrt(0.1)) = 0.59.
    fitting = area[area < 0.45]
    assert 0.54 < np.mean(fitting < (0.1 + 0.45) / 2) < 0.64


def test_aspects_of_inception_windows_are_uniform_from_three_quarters_to_four_thirds(
    inception_windows,
):
    height, width = inception_windows.T[2:]
    assert 0.73 < (width / height).min() < 0.77
    assert 1.31 < (width / height).max() < 1.36
    # Below two thirds of the shorter side each ratio fits.
    ratio = (width / height)[(height < 130) & (width < 130) & (height * width > 75**2)]
    assert 0.42 < np.mean(ratio < (3 / 4 + 4 / 3) / 2) < 0.58


def test_least_area_of_inception_windows_is_an_option():
    height, width = drawn_windows(100, train_crop="inception", crop_min_area=0.5).T[2:]
    assert 0.48 < (height * width / (_HEIGHT * _WIDTH)).min() < 0.56


@pytest.mark.parametrize("crop", ["windows", "inception_windows"])
def test_random_windows_lie_everywhere(crop, request):
    top, left, height, width = request.getfixturevalue(crop).T
    small = (height < 100) & (width < 100)
    centre = np.stack([top + height / 2, left + width / 2], -1)[small]
    assert small.sum() > 100
    np.testing.assert_allclose(centre.mean(axis=0), [_HEIGHT / 2, _WIDTH / 2], rtol=0.1)
    assert (centre.std(axis=0) > 25).all()


def test_least_area_is_an_option():
    y, x = np.mgrid[:_HEIGHT, :_HEIGHT]
    encoded = encode(np.stack([y, x, 0 * x], -1).astype(np.uint8), "PNG")
    config = Config(image_size=_SIZE, resize_method="bilinear", crop_min_area=0.5)
    images = training_images(encoded, config, 100).astype(float)
    height, width = (images[:, -1, -1] - images[:, 0, 0])[:, :2].T * _SIZE / (_SIZE - 1)
    assert (height * width / _HEIGHT**2).min() > 0.48


@pytest.mark.parametrize("shape", [(10, 400), (400, 10)])
def test_centre_is_taken_where_no_window_fits(shape):
    encoded = encode(noise(*shape))
    config = Config(image_size=9)
    centre = evaluation_image(encoded, config.replace(eval_crop_fraction=1.0)).numpy()
    assert (training_images(encoded, config, 20) == centre).all()


@pytest.mark.parametrize("shape", [(10, 400), (400, 10), (1, 1), (1, 50)])
def test_centre_as_in_evaluation_is_taken_where_no_inception_window_fits(shape):
    encoded = encode(noise(*shape))
    config = Config(image_size=9, train_crop="inception")
    centre = evaluation_image(encoded, config).numpy()
    assert (training_images(encoded, config, 20) == centre).all()


@pytest.mark.parametrize("crop", ["random_resized", "inception"])
@pytest.mark.parametrize("shape", [(1, 3), (2, 2), (3, 1), (5, 4)])
def test_crops_of_tiny_images_have_their_pixels(crop, shape):
    pixels = noise(*shape)
    config = Config(image_size=3, train_crop=crop, resize_method="bilinear")
    images = training_images(encode(pixels, "PNG"), config, 20)
    assert images.shape == (20, 3, 3, 3)
    assert (images >= pixels.min((0, 1))).all() and (images <= pixels.max((0, 1))).all()


@pytest.mark.parametrize("crop", ["random_resized", "inception"])
def test_attempts_are_an_option(crop):
    # Few windows of half of an image twice as wide as high fit.
    encoded = encode(noise(60, 120), "PNG")
    config = Config(image_size=9, train_crop=crop, crop_min_area=0.5, eval_crop_fraction=1.0)
    centre = evaluation_image(encoded, config).numpy()

    def at_centre(attempts):
        images = training_images(encoded, config.replace(crop_attempts=attempts), 100)
        return np.mean((images == centre).all(axis=(1, 2, 3)))

    assert at_centre(1) > 0.4
    assert at_centre(100) < at_centre(1) / 2


@pytest.mark.parametrize("crop", ["random_resized", "inception", "pad"])
def test_crop_is_a_function_of_the_seed(crop):
    encoded = encode(noise(40, 48))
    config = Config(image_size=16, train_crop=crop)
    images = training_images(encoded, config, 50)
    tf.random.set_seed(1)
    np.testing.assert_array_equal(training_images(encoded, config, 50), images)
    different = {image.tobytes() for image in images}
    assert len(different) > 25


@pytest.mark.parametrize("crop", ["random_resized", "inception"])
def test_random_window_of_a_jpeg_is_that_of_the_same_png(crop):
    encoded = encode(noise(40, 48))
    png = encode(tf.io.decode_jpeg(encoded).numpy(), "PNG")
    config = Config(image_size=16, train_crop=crop)
    np.testing.assert_array_equal(
        training_images(encoded, config, 30), training_images(png, config, 30)
    )


def test_inception_window_is_the_one_that_tensorflow_draws():
    encoded = encode(noise(120, 160), subsampling=2)
    config = Config(image_size=16, train_crop="inception", crop_min_area=0.3, crop_attempts=100)
    for seed in range(5):
        (top, left, _), (height, width, _), _ = tf.image.stateless_sample_distorted_bounding_box(
            [120, 160, 3],
            tf.constant([[[0.0, 0.0, 1.0, 1.0]]]),
            seed=[seed, 5],
            area_range=(0.3, 1.0),
            aspect_ratio_range=(3 / 4, 4 / 3),
            max_attempts=100,
        )
        window = tf.io.decode_jpeg(encoded)[top : top + height, left : left + width]
        resized = np.clip(np.rint(tf.image.resize(window, [16, 16], "bicubic")), 0, 255)
        image = training_image(encoded, tf.constant([seed, 5]), config).numpy()
        # At its edges a window has no neighbours from which to take subsampled colours.
        np.testing.assert_array_equal(image[2:-2, 2:-2], resized[2:-2, 2:-2])


def test_pad_crop_shifts_by_all_offsets_and_fills_with_zeros():
    pixels = noise(6, 6)
    margin = 2
    config = Config(
        image_size=6, train_crop="pad", crop_padding=margin, eval_crop_fraction=1.0, num_classes=1
    )
    padded = np.pad(pixels, [(margin, margin), (margin, margin), (0, 0)])
    offsets = {
        padded[top : top + 6, left : left + 6].tobytes(): (top, left)
        for top in range(2 * margin + 1)
        for left in range(2 * margin + 1)
    }
    images = training_images(encode(pixels, "PNG"), config, 500)
    counts = dict.fromkeys(offsets.values(), 0)
    for image in images:
        counts[offsets[image.tobytes()]] += 1  # a KeyError: no shifted window
    assert len(counts) == 25
    assert min(counts.values()) >= 5 and max(counts.values()) <= 45


def test_no_crop_is_the_crop_of_evaluation():
    encoded = encode(noise(30, 50))
    config = Config(image_size=20, train_crop="none")
    images = training_images(encoded, config, 3)
    assert (images == evaluation_image(encoded, config).numpy()).all()


@pytest.mark.parametrize("crop", ["random_resized", "inception", "pad", "none"])
def test_shapes_are_known_before_anything_is_read(crop):
    config = Config(image_size=20, train_crop=crop)
    spec = tf.TensorSpec([20, 20, 3], tf.uint8)
    dataset = tf.data.Dataset.from_tensors(b"")
    assert dataset.map(lambda x: training_image(x, [1, 2], config)).element_spec == spec
    assert dataset.map(lambda x: evaluation_image(x, config)).element_spec == spec
