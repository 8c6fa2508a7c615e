"""tools/install.sh, with fake Python and pip that log their arguments."""

import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PYTHON = """#!/bin/sh
# python -m venv DIRECTORY, or python -c "import ..."
[ "$1" != -c ] || { echo "$2; ${PYTHONDONTWRITEBYTECODE-compiles}" >> imported.log; exit 1; }
mkdir -p "$3/bin"
cp "$0" "$3/bin/python"
printf '#!/bin/sh\necho "$@" >> pip.log\n' > "$3/bin/pip"
chmod +x "$3/bin/pip"
"""


@pytest.fixture
def install(tmp_path):
    """Runs the script in a clone and returns pip's arguments."""
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "install.sh", tmp_path / "tools")
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)

    def run(*arguments):
        log = tmp_path / "pip.log"
        log.unlink(missing_ok=True)
        subprocess.run(
            [tmp_path / "tools" / "install.sh", *arguments],
            env={**os.environ, "PYTHON": str(python)},
            check=True,
        )
        return log.read_text().split() if log.exists() else None

    return run


@pytest.mark.parametrize(
    ("extras", "requirement"),
    [((), "."), (("digits",), ".[digits]"), (("test,addons",), ".[test,addons]")],
)
def test_extras_are_installed_once(install, extras, requirement):
    first = install(".venv", *extras)
    assert first[0] == "install"
    assert first[-2:] == ["--editable", requirement]
    assert install(".venv", *extras) is None


def test_modules_that_training_imports_are_compiled(install, tmp_path, monkeypatch):
    """If they cannot be imported, the first command says why."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert "--no-compile" in install(".venv")
    logged = (tmp_path / "imported.log").read_text()
    assert logged == "import imagenet_fast.training.train; compiles\n"


def test_an_environment_without_pip_is_made_again(install, tmp_path):
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    assert install(".venv")[0] == "install"


SCRIPTS = (
    *("tools/install.sh", "tools/test.sh", "tools/quickstart.sh", "tools/docs.sh"),
    *(".ci/run", "gcp/tpu", "gcp/host/install.sh"),
)


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_find_their_own_folder_whatever_cdpath_says(tmp_path, script):
    # All that is between its first command and where it has found the folder.
    head, found, _ = (ROOT / script).read_text().partition('cd "$(dirname "$0")/..')
    assert found
    own, other = tmp_path / "own" / script, tmp_path / "other" / script
    own.parent.mkdir(parents=True)
    other.parent.mkdir(parents=True)
    up = "/.." * script.count("/")
    own.write_text(f'{head.rpartition(chr(10))[0]}\ncd "$(dirname "$0"){up}" && pwd\n')
    finished = subprocess.run(
        ["bash", script, "argument"],
        cwd=tmp_path / "own",
        env={**os.environ, "CDPATH": str(tmp_path / "other")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert finished.stdout == f"{tmp_path / 'own'}\n"


def test_more_extras_are_added(install):
    install(".venv")
    assert install(".venv", "digits")[-1] == ".[digits]"


def test_other_requirements_are_installed_again(install, tmp_path):
    install(".venv")
    (tmp_path / "setup.cfg").write_text("[metadata]\n")
    assert install(".venv")[-1] == "."
