"""``--runner`` of ``prepare`` without Beam; tests/data/prepare/test_beam_writer.py has it."""

import sys

import pytest

from imagenet_fast import commands, data


def command(directory, *options):
    return ["prepare", "--source=digits", f"--data_dir={directory}", *options]


def test_beam_is_not_installed(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "apache_beam", None)
    monkeypatch.delitem(sys.modules, "imagenet_fast.data.prepare.beam_writer", raising=False)
    monkeypatch.delattr(data, "beam_writer", raising=False)
    assert commands.run(command(tmp_path / "data", "--runner=beam")) == 2
    errors = capsys.readouterr().err
    assert "--runner=beam needs Apache Beam" in errors and "pip install -e '.[beam]'" in errors
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--runner=beem"], "runner='beem' does not exist; did you mean 'beam'?"),
        (["--pipeline_options=--streaming"], "pipeline_options are Apache Beam's"),
        (["--runner=beam", "--threads=2"], "threads are of --runner=local"),
    ],
)
def test_flags_that_do_not_go_together(tmp_path, capsys, options, reason):
    assert commands.run(command(tmp_path / "data", *options)) == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


def test_processes_of_this_machine_do_not_write_into_buckets(capsys):
    assert commands.run(command("gs://bucket/data")) == 2
    assert "or prepare it there with --runner=beam" in capsys.readouterr().err
