"""JSON that comes from outside: whatever is wrong with it, reading it fails with one kind of error."""

from __future__ import annotations

import json
from typing import Any


def parse(text: str | bytes) -> Any:
    """The value of a JSON text.

    Args:
        text: bytes are UTF-8, UTF-16 or UTF-32.

    Raises:
        ValueError: it is no JSON, no text, nested too deeply, or has a number of thousands of digits; for the first
            reason it is a ``json.JSONDecodeError``.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"it is no text: {error.reason} at byte {error.start}") from None
    except ValueError:
        raise ValueError("it has a number of thousands of digits") from None
