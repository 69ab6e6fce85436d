"""``StrategyAccelerator`` in one process: local replicas, and what is refused or said."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
from accelerate_state import no_accelerate_state  # noqa: F401
from on_devices import IS_CUDA
from torch import nn

import tfstyle_dist as tfd
from tfstyle_dist.integrations.accelerate import StrategyAccelerator, StrategyTrainerMixin, attach, from_accelerator
from tfstyle_dist.testing.runner import run_script


def make_model() -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    model[2].weight.data[0] = model[2].weight.data[1]
    return model


def train(model: nn.Module, optimizer: Any, backward: Any) -> list[float]:
    inputs = torch.randn(3, 10, 6, generator=torch.Generator().manual_seed(1))
    losses = []
    for batch in inputs:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def strategies() -> dict[str, Any]:
    tree = tfd.ReductionToOneDevice(aggregation_method=tfd.AggregationMethod.EXPERIMENTAL_TREE)
    three = [f"cpu:{number}" for number in range(3)]
    return {
        "one_device": lambda: tfd.OneDeviceStrategy("cpu:0"),
        "mirrored_3": lambda: tfd.MirroredStrategy(three, cross_device_ops=tree),
        "central_3": lambda: tfd.experimental.CentralStorageStrategy(three),
    }


@pytest.mark.parametrize("name", strategies())
def test_local_replicas_train_as_one_device(name: str, tmp_path: Path) -> None:
    alone = make_model()
    expected = train(alone, torch.optim.Adam(alone.parameters(), lr=0.1), torch.Tensor.backward)
    with strategies()[name]() as strategy:
        accelerator = StrategyAccelerator(strategy=strategy, cpu=not IS_CUDA)
        own = make_model()
        model, optimizer = accelerator.prepare(own, torch.optim.Adam(own.parameters(), lr=0.1))
        assert accelerator.unwrap_model(model) is own
        # 10 examples over 3 replicas: uneven shares, weighted by their size.
        torch.testing.assert_close(train(model, optimizer, accelerator.backward), expected)
        torch.testing.assert_close(own.state_dict(), alone.state_dict(), rtol=1e-5, atol=1e-6)
        assert list(accelerator.get_state_dict(model)) == list(alone.state_dict())
        accelerator.save_state(str(tmp_path))
        saved = [p.detach().clone() for p in own.parameters()]
        train(model, optimizer, accelerator.backward)
        accelerator.load_state(str(tmp_path))
        assert all(torch.equal(a, b) for a, b in zip(saved, own.parameters(), strict=True))
        assert accelerator.prepare(model) is model


class Outputs(nn.Module):
    """Returns what a model may return."""

    def __init__(self, what: Any = None) -> None:
        super().__init__()
        self.linear, self.what = nn.Linear(2, 1), what
        self.norm = nn.BatchNorm1d(2)

    def forward(self, inputs: torch.Tensor, scale: float, mask: torch.Tensor | None = None) -> Any:
        result = self.linear(self.norm(inputs)) * scale
        if self.what is not None:
            return self.what(inputs)
        return {"loss": result.mean(), "pair": (result, [inputs]), "none": mask, "size": 7}


class Counted(nn.Module):
    """Divides its sum by the number that it is told, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, *, scale: torch.Tensor, inputs: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        errors = self.linear(inputs).square() * scale
        return errors.mean() if num_items_in_batch is None else errors.sum() / num_items_in_batch


@pytest.mark.parametrize("items", [None, 8, torch.tensor(8)])
def test_local_replicas_take_named_arguments_and_divide_by_their_items(items: Any) -> None:
    inputs, scale = torch.randn(5, 2), torch.tensor(2.0)
    own = Counted()
    loss = own(scale=scale, inputs=inputs, num_items_in_batch=items)
    expected = loss, *torch.autograd.grad(loss, list(own.parameters()))
    with tfd.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]) as strategy:
        accelerator = StrategyAccelerator(strategy=strategy, cpu=not IS_CUDA)
        model = accelerator.prepare(own)
        loss = model(scale=scale, inputs=inputs, num_items_in_batch=items)
        accelerator.backward(loss)
    torch.testing.assert_close((loss, *(p.grad for p in own.parameters())), expected)


def test_outputs_of_local_replicas_are_assemble() -> None:
    with tfd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        accelerator = StrategyAccelerator(strategy=strategy, cpu=not IS_CUDA, mixed_precision="bf16")
        model = accelerator.prepare(Outputs())
        inputs = torch.randn(5, 2)
        outputs = model(inputs, 2.0, mask=None)
        assert torch.equal(outputs["pair"][1][0], inputs)
        assert outputs["pair"][0].shape == (5, 1)
        torch.testing.assert_close(outputs["loss"], outputs["pair"][0].mean(), rtol=2e-2, atol=1e-3)
        assert (outputs["none"], outputs["size"]) == (None, 7)
        # The statistics are those of the first replica, which saw the first 2 examples.
        torch.testing.assert_close(model.module.norm.running_mean, 0.1 * inputs[:2].mean(0))
        with pytest.raises(TypeError, match="returned a object, which cannot be put together from 2"):
            accelerator.prepare(Outputs(lambda inputs: object()))(inputs, 1.0)
        with pytest.raises(TypeError, match="returned 2, 3 on its replicas, which cannot be put together from 2"):
            accelerator.prepare(Outputs(len))(inputs, 1.0)
        with strategy.scope():
            owned = nn.Linear(1, 1)
        with pytest.raises(ValueError, match="Build the model outside of the scope"):
            accelerator.prepare(owned)


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"fsdp_plugin": object()}, "FSDP"),
        ({"deepspeed_plugin": object()}, "DeepSpeed"),
        ({"megatron_lm_plugin": object()}, "Megatron-LM"),
        ({"parallelism_config": accelerate.ParallelismConfig()}, "ParallelismConfig"),
    ],
)
def test_other_ways_to_divide_the_work_are_refused(arguments: dict[str, Any], kind: str) -> None:
    before = dict(os.environ)
    with pytest.raises(ValueError, match=rf"cannot be used together with {next(iter(arguments))}= \({kind}\)"):
        StrategyAccelerator(cpu=True, **arguments)
    assert os.environ == before


def test_variables_of_the_launcher_are_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="ACCELERATE_USE_FSDP=true in the environment"):
        StrategyAccelerator(cpu=True)


def test_an_accelerator_of_another_kind_is_refused() -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.state.distributed_type = accelerate.DistributedType.DEEPSPEED
    for call in (attach, from_accelerator):
        with pytest.raises(ValueError, match="Accelerator of type DEEPSPEED"):
            call(accelerator)
    assert type(accelerator) is accelerate.Accelerator


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match=r"attach takes an accelerate.Accelerator, got str"):
        attach("accelerator")
    with pytest.raises(TypeError, match="strategy must be one of MirroredStrategy"):
        StrategyAccelerator(cpu=True, strategy="mirrored")
    with pytest.raises(ValueError, match=r"auto_shard_policy=.*FILE.* is not possible"):
        StrategyAccelerator(cpu=True, auto_shard_policy=tfd.AutoShardPolicy.FILE)
    with pytest.raises(TypeError, match="nonsense"):
        StrategyAccelerator(nonsense=1)
    with (
        tfd.MultiWorkerMirroredStrategy(elastic=tfd.experimental.Elastic(replicas=2)) as elastic,
        pytest.raises(ValueError, match=r"the workers of an elastic job change.*strategy\.run"),
    ):
        StrategyAccelerator(cpu=True, strategy=elastic)


def test_the_strategy_in_force_is_taken() -> None:
    with tfd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy, strategy.scope():
        accelerator = StrategyAccelerator(cpu=True)
        assert accelerator.strategy is strategy
        assert from_accelerator(accelerate.Accelerator(cpu=True)) is strategy


def test_without_other_processes_there_is_one_replica() -> None:
    accelerator = attach(accelerate.Accelerator(cpu=True))
    assert accelerator.strategy.num_replicas_in_sync == 1
    assert isinstance(accelerator, StrategyAccelerator)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert from_accelerator(accelerator) is accelerator.strategy


@pytest.mark.cpu_only("accelerate numbers CPUs")
def test_a_device_that_the_environment_names_is_that_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu:64")
    accelerator = StrategyAccelerator()
    assert str(accelerator.device) == "cpu:64"
    assert accelerator.strategy.extended.worker_devices == ("cpu:64",)
    assert accelerator.strategy.worker.torch_device(0) == torch.device("cpu")


@pytest.mark.cpu_only("accelerate numbers CPUs")
def test_a_strategy_made_before_the_accelerator_takes_the_device_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu:3")
    monkeypatch.setenv("TF_CONFIG", "{}")
    accelerator = StrategyAccelerator()
    assert isinstance(accelerator.strategy, tfd.MultiWorkerMirroredStrategy)
    assert accelerator.strategy.extended.worker_devices == (str(accelerator.device),) == ("cpu:3",)


def test_the_mixin_needs_no_transformers() -> None:
    class Base:
        args = SimpleNamespace(n_gpu=0)

        def __init__(self) -> None:
            self.create_accelerator_and_postprocess()

        def create_accelerator_and_postprocess(self) -> None:
            self.accelerator = accelerate.Accelerator(cpu=True)

    class Trainer(StrategyTrainerMixin, Base):
        pass

    with tfd.OneDeviceStrategy("cpu:0") as strategy:
        trainer = Trainer(strategy=strategy)
        assert trainer.strategy is trainer.accelerator.strategy is strategy


PROGRAM = """
from tfstyle_dist.integrations.accelerate import StrategyAccelerator
print("processes", StrategyAccelerator().num_processes)
"""


def test_a_launch_that_starts_one_process_is_said_loudly(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    command = ["-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", "--num_processes", "2", script]
    done = run_script(command, env={"HF_HOME": str(tmp_path)})
    assert done.stdout == "processes 1\n", done.stderr
    assert "accelerate launch was asked for several processes but started ONE" in done.stderr
