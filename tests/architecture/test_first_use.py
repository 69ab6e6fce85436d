"""Public names are loaded on first use, so each must work as the first thing that a program uses."""

from __future__ import annotations

import re
from pathlib import Path

import tfstyle_dist as tfd
from tfstyle_dist.testing.runner import run_script

PROGRAMS = [
    "tfd.Variable(1.0).assign_add(2.0)",
    "tfd.Variable([1.0, 2.0]).scatter_add(tfd.IndexedSlices([1.0], [0]))",
    "tfd.get_strategy().run(lambda: 1)",
    "assert not tfd.has_strategy() and tfd.in_cross_replica_context() is False",
    "tfd.get_replica_context().all_reduce('SUM', torch.ones(2))",
    "tfd.experimental_set_strategy(None)",
    "w = torch.nn.Parameter(torch.ones(2)); tfd.train.AdamOptimizer(0.1).minimize((w**2).sum(), var_list=[w])",
    "w = torch.nn.Parameter(torch.ones(2)); tfd.train.gradients(w.sum(), [w])",
    "tfd.train.Checkpoint(model=torch.nn.Linear(1, 1)).save('ckpt')",
    "tfd.nn.compute_average_loss(torch.ones(4), global_batch_size=8)",
    "tfd.nn.scale_regularization_loss(torch.ones(()))",
    "tfd.ReductionToOneDevice(aggregation_method=tfd.AggregationMethod.EXPERIMENTAL_TREE)",
    "tfd.experimental.CentralStorageStrategy(['cpu:0', 'cpu:1']).close()",
    "tfd.experimental.partitioners.FixedShardsPartitioner(2)",
    "tfd.cluster_resolver.SimpleClusterResolver(tfd.cluster_resolver.ClusterSpec({'worker': ['a:1']}))",
    "tfd.InputContext(2, 1, 2); tfd.InputOptions(); tfd.AutoShardPolicy.DATA",
    "issubclass(tfd.errors.UnavailableError, Exception)",
    "tfd.distribute.MirroredStrategy(['cpu:0']); tfd.compat.v1.train.AdamOptimizer(0.1)",
    "tfd.compat.v1.distribute.get_loss_reduction(); tfd.data.experimental.DistributeOptions()",
    "tfd.config.experimental.list_physical_devices('GPU'); tfd.tpu.experimental.initialize_tpu_system",
    "tfd.print(tfd.function(lambda: torch.ones(2))())",
    "from tfstyle_dist.distribute import experimental; experimental.CentralStorageStrategy",
    "import tfstyle_dist.compat.v1 as tf; tf.print(tf.Variable(1.0))",
    "tfd.MirroredStrategy(['cpu:0', 'cpu:1']).run(lambda: tfd.get_replica_context())",
]
DRIVER = """
import os, sys, torch

for program in {programs!r}:
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        try:
            exec("import tfstyle_dist as tfd; " + program, {{"torch": torch}})
        except BaseException as error:
            print(f"FAILED {{program}}: {{type(error).__name__}}: {{error}}", flush=True)
            os._exit(1)
        print("worked", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_every_public_name_may_be_the_first(tmp_path: Path) -> None:
    """One process loads torch and is copied for each program: that is much faster than to start it again."""
    by_home: dict[str, list[str]] = {}
    for name, home in tfd._HOMES.items():
        by_home.setdefault(home, []).append(f"tfd.{name}")
    programs = [*PROGRAMS, *("; ".join(names) for names in by_home.values())]
    unset = dict.fromkeys(("RANK", "WORLD_SIZE", "TF_CONFIG"))
    env = {"CUDA_VISIBLE_DEVICES": "", **unset}
    result = run_script(["-c", DRIVER.format(programs=programs)], cwd=tmp_path, env=env)
    assert result.returncode == 0, result.stderr
    assert not re.findall("^FAILED .*", result.stdout, re.M), result.stdout
    assert result.stdout.count("worked") == len(programs)
