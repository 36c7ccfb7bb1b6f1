# SPDX-License-Identifier: Apache-2.0
"""A controller that is just long enough for these tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from spec import wire
from tests.gym.stubs import BOUND_S

CONTROL_TOKEN = "control-token-for-tests"
DATA_TOKEN = "data-token-for-tests"

After = Callable[[str], Awaitable[None]]


class Refused(Exception):
    """A call was answered with a problem document."""

    def __init__(self, status: int, problem: Any) -> None:
        super().__init__(f"{status}: {problem}")
        self.status = status
        self.problem = problem

    @property
    def code(self) -> str:
        """The code of the problem."""
        return str(self.problem.get("code"))


@dataclass(frozen=True)
class Cut:
    """What one participant wrote for one checkpoint."""

    checkpoint_id: str
    path: Path
    digest: str

    def index(self) -> list[dict[str, Any]]:
        """The lines of its index."""
        return [json.loads(line) for line in (self.path / "rollouts.jsonl").read_text().splitlines()]

    def row(self, rollout_id: str) -> dict[str, Any]:
        """The line of one rollout."""
        (row,) = [row for row in self.index() if row["rollout_id"] == rollout_id]
        return row


class Controller:
    """The verbs of a controller, over the participants of one Gym."""

    directory: Path
    http: aiohttp.ClientSession | None
    epoch: int
    sequence: int
    incarnations: dict[str, str]

    @property
    def roles(self) -> list[str]:
        """One role per participant, in the order of their stages."""
        raise NotImplementedError

    def url(self, role: str) -> str:
        """Where the participant with a role listens."""
        raise NotImplementedError

    async def raw(
        self, role: str, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Any:
        """One call on the control plane; raises `Refused`."""
        assert self.http is not None
        sent = {"Authorization": f"Bearer {CONTROL_TOKEN}"} | dict(headers or {})
        async with self.http.request(method, self.url(role) + wire.PREFIX + path, json=body, headers=sent) as reply:
            answer = await reply.json(content_type=None)
            if reply.status >= 400:
                raise Refused(reply.status, answer)
            self.incarnations[role] = reply.headers[wire.HEADER_INCARNATION]
            return answer

    async def data(self, role: str, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Any:
        """One call on the data plane; raises `Refused`."""
        assert self.http is not None
        sent = {"Authorization": f"Bearer {DATA_TOKEN}"} | dict(headers or {})
        async with self.http.post(self.url(role) + path, json=body, headers=sent) as reply:
            answer = await reply.json(content_type=None)
            if reply.status >= 400:
                raise Refused(reply.status, answer)
            return answer

    async def adopt(self) -> None:
        """Take over as a new controller: read every incarnation, then abort `<epoch>-0` everywhere."""
        self.epoch += 1
        self.sequence = 0
        for role in self.roles:
            await self.raw(role, "GET", "/capabilities")
        for role in self.roles:
            await self.post(role, "/checkpoint/abort", {"checkpoint_id": f"{self.epoch}-0", "timeout_ms": 5000})

    async def post(self, role: str, path: str, body: Any) -> Any:
        """One mutating call; raises `Refused`."""
        return await self.raw(role, "POST", path, body, self.headers(role))

    def next_id(self) -> str:
        """A fresh checkpoint id."""
        self.sequence += 1
        return f"{self.epoch}-{self.sequence}"

    async def rollouts(self) -> dict[str, Any]:
        """What `GET /rollouts` shows, by id."""
        page = await self.raw("agent", "GET", "/rollouts")
        return {each["rollout_id"]: each for each in page["rollouts"]}

    async def results(self, wait_ms: int = 0) -> dict[str, Any]:
        """The unreleased results, by rollout: content and receipt."""
        page = await self.raw("agent", "GET", f"/results?wait_ms={wait_ms}")
        return {
            each["receipt"]["rollout_id"]: json.loads(each["result"]) | {"receipt": each["receipt"]}
            for each in page["results"]
        }

    async def result_of(self, rollout_id: str) -> Any:
        """Wait for one result."""
        async with asyncio.timeout(BOUND_S):
            while True:
                found = await self.results(wait_ms=200)
                if rollout_id in found:
                    return found[rollout_id]
                await asyncio.sleep(0.02)

    async def begin_rollout(
        self,
        rollout_id: str,
        task: Any,
        policy: Any,
        *,
        environment: str = "conformance",
        outcome: str = "started",
        **more: Any,
    ) -> None:
        """Start one rollout."""
        item = {
            "rollout_id": rollout_id,
            "attempt": 0,
            "environment": environment,
            "task": task,
            "task_digest": wire.result_digest(json.dumps(task, sort_keys=True)),
            "policy": policy,
        }
        reply = await self.post("agent", "/rollouts", {"rollouts": [item | more]})
        assert reply["outcomes"][0]["outcome"] == outcome, reply

    async def prepare(self, checkpoint_id: str, *, timeout_ms: int = 5_000) -> dict[str, Any]:
        """Prepare stage by stage; the replies."""
        replies = {}
        for role in self.roles:
            replies[role] = await self.post(
                role,
                "/checkpoint/prepare",
                {"checkpoint_id": checkpoint_id, "run_id": "run", "timeout_ms": timeout_ms, "lease_ms": 60_000},
            )
        return replies

    async def commit(self, checkpoint_id: str) -> dict[str, Cut]:
        """Commit everywhere; what each participant wrote."""
        cuts = {}
        for role in self.roles:
            target = self.directory / "snapshots" / checkpoint_id / role
            target.mkdir(parents=True)
            reply = await self.post(
                role,
                "/checkpoint/commit",
                {
                    "checkpoint_id": checkpoint_id,
                    "target": {"scheme": "file", "path": str(target)},
                    "wait": "durable",
                    "timeout_ms": 20_000,
                },
            )
            assert reply["durable"], reply
            cuts[role] = Cut(checkpoint_id, target, reply["manifest"]["digest"])
        return cuts

    async def resume(self, checkpoint_id: str) -> None:
        """Resume, callees before callers."""
        for role in reversed(self.roles):
            await self.post(role, "/checkpoint/resume", {"checkpoint_id": checkpoint_id, "timeout_ms": 5_000})

    async def snapshot(self) -> dict[str, Cut]:
        """Prepare, commit, resume."""
        checkpoint_id = self.next_id()
        replies = await self.prepare(checkpoint_id)
        assert all(reply["ready"] for reply in replies.values()), replies
        cuts = await self.commit(checkpoint_id)
        await self.resume(checkpoint_id)
        return cuts

    async def reset(self) -> None:
        """Leave every participant empty, as for a clean start."""
        await self.adopt()
        checkpoint_id = self.next_id()
        for role in reversed(self.roles):
            body = {
                "checkpoint_id": checkpoint_id,
                "run_id": "run",
                "source": None,
                **{"rollouts": [], "results": [], "fences": [], "timeout_ms": 10_000, "lease_ms": 60_000},
            }
            await self.post(role, "/checkpoint/restore", body)
        await self.resume(checkpoint_id)

    async def upload(self, role: str, checkpoint_id: str, name: str, data: bytes) -> None:
        """PUT one artifact."""
        assert self.http is not None
        headers = self.headers(role) | {
            "Authorization": f"Bearer {CONTROL_TOKEN}",
            "Content-Type": "application/octet-stream",
        }
        url = f"{self.url(role)}{wire.PREFIX}/checkpoints/{checkpoint_id}/artifacts/{name}"
        async with self.http.put(url, data=data, headers=headers) as reply:
            assert reply.status == 204, await reply.text()

    def headers(self, role: str) -> dict[str, str]:
        """Who calls, and which incarnation is meant."""
        return {
            wire.HEADER_CONTROLLER_ID: "test",
            wire.HEADER_CONTROLLER_EPOCH: str(self.epoch),
            wire.HEADER_EXPECT_INCARNATION: self.incarnations[role],
        }

    async def restore(
        self,
        cuts: Mapping[str, Cut],
        *,
        attempt: int,
        policy: Any = None,
        after: After | None = None,
        then: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Restore every participant from its cut: all turn rows continue as `attempt`, all results are kept.

        `then` takes the place of the resume.
        """
        checkpoint_id = self.next_id()
        for role in reversed(self.roles):
            cut = cuts[role]
            index = cut.index()
            body = {
                "checkpoint_id": checkpoint_id,
                "run_id": "run",
                "source": {
                    "scheme": "file",
                    "path": str(cut.path),
                    "checkpoint_id": cut.checkpoint_id,
                    "manifest_digest": cut.digest,
                },
                "rollouts": [
                    {
                        "rollout_id": row["rollout_id"],
                        "attempt": row["attempt"],
                        "next_attempt": attempt,
                        "turns_done": row["turns_done"],
                        "task_digest": row["task_digest"] or wire.result_digest("unknown"),
                    }
                    for row in index
                    if row["state"] == "turn"
                ],
                "results": [row["receipt"] for row in index if row["state"] == "finished"],
                "fences": [
                    {"rollout_id": row["rollout_id"], "through_attempt": attempt - 1}
                    for row in index
                    if row["state"] == "restart"
                ],
                "timeout_ms": 10_000,
                "lease_ms": 60_000,
            }
            if policy is not None and role == "agent":
                body["policy"] = policy
            await self.post(role, "/checkpoint/restore", body)
            if after is not None:
                await after(role)
        await (self.resume(checkpoint_id) if then is None else then())
