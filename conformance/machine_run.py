# SPDX-License-Identifier: Apache-2.0
"""Runs the state machine against a bench within a budget, and says what it saw: verdicts and visits."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import hypothesis
from hypothesis.errors import Flaky
from hypothesis.reporting import with_reporter
from hypothesis.stateful import run_state_machine_as_test

from conformance import curl, machine_tour
from conformance.case import Bench
from conformance.errors import Failed, Lost, NotOffered, SuiteError, SuiteFault
from conformance.machine_checks import BY_CHANCE, CYCLES, MACHINE_CHECKS, PROCESS, TABLE, WALK
from conformance.machine_orders import Driver
from conformance.machine_outside import KINDS
from conformance.process_machine import ProcessMachine
from conformance.registry import Check
from conformance.target import ProcessTarget
from conformance.verdict import Failure, Outcome
from conformance.wire import Exchange

if TYPE_CHECKING:
    from conformance.machine import CheckpointMachine

EXCHANGES_SHOWN = 12
STEPS_SHOWN = 60
STEPS = 40
PROCESS_STEPS = 12
PROCESS_EXAMPLES = 4
SHRINKS_FOR_S = 25.0

BudgetName = Literal["quick", "demo", "default"]


@dataclass(frozen=True)
class Allowance:
    """What a budget gives the machine.

    Args:
        seconds: for random examples, before scaling.
        batch: examples per seed.
        tours: whether every cell of the phase table is visited.
        process_seconds: for examples that end the process (level 1), before scaling; 0: none.
    """

    seconds: float
    batch: int
    tours: bool
    process_seconds: float = 0.0


ALLOWANCES: Mapping[str, Allowance] = {
    "quick": Allowance(2.5, 4, tours=False),
    "demo": Allowance(5.0, 6, tours=False),
    "default": Allowance(12.0, 8, tours=True, process_seconds=9.0),
}


@dataclass(frozen=True)
class MachineReport:
    """What the machine saw.

    Args:
        outcomes: one per check of the machine.
        visits: how often each cell of the phase table was tried.
        unvisited: the legal cells that never were.
        examples: how many random examples ran.
        steps: how many calls and moves they made.
        seeds: the seed of each batch.
    """

    outcomes: Sequence[Outcome]
    visits: Mapping[str, int]
    unvisited: Sequence[str]
    examples: int = 0
    steps: int = 0
    seeds: Sequence[int] = ()


@dataclass
class Transcript:
    """One example: its story, and the exchanges at its end."""

    steps: list[str]
    exchanges: list[Exchange] = field(default_factory=list)
    error: SuiteError | None = None


class OutOfTime(BaseException):
    """The machine's time is over; not an `Exception`, so that Hypothesis lets it through."""


class Run:
    """One run of the machine.

    Args:
        bench: the Gym and the clocks.
        machine: the machine's class.
        seed: the first batch's; each further batch takes the next.
        budget: how much is done.
    """

    def __init__(self, bench: Bench, machine: type[CheckpointMachine], *, seed: int, budget: BudgetName) -> None:
        self.bench = bench
        self.allowance = ALLOWANCES[budget]
        self.seed = seed
        self.seeds: list[int] = []
        self.visits: Counter[str] = Counter()
        self.transcripts: list[Transcript] = []
        self.bodies: dict[str, Any] = {}
        self.deadline = float("inf")
        self.over = False
        self.failed: Transcript | None = None
        self.machine = self._bounded(machine)
        self.process_machine = self._bounded(ProcessMachine)

    def _bounded(self, base: Any) -> Any:
        """Return a machine over this bench that ends with the run's time and leaves a transcript of each example."""
        run = self

        class Machine(base):  # type: ignore[misc]  # the base is a parameter on purpose
            bench = run.bench
            visits = run.visits
            bodies = run.bodies
            numbers = itertools.count(1)

            def __init__(self) -> None:
                if time.monotonic() > run.deadline:
                    run.over = True
                    raise OutOfTime
                super().__init__()
                self.transcript = Transcript(self.walk.case.steps)
                run.transcripts.append(self.transcript)

            def teardown(self) -> None:
                self.transcript.exchanges = list(run.bench.wire.exchanges)[-EXCHANGES_SHOWN:]
                run.note(self.transcript, sys.exception())
                super().teardown()

        return Machine

    def note(self, transcript: Transcript, error: BaseException | None) -> None:
        """Remember an example that failed: from here on, time is for finding a smaller one."""
        if isinstance(error, (Failed, Lost)):
            if self.failed is None:
                self.deadline = time.monotonic() + self.bench.patience.seconds(SHRINKS_FOR_S)
            transcript.error, self.failed = error, transcript

    # --- the three parts ---

    def report(self, parts: Collection[Check] = MACHINE_CHECKS) -> MachineReport:
        """Run the parts that the budget gives and return what was seen."""
        artifacts = "artifacts_http" in self.bench.gym.features
        cells = machine_tour.cells(self.bench.spec.machine, artifacts=artifacts)
        reason = self._not_applicable()
        if reason is not None:
            return MachineReport([Outcome(one, None, "not_applicable", reason=reason) for one in parts], {}, cells)
        outcomes = []
        if CYCLES in parts:
            outcomes.append(self.cycles())
        if WALK in parts:
            outcomes.append(self.walks())
        if TABLE in parts and self.allowance.tours:
            outcomes.append(self._scripted(TABLE, lambda walk: self._tour(walk, cells)))
        if PROCESS in parts and self.allowance.process_seconds:
            outcomes.append(self._process())
        unvisited = [name for name in cells if not self.visits[name]]
        steps = sum(len(transcript.steps) for transcript in self.transcripts)
        shown = {name: self.visits[name] for name in cells}
        return MachineReport(tuple(outcomes), shown, unvisited, len(self.transcripts), steps, tuple(self.seeds))

    def _not_applicable(self) -> str | None:
        bench = self.bench
        if "checkpoint" not in bench.gym.profiles:
            return "profile checkpoint is not offered"
        if not bench.has_world or "conformance" not in bench.gym.environments():
            return "the environment conformance cannot be used with the suite's world"
        if bench.target.shared_dir is None and "artifacts_http" not in bench.gym.features:
            return "neither a directory that both sides see nor http artifacts are there"
        return None

    def _cycles(self, walk: Driver) -> None:
        walk.baseline(KINDS.values())
        walk.reset()
        machine_tour.cycles(walk)

    def _tour(self, walk: Driver, cells: Sequence[str]) -> None:
        machine_tour.tour(walk, [name for name in cells if not self.visits[name]])
        machine_tour.crowd(walk)
        left = [name for name in cells if not self.visits[name]]
        if left:
            raise Failed(
                "every legal cell of the phase table is visited",
                expected="at least one visit of each",
                got=f"none of {', '.join(left[:12])}{' …' if len(left) > 12 else ''}",
                requirements=("CKPT-PHASE-001",),
            )

    def _scripted(self, check: Check, story: Callable[[Driver], None]) -> Outcome:
        first = self._once(check, story)
        if first.status != "failed":
            return first
        second = self._once(check, story)
        if second.status == "failed":
            return first
        return replace(first, status="flaky", failures=(*first.failures, _passed_once(second)))

    def _once(self, check: Check, story: Callable[[Driver], None]) -> Outcome:
        started = time.monotonic()
        numbers = self.machine.numbers
        before = self.bench.wire.made
        walk: Driver | None = None
        with self._judged(check) as found:
            try:
                walk = Driver(self.bench, 4_000_000 + next(numbers), self.visits, self.bodies)
                walk.begin()
                story(walk)
            finally:
                found.steps = walk.case.steps if walk else []
                found.exchanges = list(self.bench.wire.exchanges)[-EXCHANGES_SHOWN:]
                if walk is not None:
                    walk.close()
        made = self.bench.wire.made - before
        return replace(self._outcome(check, found), seconds=time.monotonic() - started, exchanges=made)

    def cycles(self) -> Outcome:
        """Run the two scripted cycles."""
        return self._scripted(CYCLES, self._cycles)

    def walks(self) -> Outcome:
        """Run random walks until their time is over or something is found."""
        return self._batches(WALK, self.machine, self.allowance.seconds, self.allowance.batch, STEPS)

    def _process(self) -> Outcome:
        if not isinstance(self.bench.target, ProcessTarget):
            return Outcome(PROCESS, None, "not_applicable", reason="process control (level 1) is not offered")
        seconds = self.allowance.process_seconds
        return self._batches(PROCESS, self.process_machine, seconds, PROCESS_EXAMPLES, PROCESS_STEPS)

    def _batches(self, check: Check, machine: Any, seconds: float, batch: int, steps: int) -> Outcome:
        """Run batches of examples, each with the next seed, until the time is over or something is found."""
        started, before = time.monotonic(), self.bench.wire.made
        until = started + self.bench.patience.seconds(seconds)
        outcome, number = Outcome(check, None, "passed"), itertools.count()
        while time.monotonic() < until and outcome.status == "passed":
            outcome = self._batch(check, machine, self.seed + next(number), until, batch, steps)
        made = self.bench.wire.made - before
        missed = [key for key in check.requirements if key in BY_CHANCE and not self.visits[key]]
        left_out = dict.fromkeys(missed, "no walk came to it")
        return replace(outcome, seconds=time.monotonic() - started, exchanges=made, left_out=left_out)

    def _batch(self, check: Check, machine: Any, seed: int, until: float, batch: int, steps: int) -> Outcome:
        self.seeds.append(seed)
        self.deadline, self.over, self.failed = until, False, None
        lines: list[str] = []
        settings = hypothesis.settings(
            max_examples=batch,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            derandomize=False,
            report_multiple_bugs=False,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        with self._judged(check) as found, with_reporter(lambda text: lines.append(str(text))):
            try:
                run_state_machine_as_test(hypothesis.seed(seed)(machine), settings=settings)
            except (OutOfTime, Flaky):
                # Hypothesis calls an example that the end of the time cut short flaky, too.
                if not self.over:
                    raise
                self._raise_failed()
            finally:
                self._choose(found, seed)
        return self._outcome(check, found)

    def _raise_failed(self) -> None:
        if self.failed is not None and self.failed.error is not None:
            raise self.failed.error from None

    # --- verdicts ---

    @contextlib.contextmanager
    def _judged(self, check: Check) -> Iterator[_Found]:
        found = _Found()
        try:
            yield found
        except NotOffered as error:
            found.status, found.reason = "not_applicable", str(error)
        except Flaky as error:
            found.status, found.reason = "flaky", str(error)
        except (Failed, Lost) as error:
            found.status, found.error = "failed", error
        except SuiteFault as error:
            found.status, found.reason = "fault", f"{type(error).__name__}: {error}"
        except Exception:
            found.status, found.reason = "fault", traceback.format_exc(limit=-8)

    def _choose(self, found: _Found, seed: int) -> None:
        """Take the smallest example that failed, and the last one, should they differ in their verdict."""
        chosen = self.failed or (self.transcripts[-1] if self.transcripts else None)
        if chosen is not None:
            found.steps, found.exchanges = [f"seed {seed}", *chosen.steps], chosen.exchanges
            found.other = self.transcripts[-1]

    def _outcome(self, check: Check, found: _Found) -> Outcome:
        if found.status in ("passed", "not_applicable", "fault"):
            return Outcome(check, None, found.status, reason=found.reason)
        masks = self.bench.wire.tokens.values()
        shown = tuple((curl.curl(one, masks), curl.answer(one, masks)) for one in found.exchanges)
        steps = tuple(found.steps[-STEPS_SHOWN:])
        if found.status == "flaky":
            return self._flaky(check, found, steps, shown)
        error = found.error
        if isinstance(error, Failed):
            ids = error.requirements or check.requirements[:1]
            failure = Failure(tuple(ids), error.what, error.expected, error.got, steps, shown)
        else:
            ids, what = check.requirements[:1], "the Gym answers every call of the machine"
            failure = Failure(ids, what, "a reply within the bound", str(error), steps, shown)
        return Outcome(check, None, "failed", (failure,))

    def _flaky(
        self, check: Check, found: _Found, steps: tuple[str, ...], shown: tuple[tuple[str, str], ...]
    ) -> Outcome:
        """Return the verdict about an example that failed and then did not, with both transcripts."""
        key, expected = ("CKPT-PHASE-001",), "the same verdict each time"
        failed = self.failed.error if self.failed is not None else None
        one = Failure(key, "the run that failed", expected, str(failed or found.reason)[:2000], steps, shown)
        last = tuple(found.other.steps[-STEPS_SHOWN:]) if found.other is not None else ()
        two = Failure(key, "the same steps again", expected, "no failure, or another one", last)
        return Outcome(check, None, "flaky", (one, two), reason=found.reason[:500])


@dataclass
class _Found:
    """What came of one part of the run."""

    status: Literal["passed", "failed", "flaky", "not_applicable", "fault"] = "passed"
    error: SuiteError | None = None
    reason: str = ""
    steps: list[str] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    other: Transcript | None = None


def _passed_once(outcome: Outcome) -> Failure:
    got = f"{outcome.status} {outcome.reason}".strip()
    return Failure(("CKPT-PHASE-001",), "the same steps a second time", "the same verdict", got)


def run(
    bench: Bench,
    *,
    seed: int,
    budget: BudgetName = "default",
    machine: type[CheckpointMachine] | None = None,
    parts: Collection[Check] = MACHINE_CHECKS,
) -> MachineReport:
    """Run the state machine against a Gym.

    Args:
        bench: the Gym and the clocks.
        seed: of the first batch.
        budget: `quick`, `demo` or `default`.
        machine: a subclass to run instead.
        parts: which of its checks are run.
    """
    from conformance.machine import CheckpointMachine  # the two modules name each other

    return Run(bench, machine or CheckpointMachine, seed=seed, budget=budget).report(parts)
