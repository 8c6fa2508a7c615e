"""NVIDIA's driver and CUDA libraries: those that TensorFlow was built for, and those it finds.

TensorFlow registers no GPU at all unless it can load every library of
``TryDlopenCUDALibraries`` (``xla/tsl/platform/default/dlopen_checker.cc``), and does not say which
one it misses. It loads each by ``LoadDynamicLibrary`` (``tsl/platform/default/load_library.cc``),
as does ``tf.load_op_library``: so what that finds here is what TensorFlow finds, in
``LD_LIBRARY_PATH``, in the folders of pip's packages ``nvidia-*`` that ``RUNPATH`` of
``libtensorflow_framework.so`` names, and where the system looks.
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
# Those of TryDlopenCUDALibraries, in its order, with the versions of CUDA 12 for installs whose
# header is missing.
_REQUIRED = {
    "cudart": "12",
    "cublas": "12",
    "cublasLt": "12",
    "cufft": "11",
    "cusolver": "11",
    "cusparse": "12",
    "cudnn": "9",
}
# Without it TensorFlow finds the GPUs, but cannot all-reduce among them.
_NCCL = "libnccl.so.2"
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE of cuda.h
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_...


@dataclasses.dataclass(frozen=True)
class Build:
    """What TensorFlow was built for.

    Attributes:
      cuda: version of CUDA, such as ``12.5.1``; empty: built without.
      cudnn: version of cuDNN, such as ``9``.
      capabilities: compute capabilities that it has code for, (major, minor), from the lowest.
    """

    cuda: str = ""
    cudnn: str = ""
    capabilities: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Driver:
    """NVIDIA's driver, as this process finds it.

    Attributes:
      version: of the kernel's module, such as ``550.54.14``; empty: unknown.
      cuda: the newest CUDA that it supports, such as ``12.4``; empty: unknown.
      error: why it cannot be used; empty: it can.
      hides_all: whether it works, but shows this process no GPU.
      capabilities: compute capability of each GPU that it shows, (major, minor).
    """

    version: str = ""
    cuda: str = ""
    error: str = ""
    hides_all: bool = False
    capabilities: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Library:
    """A library that TensorFlow loads when it runs.

    Attributes:
      name: of its file, such as ``libcudnn.so.9``.
      version: that was found.
      path: where it was found.
      error: why it does not load; empty: it does.
      required: whether TensorFlow registers no GPU without it.
    """

    name: str
    version: str = ""
    path: str = ""
    error: str = ""
    required: bool = True


class Problem(NamedTuple):
    """Something that keeps TensorFlow from using a GPU.

    Attributes:
      reason: what is wrong.
      advice: what to do.
    """

    reason: str
    advice: str

    def __str__(self) -> str:
        """For an error message."""
        return f"{self.reason}; {self.advice}"


def built_for() -> Build:
    """Returns what TensorFlow was built for."""
    info = tf.sysconfig.get_build_info()
    if not info.get("is_cuda_build"):
        return Build()
    told = [re.search(r"(\d+)(\d)", name) for name in info.get("cuda_compute_capabilities", ())]
    return Build(
        cuda=info.get("cuda_version", ""),
        cudnn=info.get("cudnn_version", ""),
        capabilities=tuple(sorted((int(own[1]), int(own[2])) for own in told if own)),
    )


def find_driver() -> Driver:
    """Returns what is to be known of the driver; starts it if TensorFlow has not done so."""
    version = _module_version()
    try:
        library = open_library(_DRIVER_LIBRARY)
    except OSError as error:
        return Driver(version, error=f"{error}")
    number = ctypes.c_int()
    cuda = ""
    if library.cuDriverGetVersion(ctypes.byref(number)) == 0:
        cuda = _cuda_version(number.value)
    status = library.cuInit(0)
    if status == _NO_DEVICE:
        return Driver(version, cuda, hides_all=True)
    if status:
        return Driver(version, cuda, error=_driver_error(library, status))
    count = ctypes.c_int()
    library.cuDeviceGetCount(ctypes.byref(count))
    found = tuple(_capability(library, device) for device in range(count.value))
    return Driver(version, cuda, hides_all=not found, capabilities=found)


def device_uuids() -> list[str]:
    """Returns the UUID of each device that the driver shows this process, in CUDA's order.

    Unlike CUDA's numbers, which begin at 0 in each container or bound Slurm task, they tell GPUs
    and their MIG instances apart. Empty where the driver does not say.
    """
    try:
        library = open_library(_DRIVER_LIBRARY)
        count, uuids = ctypes.c_int(), []
        if library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count)):
            return []
        for ordinal in range(count.value):
            device, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
            if library.cuDeviceGet(ctypes.byref(device), ordinal):
                return []
            if library.cuDeviceGetUuid_v2(uuid, device):
                return []
            uuids.append(bytes(uuid).hex())
    except (OSError, AttributeError):  # no driver, or one that is too old for the function
        return []
    return uuids


def find_libraries() -> list[Library]:
    """Returns the libraries that TensorFlow loads, each as it is found or with the reason."""
    versions = {**_REQUIRED, **_header_versions()}
    kinds = {kind: f"lib{kind}.so.{versions[kind]}" for kind in _REQUIRED}
    found = [_find(name, kind, required=True) for kind, name in kinds.items()]
    return [*found, _find(_NCCL, "nccl", required=False)]


def preload_libraries() -> None:
    """Loads those CUDA libraries of pip's packages that TensorFlow does not look for there.

    To be called before TensorFlow lists devices for the first time. TensorFlow 2.21.0's ``RUNPATH``
    lacks the folder of cuSOLVER (tensorflow pull request 112973), so that with the packages that
    ``tensorflow[and-cuda]`` installs it registers no GPU. A library that has been loaded is found
    by its name. Where there is no driver nothing is done.
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
            with contextlib.suppress(OSError):  # why_no_gpu names it, and says why
                ctypes.CDLL(str(path))


def why_no_gpu() -> str:
    """Returns why TensorFlow sees none of the GPUs that the driver shows, and what to do."""
    return f"{find_problem()}."


def find_problem() -> Problem:
    """Returns the first thing that keeps TensorFlow from seeing the GPUs of this machine.

    In the order in which TensorFlow comes to it: its build, the driver (``cuInit``), the devices
    that the driver shows (``VisibleDeviceCount``), the libraries (``MaybeTryDlopenGPULibraries``),
    and their compute capability (all in ``GetValidDeviceIds`` of ``gpu_device.cc``).
    """
    build = built_for()
    if not build.cuda:
        return Problem("this TensorFlow is built without CUDA", f"{INSTALL}, in a new environment")
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown in ("", "-1"):
        return Problem(f"CUDA_VISIBLE_DEVICES={shown!r} hides them", "unset it")
    driver = find_driver()
    problem = driver_problem(driver, build)
    if problem:
        return problem
    if driver.hides_all and shown is not None:
        return Problem(f"CUDA_VISIBLE_DEVICES={shown!r} names no GPU of this machine", "unset it")
    if driver.hides_all:
        return Problem(
            "the driver shows this process no GPU",
            "see whether `nvidia-smi` lists any here, and give the container or the job GPUs",
        )
    missing = [library for library in find_libraries() if library.required and library.error]
    if missing:
        names = " and ".join(library.name for library in missing)
        return Problem(f"TensorFlow cannot load {names} ({missing[0].error})", how_to_mend(missing))
    if build.capabilities and max(driver.capabilities) < build.capabilities[0]:
        return Problem(
            f"their compute capability is {_dotted(max(driver.capabilities))}, and this TensorFlow "
            f"is built for {_dotted(build.capabilities[0])} and newer",
            "use an older TensorFlow",
        )
    return Problem(
        "the driver and all CUDA libraries load now",
        "start again with TF_CPP_MIN_LOG_LEVEL=0 to see what TensorFlow says",
    )


def driver_problem(driver: Driver, build: Build) -> Problem | None:
    """Returns what is wrong with the driver, if anything.

    A driver for any 12.x runs programs of all of 12 (CUDA's minor version compatibility).
    """
    if driver.cuda and _major(driver.cuda) < _major(build.cuda):
        own = f"the driver {driver.version}".strip()
        return Problem(
            f"{own} supports CUDA {driver.cuda}, and this TensorFlow is built for {build.cuda}",
            "update the driver",
        )
    if driver.error:
        return Problem(
            f"the driver cannot be used ({driver.error})",
            "in a container, start it with the NVIDIA Container Toolkit (docker run --gpus=all); "
            "elsewhere reinstall the driver, or restart the machine after an update",
        )
    return None


def how_to_mend(missing: Sequence[Library]) -> str:
    """Returns what to do about libraries that do not load."""
    folders = [path.parent for own in missing if (path := _in_packages(own.name))]
    if len(folders) < len(missing):
        return INSTALL
    return (
        "add the folders in which TensorFlow does not look for them to LD_LIBRARY_PATH: "
        f"{':'.join(map(str, folders))}"
    )


def open_library(name: str) -> ctypes.CDLL:
    """Returns a library that TensorFlow's own loader finds.

    Raises:
      OSError: if it does not load, with the loader's reason.
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
    """Returns the versions in the names of libraries, by kind, that TensorFlow was built with."""
    header = _find_header()
    if not header.exists():
        return {}
    defined = dict(re.findall(r'^#define TF_(\w+)_VERSION "(\d+)"', header.read_text(), re.M))
    found = {kind: defined[kind.upper()] for kind in _REQUIRED if kind.upper() in defined}
    # cuBLAS is two libraries of one version.
    return {**found, "cublasLt": found["cublas"]} if "cublas" in found else found


def _in_packages(name: str) -> pathlib.Path | None:
    """Returns the path of a library in pip's packages ``nvidia-*``, which lie beside TensorFlow."""
    packages = pathlib.Path(tf.__file__).parents[1] / "nvidia"
    return next(iter(sorted(packages.glob(f"*/lib/{name}"))), None)


def _module_version() -> str:
    """Returns the version of the driver's kernel module; empty if the system does not say."""
    try:
        text = _MODULE_VERSION.read_text()
    except OSError:
        return ""
    found = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d+(?:\.\d+)+)", text)
    return found[1] if found else ""


def _driver_error(library: ctypes.CDLL, status: int) -> str:
    text = ctypes.c_char_p()
    library.cuGetErrorString(status, ctypes.byref(text))
    return f"cuInit fails with error {status}, {(text.value or b'unknown').decode()}"


def _capability(library: ctypes.CDLL, device: int) -> tuple[int, int]:
    numbers = []
    for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR):
        number = ctypes.c_int()
        library.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
        numbers.append(number.value)
    return numbers[0], numbers[1]


def _path_of(name: str) -> str:
    """Returns the path of a library that is loaded; empty if the system does not say."""
    try:
        maps = pathlib.Path("/proc/self/maps").read_text()
    except OSError:
        return ""
    found = re.search(rf"\s(/\S*/{re.escape(name)}[.\d]*)$", maps, re.MULTILINE)
    return found[1] if found else ""


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _runtime_version(library: ctypes.CDLL) -> str:
    number = ctypes.c_int()
    library.cudaRuntimeGetVersion(ctypes.byref(number))
    return _cuda_version(number.value)


def _nccl_version(library: ctypes.CDLL) -> str:
    number = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(number))
    return _dotted((number.value // 10000, number.value // 100 % 100, number.value % 100))


def _cudnn_version(library: ctypes.CDLL) -> str:
    library.cudnnGetVersion.restype = ctypes.c_size_t
    number = library.cudnnGetVersion()
    # cuDNN 9 left more room for its minor version.
    major = 10000 if number >= 90000 else 1000
    return _dotted((number // major, number % major // 100, number % 100))


def _version_by(function: str) -> Callable[[ctypes.CDLL], str]:
    """Returns what asks a library by ``cublasGetProperty`` and its like."""

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
    "cudart": _runtime_version,
    "cublas": _version_by("cublasGetProperty"),
    "cublasLt": _version_by("cublasLtGetProperty"),
    "cufft": _version_by("cufftGetProperty"),
    "cusolver": _version_by("cusolverGetProperty"),
    "cusparse": _version_by("cusparseGetProperty"),
    "cudnn": _cudnn_version,
    "nccl": _nccl_version,
}
