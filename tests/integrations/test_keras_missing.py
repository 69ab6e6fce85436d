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
