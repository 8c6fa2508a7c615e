import sys

import pytest

from imagenet_fast.data.prepare.sources.memory_limit import limited_memory

resource = pytest.importorskip("resource")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits memory so")
def test_memory_above_the_limit_cannot_be_had():
    before = resource.getrlimit(resource.RLIMIT_DATA)
    # Threads that earlier tests have left take memory meanwhile.
    with limited_memory(2**29):
        assert len(bytearray(2**24)) == 2**24
        with pytest.raises(MemoryError):
            bytearray(2**30)
        # Another limit within it is not above it.
        with limited_memory(2**40), pytest.raises(MemoryError):
            bytearray(2**30)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert len(bytearray(2**30)) == 2**30


def test_the_limit_ends_with_an_error():
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with pytest.raises(KeyError), limited_memory(2**30):
        raise KeyError
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
