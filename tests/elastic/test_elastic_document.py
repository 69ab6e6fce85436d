"""The program of docs/elastic.md, as it stands there, with a worker that is killed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

_DOCUMENT = Path(__file__).parents[2] / "docs" / "elastic.md"


@pytest.mark.timeout(600)
def test_the_program_of_the_document_survives_a_kill(run_job: Any, tmp_path: Path) -> None:
    found = re.search(r"```python\n(.*?)```", _DOCUMENT.read_text(), re.DOTALL)
    assert found is not None
    kill = """
import json, os, signal
calls = []
def around(step):
    def inner(*batch):
        calls.append(1)
        if len(calls) == 6 and json.loads(os.environ["TF_CONFIG"])["task"]["index"] == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(*batch)
    return inner
step = around(step)
"""
    source = found[1].replace("x = torch.randn", kill + "\nx = torch.randn")
    undisturbed, disturbed = tmp_path / "undisturbed.py", tmp_path / "disturbed.py"
    undisturbed.write_text(source.replace("VICTIM", "None"))
    disturbed.write_text(source.replace("VICTIM", "0"))
    (alone,) = run_job(1, script=str(undisturbed))
    assert alone["code"] == 0, alone["output"]
    assert len(re.findall(r"epoch \d: \d", alone["output"])) == 3
    job = run_job(2, script=str(disturbed))
    assert [worker["code"] for worker in job] == [-9, 0], job
    printed = job[0]["output"] + job[1]["output"]
    assert re.findall(r"epoch 2: .*", printed) == re.findall(r"epoch 2: .*", alone["output"])
