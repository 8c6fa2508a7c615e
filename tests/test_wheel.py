"""The sdist and the wheel that is built from it contain what the package reads at run time."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILD = "import setuptools.build_meta as b; b.build_{0}('{1}')"


def build(kind, checkout, output):
    command = [sys.executable, "-W", "ignore", "-c", BUILD.format(kind, output)]
    subprocess.run(command, cwd=checkout, check=True, capture_output=True)
    (built,) = output.iterdir()
    return built


def test_a_wheel_built_from_the_sdist_has_all_files(tmp_path):
    checkout = tmp_path / "checkout"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "imagenet_fast", checkout / "imagenet_fast", ignore=ignore)
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, checkout)
    (checkout / "flags").symlink_to((ROOT / "flags").readlink())
    for name in ("sdist", "unpacked", "wheel"):
        (tmp_path / name).mkdir()
    with tarfile.open(build("sdist", checkout, tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    recipe = (ROOT / "imagenet_fast" / "flags" / "digits.flags").read_text()
    assert (unpacked / "flags" / "digits.flags").read_text() == recipe
    with zipfile.ZipFile(build("wheel", unpacked, tmp_path / "wheel")) as archive:
        packed = set(archive.namelist())
    files = (path for path in (checkout / "imagenet_fast").rglob("*") if path.is_file())
    assert {str(path.relative_to(checkout)) for path in files} <= packed
    assert "imagenet_fast/flags/digits.flags" in packed and "imagenet_fast/py.typed" in packed
