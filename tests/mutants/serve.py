# SPDX-License-Identifier: Apache-2.0
"""Starts the reference Gym with a mutant in it, in whatever processes it consists of."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from reference_gym import cli
from tests.mutants import catalogue
from tests.mutants.seam import NoSeam, wrap

_OWN = ("-m", "reference_gym.cli", "serve")


def serve(name: str, arguments: Sequence[str]) -> None:
    """Serve like `reference-gym serve`.

    Args:
        name: of the mutant, or `clean`.
        arguments: those of `reference-gym serve`.
    """
    catalogue.apply(name)
    hand_on(name)
    sys.argv = ["reference-gym", "serve", *arguments]
    cli.main()


def hand_on(name: str) -> None:
    """Let every process that this one starts get the mutant too."""

    @wrap(asyncio, "create_subprocess_exec")
    def create_subprocess_exec(original: Any, program: str, *args: str, **options: Any) -> Any:
        if args[: len(_OWN)] != _OWN:
            raise NoSeam(f"the Gym starts {args[: len(_OWN)]}: the mutant would not be in that process")
        return original(program, "-m", "tests.mutants", "serve", name, "--", *args[len(_OWN) :], **options)
