import functools
import os
import pathlib
import re

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def read(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@functools.cache
def execute(name):
    """Returns the notebook with its outputs; a cell that fails raises, with its traceback."""
    notebook = read(name)
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(FOLDER)}})
    client.execute(env=environment)
    return notebook


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_outputs_are_cleared(name):
    for cell in code_cells(read(name)):
        assert not cell.outputs, f"the outputs of this cell are in the file:\n{cell.source}"
        assert cell.execution_count is None, f"the file says that this cell ran:\n{cell.source}"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_runs(name):
    assert all(cell.execution_count for cell in code_cells(execute(name)))


def test_the_quickstart_learns_and_shows_it():
    outputs = [output for cell in code_cells(execute("quickstart")) for output in cell.outputs]
    told = "".join(output.text for output in outputs if output.get("name") == "stdout")
    accuracies = re.findall(r"val_top1: (\S+)", told)
    assert len(accuracies) == 12
    assert float(accuracies[-1]) > 0.95
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
