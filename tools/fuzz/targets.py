"""The readers that are fuzzed: for each, files that the package wrote, and how one is read."""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import os
import pathlib
import pickle
import random
import struct
import tarfile
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from imagenet_fast.config import Config
from imagenet_fast.data import manifest, metadata, records
from imagenet_fast.data.examples import decode_example, encode_example
from imagenet_fast.data.manifest import Manifest, Shard, Skipped, Split
from imagenet_fast.data.prepare import journal as prepare_journal
from imagenet_fast.data.prepare import plan as prepare_plan
from imagenet_fast.data.prepare.sources import ListedFile, open_source
from imagenet_fast.training import test_sets
from imagenet_fast.training.checkpoints import config_file

_LABELS = ("cat", "dog", "grey wolf")
_SHARD = "train-00000-of-00001"
# Returns the first files, given an empty folder.
Make = Callable[[pathlib.Path], Iterable[bytes]]
# Reads a file's content, given the folder.
Read = Callable[[pathlib.Path, bytes], None]
# Changes a file's content so that more than its first check is reached.
Mutate = Callable[[bytes, random.Random], bytes]

# Values that readers are likely to be unprepared for.
_VALUES = [
    *(None, True, -1, 0, 2**31, 2**63, 10**400, 1e308, float("nan"), [], {}, [[]] * 9),
    *("", "..", "../x", "/etc/passwd", "a\0b", "a\nb", "\ud800", "\x1b[2J", "x" * 300, "%n"),
]


def mutate_json(content: bytes, numbers: random.Random) -> bytes:
    """Replaces, removes or doubles a value in one line, or one text, of JSON."""
    try:
        values, lines = [json.loads(content)], False
    except ValueError:
        values, lines = [json.loads(line) for line in content.splitlines()], True
    for _ in range(numbers.choice((1, 1, 2, 5))):
        node: Any = values
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                break
            key = numbers.choice(keys)
            if isinstance(node[key], (dict, list)) and node[key] and numbers.random() < 0.7:
                node = node[key]
                continue
            action = numbers.random()
            if action < 0.7:
                node[key] = numbers.choice(_VALUES)
            elif action < 0.85 and node is not values:
                del node[key]
            elif isinstance(node, list):
                node.append(node[key])
            break
    texts = [json.dumps(value) for value in values]
    return "".join(f"{text}\n" for text in texts).encode() if lines else texts[0].encode()


def mutate_records(content: bytes, numbers: random.Random) -> bytes:
    """Changes a length or data of one of the records, with valid checksums."""
    parts, offset = [], 0
    while offset + 16 <= len(content):
        (length,) = struct.unpack_from("<Q", content, offset)
        parts.append(bytearray(content[offset + 12 : offset + 12 + length]))
        offset += 16 + length
    changed = bytearray()
    chosen = numbers.randrange(len(parts)) if parts else 0
    for number, data in enumerate(parts):
        size = len(data)
        if number == chosen:
            if data and numbers.random() < 0.6:
                data[numbers.randrange(len(data))] = numbers.randrange(256)
            else:
                size = numbers.choice((0, 1, size + 1, 2**31, 2**32, 2**40, 2**63, 2**64 - 1))
        header = struct.pack("<Q", size)
        changed += header + records._checksum(header) + data + records._checksum(bytes(data))
    return bytes(changed)


def _manifest() -> Manifest:
    shard = Shard(_SHARD, 3, 500, "0" * 64)
    skipped = (Skipped("train", "a.jpg", "is no image"),)
    split = Split((shard,), (1, 1, 1))
    return Manifest("animals", _LABELS, {"train": split}, skipped=skipped, warnings=("blurred",))


def _manifests(folder: pathlib.Path) -> list[bytes]:
    manifest.write_manifest(_manifest(), folder)
    return [(folder / manifest.FILE).read_bytes()]


def _read_manifest(folder: pathlib.Path, data: bytes) -> None:
    (folder / manifest.FILE).write_bytes(data)
    manifest.read_manifest(folder)


def _journals(folder: pathlib.Path) -> list[bytes]:
    skipped = [Skipped("train", "a.jpg", "is no image")]
    done = prepare_journal.Done(
        "train",
        Shard(_SHARD, 2, 500, "0" * 64),
        [1, 1, 0],
        {"PNG": 1},
        skipped,
        "",
        metadata.pack([_row(), _row()]),
    )
    with prepare_journal.Journal(folder, _JOB) as journal:
        journal.add(done)
    return [(folder / prepare_journal.JOURNAL).read_bytes()]


_JOB = {"source": "folders", "shards": {"train": 1}, "seed": 0}


def _row() -> tuple:
    return (0, 32, 32, 3, False, 400, 480, 7, False, 0)


def _read_journal(folder: pathlib.Path, data: bytes) -> None:
    (folder / prepare_journal.JOURNAL).write_bytes(data)
    with prepare_journal.Journal(folder, _JOB) as journal:
        for done in journal.done:
            metadata.unpack(done.metadata, done.shard.examples)


def _plans(folder: pathlib.Path) -> list[bytes]:
    images = [ListedFile("cat/1.jpg", 0, 400), ListedFile("dog/1.jpg", 1, 300)]
    prepare_plan.write_assignment(folder, {_SHARD: images})
    return [(folder / prepare_plan.FILE).read_bytes()]


def _read_plan(folder: pathlib.Path, data: bytes) -> None:
    (folder / prepare_plan.FILE).write_bytes(data)
    prepare_plan.read_assignment(folder)


def _arrays(folder: pathlib.Path) -> list[bytes]:
    rows = [_row()] * 3
    metadata.write_metadata(_manifest(), {_SHARD: metadata.pack(rows)}, folder)
    return [(folder / metadata.FILE).read_bytes()]


def _read_arrays(folder: pathlib.Path, data: bytes) -> None:
    (folder / metadata.FILE).write_bytes(data)
    metadata._load(_manifest(), folder)


def _configs(folder: pathlib.Path) -> list[bytes]:
    recipes = ("digits", "mosaic_mild", "airbench_cifar10")
    return [Config.from_flagfile(recipe).to_json().encode() for recipe in recipes]


def _read_config(folder: pathlib.Path, data: bytes) -> None:
    (folder / config_file.CONFIG_FILE).write_bytes(data)
    config_file.read_config(str(folder))


def _metrics(folder: pathlib.Path) -> list[bytes]:
    rows = [
        {"kind": "train", "step": 1, "epoch": 0.5, "loss": 2.25},
        {"kind": "validation", "step": 2, "top1": 0.5, "loss": None},
        {"kind": "validation", "step": 3, "map": 0.5, "f1_micro": 0.25, "loss": 1.0},
    ]
    return ["".join(f"{json.dumps(row)}\n" for row in rows).encode()]


def _read_metrics(folder: pathlib.Path, data: bytes) -> None:
    from imagenet_fast.training.logs.evaluations import Evaluations
    from imagenet_fast.training.logs.metrics_file import METRICS_FILE, read_rows

    (folder / METRICS_FILE).write_bytes(data)
    Evaluations.of_rows(read_rows(str(folder)))


def _thresholds(folder: pathlib.Path) -> list[bytes]:
    from imagenet_fast.training.checkpoints.thresholds import FILE, Thresholds, write_thresholds

    values = dict.fromkeys(_LABELS, 0.25)
    write_thresholds(str(folder), {"last": Thresholds(8, values, {**values, "cat": None})})
    return [(folder / FILE).read_bytes()]


def _read_thresholds(folder: pathlib.Path, data: bytes) -> None:
    from imagenet_fast.training.checkpoints.thresholds import FILE, thresholds_of

    (folder / FILE).write_bytes(data)
    thresholds_of(str(folder), "ckpt-8", _LABELS)


def _checkpoint_lists(folder: pathlib.Path) -> list[bytes]:
    from imagenet_fast.training.checkpoints.model_dir import record_steps

    (folder / "ckpt-20.index").touch()
    record_steps(folder, [10, 20])
    return [(folder / "checkpoint").read_bytes()]


def _read_checkpoint_list(folder: pathlib.Path, data: bytes) -> None:
    from imagenet_fast.training.checkpoints.model_dir import checkpoint_steps

    (folder / "checkpoint").write_bytes(data)
    checkpoint_steps(folder)


def _shards(folder: pathlib.Path) -> list[bytes]:
    example = encode_example(
        b"\xff\xd8\xff" + bytes(100),
        label=1,
        text="dog",
        filename="1.jpg",
        height=8,
        width=8,
        channels=3,
    )
    for count in (1, 3):
        records.write_records(folder / f"{count}", [example] * count)
    return [(folder / f"{count}").read_bytes() for count in (1, 3)]


def _read_shard(folder: pathlib.Path, data: bytes) -> None:
    path = folder / _SHARD
    path.write_bytes(data)
    for record in _records_of(str(path)).as_numpy_iterator():
        records.lost_record(record)
    with contextlib.suppress(records.CorruptRecordError):
        for record in records.read_records(path):
            with contextlib.suppress(ValueError):
                decode_example(record)


@functools.cache
def _records_of(path: str) -> Any:
    # Traced once: the file's content is not a part of the graph.
    import tensorflow as tf

    from imagenet_fast.data.shards import shard_reader

    read_shard = shard_reader([path])
    return tf.data.Dataset.from_tensors(path).flat_map(lambda path: read_shard(path, 3, 0))


def _indexes(folder: pathlib.Path) -> list[bytes]:
    import tensorflow as tf

    values = tf.train.Checkpoint(a=tf.Variable([1.0, 2.0]), b=tf.Variable("text"))
    values.write(str(folder / "ckpt"))
    return [(folder / "ckpt.index").read_bytes()]


def _read_index(folder: pathlib.Path, data: bytes) -> None:
    import tensorflow as tf

    from imagenet_fast.training.checkpoints.damaged import damage_of

    (folder / "ckpt.index").write_bytes(data)
    if damage_of(str(folder / "ckpt")) is None:
        reader = tf.train.load_checkpoint(str(folder / "ckpt"))
        for name in reader.get_variable_to_shape_map():
            with contextlib.suppress(tf.errors.OpError):
                reader.get_tensor(name)


def _hdf5_files(folder: pathlib.Path) -> list[bytes]:
    import h5py

    with h5py.File(folder / "weights.h5", "w") as file:
        file.create_group("layers/dense").create_dataset("0", data=np.ones([2, 3], np.float32))
    return [(folder / "weights.h5").read_bytes()]


def _read_hdf5(folder: pathlib.Path, data: bytes) -> None:
    from imagenet_fast.models.hdf5 import read_hdf5

    with contextlib.suppress(ValueError):  # which its callers name the file in
        read_hdf5(data)


_IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")


def _idx_files(folder: pathlib.Path, packed: bool = False) -> list[bytes]:
    images = struct.pack(">4I", 0x803, 2, 28, 28) + bytes(2 * 28 * 28)
    labels = struct.pack(">2I", 0x801, 2) + b"\5\0"
    for name, content in zip(_IDX, (images, labels)):
        (folder / name.replace("train", "t10k")).write_bytes(content)
        (folder / name).write_bytes(content)
    return [gzip.compress(images) if packed else images]


def _read_idx(folder: pathlib.Path, data: bytes) -> None:
    packed = folder / f"{_IDX[0]}.gz"
    if data.startswith(b"\x1f\x8b"):
        packed.write_bytes(data)
        (folder / _IDX[0]).unlink(missing_ok=True)
    else:
        (folder / _IDX[0]).write_bytes(data)
    _read_all(open_source("idx", folder, name="mnist"))


def _read_all(source: Any) -> None:
    for split, count in source.splits.items():
        for index in range(min(count, 3)):
            source.read(split, index)


_BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
_RECORD = b"\1" + bytes(3072)


def _cifar_files(folder: pathlib.Path) -> list[bytes]:
    for name in _BATCHES:
        (folder / f"{name}.bin").write_bytes(_RECORD)
    (folder / "batches.meta.txt").write_text("cat\ndog\n")
    return [2 * _RECORD]


def _read_cifar(folder: pathlib.Path, data: bytes) -> None:
    (folder / "data_batch_1.bin").write_bytes(data)
    _read_all(open_source("cifar10", folder))


def _cifar_pickles(folder: pathlib.Path) -> list[bytes]:
    batch = {b"data": np.zeros([2, 3072], np.uint8), b"labels": [1, 0]}
    for name in _BATCHES:
        (folder / name).write_bytes(pickle.dumps(batch, 2))
    names = pickle.dumps({"label_names": ["cat", "dog"]})
    (folder / "batches.meta").write_bytes(names)
    return [pickle.dumps(batch, protocol) for protocol in (2, 3, 4)]


def _read_cifar_pickle(folder: pathlib.Path, data: bytes) -> None:
    (folder / "data_batch_1").write_bytes(data)
    _read_all(open_source("cifar10", folder))


def _cifar_archives(folder: pathlib.Path, mode: str = "w") -> list[bytes]:
    _cifar_files(folder)
    with tarfile.open(folder / "cifar.tar", mode) as archive:
        for path in (*sorted(folder.glob("*.bin")), folder / "batches.meta.txt"):
            archive.add(path, f"cifar-10-batches-bin/{path.name}")
    return [(folder / "cifar.tar").read_bytes()]


def _read_cifar_archive(folder: pathlib.Path, data: bytes) -> None:
    (folder / "cifar.tar").write_bytes(data)
    _read_all(open_source("cifar10", folder / "cifar.tar"))


def _lists(folder: pathlib.Path) -> list[bytes]:
    for name in ("1.png", "2.png"):
        (folder / name).write_bytes(b"\x89PNG")
    rows = ("file,label,split", "1.png,cat,train", "2.png,dog,validation")
    return ["".join(f"{row}\n" for row in rows).encode()]


def _read_list(folder: pathlib.Path, data: bytes) -> None:
    (folder / "list.csv").write_bytes(data)
    _read_all(open_source("list", folder / "list.csv"))


def _json_lists(folder: pathlib.Path) -> list[bytes]:
    _lists(folder)
    rows = [{"file": f"{number}.png", "label": label} for number, label in ((1, "a"), (2, "b"))]
    return ["".join(f"{json.dumps(row)}\n" for row in rows).encode()]


def _read_json_list(folder: pathlib.Path, data: bytes) -> None:
    (folder / "list.jsonl").write_bytes(data)
    _read_all(open_source("list", folder / "list.jsonl"))


def _parquets(folder: pathlib.Path) -> list[bytes]:
    import pyarrow
    import pyarrow.parquet

    os.environ["HF_HOME"] = str(folder / "cache")
    os.environ["HF_HUB_OFFLINE"] = "1"
    images = [{"bytes": b"\x89PNG", "path": f"{number}.png"} for number in range(4)]
    table = pyarrow.table({"image": images, "label": [0, 1, 0, 1]})
    pyarrow.parquet.write_table(table, folder / "train.parquet")
    return [(folder / "train.parquet").read_bytes()]


def _read_parquet(folder: pathlib.Path, data: bytes) -> None:
    place = folder / "data"
    place.mkdir(exist_ok=True)
    (place / "train.parquet").write_bytes(data)
    _read_all(open_source("huggingface", place))


def _image_converters(folder: pathlib.Path) -> list[bytes]:
    size, scale, offset = [64, 64], [0.017, 0.018, 0.019], [-2.1, -2.0, -1.8]
    configs = [
        {"image_size": size, "scale": scale, "offset": offset},
        {"image_size": size, "scale": 1 / 255, "mean": offset, "variance": scale},
    ]
    return [json.dumps({"class_name": "ImageConverter", "config": c}).encode() for c in configs]


def _read_image_converter(folder: pathlib.Path, data: bytes) -> None:
    from imagenet_fast.models.keras_hub import preset_image_size, preset_normalization

    (folder / "image_converter.json").write_bytes(data)
    preset_image_size(folder)
    preset_normalization(folder)


def _class_maps(folder: pathlib.Path) -> list[bytes]:
    return [json.dumps({"n01": "cat", "n02": 1, "n03": "grey wolf"}).encode()]


def _read_class_map(folder: pathlib.Path, data: bytes, suffix: str = "json") -> None:
    (folder / f"map.{suffix}").write_bytes(data)
    test_sets.competing_classes(str(folder / f"map.{suffix}"), ("n03", "n01"), _LABELS)


def _right_labels(folder: pathlib.Path) -> list[bytes]:
    return [b"[[0], [], [2, 1]]", json.dumps({"1.png": [0], "a/2.png": []}).encode()]


def _read_right_labels(folder: pathlib.Path, data: bytes) -> None:
    (folder / "real.json").write_bytes(data)
    path = str(folder / "real.json")
    found = test_sets.read_right_labels(path, len(_LABELS))
    test_sets.right_labels_of(path, found, ("1.png", "2.png", "3.png")[: len(found)])


TARGETS: dict[str, tuple[Make, Read, Mutate | None]] = {
    "manifest": (_manifests, _read_manifest, mutate_json),
    "journal": (_journals, _read_journal, mutate_json),
    "plan": (_plans, _read_plan, mutate_json),
    "arrays": (_arrays, _read_arrays, None),
    "config": (_configs, _read_config, mutate_json),
    "metrics": (_metrics, _read_metrics, mutate_json),
    "thresholds": (_thresholds, _read_thresholds, mutate_json),
    "checkpoints": (_checkpoint_lists, _read_checkpoint_list, None),
    "shard": (_shards, _read_shard, mutate_records),
    "index": (_indexes, _read_index, None),
    "hdf5": (_hdf5_files, _read_hdf5, None),
    "image_converter": (_image_converters, _read_image_converter, mutate_json),
    "idx": (_idx_files, _read_idx, None),
    "idx_gz": (lambda folder: _idx_files(folder, packed=True), _read_idx, None),
    "cifar": (_cifar_files, _read_cifar, None),
    "cifar_pickle": (_cifar_pickles, _read_cifar_pickle, None),
    "cifar_tar": (_cifar_archives, _read_cifar_archive, None),
    "cifar_tar_gz": (lambda folder: _cifar_archives(folder, "w:gz"), _read_cifar_archive, None),
    "csv": (_lists, _read_list, None),
    "json_lines": (_json_lists, _read_json_list, mutate_json),
    "parquet": (_parquets, _read_parquet, None),
    "class_map": (_class_maps, _read_class_map, mutate_json),
    "class_map_csv": (
        lambda _: [b"n01,cat\nn02,1\nn03,grey wolf\n"],
        lambda folder, data: _read_class_map(folder, data, "csv"),
        None,
    ),
    "right_labels": (_right_labels, _read_right_labels, mutate_json),
}
