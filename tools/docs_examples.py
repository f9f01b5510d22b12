"""Show a docstring's ``Example:`` as code in the documentation site.

mkdocstrings loads this extension by its path (mkdocs.yml). Its parser of docstrings
takes ``>>>`` lines for code in a section ``Examples:`` only.
"""

from __future__ import annotations

import griffe


class DoctestExamples(griffe.Extension):
    """Names the section of examples as the parser expects it."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Rename the section in one docstring; griffe calls it for each object."""
        if obj.docstring is not None:
            text = obj.docstring.value
            obj.docstring.value = text.replace("\nExample:\n", "\nExamples:\n")
