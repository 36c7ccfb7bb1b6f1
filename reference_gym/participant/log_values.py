# SPDX-License-Identifier: Apache-2.0
"""The machine as the log keeps it: what outlives the process, without leases and what depends on the clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reference_gym.participant.machine import Machine
from reference_gym.participant.phases import EndedAs, Last, Open, Phase
from spec.wire import CheckpointId, ControllerPair, parse_checkpoint_id


def machine_value(machine: Machine, target: str | None) -> dict[str, Any]:
    """Return what of a machine outlives the process.

    Args:
        machine: as it is now.
        target: the directory of the open commit.
    """
    controller, opened, last = machine.controller, machine.open, machine.last
    return {
        "fresh": machine.fresh,
        "controller": None if controller is None else [controller.epoch, controller.name],
        "last": None if last is None else _last_value(last),
        "open": None if opened is None else {**_open_value(opened), "phase": machine.phase.value, "target": target},
    }


def _last_value(last: Last) -> dict[str, Any]:
    return {
        "checkpoint_id": str(last.checkpoint_id),
        "ended_as": last.ended_as.value,
        "manifest": last.manifest,
        "error_code": last.error_code,
        "pause_ms": last.pause_ms,
        "outcome": last.outcome,
    }


def _open_value(opened: Open) -> dict[str, Any]:
    return {
        "checkpoint_id": str(opened.checkpoint_id),
        "run_id": opened.run_id,
        "captured": opened.captured,
        "manifest": opened.manifest,
        "outcome": opened.outcome,
        "ending": None if opened.ending is None else opened.ending.value,
        "then": None if opened.then is None else str(opened.then),
    }


def machine_of(value: Mapping[str, Any]) -> Machine:
    """Return the machine as it was when the process ended; ``Machine.restarted`` says what that comes to.

    Raises:
        KeyError, TypeError, ValueError: the value is none of ``machine_value``.
    """
    controller, last, opened = value["controller"], value["last"], value["open"]
    return Machine(
        phase=Phase.IDLE if opened is None else Phase(opened["phase"]),
        gate_open=True,
        open=None
        if opened is None
        else Open(
            checkpoint_id=parse_checkpoint_id(opened["checkpoint_id"]),
            run_id=opened["run_id"],
            lease_ms=0,
            captured=opened["captured"],
            manifest=opened["manifest"],
            outcome=opened["outcome"],
            ending=None if opened["ending"] is None else EndedAs(opened["ending"]),
            then=_id(opened["then"]),
        ),
        last=None
        if last is None
        else Last(
            checkpoint_id=parse_checkpoint_id(last["checkpoint_id"]),
            ended_as=EndedAs(last["ended_as"]),
            manifest=last["manifest"],
            error_code=last["error_code"],
            pause_ms=last["pause_ms"],
            outcome=last["outcome"],
        ),
        controller=None if controller is None else ControllerPair.of(controller[0], controller[1]),
        fresh=value["fresh"],
    )


def _id(text: str | None) -> CheckpointId | None:
    return None if text is None else parse_checkpoint_id(text)
