"""Kills at random places, of workers that come back and of others: the end is that of the undisturbed run, bit for bit.

``TFSTYLE_KILLS=100`` kills as often; ``make kills`` does. ``TFSTYLE_KILLS_SEED`` draws other places.
"""

from __future__ import annotations

import itertools
import os
import random
from typing import Any

import pytest
from elastic_train import PLACES

STEPS = 8
KILLS = int(os.environ.get("TFSTYLE_KILLS", "6"))
SEED = int(os.environ.get("TFSTYLE_KILLS_SEED", "1"))
EXACT = ("weights", "buffers", "seen")  # "seen" counts how often each sample was learned from
TOO_LATE = ("came to the end of the training meanwhile", "have ended before it became a member")


@pytest.mark.timeout(120 + 30 * KILLS)
def test_random_kills(run_job: Any) -> None:
    chance, kills = random.Random(SEED), 0
    undisturbed: dict[tuple[str, str], dict[str, Any]] = {}
    for kind, optimizer in itertools.cycle(
        itertools.product(("transformer", "mlp", "cnn"), ("SGD", "Adam", "tf-momentum", "tf-adam"))
    ):
        if kills >= KILLS:
            break
        victims = chance.sample(range(4), chance.randint(1, 3))
        come_back = {victim: 1 for victim in victims if chance.random() < 0.6}
        faults = [f"{victim}:{chance.randrange(STEPS)}:{chance.choice(PLACES)}" for victim in victims]
        if (kind, optimizer) not in undisturbed:
            (alone,) = run_job(1, kind, STEPS, OPTIMIZER=optimizer)
            assert alone["code"] == 0, alone["output"]
            undisturbed[kind, optimizer] = alone["result"]
        job = run_job(
            4, kind, STEPS, *faults, restarts=come_back, OPTIMIZER=optimizer,
            REJOIN="1", WORKERS=str(4 - len(victims) + len(come_back)),
        )  # fmt: skip
        kills += len(victims)
        what = (kind, optimizer, faults, come_back)
        for index, worker in enumerate(job):
            if index in victims and index not in come_back:
                assert worker["code"] == -9, (what, worker["output"])
            elif index in come_back and worker["code"] == 1:
                assert any(text in worker["output"] for text in TOO_LATE), (what, worker["output"])
            else:
                assert worker["code"] == 0, (what, index, [w["output"] for w in job])
                for name in EXACT:
                    assert worker["result"][name] == undisturbed[kind, optimizer][name], (what, index, name)
