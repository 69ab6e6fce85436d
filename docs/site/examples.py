"""The docstrings' sections of examples as the reader of MkDocs calls them; an extension of griffe."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_HEADING = re.compile(r"^( *)Example:$", re.MULTILINE)


class Examples(Extension):
    """Code of an ``Example:`` is shown as code."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Called with everything that has a docstring."""
        if obj.docstring is not None:
            obj.docstring.value = _HEADING.sub(r"\1Examples:", obj.docstring.value)
