# SPDX-License-Identifier: Apache-2.0
"""One broken Gym per module, ten to twenty lines over the reference Gym.

Each module says in its docstring what is broken, and holds

- ``BREAKS``: the requirements that this breaks, the main one first, written down before the suite met it;
- ``TARGETS``: the area; ``SHOWS``: what it takes to see it (``catalogue.Shows``);
- ``FROM_THE_TEXT = True``: it was written from the specification, before any check of its chapter had been read;
- ``LOG = True``: it breaks the boundary log, so that it needs a Gym that keeps one;
- ``apply``: changes the reference Gym in this process, by ``seam.wrap``.
"""
