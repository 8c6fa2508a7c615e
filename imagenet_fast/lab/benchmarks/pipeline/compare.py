"""Benchmarks of pipelines: step time, bubbles, memory, recomputation and graph size.

The stages' devices are either emulated, by ops that keep a device busy for a given time, or cores
of this machine, each used by one process.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tqdm import tqdm

from imagenet_fast.base.addresses import free_port
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.worker_process import Worker, module_command, start_worker
from imagenet_fast.lab.benchmarks.pipeline.emulated_device import BACKWARD, check_emulation
from imagenet_fast.lab.benchmarks.pipeline.worker import Case, Network
from imagenet_fast.lab.benchmarks.timing import Spread, interleave
from imagenet_fast.lab.planning.cost_model.pipeline import (
    ideal_bubble,
    simulate_zero_bubble,
    stored_micro_batches,
)
from imagenet_fast.pipeline_parallel.schedules import Task, tasks
from imagenet_fast.pipeline_parallel.simulation import Simulation, simulate

_COMMAND = module_command("imagenet_fast.lab.benchmarks.pipeline.worker")

# Devices and micro-batches of Huang et al. 2018, table 2.
STAGES = (1, 2, 4, 8)
MICRO_BATCHES = (1, 4, 32)
# Examples per device where the batch grows with the devices.
_EXAMPLES = 64
# The shortest forward pass, with 8 stages and 32 micro-batches, takes 8 ms.
_EMULATED = Network("emulated", blocks=16, seconds=2 / _EXAMPLES)

# Of the batch of ``emulated``.
SCHEDULE_CASES = [
    Case(64, each * devices, micro_batches, "never", schedule)
    for devices in (2, 4, 8)
    for micro_batches in (8, 32)
    for schedule, each in (("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2))
]

_STEP = Network("convolutions", blocks=8, channels=32, image_size=32)
_STEP_BATCH = 256
_DEEP = Network("convolutions", blocks=32, channels=32, image_size=32)
_DEEP_BATCH = 128
_SMALL = Network("convolutions", blocks=8, channels=4, image_size=8)


class StepTimes(NamedTuple):
    """The duration of training steps.

    Attributes:
      case: the pipeline.
      seconds: of each step.
      simulated: the schedule by ``pipeline_parallel.simulation.simulate`` with stages of equal
        work; in seconds for emulated devices, else relative to a forward pass.
    """

    case: Case
    seconds: tuple[float, ...]
    simulated: Simulation

    @property
    def time(self) -> Spread:
        """Seconds of a step."""
        return Spread.of(self.seconds)

    @property
    def throughput(self) -> float:
        """Examples/s of the median step."""
        return self.case.batch / self.time.median


class ScheduleEstimate(NamedTuple):
    """A schedule with equal stages and stored activations.

    Attributes:
      schedule: its name.
      devices: number of devices.
      micro_batches: number of micro-batches.
      bubble: fraction of the devices' time in which they are idle, simulated.
      ideal_bubble: the same, by the schedule's paper.
      stored: most micro-batches whose activations a device stores, simulated.
      ideal_stored: the same, by the schedule's paper.
    """

    schedule: str
    devices: int
    micro_batches: int
    bubble: float
    ideal_bubble: float
    stored: float
    ideal_stored: float


class MemoryUse(NamedTuple):
    """The peak memory of a training step, in the process with the highest.

    Attributes:
      case: the pipeline.
      blocks: equal blocks of the network.
      before: bytes after a step on the smallest batch.
      peak: bytes after steps on the whole batch.
    """

    case: Case
    blocks: int
    before: int
    peak: int

    @property
    def activations(self) -> int:
        """Bytes that the batch adds."""
        return self.peak - self.before

    @property
    def published_fraction(self) -> float:
        """The fraction of the plain network's activations by Huang et al. 2018.

        ``(N + L/K N/M) / (N L)``: the stage's inputs, and all activations of one micro-batch.
        """
        stages, micro_batches = self.case.stages, self.case.micro_batches
        return (1 + self.blocks / stages / micro_batches) / self.blocks


class LimitedRun(NamedTuple):
    """The outcome of training with limited memory.

    Attributes:
      case: the pipeline.
      limit: bytes that each process may allocate after its start, before it has a model.
      peaks: bytes of these that each process used; empty: training failed.
      reason: of the failure, in one line.
    """

    case: Case
    limit: int
    peaks: tuple[int, ...]
    reason: str


class GraphSize(NamedTuple):
    """The graph of a training step.

    Attributes:
      case: the pipeline.
      nodes: including those of all functions.
      trace_seconds: to build it.
      first_seconds: of the first step.
    """

    case: Case
    nodes: int
    trace_seconds: float
    first_seconds: float


def emulated(repeats: int) -> list[StepTimes]:
    """Times pipelines on emulated devices, with equal work in all stages.

    Raises:
      UserError: if devices cannot be emulated.
    """
    batch = 2 * max(MICRO_BATCHES)
    cases = [Case(batch, k, m) for k in STAGES for m in MICRO_BATCHES]
    cases += [Case(batch, 8, 32, "never"), *(Case(batch, 8, 32, schedule=s) for s in _OTHERS)]
    # The batch and the number of micro-batches grow with the devices.
    cases += [Case(_EXAMPLES * k, k, 4 * k) for k in STAGES[1:]]
    return _on_emulated_devices(cases, repeats)


def simulated(case: Case, forward: float = 1.0) -> Simulation:
    """Returns the schedule of a pipeline with equal work in all stages.

    Args:
      case: with at least one stage.
      forward: duration of the whole batch's forward pass through all stages.
    """
    each = [forward / case.stages / case.micro_batches] * case.stages
    return simulate(
        order(case),
        each,
        [BACKWARD * stage for stage in each],
        rematerialize=case.rematerialize,
        devices=case.devices,
    )


def order(case: Case) -> list[Task]:
    """Returns the tasks of a pipeline."""
    schedule = case.schedule.removesuffix("-looped")
    return tasks(schedule, case.stages, case.micro_batches, case.devices)


def schedules(repeats: int) -> list[StepTimes]:
    """Times all schedules with stored activations on emulated devices.

    Raises:
      UserError: if devices cannot be emulated.
    """
    return _on_emulated_devices(SCHEDULE_CASES, repeats)


def _on_emulated_devices(cases: Sequence[Case], repeats: int) -> list[StepTimes]:
    check_emulation()
    with _trainer(_EMULATED, devices=max(STAGES)) as worker:
        return _time_steps(worker, cases, repeats, _EMULATED.seconds)


def estimates() -> list[ScheduleEstimate]:
    """Simulates the cases of :func:`schedules`, and ZB-H1 beside them."""
    found = []
    for case in SCHEDULE_CASES:
        stages_per_device = case.stages // case.devices
        extra = (case.devices - 1) / stages_per_device
        stored = {"gpipe": case.micro_batches, "1f1b": case.devices}
        found.append(
            ScheduleEstimate(
                case.schedule,
                case.devices,
                case.micro_batches,
                simulated(case).bubble,
                ideal_bubble(case.devices, case.micro_batches, stages_per_device),
                max(stored_micro_batches(order(case), case.devices)),
                min(case.micro_batches, stored.get(case.schedule, case.devices + extra)),
            )
        )
        if case.schedule == "interleaved_1f1b":
            found.append(_zero_bubble(case.devices, case.micro_batches))
    return found


def _zero_bubble(devices: int, micro_batches: int) -> ScheduleEstimate:
    """Returns ZB-H1 with forward passes, input gradients and weight gradients of equal time."""
    simulation = simulate_zero_bubble(devices, micro_batches)
    # Until its weight gradients are computed, a micro-batch is stored.
    events = sorted(
        (time, change)
        for interval in simulation.intervals
        if interval.stage == 0
        for kind, time, change in (("forward", interval.begin, 1), ("weights", interval.end, -1))
        if kind == interval.kind
    )
    ideal = devices - 1
    return ScheduleEstimate(
        "zb-h1",
        devices,
        micro_batches,
        simulation.bubble,
        ideal / (3 * micro_batches + ideal),
        max(itertools.accumulate(change for _, change in events)),
        min(devices, micro_batches),
    )


def overlap(repeats: int) -> list[StepTimes]:
    """Times two stages, each in a process on its own core, by the number of micro-batches.

    Raises:
      UserError: if there are fewer than two cores.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise UserError("overlap needs two cores, and this process may use one: leave it out")
    cases = [
        *(Case(_STEP_BATCH, 2, m, kept) for kept in ("always", "never") for m in (1, 2, 4, 8, 16)),
        *(Case(_STEP_BATCH, 2, 8, schedule=schedule) for schedule in _OTHERS),
    ]
    with (
        _servers(cores=[cores[1:2]]) as (_, addresses),
        _trainer(_STEP, servers=addresses, cores=cores[:1]) as worker,
    ):
        return _time_steps(worker, cases, repeats)


def recomputation(repeats: int) -> list[StepTimes]:
    """Times four stages on one core, where the time is proportional to the work."""
    cases = [Case(_STEP_BATCH, 4, 8, kept) for kept in ("always", "except_last", "never")]
    with _trainer(_STEP, devices=4, cores=sorted(os.sched_getaffinity(0))[:1]) as worker:
        return _time_steps(worker, cases, repeats)


def activation_memory() -> list[MemoryUse]:
    """Measures a plain network and its pipelines, with one process for each stage."""
    cases = [Case(_DEEP_BATCH), *(Case(_DEEP_BATCH, 1, m) for m in (1, 2, 4, 8, 16, 32))]
    cases += [Case(_DEEP_BATCH, k, 8) for k in (2, 4)]
    cases += [Case(_DEEP_BATCH, 1, 8, "never"), Case(_DEEP_BATCH, 4, 8, "never")]
    cases += [Case(_DEEP_BATCH, 4, 8, kept, "1f1b") for kept in ("always", "never")]
    cases += [Case(_DEEP_BATCH, 8, 8, "never", "interleaved_1f1b")]
    results = []
    for case in tqdm(cases, desc="memory", unit=" cases", dynamic_ncols=True):
        with _processes(_DEEP, case) as (worker, servers):
            few = _ask(worker, case, steps=0, first=case.micro_batches)
            before = [few["peak_memory"], *_peaks(servers)]
            after = [_ask(worker, case, steps=2)["peak_memory"], *_peaks(servers)]
        most = max(zip(before, after), key=lambda pair: pair[1] - pair[0])
        results.append(MemoryUse(case, _DEEP.blocks, *most))
    return results


def memory_limit(limit: int) -> list[LimitedRun]:
    """Trains a network with limited memory: in one process, then in a pipeline of four.

    Each process may allocate ``limit`` bytes after its start.
    """
    return [_limited(_DEEP, case, limit) for case in (Case(_DEEP_BATCH), Case(_DEEP_BATCH, 4, 8))]


def _limited(network: Network, case: Case, limit: int) -> LimitedRun:
    try:
        with _processes(network, case, more_memory=limit) as (worker, servers):
            before = [process.answer["memory"] for process in (worker, *servers)]
            after = [_ask(worker, case, steps=2)["peak_memory"], *_peaks(servers)]
    except UserError as error:
        return LimitedRun(case, limit, (), str(error))
    peaks = tuple(peak - start for start, peak in zip(before, after))
    return LimitedRun(case, limit, peaks, "")


def graphs() -> list[GraphSize]:
    """Builds the graphs of growing numbers of micro-batches, with each schedule."""
    cases = [
        Case(64, 4, m, schedule=schedule)
        for schedule in ("gpipe", *_OTHERS)
        for m in (1, 4, 16, 64)
    ]
    with _trainer(_SMALL, devices=4) as worker:
        # TensorFlow's one-time work must not count for the first case.
        _ask(worker, Case(64, 4, 2), steps=1)
        answers = [
            _ask(worker, case, steps=0)
            for case in tqdm(cases, desc="graphs", unit=" cases", dynamic_ncols=True)
        ]
    return [
        GraphSize(case, *(answer[name] for name in GraphSize._fields[1:]))
        for case, answer in zip(cases, answers)
    ]


# The schedules besides ``gpipe``.
_OTHERS = ("gpipe-looped", "1f1b")
PARTS: dict[str, Callable[..., list[Any]]] = {
    "estimates": estimates,
    "schedules": schedules,
    "emulated": emulated,
    "overlap": overlap,
    "recomputation": recomputation,
    "memory": activation_memory,
    "memory_limit": memory_limit,
    "graphs": graphs,
}


def _time_steps(
    worker: Worker, cases: Sequence[Case], repeats: int, forward: float | None = None
) -> list[StepTimes]:
    """Times the interleaved steps of each case, without the first of each.

    ``forward`` is the seconds of one example's forward pass; None: unknown.
    """

    def step(case: Case) -> float:
        (seconds,) = _ask(worker, case, steps=1)["seconds"]
        return seconds

    steps = [functools.partial(step, case) for case in cases]
    measured = interleave(steps, warmup=1, repeats=repeats, unit=" steps")
    return [
        StepTimes(case, tuple(seconds), simulated(case, forward * case.batch if forward else 1.0))
        for case, seconds in zip(cases, measured)
    ]


def _ask(worker: Worker, case: Case, *, steps: int, first: int = 0) -> dict[str, Any]:
    return worker.ask(json.dumps({"case": case, "steps": steps, "examples_first": first}))


def _peaks(servers: Sequence[Worker]) -> list[int]:
    return [server.ask("{}")["peak_memory"] for server in servers]


@contextlib.contextmanager
def _processes(
    network: Network, case: Case, more_memory: int = 0
) -> Iterator[tuple[Worker, list[Worker]]]:
    """Starts a process that trains, and a server for each stage but the first."""
    count = max(0, case.devices - 1)
    with (
        _servers(cores=[[]] * count, more_memory=more_memory) as (servers, addresses),
        _trainer(network, servers=addresses, more_memory=more_memory) as worker,
    ):
        yield worker, servers


@contextlib.contextmanager
def _servers(
    cores: Sequence[Sequence[int]], more_memory: int = 0
) -> Iterator[tuple[list[Worker], list[str]]]:
    """Starts servers that each provide a stage's device; yields them and their addresses."""
    with contextlib.ExitStack() as stack:
        servers, addresses = [], []
        for server_cores in cores:
            port = free_port()
            job = {"cores": list(server_cores), "more_memory": more_memory, "port": port}
            servers.append(stack.enter_context(_start(job, "a stage")))
            addresses.append(f"localhost:{port}")
        yield servers, addresses


def _trainer(
    network: Network,
    *,
    devices: int = 1,
    servers: Sequence[str] = (),
    cores: Sequence[int] = (),
    more_memory: int = 0,
) -> contextlib.AbstractContextManager[Worker]:
    job = {
        "network": network,
        "devices": devices,
        "servers": list(servers),
        "cores": list(cores),
        "more_memory": more_memory,
    }
    return _start(job, "training")


def _start(job: Mapping[str, Any], name: str) -> contextlib.AbstractContextManager[Worker]:
    # Everything is measured on CPUs.
    environment = {"CUDA_VISIBLE_DEVICES": ""}
    return start_worker(_COMMAND, job, name=name, environment=environment)
