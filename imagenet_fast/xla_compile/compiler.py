"""XLA's compilers for TPUs (libtpu) and GPUs (jax's CUDA plugin), in a process of their own."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import math
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, Union

from imagenet_fast.base.errors import UserError, how_to_install
from imagenet_fast.base.worker_process import Worker, start_worker
from imagenet_fast.cost_model.accelerators import ACCELERATORS, accelerator
from imagenet_fast.xla_compile.gpus import GpuTopology, gpu_topology, no_topology
from imagenet_fast.xla_compile.module import Module, read_module

_GIB = 2**30
# By the kind that libtpu tells: which of our accelerators it is.
_ACCELERATORS = {
    "TPU v2": "tpu-v2",
    "TPU v3": "tpu-v3",
    "TPU v4": "tpu-v4",
    "TPU v5 lite": "tpu-v5e",
    "TPU v5": "tpu-v5p",
    "TPU v6 lite": "tpu-v6e",
}
_EXAMPLES = "v2:2x2, v3:4x4, v4:2x2x1, v5e:4x4, v5p:2x2x1 or v6e:4x4"
# In what libtpu says of a program that is too big: either at the end, or before it has tried.
_NEEDS = (
    re.compile(r"Used ([\d.]+[KMGT]?) of ([\d.]+[KMGT]?) hbm"),
    re.compile(r"\(([\d.]+[KMGT]?)\) exceeds available HBM \(([\d.]+[KMGT]?)\)"),
)
# The kind of error, the compiler's pass, the place in its source, the whole instruction.
_FOR_AUTHORS = (
    re.compile(r"^[A-Z_]+: "),
    re.compile(r"^during context \[[^]]*\]: "),
    re.compile(r"^RET_CHECK failure \(\S+\) [^A-Z%]*"),
    re.compile(r": %\S+ = .*"),
)
_PACKAGES = {
    "TPU": ("jax", "jaxlib", "libtpu"),
    "GPU": ("jax", "jaxlib", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12"),
}
# Of the last of these: folder with what XLA takes of CUDA, and the files that it must have.
_CUDA = "nvidia/cuda_nvcc"
_CUDA_FILES = ("bin/ptxas", "nvvm/libdevice/libdevice.10.bc")


@dataclasses.dataclass(frozen=True)
class TpuTopology:
    """The cores of a TPU.

    Attributes:
      name: as libtpu knows it, ``v3:2x2``.
      kind: of its chips, ``TPU v3``.
      coordinates: (x, y, z, core) of each replica's core; where a chip is one device, of the chip.
    """

    name: str
    kind: str
    coordinates: tuple[tuple[int, ...], ...]

    platform = "TPU"
    # libtpu itself refuses what does not fit.
    usable = 0

    @property
    def chips(self) -> int:
        """How many chips it has."""
        return len({place[:3] for place in self.coordinates})

    @property
    def memory(self) -> int:
        """Bytes that each replica has, or 0 if that is not known."""
        name = _ACCELERATORS.get(self.kind)
        return int(accelerator(name).core_memory) if name else 0

    def __str__(self) -> str:
        each = f", {self.memory // _GIB} GiB each" if self.memory else ""
        replicas = len(self.coordinates)
        return f"{replicas:,} replica{'s' * (replicas != 1)} on {self.chips:,} {self.kind}{each}"


Topology = Union[TpuTopology, GpuTopology]


@dataclasses.dataclass(frozen=True)
class Program:
    """What the compiler says of a program of one replica.

    Attributes:
      seconds: that it took to compile.
      memory: bytes of ``arguments``, ``outputs``, what of these is ``shared`` with arguments,
        ``temporary`` arrays and ``code``.
      flops: of a step, as XLA counts them: of accumulated micro-batches, those of one.
      bytes: that a step reads and writes, as XLA counts them, likewise; of TPUs only.
      optimized: what XLA made of the module; of GPUs only.
    """

    seconds: float
    memory: Mapping[str, int]
    flops: float
    bytes: float
    optimized: Module | None = None

    @property
    def peak(self) -> int:
        """Bytes that it needs at once."""
        parts = ("arguments", "outputs", "temporary", "code")
        return sum(self.memory[part] for part in parts) - self.memory["shared"]


class RefusedError(Exception):
    """The compiler does not take a program: its reason, in a line.

    Args:
      message: all that it says.

    Attributes:
      message: the same.
    """

    def __init__(self, message: str) -> None:
        super().__init__(_refusal(message))
        self.message = message


class Compiler:
    """What compiles, started by :func:`start_compiler`.

    Args:
      worker: the process, as ``start_worker`` gives it.
      folder: for files that pass between the two.
    """

    def __init__(self, worker: Worker, folder: pathlib.Path) -> None:
        self._worker = worker
        self._folder = folder

    def topology(self, name: str) -> Topology:
        """Returns the topology of this name.

        Raises:
          UserError: if there is none.
        """
        own = gpu_topology(name)
        if own is not None:
            return own
        found = self._ask("topology", name=name)
        if "error" in found:
            raise no_topology(name, _line(found["error"]), _EXAMPLES)
        return TpuTopology(name, found["kind"], tuple(map(tuple, found["coordinates"])))

    def compile(self, topology: Topology, module: bytes) -> Program:
        """Returns what a serialized HLO module is for a replica on each of the devices.

        Raises:
          RefusedError: if it needs too much memory, or has what such a device does not have.
        """
        if isinstance(topology, GpuTopology):
            return self._compile_for_gpus(topology, module)
        found = self._ask("compile_for_tpu", name=topology.name, module=self._file(module))
        if "error" in found:
            raise RefusedError(found["error"])
        return Program(**found)

    def _compile_for_gpus(self, topology: GpuTopology, module: bytes) -> Program:
        optimized = self._folder / "optimized.hlo"
        found = self._ask(
            "compile_for_gpus",
            target=topology.gpu.target,
            hosts=topology.hosts,
            gpus=topology.gpus,
            cuda=str(find_cuda()),
            module=self._file(module),
            optimized=str(optimized),
        )
        if "error" in found:
            raise RefusedError(found["error"])
        return Program(**found, optimized=read_module(optimized.read_bytes()))

    def run(
        self, module: bytes, inputs: pathlib.Path, updates: Mapping[int, int], steps: int
    ) -> dict[str, dict[str, float]]:
        """Returns what ``worker.run_steps`` finds on this machine's processor.

        Args:
          module: serialized HLO module, for as many replicas as there are virtual CPUs.
          inputs: NumPy archive of what it takes.
          updates: the parameter that each of its results takes the place of.
          steps: how many.
        """
        return self._ask(
            "run_steps",
            module=self._file(module),
            inputs=str(inputs),
            updates=updates,
            steps=steps,
        )

    def _ask(self, work: str, **arguments: Any) -> dict[str, Any]:
        return self._worker.ask(json.dumps({"do": work, **arguments}))

    def _file(self, content: bytes) -> str:
        path = self._folder / "module.hlo"
        path.write_bytes(content)
        return str(path)


def platform_of(topology: str) -> str:
    """Returns ``TPU`` or ``GPU``, before a compiler is started.

    Raises:
      UserError: if it is neither's, or has more chips than there are anywhere, for which libtpu
        would work for minutes.
    """
    if gpu_topology(topology) is not None:
        return "GPU"
    kind, _, size = topology.partition(":")
    if not re.match(r"v\d", kind):
        raise no_topology(topology, f"no kind {kind!r}", _EXAMPLES)
    own = ACCELERATORS.get(f"tpu-{kind}")
    chips = math.prod(map(int, re.findall(r"\d+", size)))
    if not chips:  # which would end libtpu by a signal
        raise no_topology(topology, "an axis has 0 chips", _EXAMPLES)
    if own is not None and chips > own.most_chips:
        reason = f"a {own.title} has at most {own.most_chips:,} chips"
        raise no_topology(topology, reason, _EXAMPLES)
    return "TPU"


@contextlib.contextmanager
def start_compiler(platform: str, virtual_cpus: int = 1) -> Iterator[Compiler]:
    """Starts the compiler, and ends it at the end.

    Args:
      platform: ``TPU`` or ``GPU``.
      virtual_cpus: devices that its own processor is to be.

    Raises:
      UserError: if it is not installed or cannot be started; inside, if it fails.
    """
    require_packages(platform)
    command = [sys.executable, "-m", "imagenet_fast.xla_compile.worker"]
    environment = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={virtual_cpus}"}
    with (
        tempfile.TemporaryDirectory() as folder,
        start_worker(
            command, {"do": "start"}, name="XLA's compiler", environment=environment
        ) as worker,
    ):
        yield Compiler(worker, pathlib.Path(folder))


def require_packages(platform: str) -> dict[str, str]:
    """Returns the versions of the packages that compile for a platform, ``TPU`` or ``GPU``.

    Raises:
      UserError: if they are not installed, or not whole.
    """
    try:
        versions = {name: importlib.metadata.version(name) for name in _PACKAGES[platform]}
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError(
            f"compiling for {platform}s needs {error.name}, which is not installed here: "
            f"{how_to_install('compile')} installs it, best into an environment of its own "
            "(tools/install.sh DIRECTORY compile)"
        ) from None
    if platform == "GPU":
        find_cuda()
    return versions


def find_cuda() -> pathlib.Path:
    """Returns the folder of the ptxas and libdevice that this package's extra installs.

    Raises:
      UserError: if one of them is missing. XLA would then look for another CUDA on this machine,
        of any version, and use it without a word.
    """
    package = _PACKAGES["GPU"][-1]
    folder = pathlib.Path(str(importlib.metadata.distribution(package).locate_file(_CUDA)))
    for name in _CUDA_FILES:
        if not (folder / name).is_file():
            raise UserError(
                f"{package} is installed without {folder / name}, in whose place XLA would use "
                f"any other CUDA of this machine: install it again (pip install --force-reinstall "
                f"{package}=={importlib.metadata.version(package)})"
            )
    return folder


def _refusal(message: str) -> str:
    needs = next(filter(None, (pattern.search(message) for pattern in _NEEDS)), None)
    if needs:
        needed, there = (f"{number}iB" for number in needs.groups())
        return f"out of memory: each replica needs {needed} of the {there} that programs can have"
    return _line(message)


def _line(message: str) -> str:
    """Returns the first line of a message, without what is for the compiler's authors alone."""
    line = next((line for line in message.splitlines() if line.strip()), "no reason told")
    for part in _FOR_AUTHORS:
        line = part.sub("", line)
    return line.strip()
