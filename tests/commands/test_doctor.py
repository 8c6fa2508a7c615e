"""The command's output and status; what the checks find is in tests/doctor."""

import json
import re

import pytest

from imagenet_fast.base.addresses import free_port
from imagenet_fast.commands import doctor, run
from imagenet_fast.doctor.finding import ok, slow, wrong


def test_help(capsys):
    with pytest.raises(SystemExit, match="0"):
        run(["doctor", "--help"])
    page = capsys.readouterr().out
    assert page.startswith("usage: imagenet-fast doctor ")
    for flag in ("--timeout", "--output_dir", "--model_dir", "--data_dir", "--all_reduce"):
        assert flag in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch_size=3"], "there is no flag --batch_size"),
        (["--timeout=0"], "timeout is 0, but must be positive"),
        (["--strategy=some"], "strategy='some' does not exist"),
    ],
)
def test_mistakes(capsys, arguments, message):
    assert run(["doctor", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_an_output_dir_that_cannot_be_made(capsys, monkeypatch, tmp_path):
    """That is told before the checks."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(doctor, "examine", lambda config, timeout: pytest.fail("too early"))
    assert run(["doctor", f"--output_dir={tmp_path}/file/results"]) == 2
    assert f"cannot write to {tmp_path}/file/results: Not a directory" in capsys.readouterr().err


@pytest.mark.parametrize("state", ["ok", "slow", "wrong"])
def test_output_and_status(capsys, monkeypatch, tmp_path, state):
    last = {
        "ok": ok("resize", "compiled"),
        "slow": slow("resize", "not compiled", "install g++"),
        "wrong": wrong("resize", "not compiled", "install g++"),
    }[state]
    findings = [ok("Python", "3.11.7", version=3), last]
    monkeypatch.setattr(doctor, "examine", lambda config, timeout: iter(findings))
    # Only what is wrong fails.
    assert run(["doctor", f"--output_dir={tmp_path}"]) == (1 if state == "wrong" else 0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Python            ok     3.11.7"
    assert lines[1].startswith(f"resize            {state:7}")
    summary = "2 ok" if state == "ok" else f"1 {state} (resize); 1 ok"
    if state != "ok":
        assert lines[2] == " " * 25 + "install g++"
    assert summary in lines
    written = json.loads((tmp_path / "doctor.json").read_text())
    assert [own["state"] for own in written["findings"]] == ["ok", state]
    assert written["findings"][0]["numbers"] == {"version": 3}
    assert (tmp_path / "doctor.txt").read_text().splitlines() == lines[:-2]


@pytest.mark.slow
@pytest.mark.long
def test_a_worker_is_missing_a_gpu_unseen_and_model_dir_is_no_folder(tmp_path, run_python):
    """All of it is told in one run, which ends in time."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0)'\n")
    tool.chmod(0o755)
    (tmp_path / "runs").write_text("")
    workers = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    task = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": 0}}
    finished = run_python(
        ["-m", "imagenet_fast", "doctor", f"--model_dir={tmp_path}/runs/a", "--timeout=15"],
        environment={"TF_CONFIG": json.dumps(task), "PATH": f"{tmp_path}:/usr/bin:/bin"},
        check=False,
    )
    assert finished.returncode == 1, finished.stdout + finished.stderr
    assert "Traceback" not in finished.stdout + finished.stderr
    lines = finished.stdout.splitlines()
    told = {line[:18].strip(): line[18:].split(maxsplit=1) for line in lines if line[:1].strip()}
    assert told["cluster"] == [
        "wrong",
        f"after 15 s still waiting for worker 1 ({workers[1]}: Connection refused)",
    ]
    assert told["model_dir"] == [
        "wrong",
        f"cannot write in {tmp_path}/runs/a: Not a directory",
    ]
    state, gpus = told["GPUs"]
    assert state == "wrong"
    assert gpus.startswith("TensorFlow sees no GPU; the driver shows 1 NVIDIA H100 80GB HBM3: ")
    assert {told[f"CPU:0 {dtype}"][0] for dtype in ("float32", "bfloat16", "float16")} == {"ok"}
    assert re.search(r"^\d+ wrong \(.*GPUs, model_dir, cluster\); \d+ ok$", lines[-1])


# In the default run, tests/doctor examines, and the command prints above.
@pytest.mark.long
@pytest.mark.slow
def test_one_process(digits, tmp_path, run_python):
    arguments = [f"--data_dir={digits}", f"--model_dir={tmp_path}/run"]
    finished = run_python(["-m", "imagenet_fast", "doctor", *arguments])
    told = dict(re.findall(r"^(\S.{,16}?) +(ok|slow|wrong) ", finished.stdout, re.MULTILINE))
    for name in ("data_dir", "model_dir", *(f"CPU:0 {own}" for own in ("float32", "bfloat16"))):
        assert told[name] == "ok", finished.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.long
def test_two_workers(digits, tmp_path, run_python):
    arguments = [f"--data_dir={digits}", f"--model_dir={tmp_path}/run", "--all_reduce=torus_2d"]
    finished = run_python(["-m", "imagenet_fast", "doctor", *arguments], workers=2)
    found = re.findall(r"^\[worker (\d)\] cluster +ok +(.*)$", finished.stdout, re.MULTILINE)
    assert sorted(worker for worker, _ in found) == ["0", "1"]
    for _, text in found:
        assert re.match(r"2 workers x 1 CPU .*, gRPC; torus_2d, float32: .* [\d.]+ GB/s$", text)
    assert not list(tmp_path.iterdir())
