# SPDX-License-Identifier: Apache-2.0
"""Start the second Gym: `python -m tests.second_gym --config gym.json --announce announce.json`.

The configuration is JSON: `name`, `storage_roots`, `limits`, `port`, and, for conformance, `world_url`.
Tokens come from the environment: `GYM_CHECKPOINT_TOKEN`, `GYM_CHECKPOINT_DATA_TOKEN` and, for policy calls,
`GYM_POLICY_TOKEN`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import FrameType

from tests.second_gym.front import Server, Tokens
from tests.second_gym.gym import Gym, Settings


def main() -> int | str:
    """Serve until SIGTERM, then drain; return the exit code, or why it does not start."""
    parser = argparse.ArgumentParser(prog="second_gym")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--announce", type=Path, required=True)
    parser.add_argument("--insecure-no-auth", action="store_true")
    options = parser.parse_args()
    config = json.loads(options.config.read_text(encoding="utf-8"))
    tokens = Tokens(os.environ.get("GYM_CHECKPOINT_TOKEN") or None, os.environ.get("GYM_CHECKPOINT_DATA_TOKEN") or None)
    if None in (tokens.control, tokens.data) and not options.insecure_no_auth:
        return "No token: set GYM_CHECKPOINT_TOKEN and GYM_CHECKPOINT_DATA_TOKEN."
    gym = Gym(
        Settings(
            name=config["name"],
            roots=[Path(root).resolve(strict=True) for root in config["storage_roots"]],
            world_url=config.get("world_url"),
            limits=config.get("limits", {}),
            policy_token=os.environ.get("GYM_POLICY_TOKEN") or None,
        )
    )
    server = Server(("127.0.0.1", config.get("port", 0)), gym, tokens)
    stop = threading.Event()

    def on_term(_signal: int, _frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, on_term)
    judge = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    for serving in (server, judge):
        threading.Thread(target=serving.serve_forever, daemon=True).start()
    announce(options.announce, gym, server.server_port, judge.server_port)
    stop.wait()
    drain(gym)
    return 0


class Judge(BaseHTTPRequestHandler):
    """A server of the Gym that owns nothing: it knows no path of the protocol."""

    def do_GET(self) -> None:
        """There is nothing here."""
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


def announce(path: Path, gym: Gym, port: int, judge_port: int) -> None:
    """Tell where the Gym listens, in a file that appears whole."""
    url = f"http://127.0.0.1:{port}"
    pid = os.getpid()
    participants = [{"name": gym.settings.name, "role": "gym", "url": url, "pid": pid}]
    bystanders = [f"http://127.0.0.1:{judge_port}"]
    text = json.dumps({"pid": pid, "participants": participants, "bystanders": bystanders})
    draft = path.with_name(path.name + ".draft")
    draft.write_text(text, encoding="utf-8")
    draft.rename(path)


def drain(gym: Gym) -> None:
    """Start nothing new; serve until a checkpoint has become durable, or most of the grace has passed."""
    end = time.monotonic() + gym.limits["shutdown_grace_ms"] * 0.85 / 1000
    with gym.gate.lock:
        gym.phases.draining = True
        gym.phases.became_durable = False
        gym.gate.wait(lambda: gym.phases.became_durable, end)
    time.sleep(0.2)  # answers that are being written reach their clients


if __name__ == "__main__":
    sys.exit(main())
