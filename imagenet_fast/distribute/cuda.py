"""NVIDIA's driver and CUDA libraries: the versions TensorFlow needs, and those it finds.

TensorFlow registers no GPU unless it can load every library of ``TryDlopenCUDALibraries``
(``xla/tsl/platform/default/dlopen_checker.cc``), and does not report which one is missing. It loads
them with ``LoadDynamicLibrary`` (``tsl/platform/default/load_library.cc``), as
``tf.load_op_library`` does, so this module finds what TensorFlow finds: in ``LD_LIBRARY_PATH``, in
the folders of pip's ``nvidia-*`` packages in the ``RUNPATH`` of ``libtensorflow_framework.so``, and
in the system's folders.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import os
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

INSTALL = "install the CUDA libraries with `tools/install.sh .venv digits,gpu`"

_DRIVER_LIBRARY = "libcuda.so.1"
_MODULE_VERSION = pathlib.Path("/proc/driver/nvidia/version")
# The libraries of TryDlopenCUDALibraries, in its order, with the versions for CUDA 12, in case
# TensorFlow's header is missing.
_REQUIRED = {
    "cudart": "12",
    "cublas": "12",
    "cublasLt": "12",
    "cufft": "11",
    "cusolver": "11",
    "cusparse": "12",
    "cudnn": "9",
}
# Without NCCL, TensorFlow finds the GPUs, but cannot all-reduce among them.
_NCCL = "libnccl.so.2"
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE of cuda.h
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_...


@dataclasses.dataclass(frozen=True)
class Build:
    """The CUDA build of TensorFlow.

    Attributes:
      cuda: the CUDA version, such as ``12.5.1``; empty: built without CUDA.
      cudnn: the cuDNN version, such as ``9``.
      capabilities: supported compute capabilities, (major, minor), in ascending order.
      machine_code: those of them with machine code; the others have PTX.
    """

    cuda: str = ""
    cudnn: str = ""
    capabilities: tuple[tuple[int, int], ...] = ()
    machine_code: tuple[tuple[int, int], ...] = ()

    def has_machine_code(self, capability: tuple[int, ...]) -> bool:
        """Whether there is some for a GPU: that of its major capability, and no higher minor."""
        return any(
            major == capability[0] and (major, minor) <= capability
            for major, minor in self.machine_code
        )


@dataclasses.dataclass(frozen=True)
class Driver:
    """NVIDIA's driver, as seen by this process.

    Attributes:
      version: the version of the kernel module, such as ``550.54.14``; empty: unknown.
      cuda: the newest supported CUDA, such as ``12.4``; empty: unknown.
      error: why the driver cannot be used; empty: it can.
      hides_all: whether it works, but no GPU is visible to this process.
      capabilities: the compute capability of each visible GPU, (major, minor).
    """

    version: str = ""
    cuda: str = ""
    error: str = ""
    hides_all: bool = False
    capabilities: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Library:
    """A library that TensorFlow loads at run time.

    Attributes:
      name: the file name, such as ``libcudnn.so.9``.
      version: the loaded version.
      path: the path of the loaded file.
      error: why it cannot be loaded; empty: it can.
      required: whether TensorFlow registers no GPU without it.
    """

    name: str
    version: str = ""
    path: str = ""
    error: str = ""
    required: bool = True


class Problem(NamedTuple):
    """A problem that prevents TensorFlow from using a GPU, and what to do."""

    reason: str
    advice: str

    def __str__(self) -> str:
        """Returns both, for an error message."""
        return f"{self.reason}; {self.advice}"


def built_for() -> Build:
    """Returns the CUDA build of TensorFlow.

    Of 2.22, ``get_build_info`` has no versions and no compute capabilities.
    """
    info = tf.sysconfig.get_build_info()
    if not info.get("is_cuda_build"):
        return Build()
    if "cuda_version" in info:
        versions = {"CUDA": info["cuda_version"], "CUDNN": info.get("cudnn_version", "")}
    else:
        versions = _header_versions()
    names = info.get("cuda_compute_capabilities", ())

    def capabilities(kind: str) -> tuple[tuple[int, int], ...]:
        matches = (re.fullmatch(rf"{kind}_(\d+)(\d)[a-z]?", name) for name in names)
        return tuple(sorted((int(match[1]), int(match[2])) for match in matches if match))

    return Build(
        cuda=versions.get("CUDA", ""),
        cudnn=versions.get("CUDNN", ""),
        capabilities=capabilities("(?:sm|compute)"),
        machine_code=capabilities("sm"),
    )


def find_driver() -> Driver:
    """Returns the driver's state; initializes it if TensorFlow has not done so."""
    version = module_version()
    try:
        library = open_library(_DRIVER_LIBRARY)
    except OSError as error:
        return Driver(version, error=f"{error}")
    number = _number(library.cuDriverGetVersion)
    cuda = _cuda_version(number) if number else ""
    status = library.cuInit(0)
    if status == _NO_DEVICE:
        return Driver(version, cuda, hides_all=True)
    if status:
        return Driver(version, cuda, error=_driver_error(library, status))
    count = _number(library.cuDeviceGetCount)
    capabilities = tuple(_capability(library, device) for device in range(count))
    return Driver(version, cuda, hides_all=not capabilities, capabilities=capabilities)


def device_uuids() -> list[str]:
    """Returns the UUIDs of the devices visible to this process, in CUDA's order.

    They identify GPUs and MIG instances, unlike CUDA's device numbers, which start at 0 in each
    container and each bound Slurm task. Empty if the driver does not report them.
    """
    try:
        library = open_library(_DRIVER_LIBRARY)
        uuids: list[str] = []
        if library.cuInit(0):
            return []
        for ordinal in range(_number(library.cuDeviceGetCount)):
            device, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
            failed = library.cuDeviceGet(ctypes.byref(device), ordinal)
            if failed or library.cuDeviceGetUuid_v2(uuid, device):
                return []
            uuids.append(bytes(uuid).hex())
    except (OSError, AttributeError):  # No driver, or one without this function.
        return []
    return uuids


def find_libraries() -> list[Library]:
    """Returns the libraries that TensorFlow loads, with the error of those that fail to load."""
    built = _header_versions()
    libraries = []
    for kind, version in _REQUIRED.items():
        # cuBLAS consists of two libraries with the same version.
        own = built.get("CUBLAS" if kind == "cublasLt" else kind.upper(), version)
        libraries.append(_find(f"lib{kind}.so.{own}", kind, required=True))
    return [*libraries, _find(_NCCL, "nccl", required=False)]


def preload_libraries() -> None:
    """Loads CUDA libraries of pip's packages that TensorFlow does not search for there.

    Call it before TensorFlow first lists devices. The ``RUNPATH`` of TensorFlow 2.21.0 lacks the
    folder of cuSOLVER (tensorflow pull request 112973), so that with the packages of
    ``tensorflow[and-cuda]`` it registers no GPU. The dynamic linker finds libraries that are
    already loaded. Without a driver this function does nothing.
    """
    if not built_for().cuda:
        return
    try:
        open_library(_DRIVER_LIBRARY)
    except OSError:
        return
    for library in find_libraries():
        path = _in_packages(library.name) if library.error else None
        if path:
            with contextlib.suppress(OSError):  # find_problem() reports it.
                ctypes.CDLL(str(path))


def find_problem() -> Problem:
    """Returns the first problem that prevents TensorFlow from seeing this machine's GPUs.

    In TensorFlow's order: its build, the driver (``cuInit``), the visible devices
    (``VisibleDeviceCount``), the libraries (``MaybeTryDlopenGPULibraries``) and the compute
    capability (all in ``GetValidDeviceIds`` of ``gpu_device.cc``).
    """
    build = built_for()
    if not build.cuda:
        return Problem("this TensorFlow is built without CUDA", f"{INSTALL}, in a new environment")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible in ("", "-1"):
        return Problem(f"CUDA_VISIBLE_DEVICES={visible!r} hides them", "unset it")
    driver = find_driver()
    problem = driver_problem(driver, build)
    if problem:
        return problem
    if driver.hides_all and visible is not None:
        return Problem(f"CUDA_VISIBLE_DEVICES={visible!r} names no GPU of this machine", "unset it")
    if driver.hides_all:
        return Problem(
            "no GPU is visible to this process",
            "check whether `nvidia-smi` lists any here, and give the container or the job GPUs",
        )
    missing = [library for library in find_libraries() if library.required and library.error]
    if missing:
        names = " and ".join(library.name for library in missing)
        return Problem(f"TensorFlow cannot load {names} ({missing[0].error})", how_to_fix(missing))
    if build.capabilities and max(driver.capabilities) < build.capabilities[0]:
        return Problem(
            f"their compute capability is {_dotted(max(driver.capabilities))}, but this TensorFlow "
            f"is built for {_dotted(build.capabilities[0])} and newer",
            "use an older TensorFlow",
        )
    return Problem(
        "the driver and all CUDA libraries load now",
        "start again with TF_CPP_MIN_LOG_LEVEL=0 to see TensorFlow's messages",
    )


def driver_problem(driver: Driver, build: Build) -> Problem | None:
    """Returns the driver's problem, if any.

    A driver for any 12.x runs programs for all 12.x (CUDA's minor version compatibility).
    """
    if driver.cuda and _major(driver.cuda) < _major(build.cuda):
        name = f"the driver {driver.version}".strip()
        return Problem(
            f"{name} supports CUDA {driver.cuda}, but this TensorFlow is built for {build.cuda}",
            "update the driver",
        )
    if driver.error:
        return Problem(
            f"the driver cannot be used ({driver.error})",
            "in a container, start it with the NVIDIA Container Toolkit (docker run --gpus=all); "
            "elsewhere reinstall the driver, or restart the machine after an update",
        )
    return None


def how_to_fix(missing: Sequence[Library]) -> str:
    """Returns the advice for libraries that cannot be loaded."""
    folders = [path.parent for library in missing if (path := _in_packages(library.name))]
    if len(folders) < len(missing):
        return INSTALL
    return f"add their folders to LD_LIBRARY_PATH: {':'.join(map(str, folders))}"


def open_library(name: str) -> ctypes.CDLL:
    """Loads a library with TensorFlow's own loader.

    Raises:
      OSError: if it cannot be loaded, with the loader's reason.
    """
    try:
        tf.load_op_library(name)
    except tf.errors.OpError as error:
        raise OSError(error.message) from None
    return ctypes.CDLL(name, mode=os.RTLD_NOLOAD)


def _find(name: str, kind: str, required: bool) -> Library:
    try:
        library = open_library(name)
    except OSError as error:
        return Library(name, error=str(error), required=required)
    return Library(name, _VERSION_OF[kind](library), _path_of(name), required=required)


def _find_header() -> pathlib.Path:
    return pathlib.Path(tf.sysconfig.get_include(), "third_party", "gpus", "cuda", "cuda_config.h")


@functools.cache
def _header_versions() -> dict[str, str]:
    """Returns the versions that TensorFlow's header has, such as CUDNN's, as in file names."""
    header = _find_header()
    if not header.exists():
        return {}
    return dict(re.findall(r'^#define TF_(\w+)_VERSION "(\d[\d.]*)"', header.read_text(), re.M))


def _in_packages(name: str) -> pathlib.Path | None:
    """Returns the path of a library in pip's ``nvidia-*`` packages, beside TensorFlow's."""
    packages = pathlib.Path(tf.__file__).parents[1] / "nvidia"
    return next(iter(sorted(packages.glob(f"*/lib/{name}"))), None)


def module_version() -> str:
    """Returns the version of the driver's kernel module; empty if unknown."""
    try:
        text = _MODULE_VERSION.read_text()
    except OSError:
        return ""
    match = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d+(?:\.\d+)+)", text)
    return match[1] if match else ""


def _driver_error(library: ctypes.CDLL, status: int) -> str:
    text = ctypes.c_char_p()
    library.cuGetErrorString(status, ctypes.byref(text))
    return f"cuInit failed with error {status}, {(text.value or b'unknown').decode()}"


def _capability(library: ctypes.CDLL, device: int) -> tuple[int, int]:
    ask = library.cuDeviceGetAttribute
    return _number(ask, _CAPABILITY_MAJOR, device), _number(ask, _CAPABILITY_MINOR, device)


def _path_of(name: str) -> str:
    """Returns the path of a loaded library; empty if unknown."""
    try:
        maps = pathlib.Path("/proc/self/maps").read_text()
    except OSError:
        return ""
    match = re.search(rf"\s(/\S*/{re.escape(name)}[.\d]*)$", maps, re.MULTILINE)
    return match[1] if match else ""


def _number(function: Callable[..., int], *arguments: int) -> int:
    """Returns the number that a C function stores at its first argument; 0 if it fails."""
    number = ctypes.c_int()
    function(ctypes.byref(number), *arguments)
    return number.value


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _nccl_version(library: ctypes.CDLL) -> str:
    number = _number(library.ncclGetVersion)
    return _dotted((number // 10000, number // 100 % 100, number % 100))


def _cudnn_version(library: ctypes.CDLL) -> str:
    library.cudnnGetVersion.restype = ctypes.c_size_t
    number = library.cudnnGetVersion()
    # cuDNN 9 encodes its version with another factor.
    major = 10000 if number >= 90000 else 1000
    return _dotted((number // major, number % major // 100, number % 100))


def _version_by(function: str) -> Callable[[ctypes.CDLL], str]:
    """Returns a function that reads a version by ``cublasGetProperty`` or a similar function."""

    def version(library: ctypes.CDLL) -> str:
        numbers = []
        for part in range(3):  # MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL
            number = ctypes.c_int()
            getattr(library, function)(part, ctypes.byref(number))
            numbers.append(number.value)
        return _dotted(numbers)

    return version


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def _dotted(numbers: tuple[int, ...] | list[int]) -> str:
    return ".".join(map(str, numbers))


_VERSION_OF: dict[str, Callable[[ctypes.CDLL], str]] = {
    "cudart": lambda library: _cuda_version(_number(library.cudaRuntimeGetVersion)),
    "cublas": _version_by("cublasGetProperty"),
    "cublasLt": _version_by("cublasLtGetProperty"),
    "cufft": _version_by("cufftGetProperty"),
    "cusolver": _version_by("cusolverGetProperty"),
    "cusparse": _version_by("cusparseGetProperty"),
    "cudnn": _cudnn_version,
    "nccl": _nccl_version,
}
