"""The package as a whole: what it exports, and what it costs to import."""

import configparser
import importlib.util
import re
import sys

import pytest

import imagenet_fast

HEAVY = ("tensorflow", "keras", "numpy", "PIL", "sklearn", "matplotlib")


def imported_packages(importtime):
    """The packages that ``python -X importtime`` lists."""
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in importtime.splitlines()}


def test_help_imports_nothing_heavy(run_python):
    """Through the real entry point: what takes time is what gets imported."""
    for arguments in (["--help"], ["train", "--help"], ["evaluate", "--help"]):
        finished = run_python(["-X", "importtime", "-m", "imagenet_fast", *arguments], fresh=True)
        assert finished.stdout.startswith("usage: imagenet-fast")
        packages = imported_packages(finished.stderr)
        assert "imagenet_fast" in packages
        assert not packages & set(HEAVY)


def test_import_and_errors_import_nothing_heavy(run_python):
    code = (
        "import sys\n"
        "import imagenet_fast.models.options\n"
        "from imagenet_fast import Config, UserError, commands\n"
        "Config(batch_size=512).to_json()\n"
        "for name in commands.COMMANDS:\n"
        "    try:\n"
        "        commands.run([name, '--help'])\n"
        "    except SystemExit as end:\n"
        "        assert not end.code\n"
        "assert commands.run(['train', '--bach_size=1']) == 2\n"
        "assert commands.run(['train', '--batch_size=-1']) == 2\n"
        f"assert not set({HEAVY}) & set(sys.modules)\n"
    )
    run_python(["-c", code], fresh=True)


def test_suggested_extras_exist(request):
    root = request.config.rootpath
    setup = configparser.ConfigParser()
    setup.read(root / "setup.cfg")
    files = [
        root / "README.md",
        *root.glob("docs/*.md"),
        *root.glob("notebooks/*.ipynb"),
        *root.glob("tools/*.py"),
        *root.glob("imagenet_fast/**/*.py"),
    ]
    texts = [file.read_text() for file in files]
    told = {
        extra
        for text in texts
        for extra in re.findall(r"""(?:install -e \\?['"]\.\[|how_to_install\(')([\w,-]+)""", text)
    }
    assert {"addons", "digits", "imagenet", "notebooks", "serving", "tune"} <= told
    assert told <= {*setup["options.extras_require"]}
    # It is not on PyPI.
    assert not [text for text in texts if re.search(r"pip install [\\'\"]*imagenet_fast", text)]


def test_everything_exported_exists():
    for name in imagenet_fast.__all__:
        assert callable(getattr(imagenet_fast, name))
    assert imagenet_fast.train is sys.modules["imagenet_fast.training.train"].train


def test_unknown_attribute():
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = imagenet_fast.trian


def test_star_import_gives_the_whole_api():
    names = {}
    exec("from imagenet_fast import *", names)
    assert set(imagenet_fast.__all__) <= set(names)


def test_main_is_the_console_script(request):
    setup = (request.config.rootpath / "setup.cfg").read_text()
    module, function = re.search(r"imagenet-fast = ([\w.]+):(\w+)", setup).groups()
    assert importlib.util.find_spec(module)
    assert (module, function) == ("imagenet_fast.__main__", "main")


def test_exit_status_reaches_the_shell(run_python):
    finished = run_python(["-m", "imagenet_fast", "trian"], check=False, fresh=True)
    assert finished.returncode == 2
    assert finished.stdout == ""
    assert finished.stderr == "imagenet-fast trian: error: there is no command 'trian'; " + (
        "did you mean 'train'?\n"
    )
