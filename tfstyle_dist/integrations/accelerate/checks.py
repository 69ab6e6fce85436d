"""What cannot go together is refused, and what accelerate does silently is said."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tfstyle_dist.core import launch_env
from tfstyle_dist.core.logging import warn_once
from tfstyle_dist.gradients.by_examples import leaves_of
from tfstyle_dist.integrations.accelerate.upstream import Accelerator, DistributedType
from tfstyle_dist.variables import find_record

if TYPE_CHECKING:
    from tfstyle_dist.strategies import Strategy

_ARGUMENTS = {
    "fsdp_plugin": "FSDP",
    "deepspeed_plugin": "DeepSpeed",
    "deepspeed_plugins": "DeepSpeed",
    "megatron_lm_plugin": "Megatron-LM",
    "parallelism_config": "ParallelismConfig",
    "torch_tp_plugin": "tensor parallelism",
}
_LOOKS = 3  # a program repeats its step
_TYPES = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA")
_HOW = (
    "They decide themselves how gradients are summed and where parameters live, and so does a strategy. Use "
    "accelerate.Accelerator without a strategy, or leave this out; for a model in parts see "
    "MirroredStrategy(logical_devices_per_replica=...)."
)


def given_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of ``Accelerator(*args, **kwargs)`` by name.

    Raises:
        TypeError: they do not fit ``Accelerator``.
    """
    return dict(inspect.signature(Accelerator).bind_partial(*args, **kwargs).arguments)


def refuse_arguments(given: Mapping[str, Any]) -> None:
    """Raises ValueError for arguments or variables that ask for another way to divide the work."""
    asked = [f"{name}= ({kind})" for name, kind in _ARGUMENTS.items() if given.get(name) is not None]
    asked += [f"{name}=true in the environment" for name in launch_env.accelerate_modes()]
    if asked:
        raise ValueError(f"A strategy cannot be used together with {', '.join(asked)}. {_HOW}")


def refuse_state(accelerator: Any) -> None:
    """Raises ValueError for an accelerator that was made for another way to divide the work."""
    kind = accelerator.distributed_type
    if kind in [getattr(DistributedType, name) for name in _TYPES]:
        raise ValueError(f"A strategy cannot be used with an Accelerator of type {kind.value}. {_HOW}")
    if accelerator.parallelism_config is not None:
        raise ValueError(f"A strategy cannot be used with an Accelerator with a ParallelismConfig. {_HOW}")


def needs_cpu(given: Mapping[str, Any]) -> bool:
    """Whether ``cpu=True`` must be added: without it, accelerate lets torchrun's CPU ranks train alone, silently."""
    launch = launch_env.launch()
    several = launch is not None and launch.world_size > 1
    return several and "cpu" not in given and not torch.accelerator.is_available()


def check_start(accelerator: Any) -> None:
    """Raises or warns when this process trains alone although the user wanted several.

    Raises:
        ValueError: a launcher started several processes, and accelerate does not know of them.
    """
    launch = launch_env.launch()
    if launch is not None and launch.world_size != accelerator.num_processes:
        raise ValueError(
            f"A launcher started {launch.world_size} processes (WORLD_SIZE), but this Accelerator has "
            f"num_processes={accelerator.num_processes}: each process would train alone. On CPUs accelerate joins the "
            "processes only if it is told to: make a StrategyAccelerator before the first PartialState() or "
            "Accelerator() of the program, or use TrainingArguments(use_cpu=True). Where an Accelerator() comes first, "
            "set ACCELERATE_USE_CPU=true; where PartialState() does, which a tracker of your own makes, write "
            "PartialState(cpu=True)."
        )
    if accelerator.num_processes == 1 and launch_env.accelerate_started_one_of_several():
        warnings.warn(
            "accelerate launch was asked for several processes but started ONE: on CPUs it starts several only with "
            "mpirun. This process trains alone. Start the script with `torchrun --nproc-per-node N script.py`, or with "
            "`accelerate launch --cpu --num_processes 1 --module torch.distributed.run --nproc-per-node N script.py`.",
            RuntimeWarning,
            stacklevel=3,
        )


def check_match(strategy: Strategy, accelerator: Any) -> None:
    """Raises ValueError unless strategy and accelerator have the same workers and kind of device."""
    group = strategy.worker.group
    here, there = (group.rank, group.size), (accelerator.process_index, accelerator.num_processes)
    if here != there:
        raise ValueError(
            f"{strategy!r} is worker {here[0]} of {here[1]}, but the Accelerator is process {there[0]} of {there[1]}: "
            "accelerate's own gather and reduce work over all processes, so the strategy must have the same ones. Make "
            "the strategy without a subset of workers and without logical_devices_per_replica, and before the "
            "Accelerator when the cluster comes from TF_CONFIG or a cluster_resolver."
        )
    first = strategy.worker.torch_device(0)
    # All numbers of CPUs are torch's one CPU.
    same_number = first.type == "cpu" or (first.index or 0) == (accelerator.device.index or 0)
    if first.type != accelerator.device.type or not same_number:
        raise ValueError(
            f"The first replica of {strategy!r} is on {first}, but the Accelerator is on {accelerator.device}. Give "
            f"the strategy devices=['{accelerator.device}', ...], or the Accelerator cpu=True."
        )


def say_not_prepared(accelerator: Any, loss: Any) -> None:
    """Warns, once, of a ``backward`` of several processes that comes to no parameter that was prepared."""
    looked = getattr(accelerator, "_tfstyle_looked", 0)
    if looked >= _LOOKS or not accelerator.use_distributed or not isinstance(loss, torch.Tensor):
        return
    accelerator._tfstyle_looked = looked + 1
    parameters = [leaf for leaf in leaves_of([loss]) if isinstance(leaf, torch.nn.Parameter)]
    prepared = {id(parameter) for model in accelerator._models for parameter in model.parameters()}
    known = any(id(parameter) in prepared or find_record(parameter) for parameter in parameters)
    if parameters and not known:
        warn_once(
            "a model that was not prepared",
            "accelerator.backward(loss) comes to parameters of a model that was not given to accelerator.prepare: its "
            "gradients stay those of each process, and without a sum of your own the processes train other weights. "
            "Write model, optimizer = accelerator.prepare(model, optimizer).",
        )
