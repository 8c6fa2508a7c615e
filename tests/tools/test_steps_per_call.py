"""Training steps in calls of several."""

import importlib.util
import json
import pathlib
import types

from imagenet_fast.distribute import strategy

PATH = pathlib.Path(__file__).parents[2] / "tools" / "gpu_steps" / "steps_per_call.py"
spec = importlib.util.spec_from_file_location("steps_per_call", PATH)
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)

# One convolution: ResNets take a minute to compile.
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
    assert tool.main([*arguments, "--repeats=2", "--steps_per_call", "1", "2", "9", "auto"]) == 0

    results = json.loads(out.read_text())
    assert results["steps"] == 5 and results["batch_size"] == 20
    assert results["variables"] > 10 and results["variables_changed"] > 8
    compared = [(row["steps_per_call"], row["differ"]) for row in results["comparisons"]]
    assert compared == [(1, 0), (2, 0), (5, 0)]
    assert [row["steps_per_call"] for row in results["times"]] == [1, 2, 5, "auto"]
    for row in results["times"]:
        assert len(row["seconds"]) == len(row["cpu_seconds"]) == 2
        assert min(row["seconds"]) > 0 < min(row["cpu_seconds"])
    assert results["first_call_seconds"] > 0
    assert results["versions"]["tensorflow"] and results["hardware"]["cores"]
    assert "5 steps in calls of 1, and of 2: 0 variables differ" in capsys.readouterr().out


def test_several_devices_are_refused(tmp_path, capsys, monkeypatch):
    recipe = tmp_path / "tiny.flags"
    recipe.write_text(TINY)
    several = types.SimpleNamespace(num_replicas_in_sync=2)
    monkeypatch.setattr(strategy, "make_strategy", lambda config: several)
    assert tool.main([f"--flagfile={recipe}"]) == 2
    assert "add --gpus=1" in capsys.readouterr().err
