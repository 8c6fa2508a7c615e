"""The trials of a search, which Optuna stores in a journal file for resuming."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.option import option_text
from imagenet_fast.config import Config
from tuning.plan import Plan, Searched

JOURNAL = "study.journal"
COARSE, FINE = "coarse", "fine"
# The states of an outcome.
COMPLETE, PRUNED, DIVERGED, FAILED = "complete", "pruned", "diverged", "failed"
_BEST_FRACTION = 0.25
# They do not change the weights of a run, but what is measured of it.
_EVALUATION = {"eval_every", "test_time_augmentation", "tta_fraction"}


@dataclasses.dataclass(frozen=True)
class Trial:
    """A run to train.

    Attributes:
      number: from 0.
      round: coarse or fine.
      values: of the searched options, by name.
      handle: Optuna's trial.
    """

    number: int
    round: str
    values: dict[str, Any]
    handle: optuna.trial.Trial


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a run.

    Attributes:
      number: from 0.
      round: coarse or fine.
      values: of the searched options, by name.
      state: complete; pruned: stopped early because it was worse than others; diverged; failed.
      error: validation error of the last evaluation, a fraction; 1 if diverged, None if failed.
      seconds: wall-clock time.
    """

    number: int
    round: str
    values: dict[str, Any]
    state: str
    error: float | None
    seconds: float


class Study:
    """Suggests the values of trials, and stores their outcomes.

    Interruptions do not change the trials of a round: each has its own seed.

    Args:
      plan: of the search.
      evaluations: in a whole run.

    Raises:
      UserError: if the directory contains another search.
    """

    def __init__(self, plan: Plan, evaluations: int) -> None:
        self._plan = plan
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(plan.directory / JOURNAL))),
            study_name="tune",
            load_if_exists=True,
            # Not in the first quarter, because slow learners may become the best.
            pruner=optuna.pruners.MedianPruner(
                n_startup_trials=5, n_warmup_steps=math.ceil(evaluations / 4), n_min_trials=3
            ),
        )
        self._claim()

    def _claim(self) -> None:
        """Stores the plan in a new study, or checks that the study's plan is the same."""
        plan = self._plan
        found = self._study.user_attrs.get("plan")
        if found is None:
            values = {
                "config": json.loads(plan.config.to_json()),
                "search": list(map(str, plan.space)),
                "search_seed": plan.seed,
            }
            self._study.set_user_attr("plan", values)
            return
        config, searched = Config.from_json(json.dumps(found["config"])), list(map(str, plan.space))
        differences = []
        if found["search"] != searched:
            there, here = ", ".join(found["search"]), ", ".join(searched)
            differences.append(f"it searches {there}; here {here}")
        if found["search_seed"] != plan.seed:
            differences.append(f"search_seed is {found['search_seed']} there, {plan.seed} here")
        differences += [
            f"{name} is {option_text(getattr(config, name))} there, "
            f"{option_text(getattr(plan.config, name))} here"
            for name in config.differences(plan.config)
            if name in {*config.differences(plan.config, all_options=False), *_EVALUATION}
            and name not in [searched.option for searched in plan.space]
        ]
        if differences:
            raise UserError(
                f"{plan.directory} contains another search ({'; '.join(differences)}); choose "
                "another --study_dir, or remove that one"
            )

    def trials(self) -> Iterator[Trial]:
        """Yields the remaining trials, interrupted ones first.

        Call :meth:`finish` for each one before the next.
        """
        for frozen in self._study.get_trials(states=(TrialState.RUNNING,)):
            self._study.sampler = self._sampler(frozen.number)
            # Optuna can resume a trial only by its ID.
            handle = optuna.trial.Trial(self._study, frozen._trial_id)
            yield self._trial(handle, frozen.user_attrs.get("round") or self._round())
        while self._round():
            self._study.sampler = self._sampler(len(self._study.get_trials(deepcopy=False)))
            yield self._trial(self._study.ask(), self._round())

    def _trial(self, handle: optuna.trial.Trial, round_: str) -> Trial:
        handle.set_user_attr("round", round_)
        space = self._fine_space() if round_ == FINE else self._plan.space
        values = {searched.option: searched.suggest(handle) for searched in space}
        return Trial(handle.number, round_, values, handle)

    def _round(self) -> str:
        """Returns the round that lacks trials, not counting failed ones; empty: none does."""
        rounds = [outcome.round for outcome in self.outcomes() if outcome.state != FAILED]
        if rounds.count(COARSE) < self._plan.trials:
            return COARSE
        return FINE if rounds.count(FINE) < self._plan.fine_trials else ""

    def _fine_space(self) -> Sequence[Searched]:
        """Returns the space around the best quarter of the coarse trials."""
        coarse = [outcome for outcome in ranked(self.outcomes()) if outcome.round == COARSE]
        complete = [outcome for outcome in coarse if outcome.state == COMPLETE]
        best = complete[: max(2, math.ceil(_BEST_FRACTION * len(coarse)))]
        if not best:
            return self._plan.space
        return [
            searched.narrowed([outcome.values[searched.option] for outcome in best])
            for searched in self._plan.space
        ]

    def _sampler(self, number: int) -> optuna.samplers.BaseSampler:
        (seed,) = np.random.SeedSequence([self._plan.seed, number]).generate_state(1)
        return optuna.samplers.TPESampler(seed=int(seed), multivariate=True)

    def report(self, trial: Trial, evaluation: int, error: float) -> bool:
        """Stores the error of an evaluation (from 1); returns whether to prune the trial."""
        trial.handle.report(error, evaluation)
        return trial.handle.should_prune()

    def finish(self, trial: Trial, state: str, seconds: float, error: float = 1.0) -> Outcome:
        """Stores the outcome of a trial.

        Args:
          trial: that has ended.
          state: its final state.
          seconds: wall-clock time.
          error: its final error; for a pruned trial, the last report counts instead.
        """
        trial.handle.set_user_attr("state", state)
        trial.handle.set_user_attr("seconds", seconds)
        if state in (COMPLETE, DIVERGED):
            frozen = self._study.tell(trial.handle, error)
        else:
            ended = {PRUNED: TrialState.PRUNED, FAILED: TrialState.FAIL}[state]
            frozen = self._study.tell(trial.handle, state=ended)
        return self._outcome(frozen)

    def outcomes(self) -> list[Outcome]:
        """Returns the outcomes of ended trials, in the order in which they began."""
        ended = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
        return [self._outcome(frozen) for frozen in self._study.get_trials(False, ended)]

    def _outcome(self, frozen: optuna.trial.FrozenTrial) -> Outcome:
        attributes = frozen.user_attrs
        values = {
            searched.option: searched.value(frozen.params[searched.option])
            for searched in self._plan.space
        }
        return Outcome(
            frozen.number,
            attributes["round"],
            values,
            attributes["state"],
            frozen.value,
            attributes["seconds"],
        )


def ranked(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Returns the outcomes from the best to the worst: complete, pruned, diverged and failed."""
    states = (COMPLETE, PRUNED, DIVERGED, FAILED)
    return sorted(outcomes, key=lambda outcome: (states.index(outcome.state), outcome.error or 0.0))


def best_of(outcomes: Sequence[Outcome]) -> Outcome | None:
    """Returns the complete trial with the least error; None if none is complete."""
    complete = [outcome for outcome in ranked(outcomes) if outcome.state == COMPLETE]
    return complete[0] if complete else None
