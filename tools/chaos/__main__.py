r"""Plays faults against training runs, whose end must be that of an undisturbed run, to the bit.

    sudo .venv/bin/python tools/chaos --faults=500 --output_dir=benchmarks/chaos

Each run trains a small network with one or two workers, and meets faults at random moments until it
ends: processes are killed, terminated and stopped; its disk is full or read-only; the network
between workers drops all packets; the clock jumps; checkpoints are damaged, and files half written.
After a fault that ends processes, the same command is started again. Kinds and moments depend on
the seed and, since processes are not, only in part on it alone.

A run must lose no more steps than those since the last undamaged checkpoint, print no traceback,
and end with the weights and all other variables of an undisturbed run, and with the rows of its
metrics.jsonl, except for times. Otherwise the run, its output and its log are kept in the output
folder, and the status is 1.

`log.jsonl` there gets the faults of each run when it has ended; the same command again plays what
is missing. At the end, `results.json`, `chaos.svg` and a table are written.

Workers are forks of this process, which has imported TensorFlow, except those whose clock jumps.
Root on Linux has all faults; others are without disks and networks. Clocks need Debian's package
libfaketime.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

# The folder of this package, of launch_local.py and of network_lab, and that of imagenet_fast.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from chaos import machine
from chaos.faults import FAULTS

# Of runs whose clock jumps, which start Python anew.
_CLOCK_RUNS = 0.15


def main(arguments: Sequence[str]) -> int:
    """Plays faults, and returns 1 if something went wrong."""
    given = _parse(arguments)
    is_root = machine.enter_own_mounts()
    # Before numpy: its library would start threads, and forks would lack them.
    os.environ.update(OPENBLAS_NUM_THREADS="1", TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="")
    from tqdm import tqdm

    from chaos import report, worker
    from imagenet_fast.base.files import LineFile, whole_lines

    tqdm.monitor_interval = 0  # it would be a thread
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and clean up
    given.output_dir.mkdir(parents=True, exist_ok=True)
    log_file = given.output_dir / "log.jsonl"
    log = LineFile(log_file, whole_lines(log_file))
    rows = [json.loads(line) for line in whole_lines(log_file)]
    done = sum("fault" in row for row in rows)
    missing = machine.missing(is_root, given.workers)
    for need, reason in missing.items():
        names = [name for name, fault in FAULTS.items() if fault.needs == need]
        tqdm.write(f"without {', '.join(names)}: {reason}")
    worker.import_all()
    with (
        _temporary_folder() as folder,
        tqdm(total=given.faults, initial=done, unit=" faults", smoothing=0) as bar,
    ):
        session = _Session(given, folder, is_root, list(missing), bar)
        number = 1 + max((row["run"] for row in rows), default=-1)
        while done < given.faults:
            new = session.run(number)
            for row in new:
                log.add(json.dumps(row))
            log.flush()
            rows += new
            done += len(new) - 1
            number += 1
            if new[-1]["problem"]:
                tqdm.write(f"run {number - 1}: {new[-1]['problem']}")
    print(report.write(given.output_dir, rows))
    return 1 if any(row.get("problem") for row in rows) else 0


@contextlib.contextmanager
def _temporary_folder() -> Iterator[pathlib.Path]:
    """Makes a folder and removes it; tempfile's would be removed by forks at their end, too."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="imagenet_fast_chaos_"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", type=pathlib.Path, required=True, help="for the log")
    parser.add_argument("--faults", type=int, default=100, help="in all")
    parser.add_argument("--kinds", default=",".join(FAULTS), help="separated by commas")
    parser.add_argument("--workers", default="1,2", help="of a run, one of these numbers")
    parser.add_argument("--steps", type=int, default=400, help="of a run")
    parser.add_argument("--seed", type=int, default=1, help="of the faults")
    given = parser.parse_args(arguments)
    given.kinds = given.kinds.split(",")
    for kind in given.kinds:
        if kind not in FAULTS:
            parser.error(f"there is no fault {kind}, only {', '.join(FAULTS)}")
    try:
        given.workers = list(map(int, given.workers.split(",")))
    except ValueError:
        given.workers = [0]
    if min(given.workers) < 1:
        parser.error("--workers must be numbers of at least 1, separated by commas")
    return given


class _Session:
    """Runs, and what they have in common: the images, and ends of undisturbed runs.

    Args:
      given: the options.
      folder: for temporary files.
      is_root: whether there are disks and networks.
      missing: what this machine lacks.
      bar: counts faults.
    """

    def __init__(
        self,
        given: argparse.Namespace,
        folder: pathlib.Path,
        is_root: bool,
        missing: Sequence[str],
        bar: Any,
    ) -> None:
        self._given, self._folder, self._is_root = given, folder, is_root
        self._missing, self._bar = missing, bar
        self._data = folder / "digits"
        self._expected: dict[int, dict[str, Any]] = {}

    def run(self, number: int) -> list[dict[str, Any]]:
        """Plays a run; returns a row for each of its faults, and then one for the run."""
        from chaos.play import Setting, kinds_for

        given = self._given
        numbers = random.Random(f"{given.seed}-{number}")
        workers, clock = numbers.choice(given.workers), numbers.random() < _CLOCK_RUNS
        can_jump = "clock" in given.kinds and "clock" not in self._missing
        clock = can_jump and (clock or given.kinds == ["clock"])
        kinds = kinds_for(given.kinds, workers, clock, self._missing)
        if clock:  # Jumps are cheap, and starts are not.
            kinds += ["clock"] * len(kinds)
        if not kinds:
            raise SystemExit(f"chaos: none of these faults can be played with {workers} workers")
        if workers not in self._expected:
            end, problem, _ = self._play("undisturbed", Setting(workers, False, ()), None)
            if end is None or problem:
                raise SystemExit(f"chaos: the undisturbed run fails: {problem}")
            self._expected[workers] = end
        begin = time.monotonic()
        setting = Setting(workers, clock, tuple(kinds))
        _, problem, rows = self._play(f"run-{number}", setting, f"{given.seed}-{number}-faults")
        whole = {"workers": workers, "clock": clock, "seconds": round(time.monotonic() - begin, 1)}
        return [
            *({"run": number, **row} for row in rows),
            {"run": number, "faults": len(rows), **whole, "problem": problem},
        ]

    def _play(
        self, name: str, setting: Any, seed: str | None
    ) -> tuple[dict[str, Any] | None, str, list[dict[str, Any]]]:
        from chaos.play import Play, compare

        given, folder = self._given, self._folder / name
        self._prepare()
        play = Play(
            folder,
            self._data,
            given.steps,
            setting,
            seed,
            is_root=self._is_root,
            played=self._bar.update,
        )
        try:
            end, problem = compare(play, self._expected.get(setting.workers) if seed else None)
        finally:
            play.close()
        if problem:
            play.keep(given.output_dir / name)
        play.remove()
        return end, problem, play.rows

    def _prepare(self) -> None:
        """Makes the shards, in a process of its own."""
        from chaos.worker import Worker, train

        if self._data.exists():
            return
        log = self._folder / "prepare.txt"
        flags = ["prepare", "--source=digits", f"--data_dir={self._data}"]
        process = Worker(train(flags, {}), log)
        while not process.has_ended():
            time.sleep(0.01)
        if process.status:
            raise SystemExit(f"chaos: {log.read_text()}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
