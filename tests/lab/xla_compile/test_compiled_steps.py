"""Steps compiled by libtpu, and run on virtual CPUs: ``tools/test.sh compile``.

In processes of their own, the compiler and a command each time.
"""

import importlib.util
import json
import re

import pytest

from imagenet_fast import UserError
from imagenet_fast.commands import run
from imagenet_fast.distribute import virtual
from imagenet_fast.distribute.groups import consecutive
from imagenet_fast.lab.xla_compile.compiler import RefusedError, start_compiler
from imagenet_fast.lab.xla_compile.recipe import _compare
from imagenet_fast.training.step.classifier import Classifier

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="needs jax and libtpu: tools/install.sh DIRECTORY compile",
    ),
]
SMALL = ["--model=resnet8", "--num_classes=10", "--image_size=16", "--batch_size=64"]
LIBTPU = "0.0.51"


@pytest.fixture(scope="module")
def compiler():
    with start_compiler("TPU") as started:
        yield started


def test_command(capsys, tmp_path):
    flags = ["--topology=v3:2x2", "--batch_norm_batch_size=16", "--all_reduce=torus_2d"]
    flags += ["--optimizer=lars", "--precision=mixed_bfloat16", f"--output_dir={tmp_path}"]
    assert run(["compile", *SMALL, *flags]) == 0
    text = capsys.readouterr().out
    assert re.search(
        r"^batch-norm all-reduces +ok .*among \(0,1 2,3 4,5 6,7\)$", text, re.MULTILINE
    )
    # Rows of two chips of two cores.
    assert re.search(
        r"^gradient all-reduces +ok .*along \(0,1,2,3 4,5,6,7\) and \(0,4 1,5 2,6 3,7\)", text, re.M
    )
    assert f"compiles for TPU v3 (2x2) with libtpu {LIBTPU}." in text
    assert "there was no TPU, and none has run it" in text
    values = json.loads((tmp_path / "compile.json").read_text())
    assert values["topology"] == {
        **{"name": "v3:2x2", "kind": "TPU v3", "replicas": 8, "chips": 4},
        **{"memory": 16 * 2**30, "usable": 0},
    }
    assert 1e6 < values["program"]["per_image"] < 1e9
    assert 1e6 < values["program"]["peak"] < 1e9
    # The weights and slots are updated in place.
    memory = values["program"]["memory"]
    assert memory["shared"] > 0.9 * memory["outputs"] > 0


@pytest.mark.parametrize(
    ("name", "kind", "replicas", "chips"),
    [
        ("v2:2x2", "TPU v2", 8, 4),
        ("v3:4x4", "TPU v3", 32, 16),
        ("v4:2x2x1", "TPU v4", 4, 4),
        ("v5e:2x4", "TPU v5 lite", 8, 8),
        ("v6e:1x1", "TPU v6 lite", 1, 1),
    ],
)
def test_topologies(compiler, name, kind, replicas, chips):
    found = compiler.topology(name)
    assert (found.kind, len(found.coordinates), found.chips) == (kind, replicas, chips)
    assert found.memory


@pytest.mark.parametrize("name", ["v9:2x2", "v3:3x5", "h200:1x8", "somewhere", ""])
def test_topologies_that_do_not_exist(compiler, name):
    with pytest.raises(UserError, match=rf"no topology '{name}' \(.*\); choose .*like v2:2x2"):
        compiler.topology(name)


def test_batch_that_cannot_be_split(capsys):
    assert run(["compile", *SMALL, "--batch_size=60"]) == 2
    assert "60 (global) cannot be split evenly over 8 replicas" in capsys.readouterr().err


def test_too_large_a_batch(capsys):
    flags = ["--num_classes=10", "--model=resnet18", "--batch_size=16384"]
    assert run(["compile", *flags]) == 2
    printed = capsys.readouterr()
    expected = (
        r"out of memory: each replica needs [\d.]+GiB of the 15.48GiB that programs can have$"
    )
    assert re.search(rf"^compiled +NO  not for v3:2x2: {expected}", printed.out, re.MULTILINE)
    assert re.search(
        f"error: it does not compile for v3:2x2: {expected}", printed.err, re.MULTILINE
    )
    assert "compiles for" not in printed.out


def test_groups_that_are_not_of_all_replicas(compiler, lower_anew, monkeypatch):
    monkeypatch.setattr(virtual, "consecutive", lambda replicas, size: consecutive(4, 4))
    step = lower_anew().step
    with pytest.raises(RefusedError, match="replica"):
        compiler.compile(compiler.topology("v3:2x2"), step.serialized)


# --- On virtual processors


def differences(found, steps=2):
    return {own.kind: own for own in _compare(found.config, found.model, found.step, steps)}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"batch_norm_batch_size": 64}, marks=pytest.mark.long),
        {"batch_norm_batch_size": 16, "all_reduce": "torus_2d", "ema_decay": 0.9},
        pytest.param(
            {"batch_norm_batch_size": 4, "accumulation_steps": 2, "clip_norm": 1.0},
            marks=pytest.mark.long,
        ),
        {"optimizer": "lars", "fusion_segments": (5,), "learning_rate": 5.0},
    ],
    ids=["all", "groups", "parts", "each"],
)
def test_replicas_end_with_the_weights_of_one_device(lowered, options):
    found = differences(lowered(**options))
    assert set(found) == {"weights", "optimizer", "metrics"}
    for own in found.values():
        assert not own.wrong
        assert own.share < 2e-5
        assert own.spread == 0


def test_replicas_in_half_precision(lowered):
    found = differences(lowered(precision="mixed_bfloat16", all_reduce_dtype="bfloat16"))
    assert not any(own.wrong for own in found.values())
    assert 1e-5 < found["optimizer"].share < 0.05


# In the default run, the sum over half of the replicas is found, below.
@pytest.mark.long
def test_a_sum_in_place_of_a_mean_is_found(lower_anew, monkeypatch):
    original = Classifier._micro_batch_gradients
    monkeypatch.setattr(
        Classifier,
        "_micro_batch_gradients",
        lambda self, batch, *rest: original(
            self, batch / self.distribute_strategy.num_replicas_in_sync, *rest
        ),
    )
    found = differences(lower_anew())
    assert found["weights"].wrong and found["optimizer"].wrong
    assert found["weights"].share == pytest.approx(7, rel=0.3)


def test_a_sum_over_half_of_the_replicas_is_found(lower_anew, monkeypatch):
    monkeypatch.setattr(
        virtual, "consecutive", lambda replicas, size: consecutive(replicas, size // 2)
    )
    found = differences(lower_anew())
    assert all(own.wrong for own in found.values())
    assert found["weights"].spread > 0


# In the default run, test_compiled_for_gpus.py has a command that runs, and that fails.
@pytest.mark.long
def test_command_that_runs(capsys):
    flags = ["--topology=v2:2x2", "--batch_norm_batch_size=64", "--run_on_cpu=2"]
    assert run(["compile", *SMALL, *flags]) == 0
    assert re.search(r"^weights +ok  differ by at most", capsys.readouterr().out, re.MULTILINE)
