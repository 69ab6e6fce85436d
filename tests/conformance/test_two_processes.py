"""Recorded programs in the torchrun form: two processes of one replica each agree with TensorFlow as well.

A program run on two replicas gives each process its own half: where TensorFlow shows ``PerReplica([a, b])`` or a list
of one entry per replica, rank 0 has ``a`` and rank 1 has ``b``. The halves are put together along the golden.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from facade import Facade
from results import HERE, TOLERANCES, golden, load_compare

import tfstyle_dist as td

sys.path.insert(0, str(HERE))
import harness
from lib import bodies_multiworker, util

MEANINGFUL = {
    category: tuple(names.split())
    for category, names in {
        "context": """
            all_gather_empty_piece all_gather_even_axis0 all_gather_even_axis1 all_gather_forms_n2
            all_gather_int all_gather_rank_differs all_gather_uneven_axis0 all_gather_uneven_axis1
            all_gather_uneven_other_axis all_reduce_MEAN_n2 all_reduce_SUM_n2 all_reduce_forms_n2
            all_reduce_grad_MEAN_n2 all_reduce_grad_SUM_n2 all_reduce_uneven_n2
        """,
        "reduce": """
            gather_even_n2 gather_uneven_n2 grid_all_empty_n2 grid_empty_piece_n2 grid_matrix_n2
            grid_scalar_n2 grid_uneven_axis0_n2 grid_uneven_axisnone_n2 grid_uneven_matrix_n2 grid_vector_n2
            ints_n2
        """,
        "run": """
            returns_mirrored_n2
        """,
        "train": """
            average_loss_n2 batchnorm_FIRST_n2 batchnorm_MEAN_n2 grads_per_replica_n2
            grads_per_replica_on_read manual_sgd_MEAN_n2 manual_sgd_SUM_n2
        """,
        "variables": """
            matrix_int32_ON_READ_SUM matrix_int32_ON_WRITE_MEAN matrix_int32_ON_WRITE_SUM initializers_n2
            operators_n2 python_values_MEAN python_values_SUM return_of_assign_ON_READ_MEAN
            return_of_assign_ON_READ_SUM return_of_assign_ON_WRITE_SUM sequence_on_read_sum
            sequence_on_write_mean trainable_n2
        """,
    }.items()
}
MATRICES = tuple(
    f"matrix_{sync}_{aggregation}_n2"
    for sync in ("AUTO", "NONE", "ON_WRITE", "ON_READ")
    for aggregation in ("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA")
)
MEANINGFUL["variables"] += MATRICES
CASES = [(category, "case_" + name) for category, names in MEANINGFUL.items() for name in names]


class RankFacade(Facade):
    """The strategy of two replicas is the one that finds its group from the launcher."""

    def __init__(self) -> None:
        self.mirrored = td.MirroredStrategy()

    def strategy(self, kind: str = "mirrored", n: int = 1, **kw: Any) -> Any:
        return self.mirrored if (kind, n) == ("mirrored", 2) else super().strategy(kind, n, **kw)


def together(expected: Any, parts: list[Any]) -> Any:
    """One result from each rank's half, shaped like the golden."""
    if isinstance(expected, dict) and set(expected) == {"PerReplica"} and len(expected["PerReplica"]) == len(parts):
        return {"PerReplica": [p["PerReplica"][0] if isinstance(p, dict) and "PerReplica" in p else p for p in parts]}
    if isinstance(expected, dict):
        if not all(isinstance(p, dict) and set(p) == set(expected) for p in parts):
            return parts[0] if all(p == parts[0] for p in parts) else {"ranks disagree": parts}
        merged = {key: together(value, [p[key] for p in parts]) for key, value in expected.items()}
        if "cross_read" in expected and diverged(expected["local"]):
            # A read does not communicate: each worker sees its own copy, and TensorFlow's "replica 0" is rank 0's.
            merged["cross_read"] = parts[0]["cross_read"]
        return merged
    if isinstance(expected, list):
        if len(expected) == len(parts) and all(isinstance(p, list) and len(p) == 1 for p in parts):
            return [p[0] for p in parts]
        if all(isinstance(p, list) and len(p) == len(expected) for p in parts):
            return [together(e, [p[i] for p in parts]) for i, e in enumerate(expected)]
    return parts[0] if all(p == parts[0] for p in parts) else {"ranks disagree": parts}


def diverged(copies: Any) -> bool:
    """Whether a variable's copies differ from replica to replica."""
    return isinstance(copies, list) and any(c != copies[0] for c in copies)


def exchange(strategy: Any, directory: Path, name: str, mine: Any) -> list[Any]:
    """Every rank's value, by way of files: the code under test does not carry its own results."""
    group = strategy.worker.group
    (directory / f"{name}.{group.rank}.json").write_text(json.dumps(mine))
    group.gather_objects(name, "results are written")
    return [json.loads((directory / f"{name}.{rank}.json").read_text()) for rank in range(group.size)]


@pytest.mark.distributed(workers=2, timeout=150, deadline=30)
def test_programs_agree(shared_tmp_path: Path) -> None:
    xp, wrong = RankFacade(), []
    compare = load_compare()
    for category, case in CASES:
        program = getattr(harness.load(str(HERE / "programs" / f"programs_{category}.py")), case)
        try:
            mine = harness.jsonable(program(xp))
        except Exception as error:
            mine = util.describe_error(error)
        parts = exchange(xp.mirrored, shared_tmp_path, case, mine)
        expected, out = golden()[category][case], []
        compare.leaves(expected, together(expected, parts), "", out, TOLERANCES)
        for path, good, wanted, found in out:
            if not good and not compare.accident(category, case, path):
                wrong.append(
                    f"{category}.{case}{path}\n    TensorFlow {json.dumps(wanted)}\n    here       {json.dumps(found)}"
                )
    xp.mirrored.close()
    assert not wrong, "\n".join(wrong)


@pytest.mark.distributed(workers=2, timeout=60)
@pytest.mark.parametrize("case", ["facts_2", "collectives_2", "variables_2", "train_2"])
def test_multi_worker_programs_agree(case: str, rank: int) -> None:
    module = harness.load(str(HERE / "programs" / "programs_multiworker.py"))
    recorded = getattr(module, "case_" + case).params
    params = {k: v for k, v in recorded.items() if k not in ("n", "fn")}
    xp, compare, out = Facade(), load_compare(), []
    with td.MultiWorkerMirroredStrategy() as strategy:
        mine = harness.jsonable(getattr(bodies_multiworker, recorded["fn"])(xp, strategy, rank, **params))
    compare.leaves(golden()["multiworker"]["case_" + case][rank], mine, "", out, TOLERANCES)
    # Not even the recorded accidents are excused: a worker's own first replica counts under ONLY_FIRST_REPLICA.
    assert not [o for o in out if not o[1]]


@pytest.mark.distributed(workers=2, timeout=60)
def test_dataset_program_agrees(rank: int, shared_tmp_path: Path) -> None:
    module = harness.load(str(HERE / "programs" / "programs_multiworker.py"))
    params = dict(module.case_datasets_2.params)
    params.pop("n")
    xp, compare, out = Facade(), load_compare(), []
    with td.MultiWorkerMirroredStrategy() as strategy:
        if rank == 0:
            write_files(shared_tmp_path, params.pop("lines"))
        strategy.worker.group.gather_objects(0, "files are written")
        params.pop("lines", None)
        program = bodies_multiworker.datasets
        mine = harness.jsonable(program(xp, strategy, rank, files=None, directory=str(shared_tmp_path), **params))
    compare.leaves(golden()["multiworker"]["case_datasets_2"][rank], mine, "", out, TOLERANCES)
    assert not [o for o in out if not o[1]]


def write_files(directory: Path, lines: Sequence[int]) -> None:
    """Files of so many lines; the lines are numbered throughout."""
    first = 0
    for number, count in enumerate(lines):
        (directory / f"part-{number:02d}.txt").write_text("".join(f"{first + i}\n" for i in range(count)))
        first += count
