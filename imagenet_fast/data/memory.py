"""How the C library keeps the memory of images that are done with."""

from __future__ import annotations

import ctypes
import os
import platform

# Of mallopt, in malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
# Those of threads, on machines of 64 bits.
_HEAP_BYTES = 64 * 2**20
_OWN_SETTINGS = ("GLIBC_TUNABLES", "MALLOC_TOP_PAD_", "MALLOC_TRIM_THRESHOLD_")


def keep_freed_memory() -> bool:
    """Has glibc keep what is freed for the next image, in all of this process.

    A thread that decodes takes and frees megabytes again and again. glibc gives a heap back to the
    system as soon as it is empty, so that the next image's pages are mapped and filled with zeros
    once more, while the other threads wait for the process' one table of pages. A heap's size as
    padding ends that (``heap_trim`` in glibc's ``arena.c``). The other two settings are those at
    which glibc arrives by itself, which it stops doing when one is set.

    Returns:
      Whether that was done: not with another C library, nor if the environment has settings of its
      own (``GLIBC_TUNABLES``, ``MALLOC_TOP_PAD_`` or ``MALLOC_TRIM_THRESHOLD_``).
    """
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in _OWN_SETTINGS):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = {
        _M_TOP_PAD: _HEAP_BYTES,
        _M_MMAP_THRESHOLD: _HEAP_BYTES // 2,
        _M_TRIM_THRESHOLD: _HEAP_BYTES,
    }
    results = [mallopt(name, value) for name, value in settings.items()]
    return all(results)
