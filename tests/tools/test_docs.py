"""Checks of the documentation that building it does not make."""

import ast
import json
import pathlib
import re
import shlex

import pytest

import imagenet_fast
from imagenet_fast import Config, commands
from imagenet_fast.commands.flags import CommandFlags

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "gcp" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks").rglob("README.md")),
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# What the package's own command line follows.
PROGRAM = re.compile(r"(?:\bimagenet-fast|-m imagenet_fast|launch_local\.py[^'\"]*? --) (?=[a-z])")


# --- The Python API


def documented():
    """The modules whose public names an API page shows, and the objects that it names."""
    text = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.rst"))
    modules = re.findall(r"^\.\. automodule:: (\S+)$(?!\n   :no-members:)", text, re.MULTILINE)
    objects = re.findall(r"^\.\. auto(?!module)\w+:: ([\w.]+)", text, re.MULTILINE)
    return set(modules), set(objects)


def exported(path):
    """The names in ``__all__`` of a Python file; none if it has none."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__":
            return ast.literal_eval(node.value)
    return []


def test_api_pages_have_all_of_the_notebooks_names():
    _, objects = documented()
    assert {f"imagenet_fast.{name}" for name in imagenet_fast.__all__} <= objects


def test_api_pages_have_all_packages():
    package = ROOT / "imagenet_fast"
    modules, _ = documented()
    public = {path.parent for path in package.glob("*/__init__.py")} - {package / "commands"}
    public |= {path.parent for path in package.rglob("*/__init__.py") if exported(path)}
    assert len(public) > 8
    assert {".".join(path.relative_to(ROOT).parts) for path in public} <= modules


def imports_of(path):
    """(module, name) of this package's objects that a page or notebook imports."""
    if path.suffix == ".ipynb":
        cells = json.loads(path.read_text())["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    else:
        text = path.read_text()
    for module, names in re.findall(r"^\s*from (imagenet_fast[\w.]*) import (.+)$", text, re.M):
        yield from ((module, name.strip()) for name in names.strip("()").split(","))


@pytest.mark.parametrize(
    "path",
    [path for path in (*PAGES, *(ROOT / "notebooks").glob("*.ipynb")) if any(imports_of(path))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_api_pages_have_what_examples_import(path):
    modules, objects = documented()
    for module, name in imports_of(path):
        assert module in modules or f"{module}.{name}" in objects


# --- Commands


def command_lines(path):
    """The command lines of this package in a page's code blocks, or in a recipe's head."""
    text = path.read_text()
    if path.suffix == ".flags":
        text = re.sub("^#", " ", text, flags=re.MULTILINE)
    fenced = [code for language, code in FENCE.findall(text) if not language]
    lines = [line for line in FENCE.sub("", text).splitlines() if line.startswith("    ")]
    for line in "\n".join([*fenced, *lines]).replace("\\\n", " ").splitlines():
        if program := PROGRAM.search(line):
            yield line[program.end() :]


COMMANDS = [
    pytest.param(line, id=f"{path.relative_to(ROOT)}-{line.split()[0]}")
    for path in (*PAGES, *sorted((ROOT / "imagenet_fast" / "flags").glob("*.flags")))
    for line in command_lines(path)
]


class Parsed(Exception):  # noqa: N818 - it is no error
    """Stops a command when its flags are parsed."""


@pytest.fixture
def parse(monkeypatch):
    """Parses a command line as the command does, and returns its flags."""
    read = CommandFlags.parse

    def read_and_end(self, arguments, positional=""):
        read(self, arguments, positional)
        raise Parsed(self)

    def run(line):
        # Without what stands for more, the shell's variables, and files that a run writes.
        arguments = [
            argument
            for argument in shlex.split(line, comments=True)
            if argument != "..." and not argument.startswith(("$", "--flagfile=runs/"))
        ]
        with pytest.raises(Parsed) as parsed:
            commands.run(arguments)
        return parsed.value.args[0]

    monkeypatch.setattr(CommandFlags, "parse", read_and_end)
    monkeypatch.chdir(ROOT)
    return run


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_can_be_run_as_written(line, parse):
    flags = parse(line)
    own = flags.own_names()
    Config().replace(**{name: given for name, given in flags.changes().items() if name not in own})


def test_a_wrong_command_is_found(parse):
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        parse("train --bach_size=256")


def test_commands_are_found():
    assert len(COMMANDS) > 30
    programs = {line.values[0].split()[0] for line in COMMANDS}
    assert programs >= {
        "prepare",
        "train",
        "export",
        "predict",
        "benchmark",
        "input-server",
        "stage-server",
    }
