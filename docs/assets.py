# SPDX-License-Identifier: Apache-2.0
"""Fetch the script of the API page from the package index, by pinned digest; it is never committed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCRIPT = HERE.parent / "build" / "docs-assets" / "redoc.js"
MEMBER = "drf_spectacular_sidecar/static/drf_spectacular_sidecar/redoc/bundles/redoc.standalone.js"
# The script shows a picture of its makers, loaded from their host; the built pages load nothing from outside.
OUTSIDE = (b"https://cdn.redoc.ly/redoc/logo-mini.svg", b"data:,")


def fetch() -> None:
    """Write the script, unless it is newer than the pin.

    Raises:
        subprocess.CalledProcessError: the package cannot be fetched or is not the pinned one.
    """
    pin = HERE / "assets.lock"
    if SCRIPT.is_file() and SCRIPT.stat().st_mtime >= pin.stat().st_mtime:
        return
    SCRIPT.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--require-hashes", "--dest", directory, "-r", str(pin)], check=True)
        (wheel,) = Path(directory).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            script = archive.read(MEMBER)
    if OUTSIDE[0] not in script:
        raise SystemExit("the script no longer holds the outside address that is taken out; look at what it loads now")
    SCRIPT.write_bytes(script.replace(*OUTSIDE))


if __name__ == "__main__":
    fetch()
