# SPDX-License-Identifier: Apache-2.0
"""What the tests against real processes share: one server that forks them, for all tests of a worker."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.crash_matrix.forks import ForkServer, fork_server


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def forks() -> AsyncIterator[ForkServer]:
    """Start processes without the price of their imports; a test that asks for it runs in the session's loop."""
    async with fork_server() as server:
        yield server
