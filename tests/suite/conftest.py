# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the suite's own tests: real sockets on the loopback, port 0."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from conformance.loopback import Loopback
from conformance.patience import Patience
from conformance.witness import Witness
from conformance.world import World


@pytest.fixture
def patience() -> Patience:
    """Bounds as written."""
    return Patience()


@pytest.fixture
def loopback() -> Iterator[Loopback]:
    """A thread with an event loop."""
    with Loopback() as running:
        yield running


@pytest.fixture
def witness(loopback: Loopback, patience: Patience) -> Iterator[Witness]:
    """A witness that listens."""
    served = Witness(loopback, patience)
    yield served
    served.close()


@pytest.fixture
def world(loopback: Loopback, patience: Patience) -> Iterator[World]:
    """A world that listens."""
    served = World(loopback, patience)
    yield served
    served.close()


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    """A plain client."""
    with httpx.Client(timeout=10, trust_env=False) as client:
        yield client
