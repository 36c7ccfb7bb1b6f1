# SPDX-License-Identifier: Apache-2.0
"""Exchanges as lines that a person can read and repeat; every token is masked."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from conformance.masking import mask
from conformance.wire import Exchange

MAX_TEXT = 1500


def curl(exchange: Exchange, secrets: Iterable[str] = ()) -> str:
    """Return an exchange as a curl command line."""
    known = tuple(secrets)
    words = ["curl", "-s"]
    if exchange.method != "GET":
        words += ["-X", exchange.method]
    for name, value in exchange.request_headers.items():
        lowered = name.lower()
        if lowered == "authorization":
            words += ["-H", "Authorization: Bearer $TOKEN"]
        elif lowered not in {"content-length", "host"}:
            words += ["-H", f"{name}: {value}"]
    if exchange.request_body:
        words += ["-d", mask(exchange.request_body.decode("utf-8", "backslashreplace"), known)[:MAX_TEXT]]
    words.append(exchange.url)
    line = " ".join('"Authorization: Bearer $TOKEN"' if "$TOKEN" in word else shlex.quote(word) for word in words)
    return mask(line, known)


def answer(exchange: Exchange, secrets: Iterable[str] = ()) -> str:
    """Return what came back, on one line."""
    note = f"  ({exchange.note})" if exchange.note else ""
    if exchange.status is None:
        return f"no reply{note}"
    known = tuple(secrets)
    text = mask(exchange.response_body.decode("utf-8", "backslashreplace"), known)  # Before it is cut: a half stays.
    shown = text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "…"
    return f"{exchange.status} {shown} in {exchange.seconds * 1000:.0f} ms{mask(note, known)}"
