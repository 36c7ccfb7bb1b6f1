# SPDX-License-Identifier: Apache-2.0
"""Start the Gym: `python -m examples.fastapi_gym --storage snapshots`."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
from pathlib import Path

from examples.fastapi_gym.app import Settings, create_gym
from reference_gym.participant import BoundaryLog, serve_uvicorn
from reference_gym.participant.serving import Server, Signals, leave, serve_until_terminated


def main() -> str:
    """Serve until SIGTERM, and end with 0; return why the Gym does not start."""
    parser = argparse.ArgumentParser(prog="fastapi_gym")
    parser.add_argument("--storage", type=Path, required=True, help="snapshots are written below it")
    parser.add_argument(
        "--data", type=Path, default=Path("fastapi-gym-data"), help="for snapshots without a shared disk"
    )
    parser.add_argument("--log", type=Path, help="the boundary log: with it the Gym survives its own SIGKILL")
    parser.add_argument("--announce", type=Path, help="a file that says where the Gym listens")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--limits", type=json.loads, default={}, help="JSON, names as in the capabilities")
    parser.add_argument("--conformance", action="store_true", help="register the conformance environments")
    parser.add_argument("--world-url", help="the only world of the conformance environments")
    parser.add_argument("--insecure-no-auth", action="store_true")
    options = parser.parse_args()
    control = os.environ.get("GYM_CHECKPOINT_TOKEN") or None
    if control is None and not options.insecure_no_auth:
        return "No token: set GYM_CHECKPOINT_TOKEN, or serve loopback alone with --insecure-no-auth."
    for directory in (options.storage, options.data):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    logging.basicConfig(level=logging.INFO)
    data = os.environ.get("GYM_CHECKPOINT_DATA_TOKEN") or control
    if control is not None and data == control:
        logging.warning("one token for both planes: give the data plane its own, GYM_CHECKPOINT_DATA_TOKEN")
    settings = Settings(
        storage=options.storage.resolve(),
        uploads=options.data.resolve(),
        limits=options.limits,
        conformance=options.conformance,
        world_url=options.world_url,
        control_token=control,
        data_token=data,
        policy_token=os.environ.get("GYM_POLICY_TOKEN") or None,
        log=None if options.log is None else BoundaryLog(options.log),
    )
    asyncio.run(serve(settings, options.port, options.announce))
    leave(0)


async def serve(settings: Settings, port: int, file: Path | None) -> None:
    """Serve until SIGTERM, and drain."""
    signals = Signals()
    gym = create_gym(settings)
    if settings.log is not None:
        await settings.log.open(gym.participant)
    server = await serve_uvicorn.start(gym, gym.participant, port=port)
    announce(server, file)
    gym.participant.go_on()
    await serve_until_terminated(server, signals)


def announce(server: Server, file: Path | None) -> None:
    """Tell where the Gym listens, in a file that appears whole."""
    config = server.participant.config
    one = {"name": config.name, "role": config.role, "url": server.url, "pid": os.getpid()}
    logging.info("listening at %s", server.url)
    if file is not None:
        draft = file.with_name(f"{file.name}.draft")
        draft.write_text(json.dumps({"pid": os.getpid(), "participants": [one]}), encoding="utf-8")
        draft.rename(file)


if __name__ == "__main__":
    sys.exit(main())
