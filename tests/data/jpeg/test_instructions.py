"""Pixels of the native ops as compiled for processors with fewer instructions than this one."""

import pathlib
import subprocess
import sys

import pytest

from imagenet_fast.base import native_ops

HERE = pathlib.Path(__file__).parent
# A process cannot load the same ops twice.
TESTS = """
import sys, pytest
from imagenet_fast.base import native_ops
native_ops._INSTRUCTIONS = native_ops._INSTRUCTIONS[:int(sys.argv[1])]
sys.exit(pytest.main(["-q", *sys.argv[2:]]))
"""


@pytest.mark.usefixtures("native_ops")
@pytest.mark.parametrize("groups", [pytest.param(0, marks=pytest.mark.long), 1])
def test_pixels_are_the_same(groups):
    fewer = sum(map(len, native_ops._INSTRUCTIONS[:groups]))
    if len(native_ops.machine_flags()) <= fewer:
        pytest.skip("this processor has no more instructions")
    tests = [HERE / "test_image_ops.py"]
    if groups:
        tests.append(HERE / "test_window.py")
    command = [sys.executable, "-c", TESTS, str(groups), *map(str, tests)]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "skipped" not in done.stdout
