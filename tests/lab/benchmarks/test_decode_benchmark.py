import io
import json
import re

import numpy as np
import pytest
from PIL import Image

from imagenet_fast import Config, UserError
from imagenet_fast.commands.benchmark import main
from imagenet_fast.data import records
from imagenet_fast.data.examples import encode_example
from imagenet_fast.data.images import normalize_encoding
from imagenet_fast.lab.benchmarks.decode import VARIANTS, compare_decoding


def photo(number):
    """A JPEG with a quarter of its colours, large enough to be decoded at a half."""
    y, x = np.mgrid[:90, :120]
    waves = [np.sin(x / (5 + number + c)) * np.cos(y / (7 + c)) for c in range(3)]
    pixels = (127 + 120 * np.stack(waves, -1)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=85, subsampling=2)
    return file.getvalue()


@pytest.fixture
def data(tmp_path):
    """Four images, one of them a PNG, without a manifest."""
    examples = []
    for number in range(4):
        image = normalize_encoding(photo(number))
        file = image.data
        if number == 2:
            buffer = io.BytesIO()
            Image.open(io.BytesIO(file)).save(buffer, "PNG")
            file = buffer.getvalue()
        examples.append(
            encode_example(file, label=0, text="", filename="", height=90, width=120, channels=3)
        )
    records.write_records(tmp_path / "train-00000-of-00001", examples)
    return str(tmp_path)


@pytest.mark.long
def test_options_are_timed_and_their_pixels_compared_with_pillows(data):
    config = Config(data_dir=data, num_classes=1, image_size=16, batch_size=1, crop_min_area=0.9)
    comparison = compare_decoding(config, 3, warmup=1, repeats=2)
    assert comparison.names == tuple(VARIANTS) and comparison.images == 3
    assert all(len(times.seconds) == 2 for times in comparison.times)
    means = {}
    for note in comparison.notes[1:]:
        name, mean = re.match(r"  (.*): ([\d.]+) on average", note).groups()
        means[name] = float(mean)
    assert means.keys() == VARIANTS.keys()
    # Only the edges of windows, which have no neighbours from which to take subsampled colours.
    assert means["default"] < 0.2
    for name, mean in means.items():
        assert name == "default" or mean > means["default"]


def test_too_few_jpegs(data):
    with pytest.raises(UserError, match="has 3 training JPEGs, not 4"):
        config = Config(data_dir=data, num_classes=1, batch_size=1)
        compare_decoding(config, 4, warmup=1, repeats=1)


@pytest.mark.long
def test_the_command_writes_what_it_measured(digits, tmp_path, capsys):
    output = tmp_path / "found"
    flags = ["--images=2", "--repeats=2", "--warmup=1", "--image_size=4"]
    flags += ["--resize_method=bicubic", f"--data_dir={digits}", f"--output_dir={output}"]
    main(["decode", *flags])
    assert "2 crops of JPEGs" in capsys.readouterr().out
    values = json.loads((output / "4_bicubic.json").read_text())
    assert values["options"]["image_size"] == 4 and values["n"] == 2
    assert (output / "4_bicubic.svg").exists()
