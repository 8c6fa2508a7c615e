"""Steps in calls: the same bits whatever calls they are in, and as many a call as a second has."""

import gc
import json
import pathlib
import time
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from model_weights import weights_in
from program_job import train_with_each
from small_network import small_network
from tensorflow.python.data.ops.iterator_ops import OwnedIterator
from tensorflow.python.framework.kernels import get_registered_kernels_for_op

from imagenet_fast import Config, UserError, build_model, make_dataset, train
from imagenet_fast.data.dataset import distributed_dataset
from imagenet_fast.training import program as programs
from imagenet_fast.training.logs.metrics_file import read_rows
from imagenet_fast.training.options import RunOptions
from imagenet_fast.training.program import Program

JOB = pathlib.Path(__file__).with_name("program_job.py")
OPTIONS = {
    "model": "resnet8",
    "image_size": 16,
    "train_crop": "none",
    "flip": False,
    "batch_size": 32,
    "learning_rate_batch": 32,
    "warmup": "0 steps",
    "decay_at": "6 steps",
    "duration": "9 steps",
    "eval_every": "7 steps",
    "log_every": "5 steps",
    "checkpoint_every": "20 steps",
    "tensorboard": False,
    "examine": False,
}
ON_DEVICE = {"data_on_device": True, "cutout": 3, "augment_in_groups": True, "flip": True}
TRICKS = {"ema_decay": 0.9, "mixup_alpha": 0.2, "accumulation_steps": 2, "train_crop": "pad"}
# Name -> (changed options, worker processes).
JOBS = {
    "batches": ({"strategy": "one_device"}, 0),
    "on_device": ({"strategy": "one_device", **ON_DEVICE}, 0),
    "selected": ({"strategy": "one_device", "select_by_loss": 0.5, **ON_DEVICE}, 0),
    "tricks": ({"strategy": "one_device", **TRICKS}, 0),
    "replicas": ({"strategy": "mirrored", "logical_cpus": 2, **ON_DEVICE}, 0),
    "workers": ({"strategy": "multi_worker"}, 2),
    "pipeline": ({"pipeline_stages": 2, "logical_cpus": 2, "accumulation_steps": 2}, 0),
}
QUICK = ("on_device", "workers")  # Batches that the device makes, and the host.
TIMES = {"train_seconds", "wall_seconds", "images_per_second"}


def rows_of(model_dir):
    """The rows without what clocks have to do with."""
    rows = read_rows(str(model_dir))
    return [{name: row[name] for name in row.keys() - TIMES} for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in JOBS]
)
def test_steps_are_the_same_whatever_calls_they_are_in(name, digits, tmp_path, run_python):
    changes, workers = JOBS[name]
    options = json.dumps({**OPTIONS, "data_dir": digits, **changes})
    each = "1", "4" if name == "batches" else "auto"
    if changes.get("strategy") == "one_device":
        train_with_each(options, tmp_path, *each)
    else:
        run_python([JOB, options, tmp_path, *each], workers=workers)
    one, other = (tmp_path / steps for steps in each)
    assert [row["step"] for row in rows_of(one)] == [5, 7, 7, 9, 9]
    expected = weights_in(str(one))
    assert rows_of(other) == rows_of(one)
    found = weights_in(str(other))
    assert found.keys() == expected.keys()
    for variable, value in expected.items():
        np.testing.assert_array_equal(found[variable], value, err_msg=variable)


# --- XLA's loop, which GPUs have


@pytest.fixture
def compiled_config(digits):
    """Of a run whose steps XLA compiles and whose batches the device makes."""
    options = {"strategy": "one_device", "data_on_device": True, "image_size": 8}
    return Config(data_dir=digits, **{**OPTIONS, **options}, xla=True)


def trained(config, loops, monkeypatch, *orders):
    """Returns the variables after calls of so many steps, for each order of calls from the start.

    And how often the program was traced.
    """
    monkeypatch.setattr(programs, "_WITHOUT_LOOPS", () if loops else ("CPU",))
    model = build_model(config, model=small_network)
    model.make_slots()
    program = Program(model, model.train_step, config.replace(steps_per_call="6"), xla=True)
    variables = [*model.variables, *model.optimizer.variables, model.metric_sums.variable]
    initial, found = [variable.numpy() for variable in variables], []
    for calls in orders:
        for variable, value in zip(variables, initial):
            variable.assign(value)
        step = 0
        for steps in calls:
            end, diverged = program.take(step, step + steps)
            assert (end, diverged) == (step + steps, None)
            step = end
        found.append([variable.numpy() for variable in variables])
    return found, program._call.experimental_get_tracing_count()


def test_a_loop_of_xla_takes_the_same_steps(compiled_config, monkeypatch):
    config = compiled_config
    (one, other), traced = trained(config, True, monkeypatch, [1] * 6, [1, 3, 2])
    for expected, found in zip(one, other):
        np.testing.assert_array_equal(found, expected)
    # The number of steps is an argument of the program.
    assert traced == 1
    (without,), _ = trained(config, False, monkeypatch, [1, 5])
    for expected, found in zip(one, without):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_which_calls_are_one_xla_program(monkeypatch):
    made = []
    monkeypatch.setattr(programs, "_on_device", lambda *_: made.append("XLA"))
    monkeypatch.setattr(programs, "_on_host", lambda *_: made.append("graph"))

    def make(device="GPU:0", batches=None, xla=True, strategy=None):
        strategy = strategy or types.SimpleNamespace(num_replicas_in_sync=1)
        place = f"/job:localhost/replica:0/task:0/device:{device}"
        monkeypatch.setattr(programs, "devices_of", lambda _: [place])
        stand_in = types.SimpleNamespace(distribute_strategy=strategy)
        Program(stand_in, None, RunOptions(), batches, xla=xla)
        return made.pop()

    assert make() == "XLA"
    assert make(device="CPU:0") == "graph"
    assert make(batches=[]) == "graph"
    assert make(xla=False) == "graph"
    assert make(strategy=types.SimpleNamespace(num_replicas_in_sync=2)) == "graph"


# --- How many steps a call has


class Calls:
    """A program with a clock of its own, by which its steps take the given seconds."""

    def __init__(self, monkeypatch, seconds, option="auto", diverges_at=None):
        self.now, self.counts = 0.0, []
        call = self._call
        monkeypatch.setattr(programs, "_on_host", lambda strategy, step: call)
        model = types.SimpleNamespace(distribute_strategy=tf.distribute.get_strategy())
        options = RunOptions(steps_per_call=option)
        self.seconds, self.diverges_at = [seconds], diverges_at
        self.program = Program(model, None, options, now=lambda: self.now)

    def _call(self, iterator, first, most, seconds):
        assert first.dtype == most.dtype == tf.int32
        count, start = 0, self.now
        while count < int(most) and (not count or self.now - start < float(seconds)):
            self.now += self.seconds[0] if len(self.seconds) == 1 else self.seconds.pop(0)
            count += 1
        self.now += 100 * (not self.counts)  # compiles
        self.counts.append(count)
        bad = self.diverges_at
        within = bad is not None and int(first) <= bad < int(first) + count
        return tf.constant(count), tf.constant(bad if within else -1, tf.int64)

    def take(self, step, end, until=None):
        while step < (until or end):
            step, diverged = self.program.take(step, end)
            if diverged is not None:
                return diverged
        return step


def test_calls_take_about_a_second(monkeypatch):
    calls = Calls(monkeypatch, 0.01)
    calls.take(0, 1000, until=300)
    assert calls.counts == [1, 1, 8, 64, 100, 100, 100]
    calls.seconds = [0.25]  # such as when the input is slow
    calls.take(374, 1000, until=383)
    assert calls.counts[7:] == [4, 4, 4]
    calls.seconds = [3.0]
    calls.take(500, 503)
    assert calls.counts[-3:] == [1, 1, 1]
    calls.seconds = [*[0.001] * 3, 0.6]  # three batches had been read ahead
    calls.take(600, 700, until=607)
    assert calls.counts[10:] == [1, 1, 1, 1, 4, 2]


@pytest.mark.parametrize("batches", [None, "slow"])
def test_a_call_of_a_graph_ends_after_a_second(batches, monkeypatch):
    monkeypatch.setattr(programs, "_SECONDS", 0.2)
    if batches:
        batches = tf.data.Dataset.range(10**6).map(
            lambda number: tf.py_function(lambda n: time.sleep(0.05) or n, [number], tf.int64)
        )

    def step(batch):
        return {"loss": tf.reshape(tf.cast(batch if batches else batch["step"], tf.float32), [])}

    model = types.SimpleNamespace(distribute_strategy=tf.distribute.get_strategy())
    program = Program(model, step, RunOptions(), batches)
    program.take(0, 10**6)
    program._second = 10**6
    steps, diverged = program.take(1, 10**6)
    assert diverged is None
    assert 2 < steps < 8 if batches else 100 < steps < 10**6


def test_the_host_decides_whether_a_loop_goes_on():
    """On a GPU, a comparison of floats, or AND, would wait for the steps before."""
    call = programs._on_host(
        tf.distribute.get_strategy(), lambda batch: {"loss": tf.cast(batch["step"], tf.float32)}
    )
    numbers = [tf.constant(0), tf.constant(3), tf.constant(1.0, tf.float64)]
    functions = call.get_concrete_function(None, *numbers).graph.as_graph_def().library.function
    (condition,) = (
        own for own in functions if any(node.op == "Timestamp" for node in own.node_def)
    )
    computed = [node for node in condition.node_def if node.op not in ("Const", "Identity", "NoOp")]
    assert {"Timestamp", "Less", "LogicalAnd"} <= {node.op for node in computed}
    assert all(node.device.endswith("CPU:0") for node in computed)


def test_deterministic_calls_have_no_clock(monkeypatch):
    """With which TensorFlow refuses one."""
    monkeypatch.setattr(programs, "is_op_determinism_enabled", lambda: True)
    call = programs._on_host(
        tf.distribute.get_strategy(), lambda batch: {"loss": tf.cast(batch["step"], tf.float32)}
    )
    numbers = [tf.constant(2), tf.constant(3), tf.constant(0.0, tf.float64)]
    graph = call.get_concrete_function(None, *numbers).graph.as_graph_def()
    functions = graph.library.function
    nodes = [*graph.node, *(node for own in functions for node in own.node_def)]
    assert "Timestamp" not in {node.op for node in nodes}
    assert [int(number) for number in call(None, *numbers)] == [3, -1]


def test_a_call_ends_where_it_is_told(monkeypatch):
    calls = Calls(monkeypatch, 1e-6)
    step = 0
    for end in (5, 6, 27, 27 + 10**5, 30 + 10**5):
        step = calls.take(step, end)
    assert calls.counts == [1, 1, 3, 1, 8, 13, 104, 832, *calls.counts[8:]]
    assert sum(calls.counts) == 30 + 10**5 and len(calls.counts) < 14


@pytest.mark.parametrize("option", ["1", "3", "1000000"])
def test_a_given_number_of_steps(monkeypatch, option):
    calls = Calls(monkeypatch, 5.0, option)
    calls.take(0, 8)
    assert calls.counts == {"1": [1] * 8, "3": [1, 3, 3, 1], "1000000": [1, 7]}[option]


def test_the_step_that_diverges_is_told(monkeypatch):
    assert Calls(monkeypatch, 0.01, "10", diverges_at=6).take(0, 100) == 7
    assert Calls(monkeypatch, 0.01, "10", diverges_at=0).take(0, 100) == 1


def test_a_nan_within_a_call_is_named(digits, tmp_path):
    messages = []
    for calls in ("1", "16"):
        options = {**OPTIONS, "learning_rate": 1e18, "steps_per_call": calls}
        config = Config(
            data_dir=digits, model_dir=str(tmp_path / calls), strategy="one_device", **options
        )
        # The call of 16 would have ended at step 5, with a row.
        with pytest.raises(UserError, match=r"the loss is \w+ at step [234] \(") as error:
            train(config, model=small_network)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_the_chief_says_how_many_steps_a_call_has(monkeypatch):
    """Workers of other calls would wait for each other for ever."""
    told, asked = iter([7, 20, 3, 9]), []
    monkeypatch.setattr(programs, "workers_of", lambda strategy: strategy)
    monkeypatch.setattr(
        programs, "text_of_chief", lambda _, own: asked.append(int(own)) or str(next(told))
    )
    calls = Calls(monkeypatch, 0.25)
    calls.take(0, 100, until=90)
    # None ends by the clock, which is another one in each.
    assert calls.counts == [1, 7, 20, 20, 3, 3, 3, 3, 9, 9, 9, 9]
    assert asked == [1, 4, 4, 4]


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "many", "", str(2**31)])
def test_bad_values(value):
    with pytest.raises(UserError, match=r"steps_per_call=.* be a positive number of steps"):
        RunOptions(steps_per_call=value)


# --- Calls of a run


@pytest.fixture
def counts(monkeypatch):
    """(first step, steps) of each call of training, whose steps take no time."""
    seen, take = [], Program.take

    def noting(self, step, end):
        monkeypatch.setattr(programs, "_SECONDS", 10.0)
        if self._batches is not None and self.is_compiled:
            self._second = 10**6
        result = take(self, step, end)
        seen.append((step, result[0] - step))
        return result

    monkeypatch.setattr(Program, "take", noting)
    return seen


def test_calls_end_at_events_alone(digits, tmp_path, counts):
    """Steps between two events are one call, however many they are."""
    events = {"log_every": "40 steps", "eval_every": "60 steps", "checkpoint_every": "50 steps"}
    config = Config(
        data_dir=digits,
        model_dir=str(tmp_path),
        **{**OPTIONS, **events, "duration": "130 steps", "strategy": "one_device"},
        profile_steps=(66, 69),
        eval_batch_size=359,
    )
    train(config, model=small_network)
    evaluation = (0, 1)
    assert counts == [
        *((0, 1), (1, 39), (40, 10), (50, 10), evaluation, (60, 5), (65, 4), (69, 11)),
        *((80, 20), (100, 20), evaluation, (120, 10), evaluation),
    ]


class Hooks(keras.callbacks.Callback):
    """Notes the calls of its hooks."""

    def __init__(self, stop_after=None):
        super().__init__()
        self.told, self._stop_after = [], stop_after

    def on_train_begin(self, logs=None):
        self._history = self.model.history.history  # which evaluations replace
        self.told.append("train")

    def on_epoch_begin(self, epoch, logs=None):
        self.told.append(f"epoch {epoch}")

    def on_train_batch_begin(self, batch, logs=None):
        self.told.append(batch)

    def on_train_batch_end(self, batch, logs=None):
        self.told[-1] = (self.told[-1], batch)
        assert set(logs) == {"loss", "top1", "top5", "examples", "skipped"}
        assert logs["examples"] == 32 * (batch + 1)
        self.model.stop_training = batch == self._stop_after

    def on_test_begin(self, logs=None):
        self.told.append("test")

    def on_test_batch_begin(self, batch, logs=None):
        self.told.append(f"test {batch}")

    def on_test_batch_end(self, batch, logs=None):
        self.told[-1] += f" to {batch}"

    def on_test_end(self, logs=None):
        assert logs["examples"] == 359

    def on_epoch_end(self, epoch, logs=None):
        assert {"loss", "val_loss", "val_top1"} <= set(logs)
        self.told.append(f"end {epoch}")
        # Keras' own is called last.
        assert len(self._history.get("val_top1", [])) == epoch

    def on_train_end(self, logs=None):
        self.told.append("end")


class Looks(keras.callbacks.Callback):
    """Evaluates the model in hooks of an epoch, and notes what Keras' own callbacks look at."""

    def __init__(self, data):
        super().__init__()
        self.steps, self._data = [], data

    def on_train_begin(self, logs=None):
        self.model.evaluate(self._data, verbose=0)

    def on_epoch_begin(self, epoch, logs=None):
        self.model.evaluate(self._data, verbose=0)

    def on_train_batch_end(self, batch, logs=None):
        self.steps.append(int(self.model.optimizer.iterations.numpy()))

    def on_epoch_end(self, epoch, logs=None):
        self.model.evaluate(self._data, verbose=0)


@pytest.fixture
def run_config(digits, tmp_path):
    """Of a run with two evaluations, each of a batch."""
    options = {**OPTIONS, "strategy": "one_device", "eval_batch_size": 359}
    return Config(data_dir=digits, model_dir=str(tmp_path), **options)


CALLED_FIRST = ["train", "epoch 0", (0, 0), (1, 4)]
EVALUATION = ["test", "test 0 to 0"]


def test_callbacks_are_called_once_a_call_and_may_evaluate_the_model(run_config, counts):
    hooks, looks = Hooks(), Looks(make_dataset(run_config, "validation"))
    train(run_config, callbacks=[hooks, looks], model=small_network)
    rest = [(5, 6), *EVALUATION, "end 0", "epoch 1", (0, 1), *EVALUATION, "end 1", "end"]
    assert hooks.told == [*CALLED_FIRST, *rest]
    rows = [row for row in read_rows(run_config.model_dir) if row["kind"] == "train"]
    assert [(row["step"], row["examples"]) for row in rows] == [(5, 160), (7, 64), (9, 64)]
    assert looks.steps == [1, 5, 7, 9]


def test_a_callback_ends_the_run_after_a_call(run_config, counts):
    hooks = Hooks(stop_after=4)
    assert train(run_config, callbacks=[hooks], model=small_network)["steps"] == 5
    assert hooks.told == [*CALLED_FIRST, *EVALUATION, "end 0", "end"]


@pytest.mark.parametrize(
    "callback",
    [
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.1),
        keras.callbacks.ReduceLROnPlateau(),
    ],
    ids=["scheduler", "plateau"],
)
def test_callbacks_of_the_learning_rate_are_refused(digits, tmp_path, callback):
    config = Config(data_dir=digits, model_dir=str(tmp_path), **OPTIONS, strategy="one_device")
    with pytest.raises(UserError, match=f"{type(callback).__name__} would have no effect: "):
        train(config, callbacks=[callback], model=small_network)


def test_callbacks_whose_weights_the_checkpoints_lack_are_refused(digits, tmp_path):
    config = Config(data_dir=digits, model_dir=str(tmp_path), **OPTIONS, strategy="one_device")
    callback = keras.callbacks.EarlyStopping(restore_best_weights=True)
    with pytest.raises(UserError, match="too late for the checkpoints: leave it out"):
        train(config, callbacks=[callback], model=small_network)


# --- Iterators


class Iterators(keras.callbacks.Callback):
    """Keeps whether TensorFlow tunes the dataset of each iterator that is alive in training."""

    def __init__(self):
        super().__init__()
        self.before = list(map(id, self.alive()))
        self.tuned = set()

    def alive(self):
        gc.collect()
        return [one for one in gc.get_objects() if isinstance(one, OwnedIterator)]

    def note(self, *_, **__):
        new = [one for one in self.alive() if id(one) not in self.before]
        self.tuned.update(one._dataset.options().autotune.enabled is not False for one in new)

    on_train_batch_end = on_test_batch_end = on_test_end = note


def test_no_iterator_has_a_tuner_that_its_end_would_wait_for(digits, tmp_path):
    options = {**OPTIONS, "image_size": 8, "data_dir": digits, "strategy": "one_device"}
    config = Config(**options, model_dir=str(tmp_path / "run"))
    in_train, in_fit, others = Iterators(), Iterators(), Iterators()
    train(config, model=small_network, callbacks=[in_train])
    assert in_train.tuned == {False}
    model = build_model(config, model=small_network)
    data = make_dataset(config, "train"), make_dataset(config, "validation")
    model.fit(data[0], validation_data=data[1], epochs=1, steps_per_epoch=2, callbacks=[in_fit])
    assert in_fit.tuned == {False}
    # Where TensorFlow makes iterators by itself, it tunes them.
    with model.distribute_strategy.scope():
        iterator = iter(distributed_dataset(config, "train"))
    others.note()
    assert others.tuned == {False, True}
    del iterator


@pytest.mark.skipif(not tf.test.is_built_with_cuda(), reason="TensorFlow without GPU kernels")
def test_gpus_can_have_iterators_without_tuners():
    """Their options are an operation on the GPU (core/kernels/data/options_dataset_op.cc)."""
    found = get_registered_kernels_for_op("OptionsDataset").kernel
    assert {"CPU", "GPU"} <= {kernel.device_type for kernel in found}
