"""One script under every engine: the same weights, bit for bit, whoever starts the processes."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest
from example_runs import EXAMPLES
from started_together import clean_environment, outputs

from tfstyle_dist.core.network import free_ports

ENGINES = EXAMPLES / "engines"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


def environment(folder: Path, **others: object) -> dict[str, str]:
    """That of a shell in which nothing is launched, whose ``python`` and ``torchrun`` are those of the tests."""
    folder.mkdir(exist_ok=True)
    for name, command in (("python", "exec"), ("torchrun", "exec")):
        script = folder / name
        arguments = "-m torch.distributed.run " if name == "torchrun" else ""
        script.write_text(f'#!/bin/sh\n{command} "{sys.executable}" {arguments}"$@"\n')
        script.chmod(0o755)
    return clean_environment(PATH=f"{folder}:{os.environ['PATH']}", **others)


def digest_of(command: Sequence[object], env: dict[str, str]) -> str:
    """What the script prints of its weights, once, for two replicas."""
    (text,) = outputs([(command, env)], 400)
    assert "2 replicas, loss " in text, text
    (digest,) = set(re.findall(r"sha256 ([0-9a-f]{64})", text))
    return digest


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What torchrun's workers print."""
    folder = tmp_path_factory.mktemp("torchrun")
    return digest_of(["bash", ENGINES / "start_torchrun.sh"], environment(folder / "bin"))


def test_the_launchers_of_this_machine(expected: str, tmp_path: Path) -> None:
    env = environment(tmp_path / "bin")
    assert digest_of(["bash", ENGINES / "start_launch.sh"], env) == expected
    first, second = map(str, free_ports(2))
    assert digest_of(["bash", ENGINES / "start_tf_config.sh"], env | {"PORT": first, "PORT_2": second}) == expected


@pytest.mark.parametrize("engine", ["ray", "kubeflow"])
def test_ray_and_kubeflow(engine: str, expected: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(engine) is None:
        pytest.skip(f"{engine} is not installed: `make test-engines` runs this with it")
    env = environment(tmp_path / "bin", PACKAGES="none", TMPDIR=tmp_path)
    if engine == "kubeflow":
        env["PATH"] = f"{python_that_makes_environments(tmp_path / 'kubeflow')}:{env['PATH']}"
    if engine == "ray":
        del env["TMPDIR"]  # its sockets have long names
    assert digest_of([sys.executable, ENGINES / f"start_{engine}.py"], env) == expected


def python_that_makes_environments(folder: Path) -> Path:
    """A folder with a ``python`` whose new environments see the packages of the running one, torchrun among them.

    Kubeflow's local backend would install torch into each from an index.
    """
    folder.mkdir()
    program = folder / "python"
    program.write_text(
        f"""#!/bin/sh
"{sys.executable}" "$@" || exit 1
for last; do :; done
site=$("$last/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "{sysconfig.get_path("purelib")}" > "$site/running.pth"
echo "import site; site.addsitedir('{sysconfig.get_path("purelib")}')" > "$site/running_too.pth"
printf '#!/bin/sh\\nexec "%s/bin/python" -m torch.distributed.run "$@"\\n' "$last" > "$last/bin/torchrun"
chmod +x "$last/bin/torchrun"
"""
    )
    program.chmod(0o755)
    return folder


# ---- engines by the variables that they set --------------------------------------------------------------------

MONARCH = {
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "ROLE_WORLD_SIZE": "2",
    "ROLE_NAME": "rank",
    "MASTER_ADDR": "localhost",
}
"""What Monarch's ``SPMDActor`` sets in each process, but for the process's own numbers and the port."""


def test_monarchs_variables(expected: str, tmp_path: Path) -> None:
    env = environment(tmp_path / "bin", **MONARCH, MASTER_PORT=free_ports(1)[0])
    ranks = [env | {"RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank)} for rank in range(2)]
    texts = outputs([([sys.executable, ENGINES / "train.py"], rank) for rank in ranks], 300)
    assert f"sha256 {expected}" in "".join(texts)


def test_what_sparks_distributor_runs(expected: str, tmp_path: Path) -> None:
    """Each of its tasks sets these variables and runs torchrun for one process."""
    port = free_ports(1)[0]
    env = environment(tmp_path / "bin", MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE=2)
    commands = []
    for node in range(2):
        torchrun = [
            "--nnodes=2",
            f"--node_rank={node}",
            f"--rdzv_endpoint=127.0.0.1:{port}",
            "--rdzv_id=0",
            "--nproc_per_node=1",
        ]
        command = [sys.executable, "-m", "torch.distributed.run", *torchrun, ENGINES / "train.py"]
        commands.append((command, env | {"NODE_RANK": str(node), "RANK": str(node)}))
    assert f"sha256 {expected}" in "".join(outputs(commands, 300))
