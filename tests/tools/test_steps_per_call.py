"""Training steps in calls of several."""

import importlib.util
import json
import pathlib

import pytest

PATH = pathlib.Path(__file__).parents[2] / "tools" / "gpu_steps" / "steps_per_call.py"
spec = importlib.util.spec_from_file_location("steps_per_call", PATH)
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)

# One convolution: XLA's loops on CPUs compute them slowly, and ResNets take a minute to compile.
TINY = """
--model=small_network:small_network
--image_size=8
--data_on_device
--train_crop=pad
--crop_padding=1
--batch_size=20
--duration=5 steps
--warmup=0 epochs
--schedule=cosine
--precision=float32
--strategy=one_device
--xla
"""


def test_weights_do_not_depend_on_the_steps_of_a_call(digits, tmp_path, capsys):
    recipe, out = tmp_path / "tiny.flags", tmp_path / "steps.json"
    recipe.write_text(TINY)
    arguments = [f"--flagfile={recipe}", f"--data_dir={digits}", f"--out={out}"]
    assert tool.main([*arguments, "--repeats=2", "--steps_per_call", "1", "2", "9"]) == 0

    results = json.loads(out.read_text())
    assert results["steps"] == 5 and results["batch_size"] == 20
    assert results["variables"] > 10 and results["variables_changed"] > 8
    ones = [1] * 5
    assert [(row["program"], row["calls"]) for row in results["comparisons"]] == [
        ("loop", ones),
        ("loop", [2, 2, 1]),
        ("loop", [5]),
        ("one step", ones),
    ]
    # XLA may round the program of one step differently.
    assert [row["differ"] for row in results["comparisons"][:3]] == [0, 0, 0]
    assert [(row["program"], row["steps_per_call"], row["calls"]) for row in results["times"]] == [
        ("loop", 1, 5),
        ("loop", 2, 3),
        ("loop", 5, 1),
        ("one step", 1, 5),
    ]
    assert all(len(row["seconds"]) == 2 and min(row["seconds"]) > 0 for row in results["times"])
    assert set(results["first_call_seconds"]) == {"loop", "one step"}
    assert results["versions"]["tensorflow"] and results["hardware"]["cores"]
    printed = capsys.readouterr().out
    assert "5 calls of loop, and loop [2, 2, 1]: 0 variables differ" in printed
    table = printed.split("images/s  ms/step")[1].splitlines()
    assert [line[:8].strip() for line in table[1:5]] == ["loop"] * 3 + ["one step"]


@pytest.mark.parametrize("flag", ["--noxla", "--nodata_on_device"])
def test_recipes_that_are_not_one_program_are_refused(flag, tmp_path, capsys):
    recipe = tmp_path / "tiny.flags"
    recipe.write_text(TINY)
    assert tool.main([f"--flagfile={recipe}", flag]) == 2
    assert "must have --data_on_device and --xla" in capsys.readouterr().err
