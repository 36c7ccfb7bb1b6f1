# SPDX-License-Identifier: Apache-2.0
"""The controller's side of the Gym Checkpoint Protocol, as a library and as the command `reference-rl`.

``open_run`` puts a whole run into a trainer's loop. Its parts: ``Deployment`` finds and judges the participants of a
Gym, ``RolloutManager`` runs rollouts in it, ``Checkpointer`` takes snapshots, ``Recovery`` brings a run back.
``Ledger``, ``SnapshotStore`` and ``DataPlane`` hold what must survive.
"""

from reference_rl.checkpointer import Checkpointer, OpenSnapshot, Report
from reference_rl.client import ClientSettings, Controller, GymClient, make_http
from reference_rl.columns import SWITCHES, Column, Switches
from reference_rl.control import Tenure
from reference_rl.dataplane import DataPlane, EmbeddedDataPlane, Row, RowKey
from reference_rl.deployment import Deployment, Participant
from reference_rl.embedded import EmbeddedRun, open_run
from reference_rl.errors import (
    BrokenReply,
    EpochTaken,
    GymError,
    Incompatible,
    Indefinite,
    InvariantViolated,
    LedgerError,
    LedgerVersion,
    NotAParticipant,
    Problem,
    RecoveryFailed,
    Refused,
    RlError,
    SettingsError,
    SnapshotDamaged,
    SnapshotError,
    SnapshotExists,
    SnapshotFailed,
    Superseded,
    Unreachable,
)
from reference_rl.events import Events
from reference_rl.ledger import Ledger
from reference_rl.recovery import Recovery, RestartReport
from reference_rl.restorer import RestoreLimits, Restorer, RestoreWish
from reference_rl.retry import RetryPolicy
from reference_rl.rollouts import RolloutManager
from reference_rl.settings import RunSettings, load_settings, sibling_seed
from reference_rl.snapshots import Draft, Snapshot, SnapshotStore
from reference_rl.sync import BackgroundLoop, SyncCheckpointer

__all__ = [
    "SWITCHES",
    "BackgroundLoop",
    "BrokenReply",
    "Checkpointer",
    "ClientSettings",
    "Column",
    "Controller",
    "DataPlane",
    "Deployment",
    "Draft",
    "EmbeddedDataPlane",
    "EmbeddedRun",
    "EpochTaken",
    "Events",
    "GymClient",
    "GymError",
    "Incompatible",
    "Indefinite",
    "InvariantViolated",
    "Ledger",
    "LedgerError",
    "LedgerVersion",
    "NotAParticipant",
    "OpenSnapshot",
    "Participant",
    "Problem",
    "Recovery",
    "RecoveryFailed",
    "Refused",
    "Report",
    "RestartReport",
    "RestoreLimits",
    "RestoreWish",
    "Restorer",
    "RetryPolicy",
    "RlError",
    "RolloutManager",
    "Row",
    "RowKey",
    "RunSettings",
    "SettingsError",
    "Snapshot",
    "SnapshotDamaged",
    "SnapshotError",
    "SnapshotExists",
    "SnapshotFailed",
    "SnapshotStore",
    "Superseded",
    "Switches",
    "SyncCheckpointer",
    "Tenure",
    "Unreachable",
    "load_settings",
    "make_http",
    "open_run",
    "sibling_seed",
]
