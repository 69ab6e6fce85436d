"""Runs the tutorials and keeps what they print, for the site: python docs/site/print_tutorials.py [NAME ...].

The notebook is one of them: ``notebook``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node=2"
FOUR = TORCHRUN.replace("=2", "=4")
COMMANDS = {
    "accelerate_script": f"{TORCHRUN} examples/accelerate_script.py",
    "aggregation_methods": "examples/aggregation_methods.py --replicas 2",
    "central_storage": "examples/central_storage.py --replicas 2",
    "checkpoints": "examples/checkpoints.py --replicas 2",
    "custom_training": "examples/custom_training.py --replicas 3",
    "distributed_input": "examples/distributed_input.py",
    "elastic": "examples/elastic.py --directory FOLDER",
    "elastic_training": "-m tfstyle_dist.launch --workers 4 --elastic --max-restarts 20 examples/elastic_training.py"
    " --first-kill 4 --pause 1",
    "embedding_recommender": "-m tfstyle_dist.launch --workers 2 --ps 2 examples/embedding_recommender.py",
    "keras_fit": "examples/keras_fit.py --replicas 2",
    "model_parallel": f"{FOUR} examples/model_parallel.py",
    "multi_worker_keras": "-m tfstyle_dist.launch --workers 2 examples/multi_worker_keras.py",
    "multi_worker_loop": f"{TORCHRUN} examples/multi_worker_loop.py --directory FOLDER",
    "parameter_server": "-m tfstyle_dist.launch --workers 2 --ps 1 examples/parameter_server.py",
    "quickstart": "examples/quickstart.py --replicas 2",
    "save_and_load": "examples/save_and_load.py --replicas 2",
    "sync_vs_async": "examples/sync_vs_async.py",
    "trainer_script": f"{TORCHRUN} examples/trainer_script.py",
    "variable_aggregation": "examples/variable_aggregation.py --replicas 2",
}


OUTPUT = ROOT / "docs/site/output"


def shown(name: str) -> str:
    """The first line of a tutorial's output: the command as its reader writes it."""
    command = COMMANDS[name].replace("-m torch.distributed.run", "torchrun")
    return f"$ {command}" if command.startswith("torchrun") else f"$ python {command}"


def run_notebook() -> None:
    """Writes the notebook with what its cells print and draw, ``docs/site/output/notebook.json``."""
    import nbclient
    import nbformat

    notebook = nbformat.read(ROOT / "examples/notebook.ipynb", as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        nbclient.NotebookClient(
            notebook, timeout=300, coalesce_streams=True, resources={"metadata": {"path": folder}}
        ).execute()
    cells = [
        {"cell_type": cell.cell_type, "source": cell.source, "outputs": cell.get("outputs", [])}
        for cell in notebook.cells
    ]
    (OUTPUT / "notebook.json").write_text(json.dumps({"cells": cells}, indent=1) + "\n")
    print("notebook", len(cells), "cells", flush=True)


def main(names: list[str]) -> None:
    """Writes ``docs/site/output/NAME.txt`` for each."""
    for name in names or [*COMMANDS, "notebook"]:
        if name == "notebook":
            run_notebook()
            continue
        command = COMMANDS[name]
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, "TMPDIR": folder, "TQDM_DISABLE": "1", "OMP_NUM_THREADS": "1"}
            words = [folder if word == "FOLDER" else word for word in command.split()]
            run = subprocess.run(
                [sys.executable, *words],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                timeout=600,
            )
        if run.returncode:
            sys.exit(f"{name} ended with {run.returncode}:\n{run.stdout}\n{run.stderr}")
        printed = re.sub(re.escape(folder) + r"[^\s'\",]*", "FOLDER", run.stdout).replace(f"{ROOT}/", "")
        path = OUTPUT / f"{name}.txt"
        path.write_text(f"{shown(name)}\n{printed.rstrip()}\n")
        print(name, len(printed.splitlines()), "lines", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
