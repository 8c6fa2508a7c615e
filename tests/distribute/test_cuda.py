"""NVIDIA's driver and CUDA libraries, with stand-ins for what this machine lacks."""

import pathlib
import shutil
import subprocess

import pytest
import tensorflow as tf

from imagenet_fast import Config
from imagenet_fast.distribute import cuda, strategy

CUDA_12 = {
    "is_cuda_build": True,
    "cuda_version": "12.5.1",
    "cudnn_version": "9",
    "cuda_compute_capabilities": ["sm_60", "sm_80", "compute_90"],
}
NO_SUCH_FILE = "cannot open shared object file: No such file or directory"


class FakeDriver:
    """libcuda.so.1, as ctypes shows it."""

    def __init__(self, cuda=12080, status=0, capabilities=((9, 0),)):
        self.cuda, self.status, self.capabilities = cuda, status, capabilities

    def cuDriverGetVersion(self, number):  # noqa: N802
        number._obj.value = self.cuda
        return 0

    def cuInit(self, _):  # noqa: N802
        return self.status

    def cuGetErrorString(self, _, text):  # noqa: N802
        text._obj.value = b"system has unsupported display driver / cuda driver combination"
        return 0

    def cuDeviceGetCount(self, number):  # noqa: N802
        number._obj.value = len(self.capabilities)
        return 0

    def cuDeviceGetAttribute(self, number, attribute, device):  # noqa: N802
        # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR is 75, ..._MINOR 76.
        number._obj.value = self.capabilities[device][attribute - 75]
        return 0


class FakeLibrary:
    """A CUDA library of such a version, by whichever function it is asked."""

    def __init__(self, number=92800, parts=(12, 9, 3)):
        self.number, self.parts = number, parts

    def __getattr__(self, function):
        def answer(*arguments):
            *part, number = arguments or (None,)
            if number is not None:
                number._obj.value = self.parts[part[0]] if part else self.number
            return self.number

        return answer


@pytest.fixture
def machine(monkeypatch):
    """Puts together a machine: machine(driver, missing=(), build=CUDA_12)."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def machine(driver, missing=(), build=CUDA_12):
        def open_library(name):
            if name in missing or (name == "libcuda.so.1" and driver is None):
                raise OSError(f"{name}: {NO_SUCH_FILE}")
            return driver if name == "libcuda.so.1" else FakeLibrary()

        monkeypatch.setattr(cuda, "open_library", open_library)
        monkeypatch.setattr(tf.sysconfig, "get_build_info", lambda: build)

    return machine


def test_libraries_are_those_without_which_tensorflow_registers_no_gpu(machine):
    """``TryDlopenCUDALibraries`` (``dlopen_checker.cc``), by ``cuda_config.h``'s versions."""
    machine(FakeDriver())
    names = {library.name: library.required for library in cuda.find_libraries()}
    cudnn = _cudnn_of_this_tensorflow()
    assert names == {
        "libcudart.so.12": True,
        "libcublas.so.12": True,
        "libcublasLt.so.12": True,
        "libcufft.so.11": True,
        "libcusolver.so.11": True,
        "libcusparse.so.12": True,
        f"libcudnn.so.{cudnn}": True,
        "libnccl.so.2": False,
    }


def _cudnn_of_this_tensorflow():
    from tensorflow.python.platform import build_info

    return build_info.build_info.get("cudnn_version", "9")  # 2.22 does not say


@pytest.mark.parametrize(
    ("driver", "missing", "text"),
    [
        (None, (), f"the driver cannot be used (libcuda.so.1: {NO_SUCH_FILE}); in a container"),
        (FakeDriver(11080), (), "the driver supports CUDA 11.8, but this TensorFlow is built for"),
        (FakeDriver(status=803), (), "(cuInit failed with error 803, system has unsupported"),
        (FakeDriver(status=100), (), "no GPU is visible to this process; check whether"),
        (FakeDriver(capabilities=()), (), "no GPU is visible to this process; check whether"),
        (
            FakeDriver(),
            ("libcufft.so.11", "libcusparse.so.12"),
            f"cannot load libcufft.so.11 and libcusparse.so.12 (libcufft.so.11: {NO_SUCH_FILE}); "
            "install the CUDA libraries with `tools/install.sh .venv digits,gpu`",
        ),
        (FakeDriver(capabilities=((3, 7), (5, 2))), (), "compute capability is 5.2, but this Ten"),
        # TensorFlow uses the supported ones, here of the lowest capability.
        (FakeDriver(capabilities=((3, 7), (6, 0))), (), "the driver and all CUDA libraries load"),
        # A missing NCCL does not hide GPUs.
        (FakeDriver(), ("libnccl.so.2",), "the driver and all CUDA libraries load now; start"),
        # CUDA's minor version compatibility.
        (FakeDriver(12020), (), "the driver and all CUDA libraries load now; start again with"),
    ],
)
def test_find_problem(machine, driver, missing, text):
    machine(driver, missing)
    assert text in str(cuda.find_problem())


@pytest.mark.parametrize(
    ("visible", "told"), [("", "hides them"), ("-1", "hides them"), ("7", "names no GPU of this")]
)
def test_cuda_visible_devices_hides_the_gpus(machine, monkeypatch, visible, told):
    machine(FakeDriver(status=100))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert str(cuda.find_problem()).startswith(f"CUDA_VISIBLE_DEVICES={visible!r} {told}")


def test_a_build_without_cuda(machine):
    machine(FakeDriver(), build={"is_cuda_build": False})
    assert "built without CUDA; install the CUDA libraries" in str(cuda.find_problem())


def test_this_machine_can_be_asked():
    """Whatever it has; TensorFlow's own loader is asked, and nothing is raised."""
    assert cuda.find_driver().error or cuda.find_driver().cuda
    assert all(own.version or own.error for own in cuda.find_libraries())
    assert str(cuda.find_problem())


@pytest.mark.parametrize(
    ("kind", "library", "version"),
    [
        ("cudart", FakeLibrary(12090), "12.9"),
        ("cudnn", FakeLibrary(92800), "9.28.0"),
        ("cudnn", FakeLibrary(90501), "9.5.1"),
        ("cudnn", FakeLibrary(8907), "8.9.7"),
        ("nccl", FakeLibrary(23203), "2.32.3"),
        ("cublas", FakeLibrary(parts=(12, 9, 3)), "12.9.3"),
    ],
)
def test_versions(kind, library, version):
    assert cuda._VERSION_OF[kind](library) == version


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.14  Release Build",
    ],
)
def test_version_of_the_kernel_module(monkeypatch, tmp_path, text):
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr(cuda, "_MODULE_VERSION", tmp_path / "version")
    assert cuda.find_driver().version == "550.54.14"


@pytest.fixture
def in_packages(monkeypatch, tmp_path):
    """A library that only the folder of a pip package has; returns its name."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    name = f"libimagenet_fast_{tmp_path.parent.name}.so.1".replace("-", "_")
    folder = tmp_path / "nvidia" / "probe" / "lib"
    folder.mkdir(parents=True)
    (tmp_path / "probe.c").write_text("int probe(void) { return 42; }\n")
    flags = ["-shared", "-fPIC", f"-Wl,-soname,{name}"]
    command = [compiler, *flags, "-o", folder / name, tmp_path / "probe.c"]
    subprocess.run(command, check=True)
    monkeypatch.setattr(tf, "__file__", str(tmp_path / "tensorflow" / "__init__.py"))
    return name


def test_libraries_that_tensorflow_does_not_look_for_are_loaded(monkeypatch, in_packages):
    """``LoadDynamicLibrary`` (``load_library.cc``) calls ``dlopen``, which finds what is loaded.

    As cuSOLVER under TensorFlow 2.21.0, whose RUNPATH lacks its folder.
    """
    with pytest.raises(OSError, match=f"{in_packages}: {NO_SUCH_FILE}"):
        cuda.open_library(in_packages)
    load = cuda.open_library

    def find_libraries():
        try:
            load(in_packages)
        except OSError as error:
            return [cuda.Library(in_packages, error=str(error))]
        return []

    monkeypatch.setattr(cuda, "find_libraries", find_libraries)
    assert cuda.how_to_fix(find_libraries()).startswith("add their folders to LD_LIBRARY_PATH")
    # Without a driver nothing is loaded: it would take time for nothing.
    monkeypatch.setattr(cuda, "open_library", _raise)
    cuda.preload_libraries()
    assert find_libraries()
    monkeypatch.setattr(cuda, "open_library", lambda name: FakeDriver())
    cuda.preload_libraries()
    assert load(in_packages).probe() == 42


def test_make_strategy_loads_them_before_it_asks_for_gpus(monkeypatch):
    """Else TensorFlow has looked, which it does once: ``CachedDsoLoader`` (``dso_loader.cc``)."""
    calls = []
    monkeypatch.setattr(strategy, "preload_libraries", lambda: calls.append("preload"))
    monkeypatch.setattr(strategy, "use_gpus", lambda *_: calls.append("use") or 0)
    strategy._visible_gpus.cache_clear()  # they are looked for once
    strategy.make_strategy(Config())
    assert calls == ["preload", "use"]


def _raise(name):
    raise OSError(name)


def test_path_of_a_loaded_library():
    # Python and TensorFlow have loaded the C library.
    path = pathlib.Path(cuda._path_of("libc.so"))
    assert path.is_file() and path.name.startswith("libc.so")
    assert cuda._path_of("libcuda_of_no_machine.so") == ""


def test_versions_of_a_build_that_does_not_say_them(monkeypatch, tmp_path):
    """As TensorFlow 2.22's: they are in the header of its build."""
    header = tmp_path / "cuda_config.h"
    header.write_text('#define TF_CUDA_VERSION "13.1.0"\n#define TF_CUDNN_VERSION "10"\n')
    monkeypatch.setattr(cuda, "_find_header", lambda: header)
    # Which keeps what it has read.
    monkeypatch.setattr(cuda, "_header_versions", cuda._header_versions.__wrapped__)
    monkeypatch.setattr(tf.sysconfig, "get_build_info", lambda: {"is_cuda_build": True})
    assert cuda.built_for() == cuda.Build("13.1.0", "10")
    monkeypatch.setattr(tf.sysconfig, "get_build_info", lambda: {"is_cuda_build": False})
    assert cuda.built_for() == cuda.Build()


def test_ptx_is_no_machine_code(monkeypatch):
    monkeypatch.setattr(tf.sysconfig, "get_build_info", lambda: CUDA_12)
    build = cuda.built_for()
    assert build.capabilities == ((6, 0), (8, 0), (9, 0))
    assert build.machine_code == ((6, 0), (8, 0))
