import os
import platform
import subprocess
import sys

import pytest

# A thread that takes and frees blocks as decoding does, and the pages mapped meanwhile.
CHURN = """
import ctypes, resource, threading
from imagenet_fast.data.malloc import keep_freed_memory

print(keep_freed_memory())
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def use(times):
    for _ in range(times):
        blocks = [libc.malloc(100_000) for _ in range(200)]
        for block in blocks:
            ctypes.memset(block, 1, 100_000)
        for block in reversed(blocks):
            libc.free(block)

def faults(times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    thread = threading.Thread(target=use, args=(times,))
    thread.start()
    thread.join()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

once = faults(1)
print((faults(21) - once) / once)
"""


def churn(**environment):
    finished = subprocess.run(
        [sys.executable, "-c", CHURN],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    kept, ratio = finished.stdout.split()
    return kept == "True", float(ratio)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_pages_are_mapped_once():
    kept, ratio = churn()
    assert kept and ratio < 1
    # With settings of the user's own, here glibc's default, nothing is changed.
    kept, ratio = churn(MALLOC_TOP_PAD_="131072")
    assert not kept and ratio > 2
