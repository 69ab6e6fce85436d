"""The form ``servers``: models on a parameter server whose one worker does a step at a time; one cluster for all."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from forms import execute
from judge import AGREES, DIFFERS, RAISES, REFUSED, TOLERANCE, Verdict, difference, expected
from programs import CASES, STEPS, flat
from torch import optim

import tfstyle_dist as tfd

SECONDS = 60.0


@contextlib.contextmanager
def _findable() -> Iterator[None]:
    """The cluster's processes import the modules of the cases."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *([before] if before else [])])
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _trained(recipe: Any, cluster: Any) -> dict[str, Any]:
    strategy = tfd.ParameterServerStrategy(cluster, max_staleness=0)
    coordinator = tfd.coordinator.ClusterCoordinator(strategy)
    try:
        torch.manual_seed(0)
        with strategy.scope():
            model = recipe.build().to(torch.get_default_dtype()).train()
        optimizer = optim.SGD(model.parameters(), lr=recipe.rate)
        batch, loss = recipe.batch, recipe.loss
        dtype = torch.get_default_dtype()

        def step(i: int) -> None:
            torch.set_default_dtype(dtype)
            optimizer.zero_grad()
            loss(model, batch(i)).backward()
            optimizer.step()

        for i in range(STEPS):
            coordinator.schedule(step, args=(i,))
        coordinator.join(timeout=SECONDS)
        return {"weights": flat(list(model.parameters())), "keys": " ".join(model.state_dict())}
    finally:
        coordinator.close()


def _verdict(title: str, dtype: str, cluster: Any) -> Verdict:
    case = CASES[title]
    try:
        reference = execute(case, "one", dtype)
        torch.manual_seed(0)
        found = _trained(case.program.recipe, cluster)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        refused = expected(case.refused, "servers")
        return Verdict(title, "servers", REFUSED if refused and re.search(refused, said) else RAISES, None, dtype, said)
    if refused := expected(case.refused, "servers"):
        return Verdict(title, "servers", RAISES, None, dtype, f"no refusal: {refused}")
    apart, where = difference({key: reference[key] for key in found}, found)
    word = AGREES if apart <= (case.tolerance or TOLERANCE[dtype]) else DIFFERS
    return Verdict(title, "servers", word, apart, dtype, where)


def verdicts_of(titles: Sequence[str]) -> Iterator[Verdict]:
    """The verdicts of these cases, one after the other."""
    if not titles:
        return
    with _findable(), tfd.Server.local_cluster(workers=1, ps=1) as cluster:
        for title in titles:
            for dtype in ("fp32", "fp64"):
                verdict = _verdict(title, dtype, cluster)
                if verdict.verdict != DIFFERS:
                    break
            yield verdict
