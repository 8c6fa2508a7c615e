"""What pipelines take: time, bubbles, memory, recomputation and graphs.

The devices of stages are emulated, by ops that keep one busy for a given time; or they are cores of
this machine, each of a process of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tqdm import tqdm

from imagenet_fast.base.addresses import free_port
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.worker_process import Worker, start_worker
from imagenet_fast.benchmarks.pipeline.emulated_device import BACKWARD, check_emulation
from imagenet_fast.benchmarks.pipeline.worker import Case, Network
from imagenet_fast.benchmarks.timing import Spread, in_turns
from imagenet_fast.cost_model.pipeline import Simulation, simulate
from imagenet_fast.pipeline_parallel.orders import tasks

_MODULE = [sys.executable, "-m", "imagenet_fast.benchmarks.pipeline.worker"]

# As in the paper's table 2: devices and micro-batches.
STAGES = (1, 2, 4, 8)
MICRO_BATCHES = (1, 4, 32)
# The batch that a device is for where batches grow with the devices.
_EXAMPLES = 64
# The shortest pass, of 8 stages and 32 micro-batches, takes 8 ms forward.
_EMULATED = Network("emulated", blocks=16, seconds=2 / _EXAMPLES)

_STEP = Network("convolutions", blocks=8, channels=32, image_size=32)
_STEP_BATCH = 256
_DEEP = Network("convolutions", blocks=32, channels=32, image_size=32)
_DEEP_BATCH = 128
_SMALL = Network("convolutions", blocks=8, channels=4, image_size=8)


@dataclasses.dataclass(frozen=True)
class Timed:
    """How long training steps took.

    Attributes:
      case: of what.
      seconds: of each.
      simulated: when ``planning.pipeline.simulate`` has stages of equal work do theirs; in seconds
        for emulated devices, else in parts of the work of a forward pass.
    """

    case: Case
    seconds: tuple[float, ...]
    simulated: Simulation

    @property
    def time(self) -> Spread:
        """Of a step, in seconds."""
        return Spread.of(self.seconds)

    @property
    def throughput(self) -> float:
        """Examples a second, of the median step."""
        return self.case.batch / self.time.median


class Memory(NamedTuple):
    """What a training step took at most, in the process that took most.

    Attributes:
      case: of what.
      blocks: of the network, equal ones.
      before: bytes after a step on as few examples as can be.
      peak: bytes after steps on the whole batch.
    """

    case: Case
    blocks: int
    before: int
    peak: int

    @property
    def activations(self) -> int:
        """The bytes that the batch makes the difference of."""
        return self.peak - self.before

    @property
    def published_share(self) -> float:
        """Of the plain network's activations, as Huang et al. 2018 have it.

        That is ``N + L/K N/M`` to ``N L``: the inputs of a stage, and all of one micro-batch.
        """
        stages, micro_batches = self.case.stages, self.case.micro_batches
        return (1 + self.blocks / stages / micro_batches) / self.blocks


class Limited(NamedTuple):
    """What came of training under a limit of memory.

    Attributes:
      case: of what.
      limit: bytes that each process might ask for, beyond what it had asked for without a model.
      peaks: bytes that each process took, of those that it might; empty: it failed.
      reason: why it failed, in a line.
    """

    case: Case
    limit: int
    peaks: tuple[int, ...]
    reason: str


class Traced(NamedTuple):
    """The graph of a training step.

    Attributes:
      case: of what.
      nodes: with those of all functions.
      trace_seconds: to make it.
      first_seconds: of the first step.
    """

    case: Case
    nodes: int
    trace_seconds: float
    first_seconds: float


def emulated(repeats: int) -> list[Timed]:
    """Times pipelines of emulated devices: each stage an equal part of the work.

    Raises:
      UserError: if devices cannot be emulated.
    """
    check_emulation()
    batch = 2 * max(MICRO_BATCHES)
    cases = [Case(batch, k, m) for k in STAGES for m in MICRO_BATCHES]
    cases += [Case(batch, 8, 32, "never"), *(Case(batch, 8, 32, schedule=s) for s in _OTHERS)]
    # The batch grows with the devices, as do the micro-batches, of the same size each.
    cases += [Case(_EXAMPLES * k, k, 4 * k) for k in STAGES[1:]]
    with _trainer(_EMULATED, devices=max(STAGES)) as worker:
        seconds = _time_steps(worker, cases, repeats)
    return [
        Timed(case, own, simulated(case, _EMULATED.seconds * case.batch))
        for case, own in zip(cases, seconds)
    ]


def simulated(case: Case, forward: float = 1.0) -> Simulation:
    """Returns when stages of equal work should do theirs.

    Args:
      case: with a pipeline.
      forward: the forward pass of the whole batch through all stages.
    """
    each = [forward / case.stages / case.micro_batches] * case.stages
    return simulate(
        tasks(case.schedule, case.stages, case.micro_batches),
        each,
        [BACKWARD * own for own in each],
        rematerialize=case.rematerialize,
    )


def overlap(repeats: int) -> list[Timed]:
    """Times two stages, each a process with a core of its own, by the number of micro-batches.

    Raises:
      UserError: if there are fewer than two cores.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise UserError("overlap needs two cores, of which this process has one: leave it out")
    cases = [
        *(Case(_STEP_BATCH, 2, m, kept) for kept in ("always", "never") for m in (1, 2, 4, 8, 16)),
        *(Case(_STEP_BATCH, 2, 8, schedule=schedule) for schedule in _OTHERS),
    ]
    with (
        _servers(cores=[cores[1:2]]) as (_, addresses),
        _trainer(_STEP, servers=addresses, cores=cores[:1]) as worker,
    ):
        seconds = _time_steps(worker, cases, repeats)
    return [Timed(case, own, simulated(case)) for case, own in zip(cases, seconds)]


def recomputation(repeats: int) -> list[Timed]:
    """Times four stages on one core, so that the time is that of all that is computed."""
    cases = [Case(_STEP_BATCH, 4, 8, kept) for kept in ("always", "except_last", "never")]
    with _trainer(_STEP, devices=4, cores=sorted(os.sched_getaffinity(0))[:1]) as worker:
        seconds = _time_steps(worker, cases, repeats)
    return [Timed(case, own, simulated(case)) for case, own in zip(cases, seconds)]


def activation_memory() -> list[Memory]:
    """Measures a plain network, and the same in pipelines: processes of a stage each."""
    cases = [Case(_DEEP_BATCH), *(Case(_DEEP_BATCH, 1, m) for m in (1, 2, 4, 8, 16, 32))]
    cases += [Case(_DEEP_BATCH, k, 8) for k in (2, 4)]
    cases += [Case(_DEEP_BATCH, 1, 8, "never"), Case(_DEEP_BATCH, 4, 8, "never")]
    cases += [Case(_DEEP_BATCH, 4, 8, kept, "1f1b") for kept in ("always", "never")]
    results = []
    for case in tqdm(cases, desc="memory", unit=" cases", dynamic_ncols=True):
        with _processes(_DEEP, case) as (worker, servers):
            few = _ask(worker, case, steps=0, first=case.micro_batches)
            before = [few["peak_memory"], *_peaks(servers)]
            after = [_ask(worker, case, steps=2)["peak_memory"], *_peaks(servers)]
        results.append(
            Memory(case, _DEEP.blocks, *max(zip(before, after), key=lambda own: own[1] - own[0]))
        )
    return results


def memory_limit(limit: int) -> list[Limited]:
    """Trains a network under a limit of memory: plain, then over four processes.

    Args:
      limit: bytes that each process may ask for, beyond what it has without a model.
    """
    return [_limited(_DEEP, case, limit) for case in (Case(_DEEP_BATCH), Case(_DEEP_BATCH, 4, 8))]


def _limited(network: Network, case: Case, limit: int) -> Limited:
    try:
        with _processes(network, case, more_memory=limit) as (worker, servers):
            begun = [process.answer["memory"] for process in (worker, *servers)]
            ended = [_ask(worker, case, steps=2)["peak_memory"], *_peaks(servers)]
    except UserError as error:
        return Limited(case, limit, (), str(error))
    taken = tuple(after - before for before, after in zip(begun, ended))
    return Limited(case, limit, taken, "")


def graphs() -> list[Traced]:
    """Makes the graphs of more and more micro-batches, in each schedule."""
    cases = [
        Case(64, 4, m, schedule=schedule)
        for schedule in ("unrolled", *_OTHERS)
        for m in (1, 4, 16, 64)
    ]
    with _trainer(_SMALL, devices=4) as worker:
        # What TensorFlow does once is not the first case's.
        _ask(worker, Case(64, 4, 2), steps=1)
        answers = [
            _ask(worker, case, steps=0)
            for case in tqdm(cases, desc="graphs", unit=" cases", dynamic_ncols=True)
        ]
    return [
        Traced(case, *(own[name] for name in Traced._fields[1:]))
        for case, own in zip(cases, answers)
    ]


# Besides ``unrolled``.
_OTHERS = ("while", "1f1b")
# By name.
PARTS: dict[str, Callable[..., list[Any]]] = {
    "emulated": emulated,
    "overlap": overlap,
    "recomputation": recomputation,
    "memory": activation_memory,
    "memory_limit": memory_limit,
    "graphs": graphs,
}


def _time_steps(worker: Worker, cases: Sequence[Case], repeats: int) -> list[tuple[float, ...]]:
    """Returns the seconds of steps of each case, taken in turns; the first turn does not count."""

    def step(case: Case) -> float:
        (seconds,) = _ask(worker, case, steps=1)["seconds"]
        return seconds

    steps = [functools.partial(step, case) for case in cases]
    return [tuple(own) for own in in_turns(steps, warmup=1, repeats=repeats, unit=" steps")]


def _ask(worker: Worker, case: Case, *, steps: int, first: int = 0) -> dict[str, Any]:
    return worker.ask(json.dumps({"case": case, "steps": steps, "examples_first": first}))


def _peaks(servers: Sequence[Worker]) -> list[int]:
    return [own.ask("{}")["peak_memory"] for own in servers]


@contextlib.contextmanager
def _processes(
    network: Network, case: Case, more_memory: int = 0
) -> Iterator[tuple[Worker, list[Worker]]]:
    """Starts what trains, and a server for each stage but the first."""
    count = max(0, case.stages - 1)
    with (
        _servers(cores=[[]] * count, more_memory=more_memory) as (servers, addresses),
        _trainer(network, servers=addresses, more_memory=more_memory) as worker,
    ):
        yield worker, servers


@contextlib.contextmanager
def _servers(
    cores: Sequence[Sequence[int]], more_memory: int = 0
) -> Iterator[tuple[list[Worker], list[str]]]:
    """Starts processes that lend a stage their device; yields them and their addresses."""
    with contextlib.ExitStack() as stack:
        servers, addresses = [], []
        for own in cores:
            port = free_port()
            job = {"cores": list(own), "more_memory": more_memory, "port": port}
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
    # All is of processors: their cores, their memory.
    environment = {"CUDA_VISIBLE_DEVICES": ""}
    return start_worker(_MODULE, job, name=name, environment=environment)
