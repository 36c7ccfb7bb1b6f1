# SPDX-License-Identifier: Apache-2.0
"""Logs as JSON lines on standard error, with every known secret struck out (CKPT-SEC-006)."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable

STRUCK_OUT = "[secret]"
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class JsonFormatter(logging.Formatter):
    """One JSON object per record; what is passed as `extra` becomes members of it.

    Args:
        secrets: texts that are replaced wherever they appear.
    """

    def __init__(self, secrets: Iterable[str]) -> None:
        super().__init__()
        self._secrets = sorted((secret for secret in secrets if secret), key=len, reverse=True)

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line: dict[str, object] = {
            "t": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        line |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        text = json.dumps(line, default=str)
        for secret in self._secrets:
            text = text.replace(secret, STRUCK_OUT)
        return text


def configure(secrets: Iterable[str], level: int = logging.INFO) -> None:
    """Send every logger of this process to standard error as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(secrets))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
