# SPDX-License-Identifier: Apache-2.0
"""The Gym Checkpoint Protocol as data: requirements, transitions, errors, schemas and the OpenAPI document.

>>> import spec
>>> spec.load("1.0").errors["not_ready"].status
409
"""

from __future__ import annotations

from spec._load import SUPPORTED_VERSIONS, SpecificationError, load
from spec._model import (
    Cell,
    Condition,
    ErrorSpec,
    Event,
    Requirement,
    Specification,
    StateMachine,
)

__all__ = [
    "SUPPORTED_VERSIONS",
    "Cell",
    "Condition",
    "ErrorSpec",
    "Event",
    "Requirement",
    "Specification",
    "SpecificationError",
    "StateMachine",
    "load",
]
