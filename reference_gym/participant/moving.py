# SPDX-License-Identifier: Apache-2.0
"""The one place where the machine moves: what a step of it comes to for the gate, the lease, and whoever waits.

``accept`` and ``move`` are the only ways by which a step becomes real: they do what the step asks for, put the gate
into its position, wake whoever waits, and order the end of the lease.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

from reference_gym.participant import failpoints
from reference_gym.participant.clock import Clock, Timer, within
from reference_gym.participant.gate import Gate, Position
from reference_gym.participant.journal import Journal
from reference_gym.participant.log_values import machine_value
from reference_gym.participant.machine import Machine, Step
from reference_gym.participant.phases import Phase, Todo


class Moving(ABC):
    """The machine and the gate of one participant.

    Args:
        clock: monotonic time.
        journal: where it is noted that the machine has moved.
    """

    def __init__(self, clock: Clock, journal: Journal) -> None:
        self.clock = clock
        self.journal = journal
        self.gate = Gate(clock, self._gate_changed)
        self._machine = Machine()
        self._closing = False
        self._moved = asyncio.Event()
        self._lease_timer: Timer | None = None

    @property
    @abstractmethod
    def _target(self) -> str | None:
        """The directory of the open commit."""

    @abstractmethod
    def _act(self, todo: Todo | None) -> None:
        """Do what a step asks for; the machine stands where it leads to, and the gate has not moved yet."""

    @abstractmethod
    def _tidy(self, before: Machine) -> None:
        """Remove what nobody needs after a step, once the gate has moved."""

    @property
    def machine(self) -> Machine:
        """Where the participant stands."""
        return self._machine

    @machine.setter
    def machine(self, machine: Machine) -> None:
        before, self._machine = self._machine, machine
        kept = (machine.phase, machine.open, machine.last, machine.controller, machine.fresh)
        if kept != (before.phase, before.open, before.last, before.controller, before.fresh):
            self.journal.note("machine", value=machine_value(machine, self._target))

    def accept(self, step: Step) -> None:
        """Make the step of a call that was not refused real."""
        self.move(Step(step.machine.used(), step.answer, step.todo))

    def move(self, step: Step) -> None:
        """Make a step real: what the gate guards first, then the gate, then those who wait."""
        before = self.machine
        if step.machine is before:
            return
        self.machine = step.machine
        self._act(step.todo)
        self.gate.move(self._position())
        self._wake()
        self._order_lease()
        self._tidy(before)  # Last: what happens on a disk must not keep a gate closed.

    def _position(self) -> Position:
        if self.machine.gate_open:
            return Position.OPEN
        return Position.CLOSING if self.machine.phase is Phase.PREPARING else Position.SEALED

    def _gate_changed(self) -> None:
        """Something that ran has ended: perhaps everything is quiescent now."""
        if self.machine.phase is Phase.PREPARING and self.gate.quiescent:
            self.move(Step(self.machine.quiescent(self.clock.now())))
            failpoints.reach("prepare.quiescent")
        else:
            self._wake()

    def _wake(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    async def wait_move(self, deadline: float) -> bool:
        """Wait until something has moved; return False if the deadline came first."""
        if self.clock.now() >= deadline or self._closing:
            return False
        waiting = asyncio.ensure_future(self._moved.wait())
        try:
            return await within(self.clock, deadline, waiting) and not self._closing
        finally:
            waiting.cancel()

    def _order_lease(self) -> None:
        if self._lease_timer is not None:
            self._lease_timer.cancel()
            self._lease_timer = None
        if self.machine.leased and not self.machine.serving and self.machine.lease_until is not None:
            self._lease_timer = self.clock.call_at(self.machine.lease_until, self._lease_due)

    def _lease_due(self) -> None:
        self._lease_timer = None
        step = self.machine.lease_end(self.clock.now())
        if step is None:
            self._order_lease()
        else:
            self.move(step)
            failpoints.reach("lease.ended")
