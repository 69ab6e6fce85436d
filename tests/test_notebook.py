"""The notebook runs from its first cell to its last in a kernel of its own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")
NOTEBOOK = Path(__file__).resolve().parents[1] / "examples" / "notebook.ipynb"


def text_of(cell: Any) -> str:
    """What a cell printed, and its value."""
    outputs = cell.get("outputs", [])
    return "".join(o.get("text", "") or o.get("data", {}).get("text/plain", "") for o in outputs)


@pytest.mark.slow
# The kernel's client asks for an event loop in a way that newer versions of Python warn of.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_every_cell_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "clear the outputs before committing"
    nbclient.NotebookClient(notebook, timeout=100, resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = "\n".join(text_of(cell) for cell in notebook.cells)
    (accuracy,) = re.findall(r"test accuracy (\d+\.\d+)%", said)
    assert float(accuracy) >= 93, said
    ((first, second),) = re.findall(r"\(\(0, (\S+)\), \(1, (\S+)\)\)", said)
    assert first == second, "the replicas' weights differ"
