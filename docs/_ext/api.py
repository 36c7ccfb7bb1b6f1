# SPDX-License-Identifier: Apache-2.0
"""Show the OpenAPI document as an interactive reference that loads nothing from outside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

import spec

SCRIPT = Path(__file__).parents[2] / "build" / "docs-assets" / "redoc.js"

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Gym Checkpoint Protocol {version}: API reference</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none';
 script-src 'self' 'unsafe-inline' 'unsafe-eval' file: blob:; style-src 'unsafe-inline';
 img-src 'self' data: file:; worker-src blob:; font-src data:">
<style>body {{ margin: 0 }} .back {{ font: 14px sans-serif; padding: 8px 16px; display: block }}</style></head>
<body><a class="back" href="../index.html">← Gym Checkpoint Protocol</a><div id="api"></div>
<script src="redoc.js"></script>
<script>Redoc.init({document}, {{ disableSearch: true, expandResponses: "200", hideDownloadButton: true,
 nativeScrollbars: true, theme: {{ typography: {{ fontFamily: "system-ui, sans-serif",
 headings: {{ fontFamily: "system-ui, sans-serif" }} }} }} }}, document.getElementById("api"));</script>
</body></html>
"""


class ApiReference(SphinxDirective):
    """The directive ``api-reference``: a link to the drawn page and a list of the operations."""

    def run(self) -> list[nodes.Node]:
        """Return the link and the list."""
        rows = []
        for path, item in spec.load("1.0").openapi.get("paths", {}).items():
            for method, operation in item.items():
                if isinstance(operation, dict) and "operationId" in operation:
                    href = f"_static/api/index.html#operation/{operation['operationId']}"
                    rows.append(
                        f'<tr><td><a href="{href}"><code>{method.upper()} {path}</code></a></td>'
                        f"<td>{operation.get('summary', '')}</td></tr>"
                    )
        table = f'<table class="docutils"><tbody>{"".join(rows)}</tbody></table>'
        link = '<p><a href="_static/api/index.html"><b>Open the API reference</b></a></p>'
        return [nodes.raw("", link + table, format="html")]


def write_page(app: Sphinx, error: Exception | None) -> None:
    """Write the drawn page beside the built site."""
    if error is not None or app.builder.format != "html" or app.config.api_page in (False, "0"):
        return
    if not SCRIPT.is_file():
        raise ExtensionError("the script of the API page is not there; build with `make docs`, which fetches it")
    target = Path(app.outdir) / "_static" / "api"
    target.mkdir(parents=True, exist_ok=True)
    (target / "redoc.js").write_bytes(SCRIPT.read_bytes())
    specification = spec.load("1.0")
    # `</` inside a script element would end it.
    document = json.dumps(specification.openapi).replace("</", "<\\/")
    page = PAGE.format(version=specification.version, document=document)
    (target / "index.html").write_text(page, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive and the page."""
    app.add_directive("api-reference", ApiReference)
    app.add_config_value("api_page", default=True, rebuild="html", types=(bool, str))
    app.connect("build-finished", write_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
