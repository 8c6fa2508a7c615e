"""A fake ``gcloud`` with the commands that ``gcp/`` uses, whose hosts are local folders.

As a program it takes gcloud's command lines, refuses what gcloud does not document, and keeps its
state in the folder ``FAKE_GCLOUD``:

* ``state.json``: queued resources, TPUs, buckets, the account
* ``calls.jsonl``: each command line, as a list
* ``faults.json``: faults to inject, see :class:`Cloud`
* ``hosts/``: a folder for each host of a TPU, its HOME; removed with the TPU
* ``buckets/``: gs://, as folders

``ssh --command`` runs the command in the host's folder with separate environment variables. There,
``python3 -m venv --clear`` makes a virtual environment that uses this interpreter, whose pip
records its arguments instead of installing. Processes on hosts have ``FAKE_HOST`` in their
environment, by which they are found and killed when their TPU is preempted or deleted.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

THIS_FILE = pathlib.Path(__file__).resolve()
# The command that runs this file. It starts faster without installed packages, of which it needs
# none, and as a module, which is compiled once.
_START = "import sys; sys.path.insert(0, sys.argv.pop(1)); import fake_gcloud; fake_gcloud.start()"
COMMAND = [sys.executable, "-I", "-S", "-c", _START, str(THIS_FILE.parent)]
PROGRAM = shlex.join(COMMAND)

# From gcloud's reference, for each command: number of positional arguments, flags with a value,
# flags without one. Required flags end with !.
ANYWHERE = "project format account verbosity configuration", "quiet"
COMMANDS = {
    "compute tpus queued-resources create": (
        1,
        "zone runtime-version! accelerator-type topology type node-id node-count node-prefix "
        "boot-disk data-disk description labels metadata metadata-from-file network range scopes "
        "service-account subnetwork tags valid-after-duration valid-after-time "
        "valid-until-duration valid-until-time",
        "async guaranteed internal-ips reserved shielded-secure-boot spot",
    ),
    "compute tpus queued-resources delete": (1, "zone", "async force"),
    "compute tpus queued-resources describe": (1, "zone", ""),
    "compute tpus tpu-vm describe": (1, "zone", ""),
    "compute tpus tpu-vm ssh": (
        1,
        "zone worker command output-directory ssh-flag ssh-key-file strict-host-key-checking "
        "ssh-key-expiration ssh-key-expire-after batch-size",
        "dry-run force-key-file-overwrite internal-ip plain tunnel-through-iap",
    ),
    "compute tpus tpu-vm scp": (
        2,
        "zone worker scp-flag ssh-key-file strict-host-key-checking ssh-key-expiration "
        "ssh-key-expire-after batch-size",
        "compress dry-run force-key-file-overwrite internal-ip plain recurse tunnel-through-iap",
    ),
    "storage buckets create": (
        1,
        "location default-storage-class placement soft-delete-duration",
        "uniform-bucket-level-access public-access-prevention",
    ),
    "storage buckets describe": (1, "", "raw"),
    "storage ls": (1, "", "recursive long json buckets"),
    "storage rsync": (
        2,
        "exclude",
        "recursive checksums-only no-clobber continue-on-error dry-run "
        "delete-unmatched-destination-objects",
    ),
    "config get-value": (1, "", ""),
}


class GcloudError(Exception):
    """An error that gcloud prints before it exits.

    Args:
      message: the error.
      status: the exit status.
    """

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


def parse(arguments: list[str]) -> tuple[str, list[str], dict[str, str]]:
    """Returns the command, its positional arguments and its flags.

    Raises:
      GcloudError: if gcloud does not document the command or a flag, or a required one is missing.
    """
    words = 0
    while words < len(arguments) and not arguments[words].startswith("-"):
        words += 1
    for count in range(words, 0, -1):
        command = " ".join(arguments[:count])
        if command in COMMANDS:
            break
    else:
        raise GcloudError(f"Invalid choice: {' '.join(arguments[:words])!r}.", 2)
    places, valued, bare = COMMANDS[command]
    valued, bare = (f"{ANYWHERE[0]} {valued}".split(), f"{ANYWHERE[1]} {bare}".split())
    positional, flags, rest = [], {}, arguments[count:]
    while rest:
        word = rest.pop(0)
        name, equals, value = word[2:].partition("=")
        if not word.startswith("-"):
            positional.append(word)
        elif name in bare and not equals:
            flags[name] = "true"
        elif name in (flag.rstrip("!") for flag in valued):
            if not equals and not rest:
                raise GcloudError(f"argument --{name}: expected one argument", 2)
            flags[name] = value if equals else rest.pop(0)
        else:
            raise GcloudError(f"unrecognized arguments: {word}", 2)
    if len(positional) != places:
        raise GcloudError(f"{command} takes {places} argument(s), but got {positional}", 2)
    needed = [flag[:-1] for flag in valued if flag.endswith("!")]
    if command.startswith("compute tpus"):
        needed += ["zone", "project"]
    for name in needed:
        if not flags.get(name):
            raise GcloudError(f"argument --{name}: Must be specified.", 2)
    return command, positional, flags


class Cloud:
    """The state of the cloud, in a folder.

    ``faults.json`` is a list. Each fault has ``on``, a regular expression that matches command
    lines; optionally ``worker``, for commands on that host; ``times``, how often (default 1); and
    ``do``: ``fail`` (with ``message`` and ``status``), ``preempt`` (the TPU ``name``, before the
    command runs) or, on create, ``refuse`` (the request becomes FAILED with ``message``) or
    ``starve`` (it waits forever).
    """

    def __init__(self, folder: os.PathLike[str] | str) -> None:
        self.folder = pathlib.Path(folder)
        (self.folder / "buckets").mkdir(parents=True, exist_ok=True)
        (self.folder / "hosts").mkdir(exist_ok=True)

    @contextlib.contextmanager
    def state(self):
        """Yields the state, and saves changes to it."""
        file = self.folder / "state.json"
        with self._locked():
            state = {"requests": {}, "nodes": {}, "buckets": [], "foreign_buckets": []}
            state["account"] = "Jane.Doe@example.com"
            if file.exists():
                state = json.loads(file.read_text())
            yield state
            new = file.with_suffix(".new")
            new.write_text(json.dumps(state, indent=1))
            new.replace(file)

    @contextlib.contextmanager
    def _locked(self):
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def calls(self) -> list[list[str]]:
        """Returns the command lines so far."""
        file = self.folder / "calls.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def set_faults(self, *faults: dict) -> None:
        """Sets the faults to inject."""
        (self.folder / "faults.json").write_text(json.dumps(faults))

    def host(self, name: str, worker: int) -> pathlib.Path:
        """Returns a host's folder, its HOME."""
        return self.folder / "hosts" / name / str(worker)

    def preempt(self, name: str) -> None:
        """Preempts a request's TPU: its hosts vanish with their processes and files."""
        with self.state() as state:
            request = state["requests"][name]
            request.update(state="SUSPENDING", then=["SUSPENDING", "SUSPENDED"])
            state["nodes"].pop(request["node_id"], None)
        self._remove_hosts(request["node_id"])

    def kill_all(self) -> None:
        """Kills the processes of all hosts."""
        _kill(self.folder / "hosts")

    def _remove_hosts(self, name: str) -> None:
        _kill(self.folder / "hosts" / name)
        shutil.rmtree(self.folder / "hosts" / name, ignore_errors=True)

    def fault(self, line: str, worker: int | None = None) -> dict | None:
        """Returns the fault to inject into a command, if any, and counts it."""
        file = self.folder / "faults.json"
        with self._locked():
            faults = json.loads(file.read_text()) if file.exists() else []
            for fault in faults:
                if fault.get("worker") == worker and re.search(fault["on"], line):
                    fault["times"] = fault.get("times", 1) - 1
                    left = [one for one in faults if one.get("times", 1) > 0]
                    file.write_text(json.dumps(left))
                    return fault
        return None

    def run(self, arguments: list[str]) -> int:
        """Runs a command line; returns the exit status."""
        command, positional, flags = parse(arguments)
        with (self.folder / "calls.jsonl").open("a") as calls:
            calls.write(json.dumps(arguments) + "\n")
        fault = self.fault(shlex.join(arguments))
        if fault and fault["do"] == "fail":
            raise GcloudError(fault["message"], fault.get("status", 1))
        if fault and fault["do"] == "preempt":
            self.preempt(fault["name"])
        method = getattr(self, "_" + re.sub("[ -]", "_", command.replace("compute tpus ", "")))
        return method(*positional, flags=flags, fault=fault) or 0

    # The commands.

    def _config_get_value(self, name, flags, fault):
        with self.state() as state:
            print(state[name])

    def _queued_resources_create(self, name, flags, fault):
        if "accelerator-type" not in flags or "node-id" not in flags:
            raise GcloudError("Exactly one of (--accelerator-type | ...) must be specified.", 2)
        labels = dict(pair.split("=") for pair in flags.get("labels", "").split(",") if pair)
        for text in (*labels, *labels.values()):
            if not re.fullmatch("[a-z0-9_-]{0,63}", text):
                raise GcloudError(
                    f"Bad value [{text}]: Only hyphens, underscores, lowercase ...", 2
                )
        with self.state() as state:
            if name in state["requests"] or flags["node-id"] in state["nodes"]:
                raise GcloudError(f"ALREADY_EXISTS: Resource '{name}' already exists")
            then = ["WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"]
            if fault:
                then = {"refuse": ["FAILED"], "starve": ["WAITING_FOR_RESOURCES"]}[fault["do"]]
            state["requests"][name] = {
                "state": "ACCEPTED",
                "then": then,
                "error": (fault or {}).get("message", ""),
                "node": {
                    "acceleratorType": flags["accelerator-type"],
                    "runtimeVersion": flags["runtime-version"],
                    "labels": labels,
                    "spot": "spot" in flags,
                },
                "node_id": flags["node-id"],
            }

    def _queued_resources_describe(self, name, flags, fault):
        with self.state() as state:
            request = _find(state["requests"], name, flags, "queuedResources")
            if request["then"]:
                request["state"] = request["then"].pop(0)
                if not request["then"] and request["state"] == "WAITING_FOR_RESOURCES":
                    request["then"] = ["WAITING_FOR_RESOURCES"]
            if request["state"] == "ACTIVE" and not request.get("granted"):
                self._make_node(state, request)
            description = {
                "name": name,
                "state": {"state": request["state"], "error": request["error"]},
                "tpu": {"nodeSpec": [{"node": request["node"]}]},
            }
        print(_formatted(description, flags["format"]))

    def _make_node(self, state, request):
        kind, number = request["node"]["acceleratorType"].rsplit("-", 1)
        chips = int(number) if kind in ("v5litepod", "v6e") else int(number) // 2
        count = max(1, chips // 4)
        name = request["node_id"]
        request["granted"] = True
        state["nodes"][name] = {
            **request["node"],
            "state": "READY",
            "networkEndpoints": [{"ipAddress": "127.0.0.1", "port": 8470}] * count,
        }
        for worker in range(count):
            home = self.host(name, worker)
            (home / "bin").mkdir(parents=True)
            (home / "tmp").mkdir()
            _write_program(home / "bin" / "python3", _PYTHON3)
            _write_program(home / "bin" / "sudo", '#!/bin/bash\necho "$@" >> "$HOME/sudo"\n')
            _write_program(home / "bin" / "hostname", f"#!/bin/bash\necho t1v-{name}-w-{worker}\n")

    def _queued_resources_delete(self, name, flags, fault):
        with self.state() as state:
            request = _find(state["requests"], name, flags, "queuedResources")
            if request["state"] in ("SUSPENDING", "DELETING"):
                raise GcloudError(f"FAILED_PRECONDITION: {name} is in state {request['state']}")
            if request["node_id"] in state["nodes"] and "force" not in flags:
                raise GcloudError("FAILED_PRECONDITION: the queued resource has nodes; use --force")
            del state["requests"][name]
            state["nodes"].pop(request["node_id"], None)
        self._remove_hosts(request["node_id"])

    def _tpu_vm_describe(self, name, flags, fault):
        with self.state() as state:
            print(_formatted(_find(state["nodes"], name, flags, "nodes"), flags["format"]))

    def _workers(self, name, flags):
        with self.state() as state:
            node = _find(state["nodes"], name, flags, "nodes")
        count = len(node["networkEndpoints"])
        worker = flags.get("worker", "0")
        if worker != "all" and not 0 <= int(worker) < count:
            raise GcloudError(f"worker index {worker} is not one of {count}")
        return list(range(count)) if worker == "all" else [int(worker)]

    def _tpu_vm_ssh(self, name, flags, fault):
        import concurrent.futures  # here, because most commands do without it, and faster

        if "command" not in flags:
            raise GcloudError("the fake has no interactive sessions")
        workers = self._workers(name, flags)
        with concurrent.futures.ThreadPoolExecutor(len(workers)) as pool:
            statuses = list(pool.map(lambda k: self._execute(name, k, flags["command"]), workers))
        return next(filter(None, statuses), 0)

    def _execute(self, name: str, worker: int, command: str) -> int:
        home = self.host(name, worker)
        fault = self.fault(command, worker)
        if fault:
            print(fault["message"], file=sys.stderr)
            return fault.get("status", 255)
        finished = subprocess.run(
            ["bash", "-c", command],
            cwd=home,
            env=environment(home),
            stdin=subprocess.DEVNULL,
            check=False,
            start_new_session=True,
        )
        if finished.returncode < 0:
            print("Connection to 127.0.0.1 closed by remote host.", file=sys.stderr)
            return 255
        return finished.returncode

    def _tpu_vm_scp(self, source, target, flags, fault):
        name = (source if ":" in source else target).partition(":")[0]
        for worker in self._workers(name, flags):
            home = self.host(name, worker)
            places = [
                home / place.partition(":")[2] if ":" in place else pathlib.Path(place)
                for place in (source, target)
            ]
            if places[0].is_dir() and "recurse" not in flags:
                raise GcloudError(f"scp: {source}: not a regular file")
            if not places[0].exists():
                raise GcloudError(f"scp: {source}: No such file or directory")
            if places[1].is_dir():
                places[1] /= places[0].name
            copy = shutil.copytree if places[0].is_dir() else shutil.copy
            copy(*places, **({"dirs_exist_ok": True} if places[0].is_dir() else {}))

    def _storage_buckets_describe(self, url, flags, fault):
        with self.state() as state:
            if url in state["foreign_buckets"]:
                raise GcloudError(f"HTTPError 403: storage.buckets.get denied on {url}")
            if url not in state["buckets"]:
                raise GcloudError(f"{url} not found: 404.")
            print(_formatted({"name": url[5:]}, flags["format"]))

    def _storage_buckets_create(self, url, flags, fault):
        with self.state() as state:
            if url in (*state["buckets"], *state["foreign_buckets"]):
                raise GcloudError("HTTPError 409: The requested bucket name is not available.")
            state["buckets"].append(url)
        self._local(url).mkdir(parents=True)

    def _storage_ls(self, url, flags, fault):
        path = self._local(url)
        found = sorted(path.parent.glob(path.name))
        if not found:
            raise GcloudError("One or more URLs matched no objects.")
        for path in found:
            print(f"gs://{path.relative_to(self.folder / 'buckets')}")

    def _storage_rsync(self, source, target, flags, fault):
        source, target = self._local(source), self._local(target)
        if not source.is_dir():
            raise GcloudError(f"Did not find existing container at: {source}")
        if (self.folder / "buckets") not in target.parents and not target.is_dir():
            raise GcloudError(f"Did not find existing container at: {target}")
        shutil.copytree(source, target, dirs_exist_ok=True)

    def _local(self, url: str) -> pathlib.Path:
        """Returns the local path of a gs:// address; other paths unchanged."""
        if not url.startswith("gs://"):
            return pathlib.Path(url)
        bucket, _, rest = url[5:].partition("/")
        if rest and not (self.folder / "buckets" / bucket).is_dir():
            raise GcloudError(f"gs://{bucket} not found: 404.")
        return self.folder / "buckets" / bucket / rest


def _find(table, name, flags, kind):
    if name not in table:
        place = f"projects/{flags['project']}/locations/{flags['zone']}/{kind}/{name}"
        raise GcloudError(f"NOT_FOUND: Resource '{place}' was not found")
    return table[name]


def _formatted(resource, text: str) -> str:
    """Formats like ``--format=value(...)``, the only format supported here."""
    match = re.fullmatch(r'value(?:\[separator="(.)"\])?\(([^()]*)\)', text)
    if not match:
        raise GcloudError(f"the format {text} is not known to the fake", 2)
    return (match[1] or "\t").join(_text(_get(resource, key)) for key in match[2].split(","))


def _get(resource, key: str):
    parts = re.findall(r"[A-Za-z_]+|\[[0-9]*\]", key)
    for position, part in enumerate(parts):
        if part == "[]":
            rest = ".".join(parts[position + 1 :])
            return [_get(item, rest) for item in resource]
        resource = resource[int(part[1:-1])] if part[0] == "[" else (resource or {}).get(part, "")
    return resource


def _text(value) -> str:
    if isinstance(value, dict):
        return ";".join(f"{key}={value}" for key, value in value.items())
    return ";".join(map(str, value)) if isinstance(value, list) else str(value)


# Hosts.

_PYTHON3 = f"""#!/bin/bash
if [ "$1 $2 $3" = "-m venv --clear" ]; then exec {PROGRAM} venv "$4"; fi
exec {sys.executable} "$@"
"""

# Its pip is this file; other commands see the host's copy of the project. Imports of installed
# packages are assumed to work. If the cloud's folder has a program named trainer, it runs instead
# of imagenet_fast.
_VENV_PYTHON = f"""#!/bin/bash
venv=$(cd "$(dirname "$0")/.." && pwd)
trainer=$FAKE_HOST/../../../trainer
case "$1 $2" in
  "-m pip") shift 2; exec {PROGRAM} pip "$venv" "$@" ;;
  "-m imagenet_fast") [ ! -x "$trainer" ] || {{ shift 2; exec "$trainer" "$@"; }} ;;
  "-c import tensorflow,"*) exit 0 ;;
  "-c import libtpu;"*) echo "$venv/libtpu.so"; exit 0 ;;
  "-c import sysconfig;"*) echo "$venv/site"; exit 0 ;;
esac
export PYTHONPATH=$(cat "$venv/source" 2>/dev/null):$venv/site
exec {sys.executable} "$@"
"""


def _write_program(path: pathlib.Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def environment(home: pathlib.Path) -> dict[str, str]:
    """Returns the environment variables of a host's processes."""
    return {
        "HOME": str(home),
        "PATH": f"{home}/bin:/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "TMPDIR": f"{home}/tmp",
        "FAKE_HOST": str(home),
        # Otherwise gRPC would use a proxy to reach the other workers.
        "no_proxy": "127.0.0.1,localhost",
        "OMP_NUM_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
    }


def _processes(hosts: pathlib.Path) -> list[int]:
    """Returns the processes of the hosts below a folder."""
    mark = b"\0FAKE_HOST=" + str(hosts).encode() + b"/"
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in b"\0" + (process / "environ").read_bytes():
                found.append(int(process.name))
    return found


def _kill(hosts: pathlib.Path) -> None:
    """Kills the processes of the hosts below a folder, and those that they start meanwhile."""
    deadline = time.monotonic() + 10
    while (found := _processes(hosts)) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def make_venv(folder: str) -> int:
    """``python3 -m venv --clear``: an environment that uses this interpreter."""
    path = pathlib.Path(folder)
    shutil.rmtree(path, ignore_errors=True)
    (path / "bin").mkdir(parents=True)
    (path / "site").mkdir()
    _write_program(path / "bin" / "python", _VENV_PYTHON)
    return 0


def pip(folder: str, arguments: list[str]) -> int:
    """``pip install``: records the arguments, and writes the packages' metadata."""
    import argparse
    import configparser

    path = pathlib.Path(folder)
    with (path / "pip.jsonl").open("a") as calls:
        calls.write(json.dumps(arguments) + "\n")
    parser = argparse.ArgumentParser(prog="pip", allow_abbrev=False)
    parser.add_argument("--disable-pip-version-check", action="store_true")
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("verb", choices=["install"])
    parser.add_argument("--no-deps", action="store_true")
    parser.add_argument("--force-reinstall", action="store_true")
    parser.add_argument("--requirement")
    parser.add_argument("--constraint")
    parser.add_argument("what", nargs="*")
    given = parser.parse_intermixed_args(arguments)
    names = list(given.what)
    for file in filter(None, [given.requirement, given.constraint]):
        lines = pathlib.Path(file).read_text().splitlines()
        if file == given.requirement:
            names += [line for line in lines if line and not line.startswith("#")]
    for name in names:
        if name == ".":
            config = configparser.ConfigParser()
            config.read("setup.cfg")
            requires = config["options"]["install_requires"].split("\n")
            _add_metadata(path, "imagenet_fast", "0", [line for line in requires if line])
            (path / "source").write_text(str(pathlib.Path.cwd()))
        elif "==" in name:
            package, version = name.split("==")
            asks_for = {"keras": ["h5py"], "tensorflow-tpu": ["libtpu", "keras", "h5py>=3.11"]}
            _add_metadata(path, package, version, asks_for.get(package, []))
    return 0


def _add_metadata(path: pathlib.Path, name: str, version: str, requires: list[str]) -> None:
    folder = path / "site" / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {one}" for one in requires)]
    (folder / "METADATA").write_text("\n".join(lines) + "\n")


def watch(owner: int, folder: str) -> int:
    """Ends all hosts' processes below a folder when the process that owns it has gone."""
    while pathlib.Path(f"/proc/{owner}").exists():
        time.sleep(0.5)
    _kill(pathlib.Path(folder))
    return 0


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    if arguments[:1] == ["venv"]:
        return make_venv(arguments[1])
    if arguments[:1] == ["pip"]:
        return pip(arguments[1], arguments[2:])
    if arguments[:1] == ["watch"]:
        return watch(int(arguments[1]), arguments[2])
    # gcloud's way to end at Ctrl-C, though what it runs on hosts goes on.
    signal.signal(signal.SIGINT, lambda *_: os._exit(255))
    try:
        return Cloud(os.environ["FAKE_GCLOUD"]).run(arguments)
    except GcloudError as failure:
        words = [word for word in arguments if not word.startswith("-")][:4]
        print(f"ERROR: (gcloud.{'.'.join(words)}) {failure}", file=sys.stderr)
        return failure.status


def start() -> None:
    """Runs the command line of this process."""
    sys.exit(main(sys.argv[1:]))
