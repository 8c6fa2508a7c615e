"""The versions of Python and its packages, of NVIDIA's driver, CUDA and cuDNN."""

from __future__ import annotations

import platform

import tensorflow as tf
import tf_keras as keras

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.shared_options import SharedOptions
from imagenet_fast.distribute import cuda
from imagenet_fast.distribute.gpus import cpu_is_requested, installed_gpus
from imagenet_fast.distribute.options import ClusterOptions
from imagenet_fast.doctor.finding import Finding, ok, refused, wrong

# TensorFlow 2.21's compiler asks for fused convolutions that cuDNN 9.5.1 does not have, on T4, A10G
# and L4; 9.24 has them (aws/deep-learning-containers, pull request 6418).
_CUDNN_FLOOR = (9, 24)
_FIRST_WITH_FLOOR = (2, 21)


def check_packages(_: SharedOptions) -> list[Finding]:
    """Checks that tf_keras is that of this TensorFlow."""
    found = [ok("Python", platform.python_version()), ok("TensorFlow", tf.__version__)]
    if _numbers(tf.__version__)[:2] == _numbers(keras.__version__)[:2]:
        return [*found, ok("tf_keras", keras.__version__)]
    major, minor = _numbers(tf.__version__)[:2]
    told = f"{keras.__version__}, which is not for TensorFlow {tf.__version__}"
    advice = f"pip install 'tf_keras=={major}.{minor}.*'"
    return [*found, wrong("tf_keras", told, advice)]


def check_cuda(options: ClusterOptions) -> list[Finding]:
    """Checks the driver and the CUDA libraries against what TensorFlow was built for."""
    build = cuda.built_for()
    built = f"built for CUDA {build.cuda} and cuDNN {build.cudnn}"
    if not build.cuda:
        built = "built without CUDA"
    try:
        gpus = installed_gpus()
    except UserError as error:
        if cpu_is_requested(options.gpus):
            return [ok("CUDA", f"no GPU is asked for; TensorFlow is {built}", **vars(build))]
        return [ok("CUDA", f"TensorFlow is {built}", **vars(build)), refused("driver", error)]
    if not gpus:
        return [ok("CUDA", f"no NVIDIA GPU here; TensorFlow is {built}", **vars(build))]
    if not build.cuda:
        return [wrong("CUDA", f"TensorFlow is {built}", cuda.INSTALL)]
    findings = [ok("CUDA", f"TensorFlow is {built}", **vars(build)), _driver(build)]
    libraries = cuda.find_libraries()
    loaded = [own for own in libraries if not own.error]
    if not loaded:
        names = ", ".join(own.name for own in libraries)
        told = f"none loads, and TensorFlow sees no GPU without them: {names}"
        findings.append(wrong("CUDA libraries", told, cuda.how_to_fix(libraries)))
        return findings
    told = ", ".join(f"{_short(own.name)} {own.version}" for own in loaded)
    numbers = {own.name: {"version": own.version, "path": own.path} for own in loaded}
    findings.append(ok("CUDA libraries", told, **numbers))
    for own in libraries:
        if own.error:
            what = "TensorFlow sees no GPU without it" if own.required else "no NCCL without it"
            told = f"does not load: {own.error}; {what}"
            findings.append(wrong(own.name, told, cuda.how_to_fix([own])))
    return findings + _cudnn(loaded)


def _driver(build: cuda.Build) -> Finding:
    driver = cuda.find_driver()
    problem = cuda.driver_problem(driver, build)
    if problem:
        return wrong("driver", problem.reason, problem.advice)
    told = ", ".join(filter(None, [driver.version, f"supports CUDA up to {driver.cuda}"]))
    return ok("driver", told, version=driver.version, cuda=driver.cuda)


def _cudnn(loaded: list[cuda.Library]) -> list[Finding]:
    """Returns what is wrong with cuDNN, if anything."""
    if _numbers(tf.__version__)[:2] < _FIRST_WITH_FLOOR:
        return []
    floor = ".".join(map(str, _CUDNN_FLOOR))
    return [
        wrong(
            "cuDNN",
            f"{own.version} of {own.path or own.name}, below {floor}: convolutions of TensorFlow "
            f"{tf.__version__} fail on common GPUs",
            f"pip install 'nvidia-cudnn-cu12>={floor}', and take another cuDNN out of "
            "LD_LIBRARY_PATH",
            version=own.version,
        )
        for own in loaded
        if own.name.startswith("libcudnn.") and _numbers(own.version) < _CUDNN_FLOOR
    ]


def _short(name: str) -> str:
    return name.partition(".")[0].removeprefix("lib")


def _numbers(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version, as (2, 21, 0), without what follows them, as rc0."""
    numbers = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)
