"""Functions that are pickled by value, as those of a program's own file are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tfstyle_dist.parameter_server.protocol import pickling

SOURCE = """
import torch
import operator as ops

def step(x):
    with torch.no_grad():
        return ops.add(x, 1) if torch.{name} is not None else None
"""


@pytest.mark.parametrize("name", ["ops", "classes", "backends", "backends.cudnn", "compiler.config"])
def test_a_function_that_names_a_module_of_its_own_class(name: str) -> None:
    """For cloudpickle ``torch`` and a name such as ``ops`` are a reference to ``torch.ops``, whatever ``ops`` is."""
    program: dict[str, Any] = {"__name__": "__main__"}
    exec(SOURCE.format(name=name), program)
    again = pickling.loads(pickling.dumps(program["step"]))
    assert again is not program["step"]
    assert again(2) == 3
    assert pickling.loads(pickling.dumps(torch.backends)) is torch.backends


class WithoutState:
    def __reduce__(self) -> Any:
        raise TypeError("This has no state.")


def test_what_cannot_travel_is_said_in_whole_sentences() -> None:
    with pytest.raises(TypeError, match=r"cannot be sent to another process: This has no state\. Make what it needs"):
        pickling.dumps(WithoutState())
