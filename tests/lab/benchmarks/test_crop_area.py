import io
import json

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from imagenet_fast import Config, UserError
from imagenet_fast.data import records
from imagenet_fast.data.examples import encode_example
from imagenet_fast.data.jpeg.image_ops import with_resize_kernel
from imagenet_fast.lab.benchmarks import crop_area
from imagenet_fast.lab.benchmarks.timing import Times


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two baseline JPEGs of 80 x 96 pixels, and a progressive one, which has no index."""
    directory = tmp_path_factory.mktemp("data")
    examples = []
    for number in range(3):
        pixels = np.random.default_rng(number).integers(0, 255, (10, 12, 3), np.uint8)
        file = io.BytesIO()
        image = Image.fromarray(pixels).resize((96, 80))
        image.save(file, "JPEG", quality=90, progressive=number == 1)
        examples.append(
            encode_example(
                file.getvalue(), label=0, text="", filename="", height=80, width=96, channels=3
            )
        )
    records.write_records(directory / "train-00000-of-00001", examples)
    return str(directory)


def test_all_decoders_make_the_same_crop(data):
    options = with_resize_kernel(Config(data_dir=data, num_classes=1, image_size=16))
    encoded, indexes = crop_area._indexed_jpegs(options, 2)
    box = tf.constant([17, 22, 33, 40])
    cut, whole = (
        decoder(encoded[0], indexes[0], box)
        for decoder in (crop_area._natively(options, True), crop_area._whole(options))
    )
    np.testing.assert_array_equal(cut, whole)
    # TensorFlow's op differs at the border of the crop.
    cropped = crop_area._natively(options, False)(encoded[0], indexes[0], box)
    assert np.abs(cropped.numpy().astype(int) - whole.numpy()).mean() < 1


@pytest.mark.parametrize("area", [0.08, 0.5, 1.0])
def test_boxes_have_the_area_and_lie_in_the_image(area):
    sizes = np.array([[375, 500], [500, 375]] * 50)
    boxes = crop_area._boxes(sizes, area, np.random.default_rng(0))
    assert boxes[:, :2].min() >= 0
    assert (boxes[:, :2] + boxes[:, 2:] <= sizes).all()
    np.testing.assert_allclose(boxes[:, 2:].prod(1) / sizes.prod(1), area, rtol=0.01)
    if area < 1:
        assert len(np.unique(boxes[:, 0])) > 20


def test_the_report_compares_cpu_times():
    times = {
        area: {
            crop_area.INDEXED: Times((1.0, 1.0), (0.1, 0.2)),
            crop_area.CROPPED: Times((1.0, 1.0), (0.2, 0.4)),
            crop_area.WHOLE: Times((1.0, 1.0), (0.4, 0.6)),
        }
        for area in crop_area.AREAS
    }
    result = crop_area.CropAreas(times, 100, 224, 105.0, 2000.0)
    report = crop_area.make_report(result)
    row = next(line for line in report.text.splitlines() if line.lstrip().startswith("8 "))
    expected = "8 1,500 3,000 5,000 2.00 (2.00 to 2.00) 3.50 (3.00 to 4.00)"
    assert " ".join(row.split()) == expected
    assert "105 kB" in report.text and "2.0 kB" in report.text
    assert report.svg().count("whole image") >= 1


@pytest.mark.long
def test_only_jpegs_with_an_index_count(data, tmp_path):
    config = Config(data_dir=data, num_classes=1, image_size=8)
    with pytest.raises(UserError, match="has 2 training JPEGs that can have an index, not 3"):
        crop_area.compare_crop_areas(config, 3, warmup=1, repeats=1)
    result = crop_area.compare_crop_areas(config, 1, warmup=1, repeats=1)
    crop_area.make_report(result).write({}, str(tmp_path), "crop_area")
    values = json.loads((tmp_path / "crop_area.json").read_text())
    assert list(values["areas"]) == [str(area) for area in crop_area.AREAS]
    assert values["images"] == 1 and values["index_bytes"] > 0
