# SPDX-License-Identifier: Apache-2.0
"""Fail points (level 2): moments at which a Gym can be killed, made to fail, or held. See TARGET.md."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

from conformance.errors import NotOffered, SuiteFault, UsageError
from conformance.patience import Patience

Action = Literal["kill", "fail", "hold"]

MOMENTS: Final[Mapping[str, str]] = {
    "start.judge": "a start is accepted in memory, nothing of it is kept",
    "effect.begin": "an effect is about to run",
    "effect.end": "an effect has run and is not recorded",
    "turn.close": "a boundary is crossed in memory, nothing that depends on it has left",
    "result.make": "a result is recorded in memory, nobody has seen it",
    "ack.release": "a result is released in memory, the reply has not left",
    "retire.fence": "a fence is raised in memory, the reply has not left",
    "prepare.close": "the gate is closed for a prepare, the reply has not left",
    "commit.capture": "the cut is captured, nothing of it is in the target",
    "commit.write": "some of the cut is in the target, the manifest is not",
    "commit.manifest": "the manifest is in the target, the participant has not taken note of it",
    "commit.note": "the participant has noted the cut as durable, the reply has not left",
    "resume.open": "the gate is open after a resume, the reply has not left",
    "abort.end": "an abort has ended the checkpoint in memory, the reply has not left",
    "restore.verify": "the source of a restore is verified, nothing of it is built",
    "restore.build": "everything that a restore lists is built aside, nothing is installed",
    "restore.install": "what was built is current, the reply has not left",
}
"""The suite's names for moments, and what is true at each. A target file gives the Gym's own word for those it has."""

MAY_FAIL: Final = frozenset({"commit.write", "restore.build"})
MAY_HOLD: Final = frozenset({"commit.write", "restore.verify", "restore.build"})
"""Where the actions `fail` and `hold` are used; `kill` is used at every moment."""


class FailPoints:
    """The fail points of one Gym, directed through a file that it reads whenever it reaches one.

    Args:
        env: the environment variable in which the Gym gets the path of the file.
        points: the Gym's own words, by the suite's names.
        file: that file; `{file}.reached` is what the Gym appends to.
        patience: scales the bounds.
    """

    def __init__(self, env: str, points: Mapping[str, str], file: Path, patience: Patience) -> None:
        self.env = env
        self.points = dict(points)
        self.file = file
        self.patience = patience

    @property
    def _reached(self) -> Path:
        return self.file.with_name(f"{self.file.name}.reached")

    def arm(self, moment: str, action: Action) -> Armed:
        """Direct the Gym to kill itself, fail, or wait whenever it reaches a moment; use as a context manager.

        Raises:
            NotOffered: the Gym has no word for the moment.
            SuiteFault: the action is not used there.
        """
        if moment not in {"kill": MOMENTS, "fail": MAY_FAIL, "hold": MAY_HOLD}[action]:
            raise SuiteFault(f"{action} is no action at {moment}")
        if moment not in self.points:
            raise NotOffered(f"the fail point {moment} (level 2) is not offered")
        self._reached.unlink(missing_ok=True)
        return Armed(self, moment, action)

    def direct(self, text: str) -> None:
        """Write the file in one step."""
        draft = self.file.with_name(f"{self.file.name}.draft")
        draft.write_text(f"{text}\n", encoding="utf-8")
        draft.replace(self.file)

    def disarm(self) -> None:
        """Direct nothing any more; whoever is held goes on."""
        self.file.unlink(missing_ok=True)

    def visits(self, moment: str) -> int:
        """Return how often the moment was reached since it was armed."""
        try:
            lines = self._reached.read_text(encoding="utf-8").split("\n")
        except FileNotFoundError:
            return 0
        return sum(1 for line in lines if line.split(" ")[0] == self.points[moment])


class Armed:
    """One fail point that is armed until the block ends.

    Args:
        points: the Gym's.
        moment: the suite's name.
        action: what is done at it.
    """

    def __init__(self, points: FailPoints, moment: str, action: Action) -> None:
        self._points = points
        self.moment = moment
        self.turn_into(action)

    def turn_into(self, action: Action) -> None:
        """Direct another action; who is held goes on and does that."""
        self.action = action
        self._points.direct(f"{self._points.points[self.moment]} {action}")

    def release(self) -> None:
        """Direct nothing any more; who is held goes on."""
        self._points.disarm()

    @property
    def reached(self) -> bool:
        """Whether the moment was reached since it was armed."""
        return self._points.visits(self.moment) > 0

    def wait_reached(self, within_s: float = 10.0) -> None:
        """Wait until the moment is reached.

        Raises:
            TimedOut: it was not within the bound.
        """
        words = f"the Gym reaches {self.moment} ({MOMENTS[self.moment]})"
        self._points.patience.until(lambda: self.reached, words, within_s=within_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def read_declaration(data: Any) -> tuple[str, dict[str, str]]:
    """Return the variable and the Gym's words of a `failpoints:` section.

    Raises:
        UsageError: it does not have the documented form, or names a moment that is none.
    """
    if not isinstance(data, Mapping) or set(data) != {"env", "points"} or not isinstance(data["points"], Mapping):
        raise UsageError("failpoints: {env: VARIABLE, points: {moment: word}} is expected")
    unknown = sorted(set(data["points"]) - set(MOMENTS))
    if unknown:
        raise UsageError(f"failpoints: {', '.join(unknown)} is none of {', '.join(MOMENTS)}")
    return str(data["env"]), {str(name): str(word) for name, word in data["points"].items()}
