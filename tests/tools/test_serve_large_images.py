import importlib.util
import json
import pathlib

import numpy as np
import pytest
from PIL import Image
from small_config import SMALL

from imagenet_fast import build_model, export

TOOL = pathlib.Path(__file__).parents[2] / "tools" / "serve_large_images.py"


def load():
    spec = importlib.util.spec_from_file_location("serve_large_images", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = load()


@pytest.mark.parametrize(("kind", "mode"), [("opaque", "RGB"), ("transparent", "RGBA")])
def test_pngs(kind, mode, tmp_path):
    tool.write_png(tmp_path / "image.png", 70, kind)
    image = Image.open(tmp_path / "image.png")
    assert (image.size, image.mode) == ((70, 70), mode)
    expected = (np.arange(70) % 251 + np.arange(70)[:, np.newaxis] // 16) % 256
    assert (np.asarray(image) == expected[..., np.newaxis]).all()


@pytest.mark.long
def test_what_is_measured_of_refused_images(tmp_path, run_python):
    model = build_model(SMALL.replace(num_classes=4, max_pixels=1_000_000))
    saved_model = export(model, tmp_path / "model")
    output = tmp_path / "results"
    options = ["--megapixels=4", "--repeats=1", f"--output_dir={output}"]
    run_python([TOOL, f"--saved_model={saved_model}", *options])
    results = json.loads((output / "large_images.json").read_text())["results"]
    refused = "2000 x 2000 pixels, more than the limit of 1000000"
    assert [(r["megapixels"], r["kind"], r["error"]) for r in results] == [
        (4, "opaque", refused),
        (4, "transparent", refused),
    ]
    assert all(r["peak"] >= r["before"] > 0 for r in results)
    assert refused in (output / "large_images.txt").read_text()
