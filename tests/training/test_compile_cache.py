"""The cache of what XLA compiles: never in a run's way, and of use to the next one."""

import errno
import json
import os
import pathlib
import re
import shutil
import signal
import stat
import subprocess
import sys

import pytest
import tensorflow as tf
from model_weights import weights_in

from imagenet_fast import Config, UserError, train
from imagenet_fast.base.notices import warn_once
from imagenet_fast.training import compile_cache as module
from imagenet_fast.training.compile_cache import CompileCache, cache_flags

CONTENT = bytes(range(256)) * 40
needs_programs = pytest.mark.skipif(
    not tf.__version__.startswith(module._VERSION), reason="this TensorFlow cannot save programs"
)


def new_process():
    """Forgets what a process knows; the folder of the one before stays locked."""
    for cached in (module._private_folder, module._given_flags, module._gpus, warn_once):
        cached.cache_clear()


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """A machine of its own, on which no TensorFlow compiles."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_VERSION", tf.__version__)
    monkeypatch.setattr(module, "installed_gpus", list)
    monkeypatch.delenv("TF_XLA_FLAGS", raising=False)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    new_process()
    yield tmp_path
    new_process()


@pytest.fixture
def store(tmp_path):
    """Returns the folder of the entries, after a run has filled it."""
    run(a=CONTENT, b=CONTENT[::-1])
    (folder,) = (tmp_path / "cache" / "imagenet_fast").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["a", "b"]
    return folder


def config(**options):
    return Config(xla=True, **options)


def run(given=None, /, **programs):
    """Compiles programs in a new process, and returns those that it got from the cache."""
    new_process()
    cache = CompileCache(given or config())
    folder = module._private_folder()
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    for name, content in programs.items():
        (folder / name).write_bytes(content)
    cache.save()
    return found


# --- What it keeps


def test_the_next_process_gets_what_was_compiled(store):
    assert run() == {"a": CONTENT, "b": CONTENT[::-1]}
    assert stat.S_IMODE(store.stat().st_mode) == 0o700


def test_unfinished_files_are_not_kept():
    run(**{"a": CONTENT, "bXYZ.tmp": b"half"})
    assert run() == {"a": CONTENT}


def test_tensorflow_never_writes_into_the_store(store):
    run(a=b"another")
    assert run()["a"] == CONTENT


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "longer"])
def test_damaged_entries_are_removed_and_compiled_again(store, capsys, damage):
    entry = store / "a"
    content = bytearray(entry.read_bytes())
    content[100] ^= damage == "flipped"
    cut = {"truncated": len(content) // 2, "empty": 0}.get(damage, len(content))
    entry.write_bytes(bytes(content[:cut]) + b"x" * (damage == "longer"))
    assert run(a=CONTENT) == {"b": CONTENT[::-1]}
    assert capsys.readouterr().err == f"{store}: removed 1 damaged of 2 compiled programs\n"
    assert run() == {"a": CONTENT, "b": CONTENT[::-1]}
    assert not capsys.readouterr().err


def test_links_pipes_and_folders_are_not_opened(store, tmp_path):
    (tmp_path / "private").write_bytes((store / "a").read_bytes())
    (store / "link").symlink_to(tmp_path / "private")
    os.mkfifo(store / "pipe")
    (store / "folder").mkdir()
    assert run() == {"a": CONTENT, "b": CONTENT[::-1]}
    assert sorted(path.name for path in store.iterdir()) == ["a", "b", "folder"]
    assert (tmp_path / "private").exists()


def test_least_recently_used_entries_go_first(store, monkeypatch):
    for age, name in enumerate("ab"):
        os.utime(store / name, (0, 1000 - age))
    other = store.with_name(f"{store.name}-of-another-machine")
    other.mkdir()
    (other / "c").write_bytes(CONTENT)
    os.utime(other / "c", (0, 10))
    (store.parent / "mine").mkdir()
    (store.parent / "mine" / "photo").write_bytes(CONTENT)
    os.utime(store.parent / "mine" / "photo", (0, 1))
    monkeypatch.setattr(module, "_MOST_IN_STORE", 2 * len(CONTENT) + 100)
    run()
    assert sorted(path.name for path in store.iterdir()) == ["a", "b"]
    assert not (other / "c").exists()
    run(d=CONTENT)
    assert sorted(path.name for path in store.iterdir()) == ["a", "d"]
    assert (store.parent / "mine" / "photo").exists()


def test_entries_that_tensorflow_has_read_are_used(store):
    for name in "ab":
        os.utime(store / name, (0, 1000))
    new_process()
    cache = CompileCache(config())
    os.utime(module._private_folder() / "b", (2000, 1000))  # as a reading does
    cache.save()
    assert (store / "a").stat().st_mtime == 1000 < (store / "b").stat().st_mtime


def test_a_process_takes_the_newest_up_to_a_limit(store, monkeypatch):
    os.utime(store / "b", (0, 1000))
    monkeypatch.setattr(module, "_MOST_TAKEN", 2 * len(CONTENT))
    assert run() == {"a": CONTENT}


# --- Whose programs are whose


@pytest.mark.parametrize("differs", ["TensorFlow", "flags", "CPU", "cores", "GPU", "deterministic"])
def test_others_programs_are_not_used(store, monkeypatch, differs):
    if differs == "TensorFlow":
        monkeypatch.setattr(tf, "__version__", f"{tf.__version__}.1")
    if differs == "flags":
        monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    if differs == "CPU":
        monkeypatch.setattr(module, "cpu_model", lambda: ("Other", {"avx512f"}))
    if differs == "cores":
        monkeypatch.setattr(module, "cpu_cores", lambda: 1000)
    if differs == "GPU":
        monkeypatch.setattr(module, "installed_gpus", lambda: ["NVIDIA H100 80GB HBM3"])
    assert run(config(deterministic=differs == "deterministic"), a=b"of another") == {}
    monkeypatch.undo()


# --- The flags


def test_tensorflow_gets_the_folder_and_other_processes_do_not(monkeypatch):
    monkeypatch.setenv("TF_XLA_FLAGS", "--tf_xla_clustering_debug")
    with cache_flags(config()):
        given, directory, devices = os.environ["TF_XLA_FLAGS"].split()
        assert given == "--tf_xla_clustering_debug" and "XLA_FLAGS" not in os.environ
        assert directory.partition("=")[2] == str(module._private_folder())
        assert devices == "--tf_xla_persistent_cache_device_types=CPU"
    assert os.environ["TF_XLA_FLAGS"] == given
    monkeypatch.delenv("TF_XLA_FLAGS")
    new_process()
    with cache_flags(config()):
        assert "TF_XLA_FLAGS" in os.environ
    assert "TF_XLA_FLAGS" not in os.environ


def test_gpus_keep_the_autotuners_choices(monkeypatch):
    monkeypatch.setattr(module, "installed_gpus", lambda: ["NVIDIA H100 80GB HBM3"])
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x")
    before = module._key(config())
    with cache_flags(config()):
        pass
    given, cache = os.environ["XLA_FLAGS"].split()  # which TensorFlow reads later
    assert given == "--xla_dump_to=x"
    assert cache == f"--xla_gpu_per_fusion_autotune_cache_dir={module._private_folder()}"
    assert module._key(config()) == before


@pytest.mark.parametrize("why", ["none", "no XLA", "version", "cache of the user's own", "space"])
def test_without_a_cache_there_are_no_flags(monkeypatch, tmp_path, why):
    options = Config(xla=why != "no XLA", compile_cache="none" if why == "none" else "auto")
    if why == "version":
        monkeypatch.setattr(module, "_VERSION", "1.")
    if why == "cache of the user's own":
        monkeypatch.setenv("TF_XLA_FLAGS", "--tf_xla_persistent_cache_directory=x")
    if why == "space":
        (tmp_path / "t m p").mkdir()
        monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path / "t m p"))
    before = os.environ.get("TF_XLA_FLAGS")
    with cache_flags(options):
        CompileCache(options).save()
        assert os.environ.get("TF_XLA_FLAGS") == before
    assert not list((tmp_path / "cache").rglob("*xla*/*"))


def test_a_cache_without_effect_is_said(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(module, "_VERSION", "1.")
    CompileCache(config(compile_cache=str(tmp_path / "own")))
    assert capsys.readouterr().err.startswith("compile_cache has no effect: it needs TensorFlow")


# --- Folders that cannot be used


def test_a_folder_of_the_users(tmp_path):
    own = config(compile_cache=str(tmp_path / "own"))
    run(own, a=CONTENT)
    assert run(own) == {"a": CONTENT} and run() == {}


@pytest.mark.parametrize("kind", ["file", "others", "unwritable"])
def test_a_bad_folder_is_refused(tmp_path, kind):
    folder = tmp_path / kind
    if kind == "file":
        folder.write_text("")
    if kind == "others":
        folder.mkdir()
        folder.chmod(0o777)
    if kind == "unwritable":
        folder = pathlib.Path("/proc/imagenet_fast")
    with pytest.raises(UserError, match=f"compile_cache {folder} .*; choose another folder, or no"):
        CompileCache(config(compile_cache=str(folder)))


def test_a_bad_folder_is_refused_before_work_starts(tmp_path):
    options = {"model_dir": str(tmp_path / "run"), "data_dir": str(tmp_path / "missing")}
    with pytest.raises(UserError, match="compile_cache /proc/imagenet_fast cannot be written"):
        train(config(compile_cache="/proc/imagenet_fast", **options))


@pytest.mark.parametrize("folder", ["", "gs://bucket/xla"])
def test_no_folder_of_this_machine(folder):
    with pytest.raises(UserError, match=r"compile_cache is .* must be on a disk of this machine"):
        config(compile_cache=folder)


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_store_that_is_no_folder(store, tmp_path, capsys, kind):
    shutil.move(store, tmp_path / "moved")
    if kind == "file":
        store.write_text("")
    else:
        store.symlink_to(tmp_path / "moved")
    assert run(c=CONTENT) == {}
    expected = f"no more programs of XLA are cached: {store} is a link or a file\n"
    assert capsys.readouterr().err == expected
    assert not (tmp_path / "moved" / "c").exists()


def test_without_a_default_folder(tmp_path, capsys):
    (tmp_path / "cache").write_text("")
    assert run(a=CONTENT) == {}
    assert "XLA's programs are compiled anew by each process" in capsys.readouterr().err


def fail(number):
    def fails(path, content):
        raise OSError(number, os.strerror(number), str(path))

    return fails


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_store_that_cannot_be_written(store, monkeypatch, capsys, number):
    monkeypatch.setattr(module, "write_file", fail(number))
    assert run(c=CONTENT) == {}
    said = capsys.readouterr().err
    assert re.fullmatch(f"no more programs of XLA are cached: .* {os.strerror(number)}\n", said)


def test_an_entry_that_another_process_removes_while_it_is_written(store, monkeypatch, capsys):
    own = module.write_file

    def write(path, content):
        (fail(errno.ENOENT) if path == store / "c" else own)(path, content)

    monkeypatch.setattr(module, "write_file", write)
    run(b=CONTENT, c=CONTENT, d=CONTENT)
    assert {"b", "d"} < run().keys()
    assert capsys.readouterr().err == ""


def test_a_disk_that_is_almost_full(store, monkeypatch, capsys):
    new_process()
    cache = CompileCache(config())
    (module._private_folder() / "c").write_bytes(CONTENT)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 8, 1))
    cache.save()
    assert f"{store} has less than" in capsys.readouterr().err
    assert not (store / "c").exists()
    new_process()
    with cache_flags(config()):  # TensorFlow would write there
        assert "TF_XLA_FLAGS" not in os.environ


# --- Several processes

PROCESS = """
import sys, tempfile
from imagenet_fast import Config
from imagenet_fast.training import compile_cache as module
module._is_wanted, module._key = (lambda config: True), (lambda config: "key")
module._MOST_IN_STORE = 40000
config = Config(xla=True, compile_cache=sys.argv[1])
for number in range(60):
    module._private_folder.cache_clear()
    cache = module.CompileCache(config)
    for name in range(number % 7):
        (module._private_folder() / str(name)).write_bytes(bytes(9000))
    cache.save()
print(module._private_folder(), flush=True)
sys.stdin.read()
"""


def start(tmp_path, store):
    """Starts a process that uses the store over and over, and then waits."""
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-c", PROCESS, str(store)]
    return subprocess.Popen(command, env=environment, text=True, **pipes)


def test_processes_share_the_store_and_the_killed_ones_folders_are_removed(tmp_path):
    processes = [start(tmp_path, tmp_path / "shared") for _ in range(2)]
    folders = [pathlib.Path(process.stdout.readline().strip()) for process in processes]
    try:
        processes[0].kill()
        assert processes[0].communicate()[1] == "" and folders[0].is_dir()
        (tmp_path / "photos").mkdir()
        (tmp_path / "tmp" / f"{module._PREFIX}link").symlink_to(tmp_path / "photos")
        os.mkfifo(tmp_path / "tmp" / f"{module._PREFIX}pipe")
        module._private_folder()
        assert not folders[0].exists() and folders[1].is_dir() and (tmp_path / "photos").is_dir()
    finally:
        left = processes[1].communicate("")
    assert left[1] == "" and not folders[1].exists()
    assert processes[1].returncode == 0


def test_an_entry_that_another_process_removes(store, monkeypatch, capsys):
    real = pathlib.Path.read_bytes

    def read(path):
        if path == store / "a":
            path.unlink()
        return real(path)

    monkeypatch.setattr(pathlib.Path, "read_bytes", read)
    assert run() == {"b": CONTENT[::-1]}
    assert not capsys.readouterr().err


# --- With TensorFlow

COMPILE = """
import json, sys
import tensorflow as tf
from imagenet_fast import Config
from imagenet_fast.distribute.quiet import import_tensorflow
from imagenet_fast.training.compile_cache import CompileCache, cache_flags
config = Config(xla=True)
import_tensorflow(cache_flags(config))
cache = CompileCache(config)
@tf.function(jit_compile=True)
def program(images, filters):
    return tf.reduce_sum(tf.sin(tf.nn.conv2d(images, filters, 1, "SAME")), (0, 1, 2))
random = tf.random.stateless_normal
sums = program(random((8, 9, 9, 3), [1, 2]), random((3, 3, 3, 4), [3, 4]))
print(json.dumps(sums.numpy().tolist()))
cache.save()
"""


@needs_programs
def test_tensorflow_loads_what_it_saved(tmp_path, run_python):
    def compiled(**environment):
        places = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(tmp_path / "tmp")}
        finished = run_python(["-c", COMPILE], environment={**places, **environment})
        assert "cache" not in finished.stderr or environment or "removed 1" in finished.stderr
        assert not list((tmp_path / "tmp").glob(f"*{module._PREFIX}*"))
        return json.loads(finished.stdout)

    without = compiled(TF_XLA_FLAGS="--tf_xla_persistent_cache_directory=")
    assert not (tmp_path / "cache" / "imagenet_fast").exists()
    assert compiled() == without
    (entry,) = (tmp_path / "cache" / "imagenet_fast").glob("*xla*/*")
    os.utime(entry, (0, 1000))
    assert compiled() == without
    assert entry.stat().st_mtime > 1000  # it was read
    entry.write_bytes(entry.read_bytes()[:-9])
    assert compiled() == without
    assert entry.is_file()


@needs_programs
@pytest.mark.long
def test_a_killed_run_leaves_its_program(tmp_path, digits):
    def command(name, *options):
        recipe = ["--flagfile=digits", f"--data_dir={digits}", "--xla", "--noexamine"]
        times = ["--duration=4 steps", "--decay_at=3 steps", "--log_every=1 step"]
        run = ["train", *recipe, *times, f"--model_dir={tmp_path / name}", *options]
        return [sys.executable, "-m", "imagenet_fast", *run]

    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    subprocess.run(command("without", "--compile_cache=none"), env=environment, check=True)
    assert not list((tmp_path / "cache").rglob("*xla*"))  # matplotlib has made a folder
    process = subprocess.Popen(command("killed"), env=environment, stderr=subprocess.PIPE)
    store = tmp_path / "cache" / "imagenet_fast"
    while not list(store.glob("*xla*/[!.]*")):
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert list((tmp_path / "tmp").glob(f"{module._PREFIX}*"))
    (entry,) = store.glob("*xla*/*")
    os.utime(entry, (0, 1000))
    subprocess.run(command("with"), env=environment, check=True)
    assert entry.stat().st_mtime > 1000
    assert not list((tmp_path / "tmp").glob(f"{module._PREFIX}*"))
    expected = weights_in(str(tmp_path / "without"))
    found = weights_in(str(tmp_path / "with"))
    assert all((found[name] == value).all() for name, value in expected.items())
