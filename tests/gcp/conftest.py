"""Fixtures that run gcp/tpu against a fake cloud."""

import os
import pathlib
import shutil
import socket
import subprocess

import fake_gcloud
import pytest

ROOT = pathlib.Path(__file__).parents[2]
# Records its arguments and environment; exits with the status in the cloud's file `status`.
TRAINER = """#!/bin/bash
cloud=$FAKE_HOST/../../..
{ printf '%s\\n' "$@"; env; } > "$HOME/trained"
echo "training on $(hostname)"
while [ -e "$cloud/hold" ]; do sleep 0.05; done
exit "$(cat "$cloud/status" 2>/dev/null || echo 0)"
"""


class Bench:
    """A fake cloud, and a user at a shell.

    Args:
      folder: directory for everything.
      checkout: the project's files, which are copied for the user.
    """

    def __init__(self, folder: pathlib.Path, checkout: pathlib.Path) -> None:
        self.folder = folder
        self.checkout = shutil.copytree(checkout, folder / "checkout")
        self.cloud = fake_gcloud.Cloud(folder / "cloud")
        (folder / "bin").mkdir()
        program = folder / "bin" / "gcloud"
        program.write_text(f'#!/bin/bash\nexec {fake_gcloud.PROGRAM} "$@"\n')
        program.chmod(0o755)
        self.settings = {
            "PROJECT": "my-project",
            "ZONE": "us-central2-b",
            "NAME": "my-tpu",
            "ACCELERATOR_TYPE": "v4-16",
            "PROVISIONING": "spot",
            "DATA_DIR": "gs://my-bucket/digits",
            "RUNS_DIR": "gs://my-bucket/runs",
            "RECIPE": "digits",
            "POLL_SECONDS": "0.01",
        }

    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "FAKE_GCLOUD": str(self.cloud.folder),
        }

    def arguments(self, *arguments: str) -> list[str]:
        """Writes the env file and returns a command line."""
        file = self.folder / "my.env"
        file.write_text("".join(f"{name}={value}\n" for name, value in self.settings.items()))
        return [str(self.checkout / "gcp" / "tpu"), f"--env={file}", *arguments]

    def start(self, *arguments: str, output=subprocess.PIPE) -> subprocess.Popen:
        return subprocess.Popen(
            self.arguments(*arguments),
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str, status: int = 0, timeout: float = 60) -> str:
        """Runs gcp/tpu and returns its output; fails unless it exits with ``status``."""
        process = self.start(*arguments)
        try:
            output, _ = process.communicate(timeout=timeout)
        finally:
            process.kill()
        assert process.returncode == status, output
        return output

    def refused(self, *arguments: str) -> str:
        """Runs a command that must fail without changing anything in the cloud."""
        before = len(self.changes())
        output = self.run(*arguments, status=1)
        assert self.changes()[before:] == []
        return output

    def changes(self) -> list[list[str]]:
        """Returns the command lines that changed something, successful or not."""
        queries = {"describe", "get-value", "ls"}
        return [call for call in self.cloud.calls() if not queries & set(call)]

    def make_data(self) -> None:
        """Makes a bucket with a fake shard."""
        with self.cloud.state() as state:
            state["buckets"].append("gs://my-bucket")
        folder = self.cloud.folder / "buckets" / "my-bucket" / "digits"
        folder.mkdir(parents=True)
        (folder / "train-00000-of-00001").write_text("data")

    def use_trainer(self) -> None:
        """Installs the fake trainer."""
        program = self.cloud.folder / "trainer"
        program.write_text(TRAINER)
        program.chmod(0o755)

    def trained(self, worker: int) -> list[str] | None:
        """Returns the trainer's arguments and environment on a host; None if it did not run."""
        file = self.cloud.host(self.settings["NAME"], worker) / "trained"
        return file.read_text().splitlines() if file.exists() else None


@pytest.fixture(scope="session")
def watched(tmp_path_factory):
    """A folder below which hosts' processes end with pytest, also if it is killed."""
    folder = tmp_path_factory.getbasetemp()
    watcher = subprocess.Popen(
        [*fake_gcloud.COMMAND, "watch", str(os.getpid()), folder], start_new_session=True
    )
    yield folder
    watcher.kill()
    watcher.wait()


@pytest.fixture
def bench(tmp_path, checkout, watched):
    """A fake cloud; its hosts' processes end with the test."""
    yield from make_bench(tmp_path, checkout)


def make_bench(folder, checkout):
    made = Bench(folder, checkout)
    yield made
    made.cloud.kill_all()


@pytest.fixture(scope="session")
def checkout(tmp_path_factory):
    """A checkout that other tests do not change, with the files that the hosts need.

    Of the package only the recipes, and a module to compare: each test copies the checkout, and
    the fake trainer needs no more.
    """
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "gcp", folder / "gcp")
    recipes = pathlib.PurePath("imagenet_fast", "flags")
    shutil.copytree(ROOT / recipes, folder / recipes)
    shutil.copy(ROOT / "imagenet_fast" / "__init__.py", folder / "imagenet_fast")
    for name in (".gitignore", "LICENSE", "README.md", "pyproject.toml", "setup.cfg"):
        shutil.copy(ROOT / name, folder)
    subprocess.run(["git", "init", "--quiet", "--template=", folder], check=True)
    return folder


@pytest.fixture(scope="session")
def prepared(tmp_path_factory, checkout, watched):
    """The folders of two clouds: one with data and a TPU, one with everything installed, too."""
    for bench in make_bench(tmp_path_factory.mktemp("prepared"), checkout):
        bench.use_trainer()
        bench.make_data()
        bench.settings["STRATEGY"] = "multi_worker"
        bench.run("--yes", "create")
        shutil.copytree(bench.cloud.folder, bench.folder / "created")
        bench.run("install")
        yield bench.folder / "created", bench.cloud.folder


@pytest.fixture
def created(bench, prepared):
    """A bench with data and a TPU of two hosts, which run the fake trainer."""
    shutil.copytree(prepared[0], bench.cloud.folder, dirs_exist_ok=True)
    bench.settings["STRATEGY"] = "multi_worker"
    return bench


@pytest.fixture
def ready(bench, prepared):
    """The same with everything installed."""
    shutil.copytree(prepared[1], bench.cloud.folder, dirs_exist_ok=True)
    bench.settings["STRATEGY"] = "multi_worker"
    return bench


@pytest.fixture
def port():
    """The first of two consecutive free ports."""
    for _ in range(100):
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            number = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", number + 1))
            except (OSError, OverflowError):
                continue
            return number
    raise AssertionError("no two free ports in a row")
