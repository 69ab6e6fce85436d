"""The private names of torch that are used: what each must do, so that a new torch shows what would break."""

from __future__ import annotations

import importlib.util
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from tfstyle_dist.core import torch_internals
from tfstyle_dist.testing.runner import run_script

BESIDE = "core/test_torch_*.py", "runtime/test_process_settings.py"
"""Where the tests are, in ``tests``."""
HELPERS = {
    "annotations",
    "defaultdict",
    "functools",
    "importlib",
    "itemgetter",
    "re",
    "sys",
    "Patch",
    "SimpleNamespace",
    "suppress",
    "timedelta",
    "threading",
    "torch",
    "torch_releases",
    "attrgetter",
    "torch_module",
    "torch_optimizer",
    "Any",
    "Callable",
    "Sequence",
}


def test_every_name_has_a_test() -> None:
    names = {n for n in vars(torch_internals) if n[0].isalpha()} - HELPERS
    files = [file for pattern in BESIDE for file in Path(__file__).parents[1].glob(pattern)]
    tests = "".join(file.read_text(encoding="utf-8") for file in files)
    assert not {name for name in names if f"torch_internals.{name}" not in tests}


def test_a_torch_without_a_name_is_refused_with_its_version(tmp_path: Path) -> None:
    program = "import torch, tfstyle_dist\ndel torch._C._swap_tensor_impl\ntfstyle_dist.MirroredStrategy"
    result = run_script(["-c", program], cwd=tmp_path)
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: torch {torch.__version__} has no torch._C._swap_tensor_impl, which"), last


def test_what_is_checked_at_first_use_is_refused_too() -> None:
    with pytest.raises(ImportError, match=r"has no DTensor\._local_tensor, which tfstyle_dist needs to read the parts"):
        torch_internals.local_part(torch.ones(2))


def test_which_optimizers_have_step_hooks() -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, base: torch.optim.Optimizer) -> None:
            self.base, self.param_groups = base, base.param_groups

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.base.step()

    base = torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1)
    assert torch_internals.has_step_hooks(base)
    assert not torch_internals.has_step_hooks(Wrapper(base))


class Asked(torch.Tensor):
    calls: list[Any] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(function)
        with torch_internals.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


def test_subclasses_share_memory_and_are_asked() -> None:
    data = torch.ones(2)
    made = torch_internals.make_subclass(Asked, data, True)
    assert type(made) is Asked
    assert (made.is_leaf, made.requires_grad, made.data_ptr()) == (True, True, data.data_ptr())
    data.add_(1)
    assert made.tolist() == [2, 2]
    Asked.calls.clear()
    with torch_internals.DisableTorchFunctionSubclass():
        made.sum()
    assert not Asked.calls
    made.sum()
    assert Asked.calls == [torch.Tensor.sum]


def test_modules_ask_before_they_put_data_into_a_parameter() -> None:
    module = nn.Linear(1, 1)
    module.weight.__class__ = type("AskedParameter", (Asked, nn.Parameter), {})
    Asked.calls.clear()
    module.double()
    assert torch_internals.has_compatible_shallow_copy_type in Asked.calls
    assert torch_internals.has_compatible_shallow_copy_type(torch.ones(1), torch.ones(1)) is True


def test_many_tensors_in_one_call() -> None:
    targets, sources = [torch.ones(2), torch.ones(3)], [torch.full((2,), 3.0), torch.full((3,), 5.0)]
    added = torch._foreach_add(targets, sources)  # type: ignore[attr-defined]
    assert [t.tolist() for t in added] == [[4, 4], [6, 6, 6]]
    torch_internals.foreach_add_(targets, sources)
    assert [t.tolist() for t in targets] == [[4, 4], [6, 6, 6]]
    torch_internals.foreach_mul_(targets, torch.tensor(0.5))
    assert [t.tolist() for t in targets] == [[2, 2], [3, 3, 3]]
    halves = [t.to(torch.bfloat16) for t in targets]
    torch_internals.foreach_copy_(halves, sources)
    assert [t.tolist() for t in halves] == [[3, 3], [5, 5, 5]]


def test_entries_that_are_not_coalesced() -> None:
    rows = torch.sparse_coo_tensor([[2, 0, 2]], torch.tensor([1.0, 2.0, 3.0]), (4,), check_invariants=True)
    assert torch_internals.entries_of(rows) == 3
    assert torch_internals.indices_of(rows).tolist() == [[2, 0, 2]]
    assert torch_internals.values_of(rows).tolist() == [1, 2, 3]
    assert torch_internals.entries_of(rows.coalesce()) == 2


def test_a_workers_part_and_the_store_of_the_default_group() -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch_internals.default_store().set("key", "value")
        assert torch_internals.default_store().get("key") == b"value"
        whole = nn.Parameter(distribute_tensor(torch.arange(4.0), dist.init_device_mesh("cpu", (1,)), [Shard(0)]))
        part = torch_internals.local_part(whole)
        assert type(part) is torch.Tensor
        part.add_(1)
        assert whole.full_tensor().tolist() == [1, 2, 3, 4]  # type: ignore[attr-defined]
    finally:
        dist.destroy_process_group()


def test_a_group_of_some_processes_and_its_limit() -> None:
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=71))
    try:
        assert torch_internals.limit_of_group(dist.group.WORLD) == timedelta(seconds=71)
        made = torch_internals.group_among("some/name", [0], "gloo", timedelta(seconds=17))
        assert made.group_name == "some/name"
        assert torch_internals.limit_of_group(made) == timedelta(seconds=17)
        assert c10d._process_group_name.__module__ == c10d.__name__
    finally:
        dist.destroy_process_group()


def test_what_a_module_holds() -> None:
    module = nn.BatchNorm1d(2)
    assert torch_internals.parameters_of(module)["weight"] is module.weight
    assert torch_internals.buffers_of(module)["running_mean"] is module.running_mean
    assert module.__dict__[torch_internals.BUFFERS] is torch_internals.buffers_of(module)
    handle = module.register_forward_pre_hook(lambda module, args: None)
    assert list(torch_internals.forward_pre_hooks_of(module)) == [handle.id]
    del torch_internals.forward_pre_hooks_of(module)[handle.id]
    module(torch.ones(2, 2))


def test_nests() -> None:
    pytree = torch_internals.pytree
    assert {list, tuple, dict} <= pytree.SUPPORTED_NODES.keys()
    nest = {"a": [1, (2, 3)], "b": None}
    leaves, spec = pytree.tree_flatten(nest)
    assert type(spec) is pytree.TreeSpec
    assert leaves == pytree.tree_leaves(nest) == [1, 2, 3, None]
    assert pytree.tree_unflatten(leaves, spec) == nest
    assert pytree.tree_map(lambda x: x, nest, is_leaf=lambda x: isinstance(x, tuple)) == nest
    assert pytree.tree_is_leaf(torch.ones(1))


def test_tensors_as_keys() -> None:
    known, key = torch_internals.WeakIdKeyDictionary(), torch.ones(2)
    known[key] = "value"
    assert known[key] == "value"
    assert torch.ones(2) not in known
    del key
    assert len(known) == 0


@pytest.mark.parametrize("package", torch_internals.MACHINERY)
def test_the_packages_of_machinery_are_there(package: str) -> None:
    assert package == "torch._C" or importlib.util.find_spec(package)


def test_a_profiler_is_seen_and_sees_all_threads(tmp_path: Path) -> None:
    seen: list[bool] = []

    def work() -> None:
        seen.append(torch_internals.is_profiling())
        with torch.profiler.record_function("in another thread"):
            torch.ones(2).add_(1)

    assert not torch_internals.is_profiling()
    thread = threading.Thread(target=work)
    config = torch_internals.profiler_config(profile_all_threads=True)
    with torch.profiler.profile(experimental_config=config, acc_events=True) as profiler:
        thread.start()
        thread.join(20)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    assert seen == [True]
    assert "in another thread" in (tmp_path / "trace.json").read_text(encoding="utf-8")


def test_compiling() -> None:
    seen = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(torch_internals.compiling() is not None)
        return graph

    assert torch_internals.compiling() is None
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert seen == [True]
    assert torch_internals.compiling() is None


def test_code_that_is_run_as_it_is_in_python() -> None:
    traced: list[bool] = []

    def called(x: torch.Tensor) -> torch.Tensor:
        traced.append(torch.compiler.is_compiling())
        return inner(x)

    def inner(x: torch.Tensor) -> torch.Tensor:
        traced.append(torch.compiler.is_compiling())
        return x + 1

    setattr(called, torch_internals.UNTRACED, True)
    torch_internals.run_as(called.__code__, torch_internals.IN_PYTHON)
    compiled = torch.compile(lambda x: called(x * 2) * 3, backend="eager")
    assert compiled(torch.ones(2)).tolist() == [9.0, 9.0]
    assert traced == [False, False]


def test_the_processes_of_a_loader() -> None:
    iterator = iter(DataLoader([1, 2], num_workers=1))
    processes = torch_internals.reader_processes(iterator)
    assert [process.is_alive() for process in processes] == [True]
    torch_internals.end_reader_processes(iterator)
    assert not processes[0].is_alive()
    assert torch_internals.reader_processes(iter([1])) == []
    torch_internals.end_reader_processes(iter([1]))


def test_tensors_lie_alone_unless_another_one_shares_their_memory() -> None:
    parameter = nn.Linear(2, 2).weight
    assert torch_internals.lie_alone(parameter)
    same = parameter.detach()
    assert not torch_internals.lie_alone(same)
    assert torch_internals.lie_alone(parameter, same)
    del same
    parameter.sum().backward()
    assert torch_internals.lie_alone(parameter)
    assert torch_internals.lie_alone(parameter.grad)
    parameter.data = torch.zeros(3)
    assert torch_internals.lie_alone(parameter)
    whole = torch.zeros(3, 2)
    parameter.data = whole[1]
    assert not torch_internals.lie_alone(parameter)
    assert torch_internals.lie_alone(torch.frombuffer(bytearray(8), dtype=torch.float32))


def test_a_lazy_clone_is_a_copy_as_soon_as_one_writes() -> None:
    first = torch.arange(4.0)
    second, third = torch_internals.lazy_clone(first), torch_internals.lazy_clone(first)
    first.mul_(2)
    third.add_(1)
    assert (first.tolist(), second.tolist(), third.tolist()) == ([0, 2, 4, 6], [0, 1, 2, 3], [1, 2, 3, 4])


def test_a_lazy_clone_of_a_message_is_a_copy() -> None:
    first = torch.frombuffer(bytearray(8), dtype=torch.uint8)
    second = torch_internals.lazy_clone(first)
    first.add_(1)
    assert second.tolist() == [0] * 8


def test_sparse_tensors_are_taken_apart_and_assemble() -> None:
    indices, values = torch.tensor([[2, 0, 2]]), torch.tensor([1.0, 2.0, 3.0])
    made = torch_internals.sparse_of(indices, values, (3,), coalesced=False)
    assert not made.is_coalesced()
    assert torch.equal(torch_internals.indices_of(made), indices)
    assert torch.equal(torch_internals.values_of(made), values)
    assert made.to_dense().tolist() == [2.0, 0.0, 4.0]
    assert torch_internals.sparse_of(torch.tensor([[0, 2]]), torch.ones(2), (3,), coalesced=True).is_coalesced()


def test_the_buffers_among_the_attributes_of_a_module() -> None:
    module = torch.nn.BatchNorm1d(2)
    assert torch_internals.buffers_among(vars(module)).keys() == dict(module.named_buffers()).keys()


def test_what_is_registered_among_the_attributes_of_a_module() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(1, 1))
    modules, parameters = torch_internals.registered_among(vars(module))
    assert (modules, parameters) == (dict(module.named_children()), {})
    assert torch_internals.registered_among(vars(module[0]))[1].keys() == dict(module[0].named_parameters()).keys()


def test_whose_code_runs_in_the_step_of_an_optimizer() -> None:
    class Own(torch.optim.SGD):
        pass

    weight = torch.ones(1)
    optimizer = torch.optim.Adam([weight])
    ours = register_optimizer_step_pre_hook(print), register_optimizer_step_post_hook(print)
    try:
        assert torch_internals.steps_by_torch_alone(optimizer)
        assert not torch_internals.steps_by_torch_alone(Own([weight]))
        for place, register in enumerate((optimizer.register_step_pre_hook, optimizer.register_step_post_hook)):
            handle = register(print)
            assert not torch_internals.steps_by_torch_alone(optimizer)
            assert [*torch_internals.hooks_of_step(optimizer)[place].values()] == [print]
            handle.remove()
        assert not any(torch_internals.hooks_of_step(optimizer))
        for register_for_all in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
            handle = register_for_all(print)
            assert not torch_internals.steps_by_torch_alone(optimizer)
            assert sorted(len(getattr(*place)) for place in torch_internals.HOOKS_OF_STEPS) == [1, 2]
            handle.remove()
        with FlopCounterMode(display=False):
            assert not torch_internals.steps_by_torch_alone(optimizer)
        with torch.device("meta"):
            assert not torch_internals.steps_by_torch_alone(optimizer)
        assert torch_internals.steps_by_torch_alone(optimizer)
    finally:
        for handle in ours:
            handle.remove()


def test_a_default_device_is_a_function_mode() -> None:
    assert not torch_internals.in_function_mode()
    with torch.device("meta"):
        assert torch_internals.in_function_mode()

    def with_a_default() -> bool:
        torch.set_default_device("meta")
        return torch_internals.in_function_mode()

    # In a thread of its own: torch 2.9 cannot tell the default device any more where one was taken back.
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(with_a_default).result()
    assert not torch_internals.in_function_mode()
