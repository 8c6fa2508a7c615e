"""Settings of glibc's memory allocator for threads that decode images."""

from __future__ import annotations

import ctypes
import os
import platform

# Parameters of mallopt, from malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
# The size of a thread's heap on 64-bit machines.
_HEAP_BYTES = 64 * 2**20
_VARIABLES = ("GLIBC_TUNABLES", "MALLOC_TOP_PAD_", "MALLOC_TRIM_THRESHOLD_")


def keep_freed_memory() -> bool:
    """Makes glibc reuse freed memory for the next image, in this whole process.

    A decoding thread allocates and frees megabytes for each image. glibc returns a thread's heap to
    the system as soon as it is empty, so that for the next image its pages are mapped and zeroed
    again, while other threads wait for the lock of the process's page table. A top padding of the
    heap's size prevents that (``heap_trim`` in glibc's ``arena.c``). The other two parameters are
    set to the values that glibc adapts to by itself, since setting any of them stops adaptation.

    Returns:
      Whether the parameters were set: not with another C library, nor if the user has set
      ``GLIBC_TUNABLES``, ``MALLOC_TOP_PAD_`` or ``MALLOC_TRIM_THRESHOLD_``.
    """
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in _VARIABLES):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = {
        _M_TOP_PAD: _HEAP_BYTES,
        _M_MMAP_THRESHOLD: _HEAP_BYTES // 2,
        _M_TRIM_THRESHOLD: _HEAP_BYTES,
    }
    results = [mallopt(name, value) for name, value in settings.items()]
    return all(results)
