import json
import time

import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast.lab.benchmarks.pipeline import compare as pipeline
from imagenet_fast.lab.benchmarks.pipeline.compare import (
    GraphSize,
    LimitedRun,
    MemoryUse,
    StepTimes,
    estimates,
    simulated,
)
from imagenet_fast.lab.benchmarks.pipeline.emulated_device import EmulatedBlock
from imagenet_fast.lab.benchmarks.pipeline.report import make_report
from imagenet_fast.lab.benchmarks.pipeline.worker import Case, Network

SMALL = Network("convolutions", blocks=2, channels=4, image_size=8)


# --- Emulated devices


def test_an_emulated_block_multiplies_by_its_weight():
    block = EmulatedBlock(0, 1e-6)
    inputs = tf.constant(np.random.default_rng(0).normal(size=(5, 3)).astype("float32"))
    upstream = tf.constant(np.random.default_rng(1).normal(size=(5, 3)).astype("float32"))
    block(inputs)
    block.set_weights([np.float32(2)])
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        outputs = block(inputs)
    back, gradient = tape.gradient(outputs, [inputs, block.weights[0]], upstream)
    np.testing.assert_allclose(outputs, 2 * inputs)
    np.testing.assert_allclose(back, 2 * upstream)
    np.testing.assert_allclose(gradient, np.sum(upstream * inputs), rtol=1e-5)


def test_blocks_of_a_device_wait_for_each_other():
    def seconds(devices):
        blocks = [EmulatedBlock(device, 0.1) for device in devices]
        inputs = tf.ones([3, 1])
        step = tf.function(lambda values: tf.add_n([block(values) for block in blocks]))
        step(inputs[:0])
        begin = time.perf_counter()
        step(inputs)
        return time.perf_counter() - begin

    # Each is busy for 0.3 s.
    alone, together = seconds([3, 3]), seconds([3, 4])
    assert alone >= 0.6
    assert 0.3 <= together < alone


def test_simulated_step_times():
    one = simulated(Case(64, 1, 4), forward=2.0)
    assert one.seconds == pytest.approx(2 + 2 * 3 / 4 + 4)  # the last micro-batch is not recomputed
    two = simulated(Case(64, 2, 4, "never"), forward=2.0)
    assert two.seconds == pytest.approx(6 / 2 * (4 + 1) / 4)
    # Of two devices, with two stages each.
    interleaved = simulated(Case(64, 4, 4, "never", "interleaved_1f1b"), forward=2.0)
    assert interleaved.seconds == pytest.approx(6 / 2 * (4 + 1 / 2) / 4)


# --- Processes


@pytest.mark.long
@pytest.mark.parametrize("schedules", [("interleaved_1f1b",), ("gpipe", "gpipe-looped")])
def test_steps_of_a_process(schedules):
    cases = [Case(6), *(Case(6, 2, 3, schedule=schedule) for schedule in schedules)]
    with pipeline._trainer(SMALL, devices=2) as worker:
        plain, *others = [pipeline._ask(worker, case, steps=2, first=3) for case in cases]
        again = pipeline._ask(worker, cases[0], steps=1)
    assert [len(own["seconds"]) for own in (plain, *others)] == [2] * len(cases)
    assert len(again["seconds"]) == 1
    assert min(plain["seconds"]) > 0
    assert plain["nodes"] > 100
    assert 10e6 < plain["peak_memory"] <= again["peak_memory"]
    assert "nodes" not in again  # made before


@pytest.mark.long
def test_a_network_that_cannot_be_trained_under_a_limit():
    plain = pipeline._limited(SMALL, Case(6), 2**20)
    assert plain.peaks == ()
    assert plain.reason.startswith("training failed under ")


@pytest.mark.long
def test_stages_in_processes_under_a_limit():
    both = pipeline._limited(SMALL, Case(6, 2, 3), 2**30)
    assert both.reason == ""
    assert len(both.peaks) == 2
    assert all(0 < peak < 2**30 for peak in both.peaks)


# --- Report


def timed(case, *seconds):
    return StepTimes(case, seconds, simulated(case))


@pytest.fixture
def parts():
    emulated = [
        timed(Case(64, stages, count), seconds)
        for stages, count, seconds in ((1, 1, 3.0), (2, 1, 3.6), (2, 4, 2.4), (2, 32, 1.9))
    ]
    emulated.append(timed(Case(64, 8, 32, schedule="1f1b"), 0.9))
    overlap = [timed(Case(64, 2, m, "always"), s, s + 0.2) for m, s in ((1, 1.0), (8, 0.6))]
    overlap += [timed(Case(64, 2, m, "never"), s) for m, s in ((1, 0.8), (8, 0.5))]
    overlap.append(timed(Case(64, 2, 8, schedule="gpipe-looped"), 0.77))
    schedules = [
        timed(Case(64, 2, 8, "never"), 1.8),
        timed(Case(64, 4, 8, "never", "interleaved_1f1b"), 1.7),
    ]
    kept = [timed(Case(64, 4, 8, kept), s) for kept, s in (("always", 1.25), ("never", 1.0))]
    memory = [
        MemoryUse(Case(64), 32, 500 << 20, 1500 << 20),
        MemoryUse(Case(64, 4, 8), 32, 400 << 20, 500 << 20),
        MemoryUse(Case(64, 4, 8, "never"), 32, 400 << 20, 700 << 20),
    ]
    limited = [
        LimitedRun(Case(64), 512 << 20, (), "training failed: std::bad_alloc"),
        LimitedRun(Case(64, 2, 8), 512 << 20, (100 << 20, 90 << 20), ""),
    ]
    graphs = [GraphSize(Case(64, 4, m), 1000 * m, 1.0 * m, 0.5) for m in (1, 4)]
    return {
        "estimates": estimates(),
        "schedules": schedules,
        "emulated": emulated,
        "overlap": overlap,
        "recomputation": kept,
        "memory": memory,
        "memory_limit": limited,
        "graphs": graphs,
    }


def rows(text, title):
    """The rows of a part's table, in cells."""
    part = text[text.index(title) :].split("\n\n")[0]
    cells = [line.split() for line in part.splitlines()]
    return [own for own in cells if own[0].isdigit() and own[1].isdigit()]


def test_tables(parts):
    text = make_report(parts).text
    gpipe, alternating, interleaved, *_ = rows(text, "Equal stages")
    assert gpipe[2:] == ["gpipe", "11.1%", "11.1%", "8", "8"]
    assert alternating[2:] == ["1f1b", "11.1%", "11.1%", "2", "2"]
    assert interleaved[2:] == ["interleaved_1f1b", "5.9%", "5.9%", "2.5", "2.5"]
    # With work of 1.5 on each device.
    gpipe, interleaved = rows(text, "All schedules")
    assert gpipe[8:] == ["1.067", "16.7%", "11.1%", "11.1%", "8", "8"]
    assert interleaved[8:] == ["1.067", "11.8%", "5.9%", "5.9%", "2.5", "2.5"]
    first, second, *_, last = rows(text, "Emulated devices")
    # Its own time, to the simulated; the throughput to two devices' with one micro-batch.
    assert first[:2] + first[5:10] == ["1", "1", "3.000", "3.000", "3.000", "3.000", "1.000"]
    assert first[-1] == "1.20"
    assert second[-3:] == ["1.00", "1.00", "1.00"]  # and the paper's two
    assert last[-1] == "4.00"  # the paper's is another schedule
    assert [own[8] for own in rows(text, "Two stages")] == [
        "1.000",
        "0.636",
        "1.000",
        "0.625",
        "0.700",
    ]
    assert [own[-1] for own in rows(text, "Four stages")] == ["20.0%", "0.0%"]
    pipelined, kept = rows(text, "Peak memory")
    assert pipelined[5:] == ["400", "500", "100", "10.0%", "6.2%"]
    assert kept[5:] == ["400", "700", "300", "30.0%"]
    assert "plain" in text
    assert "training failed: std::bad_alloc" in text
    assert "trains, with 100, 90 MiB" in text
    assert rows(text, "The graph")[1][-3:] == ["4,000", "4.0", "0.5"]


@pytest.mark.long
def test_files(parts, tmp_path):
    paths = make_report(parts).write({"repeats": 2}, str(tmp_path / "new"), "pipeline")
    assert [path.rpartition("/")[2] for path in map(str, paths)] == [
        "pipeline.txt",
        "pipeline.json",
        "pipeline.svg",
    ]
    values = json.loads((tmp_path / "new" / "pipeline.json").read_text())
    assert values["options"] == {"repeats": 2}
    assert values["overlap"][0]["seconds"] == [1.0, 1.2]
    assert values["overlap"][1]["micro_batches"] == 8
    assert values["memory"][1]["peak"] == 500 << 20
    assert values["hardware"]["cores"] >= 1
    svg = (tmp_path / "new" / "pipeline.svg").read_text()
    assert "throughput relative to 2 devices" in svg
    assert "seconds to trace" in svg


def test_measured_bubbles_are_drawn():
    """A step of 1/0.9 of the simulated time: a tenth of the work is idle time."""
    cases = [Case(64, 2, 8, "never", "1f1b"), Case(64, 4, 8, "never", "interleaved_1f1b")]
    times = [StepTimes(case, (simulated(case).seconds / 0.9,), simulated(case)) for case in cases]
    report = make_report({"schedules": times})
    assert "black lines: simulated" in report.svg()
    # Of 1f1b, 1/9 simulated: 1 - 8/9 * 0.9.
    assert "20.0%" in report.text


@pytest.mark.long
def test_one_part_alone(parts):
    for name, results in parts.items():
        text = make_report({name: results}).text
        assert text.count("\n\n") == 1
        assert make_report({name: results}).svg().startswith("<?xml")
