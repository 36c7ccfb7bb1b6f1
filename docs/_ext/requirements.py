# SPDX-License-Identifier: Apache-2.0
"""Show requirements: a box with a permanent anchor for each, links to them, and their index.

A paragraph that holds nothing but ``{req}`CKPT-COMMIT-003` `` becomes the box of that requirement; the role inside a
sentence becomes a link to it. An unknown id, a second box and a requirement without a box are warnings, and the build
treats warnings as errors.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective, SphinxRole

import spec

log = logging.getLogger(__name__)


class requirement_reference(nodes.Inline, nodes.TextElement):  # noqa: N801 - docutils names nodes so
    """A mention of a requirement, before it is known where its box stands."""


class RequirementRole(SphinxRole):
    """The role ``req``."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Return a reference that a later step turns into a box or a link."""
        if self.text not in spec.load("1.0").requirements:
            log.warning("there is no requirement %s", self.text, location=self.get_location())
        return [requirement_reference(self.text, self.text, requirement=self.text)], []


class Boxes(SphinxTransform):
    """Turn each paragraph that is only a mention into the requirement's box."""

    default_priority = 500

    def apply(self, **kwargs: Any) -> None:
        """Replace the paragraphs of one document."""
        boxes: dict[str, str] = getattr(self.env, "requirement_boxes", {})
        for paragraph in list(self.document.findall(nodes.paragraph)):
            mentions = [n for n in paragraph.children if isinstance(n, requirement_reference)]
            rest = "".join(n.astext() for n in paragraph.children if not isinstance(n, requirement_reference))
            if not mentions or rest.strip() or any(m.get("link") for m in mentions):
                continue
            known = [m["requirement"] for m in mentions if m["requirement"] in spec.load("1.0").requirements]
            for id in known:
                if boxes.get(id, self.env.docname) != self.env.docname:
                    log.warning("requirement %s has a box in %s too", id, boxes[id], location=paragraph)
                boxes[id] = self.env.docname
            paragraph.replace_self([box(spec.load("1.0").requirements[id]) for id in known])
        self.env.requirement_boxes = boxes  # type: ignore[attr-defined]  # Sphinx keeps what extensions put here


def box(requirement: spec.Requirement) -> nodes.Element:
    """Return the box of one requirement."""
    frame = nodes.container(classes=["requirement", f"binds-{requirement.binds}"], ids=[requirement.id])
    head = nodes.paragraph(classes=["requirement-head"])
    head += nodes.reference("", requirement.id, refid=requirement.id, classes=["requirement-id"])
    for name, text in (("level", requirement.level), ("binds", requirement.binds), ("scope", requirement.scope)):
        head += nodes.inline("", text, classes=["badge", f"badge-{name}"])
    if requirement.error:
        head += nodes.inline("", requirement.error, classes=["badge", "badge-error"])
    frame += head
    frame += sentence(requirement.text)
    frame += nodes.paragraph("", "", *status(requirement), classes=["requirement-status"])
    return frame


def sentence(text: str) -> nodes.paragraph:
    """Return a requirement's text as a paragraph; what stands in backticks is a literal."""
    paragraph = nodes.paragraph(classes=["requirement-text"])
    for part in re.split(r"(`+[^`]+`+)", text.strip()):
        if part.startswith("`"):
            paragraph += nodes.literal("", part.strip("`"))
        else:
            paragraph += nodes.Text(part)
    return paragraph


def status(requirement: spec.Requirement) -> list[nodes.Node]:
    """Return how a requirement is shown to hold."""
    if requirement.checks:
        return [nodes.Text("checked by "), nodes.literal("", ", ".join(requirement.checks))]
    if requirement.planned:
        return [nodes.Text(f"planned: {requirement.planned}")]
    return [nodes.Text(f"not observable: {requirement.excluded}")]


class RequirementIndex(SphinxDirective):
    """The directive ``requirement-index``: one table per chapter."""

    def run(self) -> list[nodes.Node]:
        """Return the counts and the tables."""
        requirements = spec.load("1.0").requirements.values()
        counts = [
            f"{len(requirements)} requirements",
            f"{sum(r.binds == 'gym' for r in requirements)} bind a Gym",
            f"{sum(bool(r.checks) for r in requirements)} are checked",
            f"{sum(bool(r.planned) for r in requirements)} have their check planned",
            f"{sum(bool(r.excluded) for r in requirements)} cannot be observed from outside",
        ]
        found: list[nodes.Node] = [nodes.paragraph("", ", ".join(counts) + ".")]
        for chapter in dict.fromkeys(r.chapter for r in requirements):
            section = nodes.section(ids=[f"in-{chapter}"])
            section += nodes.title("", chapter.capitalize())
            section += index_table([r for r in requirements if r.chapter == chapter])
            found.append(section)
        return found


def index_table(requirements: list[spec.Requirement]) -> nodes.table:
    """Return the table of one chapter's requirements."""
    table = nodes.table(classes=["requirement-index"])
    group = nodes.tgroup(cols=5)
    for width in (18, 10, 12, 14, 60):
        group += nodes.colspec(colwidth=width)
    head, body = nodes.thead(), nodes.tbody()
    head += row([nodes.paragraph("", text) for text in ("id", "level", "binds", "scope", "text")])
    for requirement in requirements:
        link = nodes.paragraph()
        link += requirement_reference(requirement.id, requirement.id, requirement=requirement.id, link=True)
        cells = [nodes.paragraph("", t) for t in (requirement.level, requirement.binds, requirement.scope)]
        body += row([link, *cells, sentence(requirement.text)])
    group += [head, body]
    table += group
    return table


def row(cells: list[nodes.paragraph]) -> nodes.row:
    """Return one row of a table."""
    made = nodes.row()
    for cell in cells:
        made += nodes.entry("", cell)
    return made


def resolve(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Turn mentions into links, once every box is known."""
    boxes: dict[str, str] = getattr(app.env, "requirement_boxes", {})
    for mention in list(doctree.findall(requirement_reference)):
        id = mention["requirement"]
        if id not in boxes:
            log.warning("requirement %s has no box in any chapter", id, location=mention)
            mention.replace_self(nodes.literal("", id))
            continue
        target = app.builder.get_relative_uri(docname, boxes[id]) + f"#{id}"
        mention.replace_self(nodes.reference("", id, refuri=target, internal=True, classes=["requirement-link"]))


def complete(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn of each requirement that no chapter shows, or that another chapter than its own shows."""
    boxes: dict[str, str] = getattr(env, "requirement_boxes", {})
    for requirement in spec.load("1.0").requirements.values():
        shown = boxes.get(requirement.id)
        if shown != f"v1/{requirement.chapter}":
            log.warning("requirement %s belongs to %s and is shown in %s", requirement.id, requirement.chapter, shown)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the role, the directive and the steps."""
    app.add_node(requirement_reference)
    app.add_role("req", RequirementRole())
    app.add_directive("requirement-index", RequirementIndex)
    app.add_transform(Boxes)
    app.connect("doctree-resolved", resolve)
    app.connect("env-check-consistency", complete)
    # Boxes are remembered across documents in the environment; a parallel read would not merge them.
    return {"parallel_read_safe": False, "parallel_write_safe": True, "env_version": 1}
