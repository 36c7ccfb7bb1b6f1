# SPDX-License-Identifier: Apache-2.0
"""The command line of the reference Gym: `reference-gym serve`.

Exit codes: 0 after a stop that was asked for, 1 when a part of the Gym failed, 2 when the settings cannot be used.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from reference_gym import lifeline, logs, nursery, settings, supervisor
from reference_gym.errors import SettingsError
from reference_gym.participant.serving import leave

USAGE = 2
ONE_FOR_BOTH = (
    "one token for both planes: whoever may call a tool may also end checkpoints and drop rollouts; "
    "give the data plane a token of its own (tokens.data)"
)


class Role(StrEnum):
    """What one process serves."""

    ALL = "all"
    AGENT = "agent"
    MODEL = "model"
    RESOURCES = "resources"


app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def reference_gym() -> None:
    """The reference Gym of the Gym Checkpoint Protocol."""


@app.command()
def serve(
    config: Annotated[Path, typer.Option(help="The settings, gym.yaml.")],
    role: Annotated[Role, typer.Option(help="Which participants this process serves.")] = Role.ALL,
    announce: Annotated[Path | None, typer.Option(help="A file that says where the participants listen.")] = None,
    insecure_no_auth: Annotated[
        bool, typer.Option("--insecure-no-auth", help="Serve without tokens, on loopback only.")
    ] = False,
) -> None:
    """Serve a Gym until SIGTERM.

    With `processes: three` a participant that ends, however it ended, is started again at its port: to stop the Gym,
    stop this command. It ends within `limits.shutdown_grace_ms`.
    """
    try:
        loaded = settings.load(config, insecure_no_auth=insecure_no_auth)
        if insecure_no_auth:
            print("WARNING: no authentication; listening on 127.0.0.1 only", file=sys.stderr)  # noqa: T201 - for the operator
        elif loaded.shares_token and supervisor.LIFELINE_VARIABLE not in os.environ:
            print(f"WARNING: {ONE_FOR_BOTH}", file=sys.stderr)  # noqa: T201 - for the operator
        settings.require_directories(loaded)
        code = _serve(loaded, config, role.value, announce, insecure_no_auth)
    except SettingsError as error:
        print(f"reference-gym: {error}", file=sys.stderr)  # noqa: T201 - for the operator
        raise typer.Exit(USAGE) from error
    raise typer.Exit(code)


def _serve(
    loaded: settings.LoadedSettings, config: Path, role: str, announce: Path | None, insecure_no_auth: bool
) -> int:
    logs.configure(
        token for token in (loaded.control_token, loaded.data_token, loaded.policy_token) if token is not None
    )
    # Wrong settings are told at once; and three processes are forked from the one that has imported this.
    from reference_gym import server

    handed = os.environ.pop(supervisor.LIFELINE_VARIABLE, None)
    descriptor = None if handed is None else int(handed)
    if role == "all" and loaded.settings.processes == "three":
        pipe = os.pipe()
        born = nursery.fork(supervisor.ROLES, pipe)
        if not isinstance(born, str):
            parent = supervisor.Supervisor(
                loaded, config, insecure_no_auth=insecure_no_auth, file=announce, forked=born, lifeline=pipe
            )
            return asyncio.run(parent.run())
        role, descriptor = born, pipe[0]
    if descriptor is not None:
        lifeline.hold(descriptor)
    if descriptor is None:
        return asyncio.run(server.serve(loaded, role, announce))
    loaded = _supervised(loaded, role)
    # The supervisor closes standard input of the others when the agent, which calls them, has ended.
    callers = None if role == "agent" else lifeline.still_open(sys.stdin.fileno())
    # Where all three listen is announced by the supervisor alone.
    return asyncio.run(server.serve(loaded, role, None, callers=callers))


def _supervised(loaded: settings.LoadedSettings, role: str) -> settings.LoadedSettings:
    """The settings with what only the supervisor knows: the port to keep, and where the peers are."""
    sections = loaded.settings
    port = os.environ.pop(supervisor.PORT_VARIABLE, None)
    try:
        peers = json.loads(sys.stdin.readline())
        ports = sections.ports if port is None else sections.ports.model_copy(update={role: int(port)})
        changed = sections.model_copy(update={"ports": ports, "peers": settings.Peers.model_validate(peers)})
    except ValueError as error:
        raise SettingsError("the supervisor handed on something that cannot be used") from error
    return loaded.model_copy(update={"settings": changed})


def main() -> None:
    """Entry point of the script."""
    try:
        app()
    except SystemExit as end:
        leave(end.code if isinstance(end.code, int) else 0)


if __name__ == "__main__":
    main()
