# SPDX-License-Identifier: Apache-2.0
"""Sources of the rendered specification; not part of the distribution."""
