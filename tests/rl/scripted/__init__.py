# SPDX-License-Identifier: Apache-2.0
"""A scripted Gym: participants that answer by the phase table of the specification and fail on order.

Nothing runs by itself: a test says when a rollout does a turn, finishes or is lost. One participant owns rollouts;
the others own sessions or a ledger and see the same turns as effects.
"""

from tests.rl.scripted.participant import ScriptedParticipant, calls_of, one_gym, serving, three_servers
from tests.rl.scripted.values import ENVIRONMENT, FAULTS, Fault

__all__ = [
    "ENVIRONMENT",
    "FAULTS",
    "Fault",
    "ScriptedParticipant",
    "calls_of",
    "one_gym",
    "serving",
    "three_servers",
]
