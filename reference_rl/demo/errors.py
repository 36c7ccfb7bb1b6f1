# SPDX-License-Identifier: Apache-2.0
"""What can go wrong in the demo.

DemoError
├── UsageError            the arguments make no example
├── ProcessDiedError      a process that should live has ended; names its log
├── WaitedTooLongError    a stated condition did not come true within its bound; names the logs
└── PromiseBrokenError    everything ran, but the numbers are not what the protocol promises
"""

from __future__ import annotations


class DemoError(Exception):
    """Base of everything that ends the demo with a sentence instead of a traceback."""


class UsageError(DemoError):
    """The arguments make no example."""


class ProcessDiedError(DemoError):
    """A process that should live has ended."""


class WaitedTooLongError(DemoError):
    """A stated condition did not come true within its bound."""


class PromiseBrokenError(DemoError):
    """The numbers in the logs are not what the protocol promises."""
