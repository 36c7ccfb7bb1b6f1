# SPDX-License-Identifier: Apache-2.0
"""Runs the chosen checks against one Gym and collects what they saw."""

from __future__ import annotations

import contextlib
import itertools
import random
import secrets
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from conformance import curl
from conformance.case import Bench, Case
from conformance.controller import Participant
from conformance.errors import Failed, Lost, LostRequest, NotOffered, SuiteError, SuiteFault, TargetUnreachable
from conformance.gym import CONFORMANCE, Gym
from conformance.judge import Judge
from conformance.loopback import Loopback
from conformance.patience import Patience
from conformance.registry import PROFILES, Budget, Check
from conformance.target import ProcessTarget, Target, TargetFile
from conformance.verdict import Failure, Outcome
from conformance.wire import Exchange, Wire
from conformance.witness import Witness
from conformance.world import World
from spec import Specification

EXCHANGES_SHOWN = 12
FAILURES_RUN_AGAIN = 5
"""How many failures are run a second time to tell flaky ones; a Gym that fails everywhere need not be waited for."""

LEVELS_MISSING = ("process control (level 1) is not offered", "fail points (level 2) are not offered")


@dataclass(frozen=True)
class Settings:
    """What a run is told.

    Args:
        urls: level 0; empty with a target file.
        target_file: level 1 and 2.
        tokens: by plane (level 0).
        shared_dir: a directory that both sees (level 0).
        world_port: fixed port of the world (level 0), 0 for any.
        world_known: whether the Gym was started with the suite's world URL.
        budget: which checks run.
        seed: order of the checks and everything that is drawn.
        time_scale: factor on every bound.
        only: run these checks alone (names, chapters or requirement ids); empty: all.
        skip: leave these out.
    """

    urls: tuple[str, ...] = ()
    target_file: Path | None = None
    tokens: Mapping[str, str] = field(default_factory=dict)
    shared_dir: Path | None = None
    world_port: int = 0
    world_known: bool = False
    budget: Budget = "default"
    seed: int = 0
    time_scale: float = 1.0
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()


@contextlib.contextmanager
def open_bench(settings: Settings, specification: Specification) -> Iterator[Bench]:
    """Serve witness and world, start or reach the Gym, discover it, and end everything afterwards."""
    patience = Patience(settings.time_scale)
    with contextlib.ExitStack() as stack:
        work_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gym-conformance-")))
        loopback = stack.enter_context(Loopback())
        witness = Witness(loopback, patience)
        stack.callback(witness.close)
        world = World(loopback, patience, settings.world_port)
        stack.callback(world.close)
        target = _target(settings, work_dir, world, patience)
        stack.callback(target.close)
        if isinstance(target, ProcessTarget):
            target.start()
        judge = Judge(specification.openapi, specification.errors, settings.seed)
        wire = Wire(judge, patience, target.tokens)
        stack.callback(wire.close)
        gym = Gym.discover(wire, [endpoint.url for endpoint in target.endpoints])
        has_world = settings.world_known or isinstance(target, ProcessTarget)
        nonce = "c" + secrets.token_hex(3)
        yield Bench(specification, target, gym, wire, witness, world, patience, nonce, has_world, work_dir)


def _target(settings: Settings, work_dir: Path, world: World, patience: Patience) -> Target:
    if settings.target_file is not None:
        return ProcessTarget(TargetFile.read(settings.target_file), work_dir, world.url, patience)
    return Target(settings.urls, settings.tokens, settings.shared_dir, patience)


def choose(checks: Mapping[str, Check], settings: Settings) -> list[Check]:
    """Return the checks of a budget, narrowed by `only` and `skip`, in the order of the seed."""
    chosen = narrowed(
        [check for check in checks.values() if settings.only or settings.budget in check.budgets], settings
    )
    random.Random(settings.seed).shuffle(chosen)
    # Checks that end the process come last: whatever they break cannot touch the others.
    return sorted(chosen, key=lambda check: (check.last, check.level))


def narrowed(checks: Sequence[Check], settings: Settings) -> list[Check]:
    """Return those checks that `only` and `skip` leave, by name, chapter or requirement."""

    def named(check: Check, words: Sequence[str]) -> bool:
        chapters = (check.chapter, check.chapter.partition("_")[0])
        return any(word in (check.name, *chapters, *check.requirements) for word in words)

    left = [check for check in checks if not settings.only or named(check, settings.only)]
    return [check for check in left if not named(check, settings.skip)]


class Runner:
    """Runs checks on a bench, one after the other.

    Args:
        bench: what they share.
        on_outcome: called after each.
    """

    def __init__(self, bench: Bench, on_outcome: Callable[[Outcome], None] = lambda outcome: None) -> None:
        self.bench = bench
        self.outcomes: list[Outcome] = []
        self._on_outcome = on_outcome
        self._numbers = itertools.count(1)
        self._again = FAILURES_RUN_AGAIN
        self.gone: str | None = None
        """The check during which the Gym ended, if it cannot be started again."""
        self._stopped = False

    def run(self, checks: Sequence[Check]) -> list[Outcome]:
        """Run the checks; every one yields at least one outcome."""
        for check in checks:
            for participant in self._participants(check):
                if self._stopped:
                    return self.outcomes
                outcome = self._judged(check, participant)
                self.outcomes.append(outcome)
                self._on_outcome(outcome)
                if outcome.status in ("failed", "fault") and not self._answers():
                    self._after_its_end(check)
                if self.gone is not None:
                    return self.outcomes
        self._leave()
        return self.outcomes

    def stop(self) -> None:
        """Begin no further check; called from another thread."""
        self._stopped = True

    def _answers(self) -> bool:
        """Say whether every participant still accepts connections."""
        try:
            for participant in self.bench.gym.participants:
                self.bench.wire.raw("GET", participant.url, plane="none")
        except LostRequest:
            return False
        except Lost:
            return True
        return True

    def _after_its_end(self, check: Check) -> None:
        """Start a Gym again that ended during a check; where that is not ours to do, nothing more can be judged."""
        if isinstance(self.bench.target, ProcessTarget):
            self.recover()
        else:
            self.gone = check.name

    def _leave(self) -> None:
        """End what a last check may have left open."""
        gym = self.bench.gym
        with contextlib.suppress(SuiteError):
            controller = gym.controller(f"leave-{self.bench.nonce}")
            for participant in gym.participants:
                controller.adopt(participant)

    def _participants(self, check: Check) -> list[Participant | None]:
        if check.each == "gym":
            return [None]
        everyone = self.bench.gym.participants
        if check.each == "participant":
            return list(everyone)
        return [p for p in everyone if p.owns(check.each)] or [None]

    def _judged(self, check: Check, participant: Participant | None) -> Outcome:
        name = participant.name if participant is not None else None
        reason = self.not_applicable(check)
        if reason is None and check.each == "sessions" and participant is None:
            reason = "no participant owns sessions"
        if reason is not None:
            return Outcome(check, name, "not_applicable", reason=reason)
        first = self._once(check, name)
        if first.status != "failed" or self._again == 0:
            return first
        self._again -= 1
        second = self._once(check, name)
        if second.status == "failed":
            return replace(second, seconds=first.seconds + second.seconds)
        if second.status == "passed":
            return replace(first, status="flaky", seconds=first.seconds + second.seconds)
        return second

    def not_applicable(self, check: Check) -> str | None:
        """Return why a check does not apply to this Gym, or None if it does."""
        bench = self.bench
        # Every profile builds on `results` (CKPT-DISC-010): whoever lists any is judged by it.
        claimed = check.profile == PROFILES[0] and any(p.capabilities["profiles"] for p in bench.gym.participants)
        if check.profile not in bench.gym.profiles and not claimed:
            return f"profile {check.profile} is not offered"
        missing = [feature for feature in check.features if feature not in bench.gym.features]
        if missing:
            return f"feature {', '.join(missing)} is not offered"
        if check.level > bench.target.level:
            return LEVELS_MISSING[bench.target.level]
        unknown = [name for name in check.points if name not in bench.target.moments]
        if unknown:
            return f"the fail point {', '.join(unknown)} (level 2) is not offered"
        if CONFORMANCE in check.features and CONFORMANCE not in bench.gym.environments():
            return "the environment conformance is not registered"
        if check.needs_world and not bench.has_world:
            return "the Gym was not started with the suite's world URL"
        if check.needs_shared_dir and bench.target.shared_dir is None:
            return "no directory that both sides see was given"
        if check.needs_storage and bench.target.shared_dir is None and "artifacts_http" not in bench.gym.features:
            return "neither a directory that both sides see nor http artifacts are there"
        return None

    def _once(self, check: Check, participant: str | None) -> Outcome:
        bench = self.bench
        under_study = next((p for p in bench.gym.participants if p.name == participant), None)
        case = Case(bench, check.name, next(self._numbers), under_study)
        started = time.monotonic()
        outcome = Outcome(check, participant, "passed")
        problem: SuiteError | None = None
        with bench.wire.recording() as exchanges:
            try:
                check.body(case)
            except NotOffered as error:
                outcome = replace(outcome, status="not_applicable", reason=str(error))
            except TargetUnreachable:
                raise
            except SuiteFault as error:
                outcome = replace(outcome, status="fault", reason=f"{type(error).__name__}: {error}")
            except (Failed, Lost) as error:
                outcome = replace(outcome, status="failed")
                problem = error
            except Exception:
                outcome = replace(outcome, status="fault", reason=traceback.format_exc(limit=-6))
        if outcome.status == "failed" and problem is not None:
            outcome = replace(outcome, failures=(self._failure(check, case, problem, exchanges),))
        case.close()
        if check.level:
            self.recover()
        seconds = time.monotonic() - started
        return replace(outcome, seconds=seconds, exchanges=len(exchanges), left_out=dict(case.left_out))

    def recover(self) -> None:
        """Make sure that the Gym runs and is known again after a check that owned the process."""
        target = self.bench.target
        if isinstance(target, ProcessTarget):
            target.cont()
            target.disarm()
            if not target.whole:
                target.restart()
            try:
                self._discover(target)
            except TargetUnreachable:
                # One of its processes may have been dying still.
                target.restart()
                self._discover(target)

    def _discover(self, target: ProcessTarget) -> None:
        self.bench.wire.reconnect()
        found = Gym.discover(self.bench.wire, [endpoint.url for endpoint in target.endpoints])
        self.bench.gym.participants = found.participants

    def _failure(self, check: Check, case: Case, error: SuiteError, exchanges: Sequence[Exchange]) -> Failure:
        secrets_known = self.bench.wire.tokens.values()
        shown = list(exchanges)[-EXCHANGES_SHOWN:]
        lines = tuple((curl.curl(e, secrets_known), curl.answer(e, secrets_known)) for e in shown)
        steps = tuple(case.steps)
        if isinstance(error, Failed):
            # A judgement without ids of its own is a prerequisite: it counts against the check's main subject.
            ids = error.requirements or check.requirements[:1]
            return Failure(ids, error.what, error.expected, error.got, steps, lines)
        expected = "a reply within the bound"
        return Failure(
            check.requirements[:1], "the Gym answers every call of the suite", expected, str(error), steps, lines
        )
