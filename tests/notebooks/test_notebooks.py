"""The notebooks: stored outputs, working links, and the results that their text describes."""

import ast
import base64
import copy
import dataclasses
import functools
import importlib
import io
import pathlib
import re
import sys
import tempfile

import nbformat
import numpy as np
import pytest
from PIL import Image

from imagenet_fast import Config

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tools" / "studies")]
tool = importlib.import_module("notebooks")
bag_of_tricks = importlib.import_module("bag_of_tricks.experiments")


def read(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@functools.cache
def execute(name):
    """Returns the notebook with the outputs of a run; a cell that fails raises."""
    return tool.execute(FOLDER / f"{name}.ipynb")


def outputs(name):
    return [output for cell in code_cells(execute(name)) for output in cell.outputs]


def printed(name, stream="stdout"):
    return "".join(output.text for output in outputs(name) if output.get("name") == stream)


def pictures(name):
    return sum("image/png" in output.get("data", {}) for output in outputs(name))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_stored_outputs_are_those_of_the_code(name):
    """And show no paths of a machine, warnings or large pictures."""
    notebook = read(name)
    assert tool.problems(notebook) == []
    counts = [cell.execution_count for cell in code_cells(notebook)]
    assert counts == [*range(1, len(counts) + 1)]
    assert sum(len(cell.outputs) for cell in code_cells(notebook)) >= 4


def test_problems_of_outputs_are_found():
    notebook = read("quickstart")
    cell = code_cells(notebook)[0]
    large = base64.b64encode(bytes(60_001)).decode()
    cell.outputs = [
        nbformat.v4.new_output("stream", text="fine\n/home/me/run\nUserWarning: no\n"),
        nbformat.v4.new_output("display_data", {"image/png": large}),
    ]
    path, warning, picture = tool.problems(notebook)
    assert path == "a cell prints '/home/me/run'"
    assert warning == "a cell prints 'UserWarning: no'"
    assert picture == "a picture has 60,001 bytes, more than 60,000"
    cell.source += " "
    assert tool.problems(notebook) == ["its outputs are of other code: run tools/notebooks.py"]


def test_outputs_are_cleaned():
    output = nbformat.v4.new_output
    folder = tempfile.mkdtemp()
    pathlib.Path(folder).rmdir()
    texts = (" 1/9\r 9/9\r\nI0000 00:00:17.3 14 a.cc:31] no GPU\nin ", f"{folder}/run\n")
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), "uint8")
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    picture = base64.b64encode(file.getvalue()).decode()
    cell = nbformat.v4.new_code_cell("code", execution_count=1)
    cell.outputs = [output("stream", text=text) for text in texts]
    cell.outputs.append(output("stream", name="stderr", text="INFO:tensorflow:Assets written\n"))
    cell.outputs.append(output("display_data", {"image/png": picture}))
    tool.clean(nbformat.v4.new_notebook(cells=[cell]))
    printed, shown = cell.outputs
    assert printed.text == " 9/9\nin FOLDER/run\n"
    assert len(shown.data["image/png"]) < 0.6 * len(picture)
    smaller = Image.open(io.BytesIO(base64.b64decode(shown.data["image/png"])))
    assert np.abs(np.array(smaller.convert("RGB")) - noise.astype(int)).mean() < 20


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_links_resolve(name):
    text = "\n".join(cell.source for cell in read(name).cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert [link for link in links if not (FOLDER / link).exists()] == []


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_its_imports_and_options_exist(name):
    """In the default run; the long tests execute the notebooks."""
    options = {field.name for field in dataclasses.fields(Config)}
    imported = []
    for cell in code_cells(read(name)):
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("imagenet_fast"):
                module = importlib.import_module(node.module)
                imported += [getattr(module, alias.name) for alias in node.names]
            makes_config = r"Config|Config\.from_flagfile|\w*config\.replace"
            if isinstance(node, ast.Call) and re.fullmatch(makes_config, ast.unparse(node.func)):
                assert {keyword.arg for keyword in node.keywords} <= {*options, None}
    assert imported


@pytest.mark.long
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_runs_and_leaves_nothing_behind(name):
    run = copy.deepcopy(execute(name))
    tool.clean(run)
    assert tool.problems(run) == []
    found, stored = (
        [[output.output_type for output in cell.outputs] for cell in code_cells(notebook)]
        for notebook in (run, read(name))
    )
    assert found == stored
    found = {path.name for path in FOLDER.iterdir() if not path.name.startswith(".")}
    assert found == {f"{name}.ipynb" for name in NOTEBOOKS}


@pytest.mark.long
def test_the_quickstart_learns_and_shows_it():
    accuracies = re.findall(r"val_top1: (\S+)", printed("quickstart"))
    assert len(accuracies) == 12
    assert float(accuracies[-1]) > 0.95
    assert pictures("quickstart") == 2


@pytest.mark.long
def test_large_batches_need_the_scaled_learning_rate_and_warmup():
    found = re.findall(r"^(.+?) +val_top1: (\S+)$", printed("large_batch"), re.MULTILINE)
    accuracies = {name: float(accuracy) for name, accuracy in found}
    small, unscaled, unwarmed, warmed, lars = accuracies.values()
    assert small > 0.95
    assert warmed > max(unscaled, unwarmed) + 0.02
    assert lars > 0.3  # three times guessing
    assert "batch 256: rate 0.8" in printed("large_batch")
    assert re.search(r"x 8 micro-batch\(es\) x \d+ images", printed("large_batch"))
    assert pictures("large_batch") == 2


@pytest.mark.long
def test_own_images_train_a_model_that_predicts():
    text = printed("own_images")
    assert "{'train': 120, 'validation': 40}" in text
    assert "{'PNG': 54}" in text
    assert float(re.search(r"top-1 (\S+) of 40 validation images", text)[1]) > 0.8
    predictions = re.findall(r"^(\w+)/\d+\.(?:jpg|png): (\w+) \(", text, re.MULTILINE)
    assert len(predictions) == 5
    assert sum(label == predicted for label, predicted in predictions) >= 4
    assert pictures("own_images") == 1


@pytest.mark.long
def test_own_images_that_are_broken_are_named():
    text = printed("own_images")
    assert "broken.jpg: error: not a whole JPEG or PNG image" in text
    assert "skipped china/cut_off.jpg" in text
    assert "skipped flower/a_note.jpg" in text
    assert "more than 1 image (max_bad_images)" in text
    assert re.search(r"palm: no image .* in it", text)


def numbers(line):
    return [float(number) for number in line.split()]


def test_tricks_have_their_published_seconds():
    (cell,) = (cell for cell in code_cells(read("bag_of_tricks")) if "published = " in cell.source)
    found = re.findall(r'^    "(.+)": \((\d+), (\d+)\),$', cell.source, re.MULTILINE)
    published = {name: (int(epochs), int(seconds)) for name, epochs, seconds in found}
    steps = {step.name: (step.epochs, step.seconds) for step in bag_of_tricks.STEPS}
    # Separate in the study; Page gives the seconds of both together.
    steps["flip in evaluation, no cutout"] = steps.pop("no cutout")
    del steps["flip in evaluation"]
    assert published == steps
    text = "\n".join(cell.source for cell in read("bag_of_tricks").cells)
    headings = re.findall(r"^## .+ \((\d+) s to (\d+) s\)$", text, re.MULTILINE)
    seconds = [seconds for _, seconds in published.values()]
    assert [(int(a), int(b)) for a, b in headings] == list(zip(seconds, seconds[1:]))


@pytest.mark.long
def test_tricks_do_what_the_notebook_says():
    text = printed("bag_of_tricks")
    differences = re.findall(r"^(conv_\w+): .+ by (\S+)$", text, re.MULTILINE)
    first, second, third = (float(difference) for _, difference in differences)
    assert first <= second < 1e-4 < 1e-2 < third
    assert float(re.search(r"mean of each group is 0, but for (\S+)", text)[1]) < 1e-4
    assert re.search(r"^weight +9 variables .+ rate x 1  decay x 1$", text, re.MULTILINE)
    assert re.search(r"^shift +8 variables .+ rate x 64  decay x 0.015625$", text, re.MULTILINE)
    assert float(re.search(r"less CELU of alpha 0.3 of x: (\S+)", text)[1]) < 1e-6
    assert pictures("bag_of_tricks") == 11


@pytest.mark.long
def test_tricks_train():
    lines = re.findall(r"^(\w.*?) +top-1 (\d.+)$", printed("bag_of_tricks"), re.MULTILINE)
    found = {name: numbers(line) for name, line in lines}
    averaged, current = found["their average"], found["weights"]
    # The average starts at the initial weights, and is then better than weights that jump around.
    assert averaged[0] < current[0]
    assert sum(averaged[2:]) > sum(current[2:])
    assert found["both"] == found["all tricks"][-1:]
    assert min(found["image"] + found["mirror image"]) > 0.8
    assert found["all tricks"][-1] > 0.9
    assert found["baseline"][-1] > 0.8


@pytest.mark.long
def test_all_recipes_are_listed():
    text = printed("recipes")
    for path in (ROOT / "imagenet_fast" / "flags").glob("*.flags"):
        batch = Config.from_flagfile(path).batch_size
        assert re.search(rf"^{path.stem} +\w+ +{batch} ", text, re.MULTILINE)
        assert re.search(rf"^{path.stem}: \S.+", text, re.MULTILINE)
    assert "  8 GPUs carry  32 replicas each: batch 8192 = 8 x 32 x 32 images, rate 3.2" in text
    assert pictures("recipes") == 3


def test_accuracies_of_recipes_are_those_of_the_readme():
    (cell,) = (cell for cell in code_cells(read("recipes")) if "published = " in cell.source)
    accuracies = dict(re.findall(r'^    "(\w+)": ([\d.]+),$', cell.source, re.MULTILINE))
    assert len(accuracies) == 8
    table = (ROOT / "README.md").read_text()
    for name, accuracy in accuracies.items():
        (row,) = re.findall(rf"^\|.*\[{name}\]\(.*$", table, re.MULTILINE)
        # Recipes that share a row share its unit.
        assert re.search(rf"\| (?:[\d., ]+, )?{accuracy}(?:, [\d., ]+)?% top-1", row)


@pytest.mark.long
def test_fine_tuning_beats_training_from_scratch():
    found = re.findall(r"^top-1 (\S+) after", printed("fine_tuning"), re.MULTILINE)
    old, scratch, head, all_layers, last_layers = map(float, found)
    assert old > 0.9
    assert head > 0.6
    assert min(all_layers, last_layers) > scratch + 0.03
    assert all_layers > head + 0.03
    assert "130 of 75,250 parameters were trained" in printed("fine_tuning")
    assert pictures("fine_tuning") == 2


@pytest.mark.long
def test_fine_tuning_reports_whether_the_head_is_kept():
    lines = re.findall(r"initial weights: those of .+", printed("fine_tuning", "stderr"))
    kept = [", including the classification head" in line for line in lines]
    assert kept == [False, True, False]


@pytest.mark.long
def test_own_models_train_and_are_exported():
    text = printed("own_model")
    assert "44 steps in an epoch" in text
    top1 = re.search(r"^top-1 (\S+)% after 4 epochs", text, re.MULTILINE)[1]
    assert float(top1) > 90
    assert f"evaluated: top-1 {top1}% of 359 images" in text
    assert float(re.search(r"own probabilities: (\S+)", text)[1]) < 1e-4
