"""The versions of Python and its packages, of NVIDIA's driver, CUDA and cuDNN."""

from __future__ import annotations

import os
import platform

import keras
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.keras_check import major_minor
from imagenet_fast.base.shared_options import SharedOptions
from imagenet_fast.distribute import cuda
from imagenet_fast.distribute.gpus import cpu_is_requested, installed_gpus
from imagenet_fast.distribute.options import ClusterOptions
from imagenet_fast.doctor.finding import Finding, ok, refused, slow, wrong

# TensorFlow 2.21's compiler asks for fused convolutions that cuDNN 9.5.1 does not have, on T4, A10G
# and L4; 9.24 has them (aws/deep-learning-containers, pull request 6418).
_CUDNN_FLOOR = (9, 24)
_FIRST_WITH_FLOOR = (2, 21)


def check_packages(_: SharedOptions) -> list[Finding]:
    """Returns the versions that importing TensorFlow and Keras has checked, and what slows it."""
    findings = [
        ok("Python", platform.python_version()),
        ok("TensorFlow", tf.__version__),
        ok("Keras", keras.__version__),
    ]
    value = os.environ.get("TF_USE_LEGACY_KERAS")
    if value in ("1", "true", "True"):  # as TensorFlow reads it
        found = f"TF_USE_LEGACY_KERAS={value}: TensorFlow also imports tf_keras, which is unused"
        findings.append(slow("tf_keras", found, "unset TF_USE_LEGACY_KERAS"))
    return findings


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
            return [ok("CUDA", f"no GPU is requested; TensorFlow is {built}", **vars(build))]
        return [ok("CUDA", f"TensorFlow is {built}", **vars(build)), refused("driver", error)]
    if not gpus:
        return [ok("CUDA", f"no NVIDIA GPU here; TensorFlow is {built}", **vars(build))]
    if not build.cuda:
        return [wrong("CUDA", f"TensorFlow is {built}", cuda.INSTALL)]
    findings = [ok("CUDA", f"TensorFlow is {built}", **vars(build)), _driver(build)]
    libraries = cuda.find_libraries()
    loaded = [library for library in libraries if not library.error]
    if not loaded:
        names = ", ".join(library.name for library in libraries)
        found = f"none loads, and TensorFlow sees no GPU without them: {names}"
        findings.append(wrong("CUDA libraries", found, cuda.how_to_fix(libraries)))
        return findings
    found = ", ".join(f"{_short(library.name)} {library.version}" for library in loaded)
    numbers = {
        library.name: {"version": library.version, "path": library.path} for library in loaded
    }
    findings.append(ok("CUDA libraries", found, **numbers))
    for library in libraries:
        if library.error:
            lost = "TensorFlow sees no GPU" if library.required else "no NCCL"
            found = f"does not load: {library.error}; {lost} without it"
            findings.append(wrong(library.name, found, cuda.how_to_fix([library])))
    return findings + _cudnn(loaded)


def _driver(build: cuda.Build) -> Finding:
    driver = cuda.find_driver()
    problem = cuda.driver_problem(driver, build)
    if problem:
        return wrong("driver", problem.reason, problem.advice)
    found = ", ".join(filter(None, [driver.version, f"supports CUDA up to {driver.cuda}"]))
    return ok("driver", found, version=driver.version, cuda=driver.cuda)


def _cudnn(loaded: list[cuda.Library]) -> list[Finding]:
    """Returns a finding if cuDNN is too old."""
    if major_minor(tf.__version__) < _FIRST_WITH_FLOOR:
        return []
    floor = ".".join(map(str, _CUDNN_FLOOR))
    return [
        wrong(
            "cuDNN",
            f"{library.version} of {library.path or library.name}, below {floor}: convolutions of "
            f"TensorFlow {tf.__version__} fail on common GPUs",
            f"pip install 'nvidia-cudnn-cu12>={floor}', and remove other cuDNNs from "
            "LD_LIBRARY_PATH",
            version=library.version,
        )
        for library in loaded
        if library.name.startswith("libcudnn.") and major_minor(library.version) < _CUDNN_FLOOR
    ]


def _short(name: str) -> str:
    return name.partition(".")[0].removeprefix("lib")
