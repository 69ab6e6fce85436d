"""What is said where Keras cannot be used."""

from __future__ import annotations

import pytest

from tfstyle_dist.testing.runner import run_script

PROGRAM = "import sys\n{before}\nimport tfstyle_dist.integrations.keras\n"


@pytest.mark.parametrize(
    ("before", "backend", "says"),
    [
        ("sys.modules['keras'] = None", None, "needs Keras 3, which is not installed: pip install 'keras>=3.15'"),
        ("import keras; keras.backend.backend = lambda: 'jax'", "torch", "Keras runs on its 'jax' backend here"),
        ("", "tensorflow", "Its backend must be torch: set KERAS_BACKEND=torch"),
    ],
    ids=["absent", "another backend", "a backend that is absent"],
)
def test_without_keras_on_torch(tmp_path: object, before: str, backend: str | None, says: str) -> None:
    script = f"{tmp_path}/program.py"
    with open(script, "w", encoding="utf-8") as file:
        file.write(PROGRAM.format(before=before))
    result = run_script([script], env={"KERAS_BACKEND": backend})
    assert result.returncode == 1
    assert "ImportError: " in result.stderr
    assert says in result.stderr


TRAINING = """
import keras
import numpy as np
import tfstyle_dist as tfd
{before}
with tfd.MirroredStrategy({devices}) as strategy:
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(np.ones((8, 2)), np.ones((8, 1)), epochs=2, verbose=0)
"""
SAID = "write 'import tfstyle_dist.integrations.keras' before that"


@pytest.mark.parametrize(
    ("before", "devices", "times"),
    [
        ("", ["cpu:0", "cpu:1"], 1),
        ("", ["cpu:0"], 0),
        ("import tfstyle_dist.integrations.keras", ["cpu:0", "cpu:1"], 0),
    ],
    ids=["forgotten", "one replica", "imported"],
)
def test_a_program_that_forgets_the_import(tmp_path: object, before: str, devices: list[str], times: int) -> None:
    script = f"{tmp_path}/program.py"
    with open(script, "w", encoding="utf-8") as file:
        file.write(TRAINING.format(before=before, devices=devices))
    result = run_script([script], env={"KERAS_BACKEND": "torch"})
    assert result.returncode == 0, result.stderr
    assert result.stderr.count(SAID) == times
