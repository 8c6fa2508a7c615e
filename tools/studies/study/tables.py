"""Tables of a study's results."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence

from study.log import Key, Record
from study.settings import SEEDS, Experiment, Setting


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The results of a setting's runs.

    Attributes:
      errors: validation errors of runs that did not diverge, as fractions.
      diverged: number of runs whose loss became infinite or NaN.
    """

    errors: tuple[float, ...]
    diverged: int

    @property
    def mean(self) -> float:
        """The mean error."""
        return statistics.mean(self.errors)

    @property
    def deviation(self) -> float:
        """The sample standard deviation of the errors; 0 for a single run."""
        return statistics.stdev(self.errors) if len(self.errors) > 1 else 0.0

    @property
    def accuracy(self) -> str:
        """Mean and standard deviation of the accuracy in percent, and the number of runs."""
        if not self.errors:
            return ""
        deviation = f" ± {100 * self.deviation:.2f}" if len(self.errors) > 1 else ""
        return f"{100 * (1 - self.mean):.2f}{deviation} ({len(self.errors)})"

    def __str__(self) -> str:
        """Mean and standard deviation in percent; an unusual number of runs is given, too."""
        if self.diverged:
            return f"{self.diverged} of {self.diverged + len(self.errors)} diverged"
        if not self.errors:
            return ""
        if len(self.errors) == 1:
            return f"{100 * self.mean:.2f} (1 run)"
        runs = f" ({len(self.errors)} runs)" if len(self.errors) < SEEDS else ""
        return f"{100 * self.mean:.2f} ± {100 * self.deviation:.2f}{runs}"


def outcome(setting: Setting, records: Mapping[Key, Record]) -> Outcome:
    """Returns the results of a setting."""
    runs = of_setting(setting, records)
    errors = tuple(run["error"] for run in runs if run["error"] is not None)
    return Outcome(errors, len(runs) - len(errors))


def of_setting(setting: Setting, records: Mapping[Key, Record]) -> list[Record]:
    """Returns the records of a setting, sorted by seed."""
    fingerprint = setting.fingerprint
    runs = [record for record in records.values() if record["fingerprint"] == fingerprint]
    return sorted(runs, key=lambda record: record["seed"])


def error_table(
    experiment: Experiment,
    records: Mapping[Key, Record],
    row_of: Callable[[Setting], tuple[int, ...]],
    heading: Sequence[str],
) -> str:
    """Returns a Markdown table of errors, with a column for each method.

    Args:
      experiment: with the settings.
      records: the log.
      row_of: returns the numbers at the beginning of a setting's row, by which rows are sorted.
      heading: of these numbers.
    """
    methods = list(dict.fromkeys(setting.method for setting in experiment.settings))
    rows: dict[tuple[int, ...], dict[str, str]] = {}
    for setting in experiment.settings:
        rows.setdefault(row_of(setting), {})[setting.method] = str(outcome(setting, records))
    return markdown(
        [*heading, *methods],
        [
            [*map(str, row), *(rows[row].get(method, "") for method in methods)]
            for row in sorted(rows)
        ],
    )


def markdown(heading: list[str], rows: list[list[str]]) -> str:
    """Returns a Markdown table."""
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
