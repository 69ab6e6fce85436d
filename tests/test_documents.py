"""Every block of code of README.md and docs/ is run by a test, or says why not."""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import math
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from document_blocks import DOCS, DOCUMENTS, ROOT, Block, blocks_of
from example_runs import ALONE
from torch.utils.data import DataLoader, TensorDataset

import tfstyle_dist as tfd
from tfstyle_dist.testing.runner import run_script

RUN_HERE = [path for path in DOCUMENTS if path.name != "README.md"]
"""Their Python blocks without a comment are run by this file; those of the README by test_readme.py."""


def ids(path: Path) -> str:
    return path.name


@pytest.mark.parametrize("path", DOCUMENTS, ids=ids)
def test_every_block_is_run_or_says_why_not(path: Path) -> None:
    for block in blocks_of(path):
        if block.run_by:
            file, _, function = block.run_by.partition("::")
            assert (ROOT / file).is_file(), f"{block.place}: {file} does not exist"
            functions = {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if hasattr(node, "name")}
            assert function in functions, f"{block.place}: {file} has no {function}"
        elif block.language == "python":
            assert block.reason or not block.comment.startswith("not run"), f"{block.place}: say why it is not run"
        else:
            in_ci = re.fullmatch(r"command [12]", block.comment) and path.name == "README.md"
            assert in_ci or block.reason, (
                f"{block.place}: no test runs this command. Write above it <!-- run by tests/test_x.py::test_name --> "
                "or <!-- not run: the reason -->"
            )


class Given:
    """What the blocks of a page take for granted: a strategy of two replicas, a small model, and data."""

    def __init__(self, folder: Path) -> None:
        self.strategy = tfd.MirroredStrategy(["cpu:0", "cpu:1"])
        x = torch.randn(48, 4)
        data = TensorDataset(x, x.sum(1, keepdim=True))
        with self.strategy.scope():
            model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = self.strategy.experimental_distribute_dataset(data, global_batch_size=16)
        self.names: dict[str, Any] = {
            "torch": torch, "tfd": tfd, "time": time, "DataLoader": DataLoader, "TensorDataset": TensorDataset,
            "x": x, "y": x.sum(1, keepdim=True), "data": data, "dataset": data, "strategy": self.strategy,
            "model": model, "optimizer": optimizer, "batches": batches, "limit": math.inf,
            "build": lambda: torch.nn.Linear(4, 1), "batch": (x, x.sum(1, keepdim=True)),
            "__name__": "a_page_of_the_documentation",
        }  # fmt: skip

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            net, optimizer = self.names["model"], self.names["optimizer"]
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        self.names |= {"step": step, "train_step": step, "train": lambda strategy: None, "itertools": itertools}
        self.names["loader"] = iter([self.names["batch"]])
        self.replaced = {"/data/job1": str(folder), "10_000": "20", "num_workers=4": "num_workers=0"}
        if folder.name == "central_storage.md":
            self.names["step"] = lambda batch: step(*(part.chunk(1)[0] for part in batch))
        if folder.name == "checkpoints.md":
            self.names |= {"dataset": batches, "train_step": lambda: None}

    def run(self, block: Block) -> None:
        source = "\n" * block.line + block.source
        for old, new in self.replaced.items():
            source = source.replace(old, new)
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(source, str(block.document), "exec"), self.names)


@pytest.fixture
def given(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Given]:
    monkeypatch.chdir(tmp_path)
    made = Given(tmp_path / request.getfixturevalue("path").name)
    yield made
    made.strategy.close()
    made.names["strategy"].close()


def own(path: Path) -> list[Block]:
    return [b for b in blocks_of(path) if b.language == "python" and not b.run_by and not b.reason]


@pytest.mark.distributed(workers=1, env=ALONE)
@pytest.mark.parametrize("path", [path for path in RUN_HERE if own(path)], ids=ids)
def test_blocks_of_a_page_run_one_after_the_other(path: Path, given: Given) -> None:
    for block in own(path):
        try:
            given.run(block)
        except Exception as error:
            error.add_note(f"in the block at {block.place}")
            raise


@pytest.mark.slow
def test_the_program_of_the_parameter_servers(tmp_path: Path) -> None:
    pytest.importorskip("zmq")
    pytest.importorskip("cloudpickle")
    (block,) = (b for b in blocks_of(DOCS / "parameter_server.md") if b.run_by)
    script = tmp_path / "program.py"
    script.write_text(block.source.replace("range(1000)", "range(200)") + "strategy.close()\n", encoding="utf-8")
    command = ["-m", "tfstyle_dist.launch", "--chief", "--workers", "1", "--ps", "1", script]
    result = run_script(command, timeout=200, env={"CUDA_VISIBLE_DEVICES": "", **dict.fromkeys(("RANK", "WORLD_SIZE"))})
    assert result.returncode == 0, result.stdout + result.stderr
    assert "weight" in result.stdout
    assert os.environ.get("TF_CONFIG") is None
