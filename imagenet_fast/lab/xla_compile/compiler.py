"""XLA's compilers for TPUs (libtpu) and GPUs (jax's CUDA plugin), in a separate process."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import math
import pathlib
import re
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, Union

from imagenet_fast.base.errors import UserError, how_to_install
from imagenet_fast.base.worker_process import Worker, module_command, start_worker
from imagenet_fast.lab.planning.cost_model.accelerators import ACCELERATORS, accelerator
from imagenet_fast.lab.xla_compile.gpus import GpuTopology, gpu_topology, no_topology
from imagenet_fast.lab.xla_compile.module import Module, read_module

_GIB = 2**30
# Names of accelerators by libtpu's device kind.
_ACCELERATORS = {
    "TPU v2": "tpu-v2",
    "TPU v3": "tpu-v3",
    "TPU v4": "tpu-v4",
    "TPU v5 lite": "tpu-v5e",
    "TPU v5": "tpu-v5p",
    "TPU v6 lite": "tpu-v6e",
}
# libtpu's messages for a program that is too large, after and before compilation.
_NEEDS = (
    re.compile(r"Used ([\d.]+[KMGT]?) of ([\d.]+[KMGT]?) hbm"),
    re.compile(r"\(([\d.]+[KMGT]?)\) exceeds available HBM \(([\d.]+[KMGT]?)\)"),
)
# Parts of messages for the compiler's developers: error kind, pass, source location, instruction.
_INTERNAL = (
    re.compile(r"^[A-Z_]+: "),
    re.compile(r"^during context \[[^]]*\]: "),
    re.compile(r"^RET_CHECK failure \(\S+\) [^A-Z%]*"),
    re.compile(r": %\S+ = .*"),
)
_PACKAGES = {
    "TPU": ("jax", "jaxlib", "libtpu"),
    "GPU": ("jax", "jaxlib", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12"),
}
# In the last of these packages: the folder that XLA uses, and the files that it needs.
_CUDA = "nvidia/cuda_nvcc"
_CUDA_FILES = ("bin/ptxas", "nvvm/libdevice/libdevice.10.bc")


@dataclasses.dataclass(frozen=True)
class TpuTopology:
    """The cores of a TPU slice.

    Attributes:
      name: libtpu's name, such as ``v3:2x2``.
      kind: of the chips, such as ``TPU v3``.
      coordinates: (x, y, z, core) of each replica's core, or of its chip if that is one device.
    """

    name: str
    kind: str
    coordinates: tuple[tuple[int, ...], ...]

    platform = "TPU"
    # libtpu itself rejects programs that do not fit.
    usable = 0

    @property
    def chips(self) -> int:
        """The number of chips."""
        return len({place[:3] for place in self.coordinates})

    @property
    def memory(self) -> int:
        """Bytes of each replica; 0 if unknown."""
        name = _ACCELERATORS.get(self.kind)
        return int(accelerator(name).core_memory) if name else 0

    def __str__(self) -> str:
        each = f", {self.memory // _GIB} GiB each" if self.memory else ""
        replicas = len(self.coordinates)
        return f"{replicas:,} replica{'s' * (replicas != 1)} on {self.chips:,} {self.kind}{each}"


Topology = Union[TpuTopology, GpuTopology]


@dataclasses.dataclass(frozen=True)
class Program:
    """The compiled program of one replica.

    Attributes:
      seconds: of compilation.
      memory: bytes of ``arguments``, ``outputs``, outputs that are ``shared`` with arguments,
        ``temporary`` arrays and ``code``.
      flops: of a step, or of one micro-batch with gradient accumulation, as XLA counts.
      bytes: that a step or micro-batch reads and writes, as XLA counts; for TPUs only.
      optimized: the optimized module; for GPUs only.
    """

    seconds: float
    memory: Mapping[str, int]
    flops: float
    bytes: float
    optimized: Module | None = None

    @property
    def peak(self) -> int:
        """Peak memory in bytes."""
        parts = ("arguments", "outputs", "temporary", "code")
        return sum(self.memory[part] for part in parts) - self.memory["shared"]


class RefusedError(Exception):
    """The compiler rejected a program; the text is its reason, in one line.

    Attributes:
      message: the compiler's whole message.
    """

    def __init__(self, message: str) -> None:
        super().__init__(_refusal(message))
        self.message = message


class Compiler:
    """A compiler process started by :func:`start_compiler`.

    Args:
      worker: the process.
      folder: for files that are exchanged with it.
    """

    def __init__(self, worker: Worker, folder: pathlib.Path) -> None:
        self._worker = worker
        self._folder = folder

    def topology(self, name: str) -> Topology:
        """Returns the topology of this name.

        Raises:
          UserError: if there is none.
        """
        gpus = gpu_topology(name)
        if gpus is not None:
            return gpus
        found = self._ask("topology", name=name)
        if "error" in found:
            raise no_topology(name, _line(found["error"]))
        return TpuTopology(name, found["kind"], tuple(map(tuple, found["coordinates"])))

    def compile(self, topology: Topology, module: bytes) -> Program:
        """Compiles a serialized HLO module for one replica on each device.

        Raises:
          RefusedError: if it needs too much memory, or something that the devices do not support.
        """
        optimized = None
        if isinstance(topology, GpuTopology):
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
        else:
            found = self._ask("compile_for_tpu", name=topology.name, module=self._file(module))
        if "error" in found:
            raise RefusedError(found["error"])
        compiled = read_module(optimized.read_bytes()) if optimized else None
        return Program(**found, optimized=compiled)

    def run(
        self, module: bytes, inputs: pathlib.Path, updates: Mapping[int, int], steps: int
    ) -> dict[str, dict[str, float]]:
        """Runs ``worker.run_steps`` on this machine's CPU.

        Args:
          module: serialized HLO module, for one replica on each virtual CPU.
          inputs: NumPy archive of the inputs.
          updates: maps the module's results to the parameters that they replace.
          steps: their number.
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
    """Returns ``TPU`` or ``GPU`` without starting a compiler.

    Raises:
      UserError: if the topology is neither's, or larger than any pod, which would keep libtpu busy
        for minutes.
    """
    if gpu_topology(topology) is not None:
        return "GPU"
    kind, _, size = topology.partition(":")
    if not re.match(r"v\d", kind):
        raise no_topology(topology, f"no kind {kind!r}")
    chip = ACCELERATORS.get(f"tpu-{kind}")
    chips = math.prod(map(int, re.findall(r"\d+", size)))
    if not chips:  # would crash libtpu
        raise no_topology(topology, "an axis has 0 chips")
    if chip is not None and chips > chip.most_chips:
        raise no_topology(topology, f"a {chip.title} has at most {chip.most_chips:,} chips")
    return "TPU"


@contextlib.contextmanager
def start_compiler(platform: str, virtual_cpus: int = 1) -> Iterator[Compiler]:
    """Runs the compiler of a platform, ``TPU`` or ``GPU``, while the context is open.

    Its CPU provides ``virtual_cpus`` devices.

    Raises:
      UserError: if it is not installed or cannot be started; in the context, if it fails.
    """
    require_packages(platform)
    command = module_command("imagenet_fast.lab.xla_compile.worker")
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
      UserError: if one is missing or incomplete.
    """
    try:
        versions = {name: importlib.metadata.version(name) for name in _PACKAGES[platform]}
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError(
            f"compiling for {platform}s needs {error.name}, which is not installed: "
            f"{how_to_install('compile')} installs it, preferably into a separate environment "
            "(tools/install.sh DIRECTORY compile)"
        ) from None
    if platform == "GPU":
        find_cuda()
    return versions


def find_cuda() -> pathlib.Path:
    """Returns the folder of ptxas and libdevice that this package's extra installs.

    Raises:
      UserError: if one of them is missing. XLA would silently use any other CUDA of this machine.
    """
    package = _PACKAGES["GPU"][-1]
    folder = pathlib.Path(str(importlib.metadata.distribution(package).locate_file(_CUDA)))
    for name in _CUDA_FILES:
        if not (folder / name).is_file():
            raise UserError(
                f"{package} is installed without {folder / name}, and XLA would use any other CUDA "
                "of this machine instead: reinstall it (pip install --force-reinstall "
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
    """Returns the first line of a message, without the parts for the compiler's developers."""
    line = next((line for line in message.splitlines() if line.strip()), "no reason given")
    for part in _INTERNAL:
        line = part.sub("", line)
    return line.strip()
