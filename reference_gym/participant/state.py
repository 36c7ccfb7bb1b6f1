# SPDX-License-Identifier: Apache-2.0
"""What an author implements, and the values that pass between the kit and the author's code.

Two things can be implemented, either or both:

* ``Agent``: a participant that owns rollouts implements ``check`` and ``run``. The kit starts ``run`` as a task per
  attempt and hands it a ``Rollout`` (module ``rollout``), with which the loop opens and closes its turns.
* ``Part``: a store of sessions or of ledger rows implements ``capture``, ``build``, ``install``, ``discard`` and
``drop``.
  The ready-made ``Sessions`` (module ``sessions``) is one; a model server's ledger is another.

A participant has one agent or none, and any number of parts; ``owns`` follows from that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    from reference_gym.participant.rollout import Rollout

Json: TypeAlias = Any
"""A JSON value: None, bool, int, float (finite), str (without lone surrogates), list of them, dict of str to them."""

Owns = Literal["rollouts", "sessions", "ledger"]
Continuation = Literal["export_restore", "stateless", "restart_only"]
Verify = Literal["wait", "repeat"]


@dataclass(frozen=True, slots=True)
class Policy:
    """Where the agent finds the model; no credential in it."""

    base_url: str
    model: str
    api: Literal["chat_completions", "responses"]


@dataclass(frozen=True, slots=True)
class Start:
    """One accepted item of a start call: what this rollout is to do.

    ``policy`` is the one of the start call; the present one is ``Rollout.policy``. ``max_turns`` is a count,
    ``episode_ms`` a budget of active time in milliseconds; None: no such limit.
    """

    rollout_id: str
    attempt: int
    environment: str
    task: Mapping[str, Json]
    task_digest: str
    policy: Policy
    agent: str | None = None
    seed: int | None = None
    max_turns: int | None = None
    episode_ms: int | None = None
    labels: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Success:
    """How a rollout ended well; ``final`` is left out of the result's body when it is None.

    Neither ``messages`` nor ``final`` may hold anything that depends on time, attempt or process.
    """

    outcome: Literal["completed", "truncated"]
    reward: float
    messages: Sequence[Json]
    final: Json = None


class TaskRefused(Exception):
    """Raised by ``Agent.check``: the item's outcome is ``invalid``, with this text as its detail."""


class RolloutFailure(Exception):
    """Raised by the author inside ``Agent.run``: the rollout ends with a failure as its result.

    Args:
        kind: what failed, e.g. ``verification_failed``, ``policy_unavailable``; a lower-case identifier.
        reason: a sentence for people.
        terminal: True when no later attempt can succeed.
        stage: where it failed, e.g. ``verification``.
    """

    def __init__(self, kind: str, reason: str, *, terminal: bool, stage: str | None = None) -> None:
        super().__init__(f"{kind}: {reason}")
        self.kind = kind
        self.reason = reason
        self.terminal = terminal
        self.stage = stage


class SessionUncertain(Exception):
    """Nobody knows what an effect changed: the rollout stops in state ``restart`` and blocks nothing.

    Raised by an effect's caller (``perform`` of ``Turn.effect``) when its handler died or the reply was lost for good.
    """


@dataclass(frozen=True, slots=True)
class EffectCall:
    """One change of environment state, as the agent asks for it.

    ``effects_done`` is the number of effects that the caller has recorded in this session before this one; None: the
    session owner does not compare (conformance probe only).
    """

    rollout_id: str
    attempt: int
    turn: int
    request_id: str
    tool: str
    args: Json
    effects_done: int | None


class Agent(Protocol):
    """The author's agent loop."""

    def check(self, start: Start) -> None:
        """Refuse a task that cannot be run; no I/O, changes nothing.

        Raises:
            TaskRefused: with the reason. (Unknown environment and agent names are refused by the kit.)
        """
        ...

    async def run(self, rollout: Rollout) -> Success:
        """Run one attempt from ``rollout.state`` (None: from the beginning) to its end.

        The kit calls it once per attempt, as a task of its own: after a start, or after the resume of a restore,
        when ``rollout.state`` and ``rollout.turns_done`` are those of the saved boundary. It is cancelled when
        the attempt is fenced. Returning ends the rollout (held while the gate is closed); inside
        ``Rollout.verification`` prefer ``Verification.finish``. An exception other than ``RolloutFailure`` ends
        it with the failure ``internal``, not terminal.
        """
        ...


@dataclass(frozen=True, slots=True)
class Captured:
    """What a part holds of one rollout at a boundary.

    Only ``data`` matters when the participant owns rollouts; the rest fills the index of one that does not.
    ``turns_done`` is the highest turn with an effect (sessions) or a row (ledger). ``restart`` is the reason why this
    rollout cannot continue, e.g. ``uncertain``, or None. ``data`` is encoded once, by the kit, before ``capture`` is
    called again; ``Encoded`` passes JSON text that is encoded already.
    """

    attempt: int
    turns_done: int
    data: Json | Encoded
    effects: int = 0
    task_digest: str | None = None
    environment: str | None = None
    restart: str | None = None
    policy_version: int | None = None
    data_refs: Sequence[Json] = ()


@dataclass(frozen=True, slots=True)
class Encoded:
    """JSON text in UTF-8 that the author has encoded, without line breaks outside of strings (escape them).

    What the author does not encode is encoded on the event loop, in one piece: a megabyte takes about two milliseconds
    as text, ten as small values, twenty-five as floating-point numbers.
    """

    text: bytes


@dataclass(frozen=True, slots=True)
class Restored:
    """One rollout of a restore, for ``Part.build``.

    ``attempt`` is the new attempt, ``saved_attempt`` the one in the snapshot; ``turns_done`` is the controller's:
    a ledger keeps its rows up to it. ``data`` is what ``capture`` gave, None if this part held nothing of the
    rollout.
    """

    rollout_id: str
    attempt: int
    saved_attempt: int
    turns_done: int
    data: Json
    task_digest: str | None = None
    environment: str | None = None


class CannotContinue(Exception):
    """Raised by ``Part.build``: these rollouts cannot be continued here; the others could.

    The kit builds again without them and reports them in ``restarts``.

    Args:
        reasons: rollout id to a short reason.
    """

    def __init__(self, reasons: Mapping[str, str]) -> None:
        super().__init__(", ".join(sorted(reasons)))
        self.reasons = dict(reasons)


class Part(Protocol):
    """A store of one kind of state, keyed by rollout; all of it on the participant's event loop.

    ``name`` is the key of its data in the payload (a lower-case identifier), ``owns`` what it stores.
    """

    @property
    def name(self) -> str:
        """The key of its data in the payload."""
        ...

    @property
    def owns(self) -> Owns:
        """What it stores."""
        ...

    def capture(self, rollout_id: str) -> Captured | None:
        """Return the state of one rollout as it is now, or None if there is none; changes nothing, does not wait.

        Called at each boundary. What it returns is not changed afterwards: return copies or immutable values.
        """
        ...

    async def build(self, rollouts: Sequence[Restored]) -> Any:
        """Build the state of these rollouts aside; nothing that is current changes.

        Returns:
            Anything; it is handed to ``install`` or ``discard``.

        Raises:
            CannotContinue: some of them cannot be continued.
            Exception: the restore fails as a whole. In both cases the part has freed what it had built.
        """
        ...

    def install(self, built: Any) -> None:
        """Make the built state current and drop everything that was, in one step: no wait, no exception."""
        ...

    async def discard(self, built: Any) -> None:
        """Free what ``build`` made and nobody installed."""
        ...

    def drop(self, rollout_id: str) -> None:
        """Free what is held of one rollout (retired, fenced or released); unknown ids are no error."""
        ...


@dataclass(frozen=True, slots=True)
class Usage:
    """What one policy call cost and produced: noted per turn with ``Rollout.note_policy``.

    ``version`` is the weights version that the policy reported, ``usage`` token counts by name, ``data_ref`` where RL's
    data plane holds the token rows of this call (a reference, never the rows).
    """

    version: int | None = None
    usage: Mapping[str, int] = field(default_factory=dict)
    data_ref: Json = None
