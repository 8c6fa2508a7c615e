"""Runs the README's commands for your own images as written."""

import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_images

ROOT = pathlib.Path(__file__).parents[1]


def commands(title):
    """Returns the commands (indented lines) of a README section, with continuation lines joined."""
    section = (ROOT / "README.md").read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    lines = "\n".join(re.findall(r"^    (.*)$", section, re.MULTILINE))
    return lines.replace("\\\n", " ").splitlines()


def cut_photographs(folder, images):
    """Writes crops of scikit-learn's two photographs, one class each, alternately JPEG and PNG."""
    random = np.random.default_rng(0)
    for name, photograph in zip(("china", "flower"), load_sample_images().images):
        (folder / name).mkdir(parents=True)
        for number in range(images):
            top, left = random.integers(0, 227), random.integers(0, 320)
            crop = Image.fromarray(photograph[top : top + 200, left : left + 320])
            crop.save(folder / name / f"{number:03d}.{('jpg', 'png')[number % 2]}")


# In the default run, tools/test_docs.py parses each command; commands/test_end_to_end.py
# runs a similar chain.
@pytest.mark.slow
@pytest.mark.long
def test_three_commands_from_a_folder_of_images_to_predictions(tmp_path):
    cut_photographs(tmp_path / "photos", 20)
    program = tmp_path / "bin" / "imagenet-fast"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m imagenet_fast "$@"\n')
    program.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    prepare, train, predict = commands("Your own images")
    for command in (prepare, train, predict):
        finished = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert finished.returncode == 0, finished.stdout + finished.stderr
    predictions = re.findall(r"^photos/(\w+)/\S+ +(\w+)", finished.stdout, re.MULTILINE)
    assert len(predictions) == 40
    assert sum(folder == label for folder, label in predictions) >= 36
