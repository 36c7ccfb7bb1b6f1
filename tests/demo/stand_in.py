# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the Gym and the RL client, so that the story can be tested in seconds, and told wrongly on purpose.

`stand_in.py serve …` announces a Gym that does nothing. `stand_in.py run …` plays the rollouts by itself: it keeps
every conversation in memory, writes them to its snapshot on SIGUSR1, and continues from there in column 3. With
`STAND_IN_FORGETS=1` it restarts at turn 1 in column 3 as well;
with `STAND_IN_DIFFERS=1` its bodies depend on the restart.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import yaml


def serve(announce: Path) -> None:
    """Announce one participant and wait for the end."""
    participant = {"name": "gym", "role": "agent", "url": f"http://127.0.0.1:{40000 + os.getpid() % 20000}"}
    text = json.dumps({"pid": os.getpid(), "participants": [participant | {"pid": os.getpid()}]})
    announce.with_suffix(".part").write_text(text, encoding="utf-8")
    announce.with_suffix(".part").rename(announce)
    signal.pause()


class Player:
    """Plays one prompt group."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.run_dir = Path(settings["run_dir"])
        self.events_lock = threading.Lock()
        self.saved = self.run_dir / "snapshots" / "1-1"
        state = json.loads((self.saved / "state.json").read_text(encoding="utf-8")) if self.saved.exists() else {}
        self.restarted = bool(state)
        continues = settings["column"] == 3 and "STAND_IN_FORGETS" not in os.environ
        self.talks: dict[int, list[dict[str, Any]]] = {}
        for sibling in range(settings["tasks"]["siblings"]):
            talk = state.get(str(sibling), [])
            finished = sum(message["role"] == "assistant" for message in talk) == settings["tasks"]["max_turns"]
            self.talks[sibling] = talk if continues or finished else []

    def emit(self, event: str, **fields: Any) -> None:
        """One event."""
        with self.events_lock, (self.run_dir / "events.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, "t": time.time(), **fields}) + "\n")

    def snapshot(self, *_: object) -> None:
        """Everything that is known of every conversation."""
        self.saved.mkdir()
        (self.saved / "state.json").write_text(json.dumps(self.talks), encoding="utf-8")
        self.emit("snapshot_published", checkpoint_id="1-1", pause_ms=1.5)

    def play(self, sibling: int) -> None:
        """Turns until the last one."""
        policy, tasks = self.settings["policy"], self.settings["tasks"]
        headers = {"Authorization": f"Bearer {os.environ['GYM_POLICY_TOKEN']}"}
        opening = {"role": "user", "content": f"sibling {sibling}"}
        while sum(message["role"] == "assistant" for message in self.talks[sibling]) < tasks["max_turns"]:
            body = {"model": "m", "seed": sibling, "messages": [opening, *self.talks[sibling]]}
            reply = httpx.post(f"{policy['base_url']}/chat/completions", json=body, headers=headers, timeout=60)
            self.talks[sibling] = [*self.talks[sibling], reply.json()["choices"][0]["message"]]
        self.emit("finished", group=0, sibling=sibling)

    def body(self, sibling: int) -> dict[str, Any]:
        """A result's body."""
        odd = 1 if self.restarted and "STAND_IN_DIFFERS" in os.environ else 0
        turns = self.settings["tasks"]["max_turns"]
        return {"outcome": "truncated", "turns": turns, "reward": odd, "messages": self.talks[sibling]}

    def run(self) -> None:
        """To the end."""
        signal.signal(signal.SIGUSR1, self.snapshot)
        threads = [threading.Thread(target=self.play, args=(sibling,)) for sibling in self.talks]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            threads[0].join(0.01)
            time.sleep(0.01)
        lines = [{"group": 0, "sibling": sibling, "body": self.body(sibling)} for sibling in self.talks]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (self.run_dir / "results.jsonl").write_text(text, encoding="utf-8")
        self.emit("done")


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(Path(sys.argv[sys.argv.index("--announce") + 1]))
    else:
        Player(yaml.safe_load(Path(sys.argv[sys.argv.index("--config") + 1]).read_text(encoding="utf-8"))).run()
