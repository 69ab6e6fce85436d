"""The examples of docstrings run, and print what they say."""

from __future__ import annotations

import ast
import contextlib
import doctest
import importlib
import io
import itertools
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import tfstyle_dist as tfd
from tfstyle_dist.config import devices
from tfstyle_dist.core.network import free_ports
from tfstyle_dist.values import PerReplica

ROOT = Path(__file__).parents[1]
ELSEWHERE = {
    "GPUs": ["NcclAllReduce", "sum_lists", "sum_and_sgd", "sum_and_adam"],
    "a TPU, or torch_xla in an environment of its own (tests/xla)": [
        "DeviceAssignment",
        "initialize_tpu_system",
        "TPUStrategy",
        "TPUClusterResolver",
        "tensor_split",
    ],
    "a cluster manager (tests/cluster_resolver has one)": [
        "GCEClusterResolver",
        "KubernetesClusterResolver",
        "SlurmClusterResolver",
    ],
    "several processes (tests/multi_worker, tests/parameter_server, tests/testing)": [
        "MultiWorkerMirroredStrategy",
        "ExperimentalMultiWorkerMirroredStrategy",
        "TorchrunClusterResolver",
        "TFConfigClusterResolver",
        "experimental_connect_to_cluster",
        "ParameterServerStrategy",
        "server.Server",
        "experimental_partition",
        "experimental_split_to_logical_devices",
        "full_state_dict",
        "PreemptionCheckpointHandler",
        "run_script",
        "embedding",
    ],
    "pytest itself (tests/testing)": ["no_leaks", "plugin", "Ranks", "restart", "strategy_combinations"],
    "another package (tests/integrations)": [
        "StrategyAccelerator",
        "TfdFabricStrategy",
        "TfdConfig",
        "parameter_server_cluster",
        "attach",
        "from_accelerator",
        "StrategyTrainerMixin",
        "DatasetCreator",
        "TensorBoard",
    ],
}
"""Examples that need what this process has not, by the name of the class or function."""


@dataclass(frozen=True)
class Documented:
    """A docstring with an example."""

    module: str
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.module.removeprefix('tfstyle_dist.')}.{self.name}"


def documented() -> Iterator[Documented]:
    for folder in ("tfstyle_dist", "kernels"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                    continue
                text = ast.get_docstring(node) or ""
                if ">>>" in text:
                    yield Documented(module, getattr(node, "name", module.rsplit(".", 1)[-1]), text)


EXAMPLES = list(documented())
RPC_ADDRESS = "localhost:4000"


def as_parameter(example: Documented) -> Any:
    """The example as a parameter of the test; skipped, with the reason, where this process has not what it needs."""
    needs = [what for what, names in ELSEWHERE.items() if any(str(example).endswith("." + name) for name in names)]
    marks = [pytest.mark.skip(reason=f"needs {needs[0]}")] if needs else []
    return pytest.param(example, marks=marks, id=str(example))


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What the examples speak of: a strategy of two replicas, a model, an optimizer, data, a step."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(devices, "_configured", {})
    monkeypatch.setattr(devices, "_hidden", set())
    torch.manual_seed(0)
    for letter in "ab":
        (tmp_path / f"{letter}.txt").write_text("1.0\n2.0\n", encoding="utf-8")
    with tfd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            model = torch.nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            variable = tfd.Variable(0.0, aggregation=tfd.VariableAggregation.SUM)
        checkpoint = tfd.train.Checkpoint(model=model)
        checkpoint.save("job1/ckpt")
        inputs = torch.randn(128, 2)
        dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
        loader = DataLoader(dataset, batch_size=64)

        def loss_of(batch: Any) -> torch.Tensor:
            x, y = batch if isinstance(batch, list | tuple) else (batch, batch.sum(1, keepdim=True))
            return torch.nn.functional.mse_loss(model(x), y)

        def train_step(*batch: Any) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(batch[0] if len(batch) == 1 else batch)
            loss.backward()
            optimizer.step()
            return loss.detach()

        yield {
            "strategy": strategy,
            "model": model,
            "optimizer": optimizer,
            "checkpoint": checkpoint,
            "dataset": dataset,
            "data": dataset,
            "samples": dataset,
            "images": inputs,
            "labels": inputs.sum(1),
            "loader": loader,
            "batches": strategy.experimental_distribute_dataset(loader),
            "batch": inputs[:4],
            "x": inputs[:4],
            "y": inputs[:4].sum(1, keepdim=True),
            "step": train_step,
            "train_step": train_step,
            "loss_of": loss_of,
            "losses": torch.tensor([0.25, 0.75]),
            "per_replica_losses": PerReplica((torch.tensor(0.25), torch.tensor(0.75))),
            "penalty": torch.tensor(0.5),
            "iterator": iter(loader),
            "variable": variable,
            "limit": time.monotonic() + 3600,
        }


@contextlib.contextmanager
def beside(example: Documented) -> Iterator[dict[str, Any]]:
    """What an example needs beside the scene: a cluster for the coordinator's, a server for remote calls."""
    if example.module in ("tfstyle_dist.coordinator.cluster_coordinator", "tfstyle_dist.coordinator.current_worker"):
        with tfd.Server.local_cluster(workers=2, ps=1) as servers, tfd.ParameterServerStrategy(servers) as strategy:
            coordinator = tfd.experimental.coordinator.ClusterCoordinator(strategy)
            iterator = coordinator.create_per_worker_dataset(lambda: [0.25])
            yield {"strategy": strategy, "coordinator": coordinator, "step": next, "iterator": iter(iterator)}
    elif example.module.startswith("tfstyle_dist.coordinator.rpc"):
        address = f"localhost:{free_ports(1)[0]}"
        server = tfd.experimental.rpc.Server.create("grpc", address)
        if example.name == "Client":
            server.register("add", lambda a, b: a + b)
            server.start()
        yield {RPC_ADDRESS: address}
    else:
        yield {}


def public_names() -> dict[str, Any]:
    names: dict[str, Any] = {}
    for home in (tfd.cluster_resolver, tfd.experimental, tfd.train, tfd):
        names.update({name: getattr(home, name) for name in home.__all__})
    return names


def check(example: Documented, names: dict[str, Any]) -> None:
    """Runs the lines of an example as a reader would type them; where they say what is printed, it must be."""
    text = example.text.replace(RPC_ADDRESS, names.get(RPC_ADDRESS, ""))
    for line in doctest.DocTestParser().get_examples(text):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(line.source, str(example), "single"), names)
        if line.want:
            flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            assert doctest.OutputChecker().check_output(line.want, printed.getvalue(), flags), (
                f"{line.source}says\n{line.want}and prints\n{printed.getvalue()}"
            )


@pytest.mark.timeout(60)
@pytest.mark.parametrize("example", [as_parameter(example) for example in EXAMPLES])
def test_example(example: Documented, scene: dict[str, Any]) -> None:
    modules = {m.__name__: m for m in (contextlib, itertools, os, sys, time, torch)}
    names = {**public_names(), **modules, "DataLoader": DataLoader, "timedelta": timedelta}
    names.update(vars(importlib.import_module(example.module.replace("kernels.", "tfstyle_dist_kernels."))))
    try:
        with beside(example) as more:
            check(example, names | scene | more)
    finally:
        tfd.experimental_set_strategy(None)


def test_every_reason_names_an_example() -> None:
    left = {name for names in ELSEWHERE.values() for name in names}
    known = {name for example in EXAMPLES for name in left if str(example).endswith("." + name)}
    assert left == known
