"""The benchmark of all-reduce algorithms."""

import dataclasses
import json
import math
import xml.etree.ElementTree

import pytest

from imagenet_fast import UserError
from imagenet_fast.commands.benchmark import main
from imagenet_fast.lab.benchmarks.all_reduce import compare as all_reduce
from imagenet_fast.lab.benchmarks.all_reduce.compare import (
    Method,
    Result,
    compare_all_reduce,
    gradients_case,
    sized_case,
)
from imagenet_fast.lab.benchmarks.all_reduce.report import make_report
from imagenet_fast.lab.benchmarks.timing import Times


def result(method, seconds, case=None, predicted=None):
    return Result(case or sized_case(2**20), method, Times(seconds, seconds), 2.0e6, predicted)


@pytest.mark.long
def test_cases():
    assert (sized_case(2**14).name, sized_case(2**14).bytes) == ("16 KiB", 2**14)
    assert sized_case(25 * 2**20).name == "25 MiB"
    assert sized_case(1).bytes == 4
    resnet = gradients_case("resnet50")
    assert len(resnet.shapes) == 161
    assert resnet.bytes == 4 * 25_557_032


def test_table_compares_with_the_fastest_builtin():
    results = [
        result(Method("builtin", 0), (0.4, 0.4, 0.4)),
        result(Method("builtin", 2**20), (0.2, 0.1, 0.3)),
        result(Method("flat", 2**20), (0.1, 0.2, 0.15), predicted=0.125),
    ]
    lines = make_report(results, replicas=4, group=2).text.splitlines()
    assert lines[0] == "4 replicas; groups of 2; n = 3"
    cells = next(line for line in lines if line.startswith("flat")).split("packs")[1].split()
    # Turn by turn: 0.5, 2, 0.5. A ring of 4 sends 1.5 times the data.
    assert cells == ["150.0", "100.0", "200.0", "0.500", "125.0", "2", "1.573"]
    assert "one pack" in next(line for line in lines if line.startswith("builtin"))


def test_files(tmp_path):
    results = [
        result(Method("builtin", 0), (0.2, 0.1)),
        result(Method("torus_2d", 0, "bfloat16"), (0.1, 0.1), predicted=0.05),
    ]
    paths = make_report(results, 4, 2).write({"sizes": "1048576"}, str(tmp_path), "4_workers")
    assert [path.rpartition(".")[2] for path in paths] == ["txt", "json", "svg"]
    values = json.loads((tmp_path / "4_workers.json").read_text())
    assert values["results"][1]["expected_bytes"] == 1.5 * 2**19
    assert values["results"][0]["seconds"]["median"] == pytest.approx(0.15)
    xml.etree.ElementTree.parse(tmp_path / "4_workers.svg")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--sizes=1,x"], "sizes is '1,x', but must be whole numbers"),
        (["--sizes=", "--gradients="], "give at least one of"),
        (["--algorithms="], "give at least one of"),
        (["--repeats=0"], "repeats is 0, but must be positive"),
        (["--gradients=", "--sizes=8"], "there is only one worker: start several"),
    ],
)
def test_bad_input(flags, message, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(UserError, match=message):
        main(["all_reduce", *flags])


def test_a_single_worker_is_refused():
    import tensorflow as tf

    with pytest.raises(UserError, match="there is only one worker: start several"):
        compare_all_reduce(tf.distribute.get_strategy(), [], [], warmup=1, repeats=1)


def test_units_of_the_network(monkeypatch):
    class AskedError(Exception):
        pass

    def compare(*_, network, **__):
        raise AskedError(network)

    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setattr(all_reduce, "compare_all_reduce", compare)
    flags = ["--latency_within=10", "--latency_between=99", "--bandwidth_within=1000"]
    flags += ["--bandwidth=8", "--stage_start=5", "--gamma=3"]
    with pytest.raises(AskedError) as asked:
        main(["all_reduce", *flags])
    (network,) = asked.value.args
    assert dataclasses.astuple(network) == pytest.approx(
        (0.01, 0.099, 125e6, 1e6, 0.005, 3e-9, math.inf)
    )


@pytest.mark.long
@pytest.mark.slow
def test_two_workers(tmp_path, run_python):
    """``auto`` stands for flat, and is reported as flat."""
    flags = [
        "--sizes=1024,65536",
        "--gradients=",
        "--algorithms=builtin,auto,torus_2d",
        "--fusion_bytes=1048576",
        "--repeats=2",
        "--warmup=1",
        "--bandwidth=10",
        "--bandwidth_within=1000",
        "--group=2",
        "--latency_within=10",
        "--latency_between=99",
        "--stage_start=5",
        "--dtype=bfloat16",
        "--timeout=60",
        f"--output_dir={tmp_path}",
    ]
    finished = run_python(["-m", "imagenet_fast", "benchmark", "all_reduce", *flags], workers=2)
    assert "2 replicas; groups of 2; n = 2" in finished.stdout
    values = json.loads((tmp_path / "2_workers.json").read_text())
    assert [(r["case"], r["algorithm"]) for r in values["results"]] == [
        (case, algorithm)
        for case in ("1 KiB", "64 KiB")
        for algorithm in ("builtin", "flat", "torus_2d")
    ]
    for found in values["results"]:
        assert len(found["each_seconds"]) == 2
        assert all(math.isfinite(s) and s > 0 for s in found["each_seconds"])
        assert (found["predicted_seconds"] is None) == (found["algorithm"] == "builtin")
    flat = values["results"][4]
    assert flat["dtype"] == "bfloat16"
    # Each of two workers sends each byte once; both count the same interface.
    assert flat["expected_bytes"] == 32768
    # An exchange and an all-gather of one step each, within the group.
    assert flat["predicted_seconds"] == pytest.approx(2 * (0.005 + 0.01) + 32768 / 125e6)
    assert 2 * 32768 < flat["sent_bytes"] < 4 * 32768
