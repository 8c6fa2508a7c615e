import base64
import functools
import html.parser
import io
import math
import re

import matplotlib
import numpy as np
import pytest
from confusion_entries import entries
from PIL import Image

from imagenet_fast.config import Config
from imagenet_fast.training.report.input_images import InputImages
from imagenet_fast.training.report.page import render
from imagenet_fast.training.step.calibration import reliability
from imagenet_fast.training.step.error_analysis import ErrorAnalysis

CONFIG = Config(data_dir="/data/flowers", model="resnet18", batch_size=64, duration="3 epochs")


def training(step, **changes):
    return {
        "kind": "train",
        "step": step,
        "epoch": step / 100,
        "loss": 2.0 - min(step, 300) / 300,
        "top1": min(step / 400, 1.0),
        "top5": min(step / 310, 1.0),
        "examples": 640.0,
        "skipped": 0.0,
        "learning_rate": 0.1,
        "images_per_second": 120.0 + step % 7,
        "train_seconds": step * 0.5,
        "wall_seconds": 10 + step * 0.6,
        **changes,
    }


def validation(step, **changes):
    row = training(step, kind="validation", examples=1000.0, **changes)
    return {name: row[name] for name in row if name not in ("learning_rate", "images_per_second")}


ROWS = [
    row
    for step in range(10, 310, 10)
    for row in [training(step), *([validation(step)] if step % 100 == 0 else [])]
]

SUMMARY = {
    "top1": 0.91234,
    "top5": 0.995,
    "loss": 0.25,
    "train_loss": 0.2,
    "images_evaluated": 10000.0,
    "images_skipped_in_training": 17.0,
    "images_skipped_in_evaluation": 0.0,
    "epochs": 3.0,
    "steps": 300,
    "train_seconds": 150.0,
    "compile_seconds": 12.0,
    "wall_seconds": 3800.0,
    "images_per_second": 123.4,
    "images_per_second_per_device": 61.7,
    "target_top1": 0.9,
    "train_seconds_to_target": 100.0,
    "wall_seconds_to_target": 3700.0,
    "parameters": 11172810,
    "replicas": 2,
    "devices": ["CPU"],
    "hardware": {"cpu": "Quick CPU", "cpu_features": ["avx2"], "cores": 2, "gpus": []},
    "versions": {"python": "3.11.2", "tensorflow": "2.21.0"},
    "command": "imagenet-fast train --model=resnet18",
    "finished": "2025-01-02T03:04:05+00:00",
}


@functools.cache
def whole_page():
    return render(SUMMARY, ROWS, CONFIG)


class Page(html.parser.HTMLParser):
    """Checks that the elements of a page nest, and collects what a reader sees."""

    VOID = frozenset({"meta", "br", "img"})

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.references, self.texts = [], [], [], []
        self.feed(page)
        self.close()
        assert not self.open

    @property
    def text(self):
        return " ".join(self.texts)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.references += [v for name, v in attrs if name in ("src", "href", "xlink:href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style" and data.strip():
            self.texts.append(data.strip())


def test_page_is_complete_and_self_contained():
    text = whole_page()
    page = Page(text)
    assert text.startswith("<!DOCTYPE html>")
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert all(reference.startswith("#") for reference in page.references)
    assert "http" not in text
    assert "url(" not in text.replace("url(#", "")
    assert "@import" not in text
    assert text.isascii()


def test_page_has_the_results():
    text = Page(whole_page()).text
    for expected in (
        "resnet18 on flowers",
        "91.23%",
        "99.50%",
        "on 10,000 images",
        "Time to 90%",
        "1 min 40 s",
        "1 h 1 min in all",
        "2 min 30 s",
        "12.0 s",
        "1 h 3 min",
        "123.4",
        "61.7",
        "Unreadable in training 17",
        "11,172,810",
        "tensorflow 2.21.0",
        "imagenet-fast train --model=resnet18",
        "2025-01-02 03:04:05 UTC",
    ):
        assert expected in text


def test_four_charts_with_their_keys():
    page = Page(whole_page())
    assert page.tags.count("svg") == 4
    for title in ("Accuracy", "Loss", "Learning rate", "Images per second"):
        assert title in page.texts
    for key in ("validation", "train", "top-5", "target 90%", "mean 123.4"):
        assert key in page.texts


def test_drawings_take_their_colors_from_the_style_sheet():
    text = whole_page()
    drawings = re.findall("<svg.*?</svg>", text)
    style = text[text.index("<style>") : text.index("</style>")]
    for name in {name for drawing in drawings for name in re.findall(r"var\(--(\w+)\)", drawing)}:
        # One color for light pages, and one for dark ones.
        assert style.count(f"--{name}:") == 2
    assert all("stroke: var(--" in drawing for drawing in drawings)
    assert not any("#0000a" in drawing for drawing in drawings)


def test_evaluations_are_listed_newest_first():
    text = Page(whole_page()).text
    assert "3 evaluations" in text
    assert text.index("75.00%") < text.index("50.00%") < text.index("25.00%")


def test_same_input_gives_the_same_page():
    assert render(SUMMARY, ROWS, CONFIG) == whole_page()


def test_matplotlib_settings_have_no_effect_and_are_kept():
    expected = whole_page()
    with matplotlib.rc_context({"axes.linewidth": 5, "svg.fonttype": "path"}):
        assert render(SUMMARY, ROWS, CONFIG) == expected
        assert matplotlib.rcParams["axes.linewidth"] == 5


def test_changed_options_come_first_and_the_others_are_folded():
    text = whole_page()
    options = text[text.index(">Options<") :]
    shown, folded = options.split("<details>")
    assert re.findall(r'<th scope="row">(\w+)</th>', shown) == CONFIG.differences(Config())
    assert "<td>64</td><td>default: 256</td>" in shown
    assert '<th scope="row">momentum</th><td>0.9</td>' in folded
    assert ">batch_size<" not in folded


def test_text_from_outside_is_escaped():
    evil = "<script>alert('&')</script>"
    summary = {**SUMMARY, "command": evil, "versions": {evil: evil}, "devices": [evil]}
    page = render(summary, [], CONFIG.replace(data_dir=f"/{evil.replace('/', '')}"))
    assert "<script" not in page
    assert evil in Page(page).text


def test_names_that_are_not_ascii_can_be_read():
    page = render(SUMMARY, [], CONFIG.replace(data_dir="/data/blümchen"))
    assert page.isascii()
    assert "resnet18 on blümchen" in Page(page).text


def test_run_without_validation_data():
    nothing = dict.fromkeys(("top1", "top5", "loss", "images_evaluated", "target_top1"))
    rows = [row for row in ROWS if row["kind"] == "train"]
    page = Page(render({**SUMMARY, **nothing}, rows, CONFIG))
    assert "no evaluation in this run" in page.text
    assert "Top-1 accuracy" not in page.text
    assert "Evaluations" not in page.texts
    assert "validation" not in page.texts
    assert page.tags.count("svg") == 4


def test_target_that_was_not_reached():
    summary = {**SUMMARY, "train_seconds_to_target": None, "wall_seconds_to_target": None}
    assert "not reached" in Page(render(summary, [], CONFIG)).text


def test_run_without_a_target_has_the_training_time():
    text = Page(render({**SUMMARY, "target_top1": None}, [], CONFIG)).text
    assert "Time to" not in text
    assert "Training time 2 min 30 s" in text


def test_run_that_ended_early_says_so():
    summary = {**SUMMARY, "epochs": 1.5}
    page = render(summary, [], CONFIG)
    assert "1.5 of 3 epochs" in page
    assert "stopped early" not in page
    summary |= {"stopped": "by early_stopping=2", "best_top1": 0.92, "best_step": 100}
    page = render(summary, [], CONFIG)
    assert "1.5 of 3 epochs, stopped early" in page
    assert "on 10,000 images; best 92.00% at step 100" in page
    assert "; best" not in Page(render({**summary, "best_top1": 0.91234}, [], CONFIG)).text
    assert "3 of 3 epochs" not in whole_page()


def test_single_row_is_drawn_as_points():
    page = Page(render(SUMMARY, [training(1, images_per_second=0.0)], CONFIG))
    # Nothing was timed, so that there is no speed to draw.
    assert page.tags.count("svg") == 3
    assert "0.01" in page.texts


def test_summary_and_rows_without_anything():
    page = Page(render(dict.fromkeys(SUMMARY), [], CONFIG))
    assert "svg" not in page.tags
    assert "resnet18 on flowers" in page.text
    assert "None" not in page.text


@pytest.mark.parametrize("bad", [math.nan, math.inf, None])
def test_nonfinite_values_are_left_out(bad):
    broken = [training(20, loss=bad), validation(20, top1=bad), {"kind": "train", "step": 21}]
    page = Page(render({**SUMMARY, "loss": bad}, ROWS + broken, CONFIG))
    assert page.tags.count("svg") == 4
    assert not re.search(r"\b(nan|inf|None)\b", page.text)


@pytest.mark.long
def test_one_huge_loss_does_not_hide_the_others():
    rows = [training(5, loss=1e5), *ROWS]
    assert "100,000" in Page(render(SUMMARY, rows, CONFIG)).texts
    # All powers of ten in between: the axis is logarithmic.
    assert {"1", "10", "100", "1,000"} <= set(Page(render(SUMMARY, rows, CONFIG)).texts)


@pytest.mark.long
def test_size_does_not_grow_with_the_length_of_the_run():
    long = [training(step) for step in range(1, 20001)]
    assert len(render(SUMMARY, long, CONFIG)) < 100_000


# --- Images


LABELS = ["tabby", "<tiger> & co", "lynx"]


def pictures(size=32, mistakes=2):
    """Input images of one color each, and an analysis with mistakes."""
    colors = np.array([[200, 30, 30], [30, 200, 30], [30, 30, 200]], np.uint8)
    images = colors[:, None, None] * np.ones((size, size, 1), np.uint8)
    labels = np.array([0, 1, 2], np.int32)
    inputs = InputImages(images, labels, labels[::-1], np.array([1, 1, 0.25], np.float32))
    analysis = ErrorAnalysis(
        step=300,
        confusion=entries([[40, 7, 0], [3, 30, 0], [0, 0, 20]]),
        images=images[:mistakes],
        labels=labels[:mistakes],
        answers=labels[1:][:mistakes],
        label_probabilities=np.array([0.02, 0.1], np.float32)[:mistakes],
        answer_probabilities=np.array([0.9, 0.6], np.float32)[:mistakes],
        losses=np.array([3.9, 2.3], np.float32)[:mistakes],
        calibration=reliability(np.repeat([0.9, 0.5], 50), np.arange(100) % 10 > 0),
        files=np.array(["cats/<1>.jpg", ""])[:mistakes],
        confused_files=np.array([["cats/<1>.jpg", "cats/2.jpg", ""], ["", "", ""]]),
    )
    return inputs, analysis


def test_images_of_a_run_are_in_the_page():
    text = render(SUMMARY, ROWS, CONFIG, LABELS, *pictures())
    page = Page(text)
    assert page.tags.count("svg") == 6
    assert page.tags.count("img") == 5
    # In the page itself.
    assert all(reference.startswith(("#", "data:image/")) for reference in page.references)
    assert "http" not in text
    assert text.isascii()
    for expected in (
        "Training images as the model sees them",
        "25% lynx 75% tabby",
        "Confusion matrix",
        "Most confused classes",
        "tabby <tiger> & co 7 of 47 cats/<1>.jpg, cats/2.jpg <tiger> & co tabby 3 of 33",
        "Reliability",
        "expected calibration error 20.00%",
        "<tiger> & co tabby 3 of 33",
        "3 classes, lowest recall first",
        "Class Recall 95% interval Precision F1 Images tabby 85.11% 72.3% to 92.6% 93.02% 88.89% "
        "47 <tiger> & co 90.91% 76.4% to 96.9% 81.08% 85.71% 33 lynx 100.00% 83.9% to 100.0% "
        "100.00% 100.00% 20 "
        "mean of the classes 92.01% 91.37% 91.53% 100",
        "Worst mistakes",
        "tabby (2%) predicted as <tiger> & co (90%) cats/<1>.jpg",
    ):
        assert expected in page.text
    assert "<tiger>" not in text
    assert render(SUMMARY, ROWS, CONFIG, LABELS, *pictures()) == text


@pytest.mark.parametrize(("size", "kind", "distance"), [(32, "png", 0), (64, "jpeg", 3)])
def test_images_keep_their_pixels(size, kind, distance):
    inputs, analysis = pictures(size)
    page = Page(render(SUMMARY, [], CONFIG, LABELS, inputs, analysis))
    start = f"data:image/{kind};base64,"
    files = [
        base64.b64decode(reference.removeprefix(start))
        for reference in page.references
        if reference.startswith(start) and "\n" not in reference
    ]
    found = [np.asarray(Image.open(io.BytesIO(file)).convert("RGB"), int) for file in files]
    for expected in (*analysis.images, *inputs.images):
        assert any(
            image.shape == expected.shape and abs(image - expected).max() <= distance
            for image in found
        )


def test_a_model_without_mistakes():
    inputs, analysis = pictures(mistakes=0)
    perfect = {**vars(analysis), "confusion": entries(np.diag([5, 6, 7]))}
    page = Page(render(SUMMARY, [], CONFIG, LABELS, inputs, ErrorAnalysis(**perfect)))
    assert "No image was mispredicted." in page.text
    assert "Worst mistakes" not in page.text
    assert page.tags.count("img") == 3


def test_each_part_may_be_missing():
    inputs, analysis = pictures()
    page = Page(render(SUMMARY, [], CONFIG, LABELS, inputs))
    assert "Confusion matrix" not in page.text
    assert page.tags.count("img") == 3
    page = Page(render(SUMMARY, [], CONFIG, LABELS, None, analysis))
    assert "Training images" not in page.text
    assert page.tags.count("img") == 2
    nothing = InputImages(*(value[:0] for value in vars(inputs).values()))
    assert "Training images" not in render(SUMMARY, [], CONFIG, LABELS, nothing)


def test_a_thousand_classes_do_not_make_a_huge_page():
    _, analysis = pictures()
    confusion = np.random.default_rng(0).integers(0, 3, (1000, 1000))
    analysis = ErrorAnalysis(**{**vars(analysis), "confusion": entries(confusion)})
    labels = [f"n{number:08}" for number in range(1000)]
    text = render(SUMMARY, [], CONFIG, labels, None, analysis)
    assert len(text) < 200_000
    assert text.count("2 of") == 15
    assert "a cell: 10 x 10 neighbouring classes" in text
    assert "a cell" not in render(SUMMARY, [], CONFIG, LABELS, *pictures())


@pytest.mark.long
def test_top5_of_few_classes_is_left_out():
    few = Page(render(SUMMARY, ROWS, CONFIG, list("abcde"))).text
    assert "op-5" not in few
    assert "Validation loss 0.25" in few
    assert "Top-5 accuracy" in Page(render(SUMMARY, ROWS, CONFIG, list("abcdef"))).text


def test_name_of_the_data():
    page = render({**SUMMARY, "data": "my birds"}, [], CONFIG)
    assert f"{CONFIG.model} on my birds</title>" in page


@pytest.mark.parametrize("flagfile", ["digits", "flags/digits.flags"])
def test_expected_accuracy_of_the_recipe(flagfile):
    command = f"imagenet-fast train --flagfile={flagfile} --duration='3 epochs'"
    text = Page(render({**SUMMARY, "command": command}, [], CONFIG)).text
    reached = "Expected accuracy Reached here 91.23% top-1 Expected with digits at least 97% top-1"
    assert reached in text


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        ("--model=keras:MobileNetV2", False),
        ("--model=resnet8", True),  # the recipe's
        ("--model=resnet18 --model=resnet8", True),
        ("--model=resnet8 --model=my_module:build", False),
    ],
)
def test_another_network_is_not_expected_to_reach_the_recipe_s_accuracy(models, expected):
    command = f"imagenet-fast train --flagfile=digits {models}"
    text = Page(render({**SUMMARY, "command": command}, [], CONFIG)).text
    assert ("Expected with digits at least 97% top-1" in text) == expected
    assert ("Expected accuracy" in text) == expected


@pytest.mark.parametrize("command", ["train --flagfile=my.flags", "train 'unbalanced", None])
def test_no_recipe_in_the_command(command):
    assert "Expected accuracy" not in render({**SUMMARY, "command": command}, [], CONFIG)


@pytest.mark.parametrize(("right", "shown"), [([6, 6, 7], False), ([50, 6, 6], True)])
def test_unequal_classes_have_the_mean_of_recalls(right, shown):
    _, analysis = pictures(mistakes=0)
    confusion = np.diag(right)
    confusion[1, 0] = 2  # of 8 images of the second class
    analysis = ErrorAnalysis(**{**vars(analysis), "confusion": entries(confusion)})
    text = " ".join(Page(render(SUMMARY, [], CONFIG, LABELS, None, analysis)).texts)
    assert ("Mean of recalls" in text) == shown
    assert ("91.67%" in text) == shown or not shown  # (1 + 6 / 8 + 1) / 3
