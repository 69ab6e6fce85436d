"""A Lightning Fabric program trains under a strategy, in processes of its own, however they are started."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from started_together import clean_environment, outputs

import tfstyle_dist as tfd
from tfstyle_dist.core.launch_env import LAUNCHER_VARIABLES
from tfstyle_dist.core.network import free_ports
from tfstyle_dist.testing.runner import run_script

PROGRAM = Path(__file__).with_name("fabric_program.py")
needs_fabric = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None,
    reason="lightning is not installed: `make test-engines` runs this with it",
)
slow = pytest.mark.slow
pytestmark = pytest.mark.timeout(500)


def environment(**others: str) -> dict[str, str]:
    """Without the variables of Fabric's launchers too."""
    clean = clean_environment(**others)
    return {name: value for name, value in clean.items() if name not in ("NODE_RANK", "PL_GLOBAL_SEED")}


def run(command: Sequence[object]) -> None:
    outputs([(command, environment())], 400)


def torchrun(processes: int) -> list[object]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]


def command_line() -> list[object]:
    """``fabric run``."""
    start = "from lightning.fabric.cli import _main; _main()"
    port = free_ports(1)[0]
    return [sys.executable, "-c", start, "run", "--accelerator=cpu", "--devices=2", f"--main-port={port}"]


def trained(folder: Path, ranks: Sequence[int]) -> tuple[dict[str, Any], str]:
    """The last checkpoint, and the digest of the weights, which all ranks have."""
    told = {(folder / f"rank{rank}").read_text() for rank in ranks}
    assert len(told) == 1, told
    gathered, _, digest = told.pop().rpartition(" ")
    assert json.loads(gathered) == list(ranks)
    return torch.load(folder / "last.ckpt", weights_only=True), digest


def assert_alike(found: Any, wanted: Any) -> None:
    assert found["model"].keys() == wanted["model"].keys()
    for name in ("model", "losses"):
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-4, atol=1e-5)
    assert found["optimizer"]["param_groups"] == wanted["optimizer"]["param_groups"]
    for number, entry in wanted["optimizer"]["state"].items():
        torch.testing.assert_close(found["optimizer"]["state"][number], entry, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What stock Fabric trains on one device, with the global batch."""
    folder = tmp_path_factory.mktemp("one")
    run([sys.executable, PROGRAM, folder, "--kind=stock", "--processes=1"])
    return trained(folder, [0])[0]


digests: dict[str, str] = {}


@slow
@needs_fabric
@pytest.mark.parametrize(
    ("way", "kind"),
    [
        ("torchrun", "tfd"),
        ("torchrun", "given"),
        ("fabric", "name"),
        ("fabric", "spawn"),
        ("launch", "tfd"),
        ("launch", "given"),
        ("fabric run", "tree"),
    ],
)
def test_a_program_of_fabric_under_every_launcher(
    way: str, kind: str, tmp_path: Path, one_device: dict[str, Any]
) -> None:
    ways = {
        "torchrun": torchrun(2),
        "fabric": [sys.executable],
        "launch": [sys.executable, "-m", "tfstyle_dist.launch", "--workers=2"],
        "fabric run": command_line(),
    }
    run([*ways[way], PROGRAM, tmp_path, f"--kind={kind}"])
    found, digest = trained(tmp_path, [0, 1])
    assert_alike(found, one_device)
    digests[f"{way} {kind}"] = digest
    assert len(set(digests.values())) == 1, digests


@slow
@needs_fabric
def test_sums_have_one_order(tmp_path: Path) -> None:
    run([*torchrun(3), PROGRAM, tmp_path, "--sums", "--processes=3"])
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(3)] == ["agrees"] * 3


@slow
@needs_fabric
def test_a_lost_worker_is_named(tmp_path: Path) -> None:
    """Also where: in the program, not in Fabric."""
    workers = [f"127.0.0.1:{port}" for port in free_ports(2)]
    command = [sys.executable, PROGRAM, tmp_path, "--lost=1"]
    tasks = [{"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}} for index in range(2)]
    texts = outputs([(command, environment(TF_CONFIG=json.dumps(task))) for task in tasks], 400, codes=[1, 7])
    where = re.escape(str(PROGRAM))
    assert re.search(rf"PeerLostError: Worker 1 is missing.* called at {where}:\d", texts[0]), texts[0]


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Nothing is launched here."""
    for name in (*LAUNCHER_VARIABLES, "TF_CONFIG", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@slow
@needs_fabric
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: tfd.MirroredStrategy(["cpu:0", "cpu:1"]), "it has 2 replicas in this process.*Fabric\\(devices=2, "),
        (
            lambda: tfd.MultiWorkerMirroredStrategy(elastic=tfd.experimental.Elastic(replicas=2)),
            "workers of an elastic job change.*strategy.run",
        ),
        (
            lambda: tfd.experimental.CentralStorageStrategy(["cpu:0"]),
            "takes one of .*Mirrored.*integrations.accelerate",
        ),
    ],
    ids=["several replicas", "elastic", "central storage"],
)
def test_strategies_that_cannot(make: Any, says: str, clean: pytest.MonkeyPatch) -> None:
    from tfstyle_dist.integrations.fabric import TfdFabricStrategy

    with make() as strategy, pytest.raises((TypeError, ValueError), match=says):
        TfdFabricStrategy(strategy)


@slow
@needs_fabric
def test_arguments_that_contradict(clean: pytest.MonkeyPatch) -> None:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.precision import FSDPPrecision

    from tfstyle_dist.integrations.fabric import TfdFabricStrategy

    with pytest.raises(ValueError, match="FSDPPrecision belongs to another strategy"):
        Fabric(accelerator="cpu", strategy="tfd_mirrored", plugins=[FSDPPrecision("bf16-mixed")])
    with pytest.raises(tfd.errors.UnavailableError, match=r"in fabric.launch\(\)"):
        _ = TfdFabricStrategy().strategy
    with tfd.OneDeviceStrategy("cpu:0") as one:
        with pytest.raises(ValueError, match="a strategy and cross_device_ops: the strategy has its own"):
            TfdFabricStrategy(one, cross_device_ops=tfd.ReductionToOneDevice())
        with pytest.raises(ValueError, match="but a strategy was given"):
            TfdFabricStrategy(one, start_method="spawn")
        clean.setenv("LOCAL_RANK", "1")  # as Fabric's own launcher sets it
        fabric = Fabric(accelerator="cpu", devices=2, strategy=TfdFabricStrategy(one))
        with pytest.raises(
            ValueError, match=r"worker 0 of 1, but Fabric's process is 1 of 2.*write TfdFabricStrategy\(\)"
        ):
            fabric.launch()


@slow
@needs_fabric
def test_the_tasks_of_tf_config(clean: pytest.MonkeyPatch) -> None:
    from lightning.fabric import Fabric

    from tfstyle_dist.integrations.fabric import TfdFabricStrategy

    cluster = {"chief": ["h0:1"], "worker": ["h0:2", "h1:1", "h1:2"], "ps": ["h2:1"]}
    clean.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 1}}))
    fabric = Fabric(accelerator="cpu", devices=2, num_nodes=2, strategy="tfd_mirrored")
    assert (fabric.world_size, fabric.global_rank, fabric.node_rank, fabric.local_rank) == (4, 2, 1, 0)
    with pytest.raises(ValueError, match=r"4 training task.*devices=2 and num_nodes=1.*devices=1, num_nodes=4"):
        Fabric(accelerator="cpu", devices=2, strategy="tfd_mirrored").launch()
    with pytest.raises(ValueError, match="but TF_CONFIG is set"):
        TfdFabricStrategy(start_method="spawn")


def test_without_lightning(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    blocked = "import sys\nsys.modules['lightning'] = sys.modules['lightning_fabric'] = None\n"
    program.write_text(f"{blocked}import tfstyle_dist.integrations\nimport tfstyle_dist.integrations.fabric\n")
    result = run_script([str(program)])
    assert result.returncode == 1
    assert "needs Lightning Fabric, which is not installed." in result.stderr
    assert "Write pip install lightning (the extra 'lightning' of tfstyle_dist)." in result.stderr
