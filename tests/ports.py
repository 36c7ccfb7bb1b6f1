# SPDX-License-Identifier: Apache-2.0
"""Ports for processes that come back where they were."""

from __future__ import annotations

import socket
from collections.abc import Iterable


class ReservedPorts:
    """A port of the loopback address for each name, which the system gives to nobody until ``close``.

    A socket that is bound and never listens keeps each: whoever names the port can listen there, also once more after
    its end, while a listener that takes any port and an outgoing connection get another one.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._sockets: list[socket.socket] = []
        self.by_name: dict[str, int] = {}
        for name in names:
            kept = socket.socket()
            self._sockets.append(kept)
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            kept.bind(("127.0.0.1", 0))
            self.by_name[name] = kept.getsockname()[1]

    def close(self) -> None:
        """Give the ports back."""
        for kept in self._sockets:
            kept.close()
