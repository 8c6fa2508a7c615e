"""All places that import by name, unpickle, delete, connect, listen or start a process.

What others made must reach none of them unchecked. A new place must be added here, with the reason
why it is safe, in the same change: what of its arguments can a file, a name or a stranger on a port
choose?
"""

import ast
import collections
import pathlib

import pytest

import imagenet_fast

PACKAGE = pathlib.Path(imagenet_fast.__file__).parent
# Names of functions, classes and methods, wherever they are from.
NAMES = {
    "import": {"import_module", "__import__", "run_module", "run_path", "exec", "eval", "compile"}
    | {"spec_from_file_location"},
    "unpickle": {"Unpickler", "load_model", "read_pickle", "genops"},
    "library": {"load_op_library", "load_library", "CDLL"},
    "delete": {"unlink", "rmtree", "rmdir", "removedirs", "remove", "CheckpointManager"},
    "connect": {"create_connection", "connect", "urlopen", "urlretrieve"}
    | {"experimental_connect_to_cluster", "TPUClusterResolver", "distribute", "model_download"},
    "listen": {"bind", "listen", "socket", "Server", "DispatchServer", "WorkerServer"},
    "process": {"Popen", "run", "check_output", "check_call", "call", "system", "popen", "fork"}
    | {"kill", "killpg", "execv", "spawn"},
    "load": {"load", "loads"},
}
# Where a name alone is ambiguous: the objects whose functions count.
OF_MODULE = {
    "run": {"subprocess"},
    "call": {"subprocess"},
    "compile": {"builtins"},
    "remove": {"os", "gfile"},
    "system": {"os"},
    "kill": {"os", "process", "logger"},
    "distribute": {"service"},
    "connect": {"client", "connection"},
    "bind": {"listener"},
    "load": {"pickle", "marshal", "saved_model"},
    "loads": {"pickle", "marshal"},
}


def calls(source):
    """Yields the kind and name of each such call in a program."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        parts = ast.unparse(node.func).split(".")
        name, owner = parts[-1], parts[-2] if len(parts) > 1 else "builtins"
        if owner in OF_MODULE.get(name, {owner}):
            yield from ((kind, name) for kind, names in NAMES.items() if name in names)


def places():
    """Returns the number of calls by (kind, file, name)."""
    return dict(
        collections.Counter(
            (kind, path.relative_to(PACKAGE).as_posix(), name)
            for path in PACKAGE.rglob("*.py")
            for kind, name in calls(path.read_text(encoding="utf-8"))
        )
    )


# By kind: file, name, number of places, and why what others made cannot choose what happens.
KNOWN = {
    "import": [
        ("base/lazy.py", "import_module", 1, "names in this package's own tables"),
        (
            "lab/benchmarks/optimizer/model_garden_worker.py",
            "spec_from_file_location",
            1,
            "a file of Model Garden, from the environment that the command line names",
        ),
        (
            "lab/benchmarks/serving/worker.py",
            "import_module",
            1,
            "one of the benchmark's own runtimes",
        ),
        ("commands/__init__.py", "import_module", 1, "one of COMMANDS"),
        ("doctor/worker.py", "import_module", 1, "one of CHECKS"),
        ("models/custom.py", "import_module", 1, "the command line's or Python's: config_file"),
        ("optimizers/__init__.py", "import_module", 1, "this package's own modules"),
        ("training/logs/trackers.py", "import_module", 1, "wandb or mlflow"),
    ],
    "unpickle": [
        ("data/prepare/sources/numeric_pickle.py", "genops", 1, "lists opcodes, and runs none"),
    ],
    "load": [
        ("lab/benchmarks/serving/worker.py", "load", 1, "what the benchmark exported"),
        ("serving/predict.py", "load", 1, "predict says that it runs the model"),
    ],
    "library": [
        ("base/native_ops.py", "load_op_library", 1, "in cache_folder, or of this process"),
        ("base/worker_process.py", "CDLL", 1, "the C library that is loaded"),
        ("lab/benchmarks/input/worker.py", "CDLL", 1, "the C library that is loaded"),
        ("data/malloc.py", "CDLL", 1, "the C library that is loaded"),
        ("distribute/cuda.py", "CDLL", 2, "of NVIDIA's packages in this environment"),
        ("distribute/cuda.py", "load_op_library", 1, "CUDA's libraries, as TensorFlow finds them"),
    ],
    "delete": [
        ("distribute/members.py", "unlink", 1, "this worker's beat, named by its number"),
        ("base/files.py", "unlink", 2, "its own temporary files"),
        ("base/paths.py", "remove", 1, "unlink of a path in a bucket"),
        ("data/prepare/add_index.py", "unlink", 1, "its own lock"),
        ("data/prepare/beam_writer.py", "unlink", 1, "its own temporary file"),
        ("data/cache.py", "unlink", 1, "its own temporary file"),
        (
            "data/prepare/job.py",
            "unlink",
            3,
            "a shard that it has just written, its plan and its journal",
        ),
        ("data/prepare/journal.py", "unlink", 3, "the journal, and .SHARD.done beside it"),
        ("data/records.py", "unlink", 2, "temporary files of the shard that is written"),
        ("doctor/files.py", "rmtree", 1, "a folder that it has just made"),
        ("serving/export.py", "rmtree", 1, "its own temporary folder"),
        (
            "training/checkpoints/checkpoint.py",
            "CheckpointManager",
            1,
            "ckpt-N: the list is written before",
        ),
        ("training/checkpoints/checkpoint.py", "rmtree", 3, "its own temporary folders"),
        ("training/checkpoints/model_dir.py", "unlink", 1, "TensorFlow's list of checkpoints"),
        ("training/compile_cache.py", "rmtree", 1, "private folders of dead processes"),
        ("training/compile_cache.py", "unlink", 3, "files in folders of its name, and its probe"),
        ("training/report/saved_images.py", "unlink", 1, "the error analysis"),
    ],
    "connect": [
        ("base/addresses.py", "create_connection", 1, "to try addresses of the command line"),
        ("models/keras_hub.py", "model_download", 1, "a preset in KerasHub's list; pretrained"),
        ("data/service.py", "distribute", 1, "input_servers, not in files of runs"),
        ("distribute/strategy.py", "TPUClusterResolver", 1, "tpu, not in files of runs"),
        ("distribute/strategy.py", "experimental_connect_to_cluster", 1, "as the one before"),
        (
            "pipeline_parallel/placement.py",
            "experimental_connect_to_cluster",
            1,
            "pipeline_servers, not in files of runs",
        ),
    ],
    "listen": [
        ("base/addresses.py", "socket", 3, "to find a free port, and to try an address"),
        ("base/addresses.py", "bind", 2, "as the one before; nothing is accepted"),
        ("data/service.py", "DispatchServer", 1, "in reachable.restricted"),
        ("data/service.py", "WorkerServer", 1, "in reachable.restricted"),
        ("distribute/reachable.py", "socket", 4, "finds the listeners, and guards them"),
        ("distribute/reachable.py", "listen", 1, "the guard, which drops all"),
        ("pipeline_parallel/placement.py", "Server", 1, "in reachable.restricted"),
    ],
    "process": [
        ("base/native_ops.py", "run", 1, "the compiler in CXX or on PATH"),
        ("base/worker_process.py", "Popen", 1, "module_command, without the working directory"),
        ("base/worker_process.py", "kill", 1, "its own process"),
        ("base/worker_process.py", "killpg", 2, "its own processes"),
        ("lab/planning/cost_model/reliability.py", "spawn", 1, "of a random number generator"),
        ("data/prepare/baseline_jpegs.py", "run", 1, "jpegtran on PATH, images by its input"),
        (
            "data/prepare/beam_writer.py",
            "kill",
            1,
            "signal 0, which asks whether the process is there",
        ),
        (
            "data/prepare/sources/imagenet_meta.py",
            "run",
            1,
            "module_command, the file by its input",
        ),
        ("distribute/gpus.py", "run", 1, "nvidia-smi on PATH"),
        ("distribute/supervisor.py", "Popen", 1, "this command line, by module_command"),
        ("distribute/supervisor.py", "killpg", 1, "its own process"),
        ("distribute/waiting.py", "Popen", 1, "module_command, addresses of the cluster"),
        ("distribute/waiting.py", "kill", 1, "its own process"),
    ],
}


def test_every_place_is_known():
    known = {
        (kind, file, name): count
        for kind, entries in KNOWN.items()
        for file, name, count, _ in entries
    }
    assert places() == known


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("importlib.import_module(config.model)", ("import", "import_module")),
        ("eval(text)", ("import", "eval")),
        ("pickle.loads(data)", ("load", "loads")),
        ("pickle.Unpickler(file).load()", ("unpickle", "Unpickler")),
        ("tf.saved_model.load(path)", ("load", "load")),
        ("keras.models.load_model(path)", ("unpickle", "load_model")),
        ("shutil.rmtree(folder)", ("delete", "rmtree")),
        ("path.unlink()", ("delete", "unlink")),
        ("subprocess.run(command)", ("process", "run")),
        ("os.system(text)", ("process", "system")),
        ("socket.create_connection(address)", ("connect", "create_connection")),
        ("tf.distribute.Server(spec)", ("listen", "Server")),
    ],
)
def test_a_new_place_would_be_found(source, found):
    assert found in list(calls(f"def f():\n    return {source}\n"))


@pytest.mark.parametrize("source", ["json.loads(text)", "strategy.run(step)", "re.compile(text)"])
def test_other_calls_do_not_count(source):
    assert not list(calls(source))
