# SPDX-License-Identifier: Apache-2.0
"""How the rendered specification is built: MyST chapters, and everything else drawn from the specification's data."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import spec

project = "Gym Checkpoint Protocol"
author = "The Gym Checkpoint Protocol authors"
project_copyright = f"{author}, Apache-2.0"
release = version = spec.load("1.0").version

extensions = ["myst_parser", "requirements", "phases", "catalogue", "api"]
exclude_patterns = ["_ext", "_build"]
nitpicky = True

myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 4

html_theme = "furo"
html_title = f"Gym Checkpoint Protocol {release}"
html_static_path = ["_static"]
html_css_files = ["spec.css"]
html_copy_source = False
html_show_sphinx = False
html_show_sourcelink = False
