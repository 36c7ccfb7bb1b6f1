# SPDX-License-Identifier: Apache-2.0
"""Show the error catalogue and the messages, drawn from the specification's data."""

from __future__ import annotations

import json
from html import escape
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import spec

NOT_MESSAGES = {"common"}


def error_table() -> str:
    """Return the error catalogue, each code with a permanent anchor."""
    rows = []
    for error in spec.load("1.0").errors.values():
        definite = "yes" if error.definite else "no"
        if error.indefinite_for:
            definite += f", not on {', '.join(sorted(error.indefinite_for))}"
        rows.append(
            f'<tr id="error-{error.code}"><th scope="row"><a class="code" href="#error-{error.code}">'
            f"{error.code}</a></th>"
            f"<td>{error.status}</td><td>{'yes' if error.retryable else 'no'}</td><td>{definite}</td>"
            f"<td>{escape(error.meaning)}</td></tr>"
        )
    head = "".join(f"<th>{name}</th>" for name in ("code", "status", "retryable", "definite", "meaning"))
    return f'<table class="docutils errors"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'


def kind(schema: Any) -> str:
    """Return the type of a field in a few words."""
    if "$ref" in schema:
        return str(schema["$ref"].rsplit("/", 1)[-1].removesuffix(".json"))
    if "const" in schema:
        return f"always {json.dumps(schema['const'])}"
    if "enum" in schema:
        return " | ".join("null" if v is None else str(v) for v in schema["enum"])
    for key in ("oneOf", "anyOf"):
        if key in schema:
            return " | ".join(kind(part) for part in schema[key])
    if schema.get("type") == "array":
        return f"list of {kind(schema.get('items', {}))}"
    types = schema.get("type", "any")
    return " | ".join(types) if isinstance(types, list) else str(types)


def fields(schema: Any) -> str:
    """Return the table of a message's fields."""
    required = set(schema.get("required", ()))
    rows = "".join(
        f"<tr><th scope=row><code>{escape(name)}</code></th><td>{escape(kind(part))}</td>"
        f"<td>{'yes' if name in required else 'no'}</td><td>{escape(part.get('description', ''))}</td></tr>"
        for name, part in schema.get("properties", {}).items()
    )
    head = "<tr><th>field</th><th>type</th><th>required</th><th>meaning</th></tr>"
    return f'<table class="docutils fields"><thead>{head}</thead><tbody>{rows}</tbody></table>' if rows else ""


class ErrorTable(SphinxDirective):
    """The directive ``error-table``."""

    def run(self) -> list[nodes.Node]:
        """Return the catalogue."""
        return [nodes.raw("", error_table(), format="html")]


class MessageCatalogue(SphinxDirective):
    """The directive ``message-catalogue``: a section per schema, with its first valid example."""

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        specification = spec.load("1.0")
        found: list[nodes.Node] = []
        for name, schema in specification.schemas.items():
            if name in NOT_MESSAGES:
                continue
            section = nodes.section(ids=[f"message-{name}"], names=[f"message-{name}"])
            section += nodes.title("", name)
            section += nodes.paragraph("", str(schema.get("description", schema.get("title", ""))))
            section += nodes.raw("", fields(schema), format="html")
            examples = sorted((specification.root / "examples" / name / "valid").glob("*.json"))
            if examples:
                text = json.dumps(json.loads(examples[0].read_text(encoding="utf-8")), indent=2, ensure_ascii=False)
                section += nodes.literal_block(text, text, language="json")
            found.append(section)
        return found


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives."""
    app.add_directive("error-table", ErrorTable)
    app.add_directive("message-catalogue", MessageCatalogue)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
