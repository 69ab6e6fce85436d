"""Settings that a module has, and in which its steps count: each replica has its own."""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from typing import Any

import pytest
import torch
from test_what_replicas_share import FORMS, values
from torch import nn


class _Settings(dict[str, Any]):
    """Settings that are read as ``settings.name``: its attributes are its entries."""

    def __init__(self, **entries: Any) -> None:
        super().__init__(**entries)
        self.__dict__ = self


class _Named(dict[str, Any]):
    """The same with methods."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class _Annealed(nn.Module):
    """Counts its calls in the settings that it was given."""

    def __init__(self, settings: Any) -> None:
        super().__init__()
        self.linear, self.settings, self.seen = nn.Linear(2, 1, bias=False), settings, Counter[str]()
        nn.init.ones_(self.linear.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.settings.calls += 1
        self.settings.deep["calls"] += 1
        self.seen["calls"] += 1
        return self.linear(x) * (self.settings.calls + self.settings.deep["calls"] + self.seen["calls"])


@pytest.mark.parametrize("kind", [_Settings, _Named, argparse.Namespace])
@FORMS
def test_settings_that_a_module_has_are_each_replicas_own(strategy: Any, process_model: str, kind: Any) -> None:
    settings = kind(calls=0, deep={"calls": 0})
    with strategy.scope():
        model = _Annealed(settings)
    x = torch.ones(1, 2)
    for factor in (3, 6):
        assert set(map(str, values(strategy, lambda: model(x)))) == {str([[2.0 * factor]])}
    assert model.settings is settings
    assert (settings.calls, settings.deep, model.seen) == (2, {"calls": 2}, {"calls": 2})
    settings.calls = 10
    settings.deep["calls"] = 20
    model.seen["calls"] = 30
    assert set(map(str, values(strategy, lambda: model(x)))) == {str([[2.0 * 63]])}
    assert {type(v) for v in strategy.experimental_local_results(strategy.run(lambda: model.settings))} == {kind}


class _Counts(defaultdict[str, int]):
    """A container of a class of its own with a method and a default."""

    def bump(self, name: str) -> int:
        self[name] += 1
        return self[name]


@FORMS
def test_a_defaultdict_of_a_class_of_its_own_stays_one(strategy: Any, process_model: str) -> None:
    with strategy.scope():
        model = nn.Linear(2, 1)
        model.counts = _Counts(int)
    for number in (1, 2):
        assert set(values(strategy, lambda: torch.tensor(model.counts.bump("calls")))) == {number}
    assert type(model.counts) is _Counts
    assert model.counts == {"calls": 2}
