"""The reader of HDF5, against h5py, and with files that would harm h5py or its user."""

import io
import struct

import h5py
import numpy as np
import pytest

from imagenet_fast.models.hdf5 import read_hdf5


def written(write):
    """The bytes of a file that ``write`` fills."""
    file = io.BytesIO()
    with h5py.File(file, "w") as opened:
        write(opened)
    return file.getvalue()


def fill(file):
    for layer in range(20):  # more than a node of the group's tree holds
        group = file.create_group(f"layer_{layer}/vars")
        group["0"] = np.arange(12, dtype="float32").reshape(3, 4) + layer
        group["1"] = np.float64(layer)
    file.create_group("nothing/below")
    file.attrs["backend"] = "tensorflow"
    file["layer_0"].attrs["names"] = [b"a", b"b"]
    for dtype in ("<f2", ">f4", "|i1", "|u1", "<i8", ">u2", "<i4"):
        file[f"types/{dtype}"] = np.arange(5).astype(dtype)
    file["empty"] = np.zeros([0, 3], "float32")


def test_same_as_h5py():
    data = written(fill)
    groups, arrays = [], {}

    def add(name, item):
        if isinstance(item, h5py.Dataset):
            arrays[name] = item[()]
        else:
            groups.append(name)

    h5py.File(io.BytesIO(data), "r").visititems(add)
    found = read_hdf5(data)
    assert sorted(found.groups) == sorted(groups)
    assert found.arrays.keys() == arrays.keys()
    for name, values in arrays.items():
        np.testing.assert_array_equal(found.arrays[name], values)
        assert found.arrays[name].dtype == values.dtype
        assert found.arrays[name].shape == values.shape


def virtual(file):
    layout = h5py.VirtualLayout((4,), "f4")
    layout[:] = h5py.VirtualSource("/etc/hostname", "x", (4,))
    file.create_virtual_dataset("x", layout)


def external(file):
    file.create_dataset("x", (4,), "f4", external=[("/etc/hostname", 0, 16)])


def unwritten(file):
    """A data set of 4 TB in a file of a kilobyte."""
    plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    space = h5py.h5s.create_simple((2**40,))
    h5py.h5d.create(file.id, b"x", h5py.h5t.IEEE_F32LE, space, plan)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda file: file.__setitem__("x", h5py.SoftLink("/etc")), "x in the group / is a link"),
        (
            lambda file: file.__setitem__("x", h5py.ExternalLink("/x", "y")),
            "a version that Keras",
        ),
        (virtual, "x is not in one piece"),
        (external, "x is compressed, or in another file"),
        (unwritten, r"x has shape \(1099511627776,\), but"),
        (lambda file: file.create_dataset("x", (9,), "f4", chunks=(3,)), "x is not in one piece"),
        (lambda file: file.create_dataset("x", (9,), "f4", compression="gzip"), "x is compressed"),
        (lambda file: file.__setitem__("x", "text"), "x is not an array of numbers"),
        (lambda file: file.__setitem__("x", np.zeros(3, "f4,i4")), "x is not an array of numbers"),
        (lambda file: file.__setitem__("x", np.zeros(3, "complex64")), "not an array of numbers"),
        (lambda file: file.__setitem__("x", h5py.Empty("f4")), "x has a shape"),
        (lambda file: file.create_group("a").__setitem__("b", file), "two things in it are at"),
    ],
)
def test_what_keras_does_not_write(write, message):
    with pytest.raises(ValueError, match=message):
        read_hdf5(written(write))


def test_of_a_later_version():
    file = io.BytesIO()
    with h5py.File(file, "w", libver="latest") as opened:
        fill(opened)
    with pytest.raises(ValueError, match="of a version of HDF5 that Keras does not write"):
        read_hdf5(file.getvalue())


def test_arrays_that_share_their_bytes():
    """A small file could hold any number of them."""

    def write(file):
        for name in "abc":
            file[name] = np.full(1000, ord(name), "uint32")

    data = written(write)
    places = {name: data.index(struct.pack("<4I", *[ord(name)] * 4)) for name in "abc"}
    for name in "bc":
        there = struct.pack("<QQ", places[name], 4000)
        assert data.count(there) == 1
        data = data.replace(there, struct.pack("<QQ", places["a"], 4000))
    with pytest.raises(ValueError, match="its arrays are larger than the file"):
        read_hdf5(data[: max(places.values())])


@pytest.mark.parametrize("end", [0, 8, 20, 100, 1000])
def test_cut_off(end):
    with pytest.raises(ValueError, match=r"damaged|version|not an HDF5|behind its end"):
        read_hdf5(written(fill)[:end])


def test_any_damage():
    """The answer is what is there, or a ValueError, soon; the HDF5 library hangs in some."""
    data = written(fill)
    random = np.random.default_rng(0)
    used = np.flatnonzero(np.frombuffer(data, np.uint8))
    for _ in range(3000):
        changed = bytearray(data)
        for place in random.choice(used, 2):
            changed[place] = random.integers(256)
        at = 8 * random.integers(len(data) // 8)
        changed[at : at + 8] = struct.pack("<Q", random.choice([0, at, 2**40, len(data) - 8]))
        try:
            arrays = read_hdf5(bytes(changed)).arrays
        except ValueError:
            continue
        assert sum(values.nbytes for values in arrays.values()) <= len(data)
