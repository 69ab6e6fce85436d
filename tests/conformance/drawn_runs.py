"""Runs a drawn program on a facade, TensorFlow's or ours, and tells what each operation gave."""

from __future__ import annotations

import operator
import tempfile
from typing import Any

import numpy as np
from lib.util import agg_of, describe_error, op_of, show, sync_of

ARITHMETIC = {"+": operator.add, "-": operator.sub, "*": operator.mul}


Locals = dict[str, Any]
"""What a replica has at hand in a run."""


class _TensorFlow:
    """What the facade of the recorded programs lacks."""

    def __init__(self) -> None:
        import tensorflow as tf

        self.optimizers, self.slices = tf.compat.v1.train, tf.IndexedSlices
        self.lookup, self.dense, self.shape = tf.gather, tf.convert_to_tensor, tf.constant([3, 2], "int64")

    def minimize(self, optimizer: Any, loss: Any, variables: list[Any]) -> None:
        optimizer.minimize(loss, var_list=variables)

    def close(self, strategy: Any) -> None:
        """There is nothing to close."""


class _Ours:
    """The same of this package."""

    def __init__(self) -> None:
        import torch

        import tfstyle_dist as tfd

        self.optimizers, self.slices = tfd.train, tfd.IndexedSlices
        self._torch, self.shape = torch, [3, 2]

    def dense(self, given: Any) -> Any:
        return self._torch.zeros(given.dense_shape).index_add(0, given.indices, given.values)

    def lookup(self, variable: Any, rows: list[int]) -> Any:
        return self._torch.nn.functional.embedding(self._torch.tensor(rows), variable, sparse=True)

    def minimize(self, optimizer: Any, loss: Any, variables: list[Any]) -> None:
        optimizer.minimize(loss(), var_list=variables)

    def close(self, strategy: Any) -> None:
        strategy.close()


class Run:
    """A program under way.

    Args:
        xp: the facade.
        program: see ``drawn_plans``.
        strategy: what runs it, if it is there already.
    """

    def __init__(self, xp: Any, program: dict[str, Any], strategy: Any = None) -> None:
        self.xp, self.operations = xp, program["operations"]
        self.strategy = xp.strategy(program["kind"], program["n"]) if strategy is None else strategy
        self.variables: dict[str, Any] = {}
        self.registers: dict[str, Any] = {}
        self.optimizers: dict[str, Any] = {}
        self.folder = tempfile.TemporaryDirectory()
        self.path = ""
        self.others = (_TensorFlow if getattr(xp, "backend", "") == "tensorflow" else _Ours)()

    def results(self) -> list[Any]:
        """What each operation gave, and then the content of all variables; up to the first error in a replica."""
        with self.folder:
            found: list[Any] = []
            for what, *rest in self.operations:
                try:
                    found.append(show(self.xp, self.strategy, getattr(self, f"_{what}")(*rest)))
                except Exception as error:
                    found.append(describe_error(error))
                    if what in ("run", "train", "data", "optimizer"):
                        return found  # how far the replicas had come is nobody's promise
            return found + [self._contents(self.strategy, variable) for variable in self.variables.values()]

    def _contents(self, strategy: Any, variable: Any) -> Any:
        """Each replica's own copy, which TensorFlow has for mirrored variables only."""
        try:
            return [self.xp.to_list(self.xp.read(part)) for part in strategy.experimental_local_results(variable)]
        except Exception as error:
            return describe_error(error)

    def _evaluated(self, expression: list[Any], locals_: dict[str, Any] | None = None, replica: int = 0) -> Any:
        what, *rest = expression
        if what == "c":
            return self.xp.constant(*rest)
        if what == "i":
            return self.xp.constant(rest[0][replica], rest[1])
        if what == "py":
            return rest[0]
        if what == "v":
            return self.variables[rest[0]] if locals_ is None else self.xp.read(self.variables[rest[0]])
        if what == "g":
            return self.registers[rest[0]]
        if what == "t":
            assert locals_ is not None
            return locals_[rest[0]]
        return ARITHMETIC[what](*(self._evaluated(each, locals_, replica) for each in rest))

    # ---- operations of the program ----

    def _variable(self, name: str, dtype: str, value: Any, sync: str, agg: str, trainable: bool | None) -> Any:
        with self.strategy.scope():
            made = self.xp.Variable(
                value,
                trainable,
                sync_of(self.xp, sync),
                agg_of(self.xp, agg),
                dtype,
                name,
            )
        self.variables[name] = made
        return [made.trainable, self.xp.dtype_name(made), self.xp.shape(made)]

    def _assign(self, name: str, how: str, value: list[Any]) -> Any:
        with self.strategy.scope():
            getattr(self.variables[name], how)(self._evaluated(value))

    def _reduce(self, op: str, source: list[Any], axis: int | None) -> Any:
        return self._read(self.strategy.reduce(op, self._evaluated(source), axis=axis))

    def _read(self, given: Any) -> Any:
        """What is reduced to the variable that it was, as its value: without aggregation copies may differ."""
        return self.xp.read(given) if self.xp.type_tag(given) == "variable" else given

    def _gather(self, source: list[Any], axis: int) -> Any:
        return self.strategy.gather(self._evaluated(source), axis=axis)

    def _values(self, name: str, values: list[Any], dtype: str) -> Any:
        def value_of(context: Any) -> Any:
            return self.xp.constant(values[context.replica_id_in_sync_group], dtype)

        self.registers[name] = self.strategy.experimental_distribute_values_from_function(value_of)
        return self.registers[name]

    def _update(self, name: str, how: str, value: list[Any], group: bool) -> Any:
        with self.strategy.scope():
            self.strategy.extended.update(
                self.variables[name], lambda v, x: getattr(v, how)(x), args=(self._evaluated(value),), group=group
            )

    def _reduce_to(self, op: str, source: list[Any], to: str | None) -> Any:
        with self.strategy.scope():
            destination = self.xp.device(0) if to is None else self.variables[to]
            return self._read(
                self.strategy.extended.reduce_to(op_of(self.xp, op), self._evaluated(source), destination)
            )

    def _arithmetic(self, what: str, left: list[Any], right: list[Any]) -> Any:
        with self.strategy.scope():
            return ARITHMETIC[what](self._evaluated(left), self._evaluated(right))

    def _scatter(self, name: str, how: str, rows: list[int], values: list[Any], dtype: str) -> Any:
        with self.strategy.scope():
            getattr(self.variables[name], how)(self._slices(rows, values[0], dtype))

    def _slices(self, rows: list[int], values: Any, dtype: str) -> Any:
        return self.others.slices(self.xp.constant(values, dtype), self.xp.constant(rows, "int64"))

    def _save(self, names: list[str]) -> Any:
        variables = {name: self.variables[name] for name in names}
        self.path = self.xp.checkpoint_save(f"{self.folder.name}/saved", **variables)

    def _restore(self, names: list[str]) -> Any:
        with self.strategy.scope():
            self.xp.checkpoint_restore(self.path, **{name: self.variables[name] for name in names})

    def _move(self, kind: str, n: int, variables: list[Any]) -> Any:
        """What another strategy has after it has restored a checkpoint."""
        if not self.path:
            return None
        strategy, made = self.xp.strategy(kind, n), {}
        with strategy.scope():
            for name, dtype, shape, sync, agg in variables:
                value = np.zeros(shape, int).tolist()
                made[name] = self.xp.Variable(value, None, sync_of(self.xp, sync), agg_of(self.xp, agg), dtype, name)
            self.xp.checkpoint_restore(self.path, **made)
        found = {name: self._contents(strategy, variable) for name, variable in made.items()}
        self.others.close(strategy)
        return found

    def _optimizer(self, name: str, kind: str, options: dict[str, Any]) -> Any:
        with self.strategy.scope():
            self.optimizers[name] = getattr(self.others.optimizers, kind)(**options)

    def _train(self, name: str, over: list[str], scales: list[float], times: int, way: str) -> Any:
        optimizer, variables = self.optimizers[name], [self.variables[each] for each in over]

        def loss() -> Any:
            replica = self.xp.get_replica_id()
            scale = self.xp.constant(scales[replica], "float32")
            if way == "sparse":
                rows = [[replica % 2], [0, 0, 1], [1]][abs(int(scales[replica])) % 3]
                looked_up = [self.others.lookup(v, rows) if len(self.xp.shape(v)) == 2 else v for v in variables]
                return sum(self.xp.sum(self.xp.square(part - scale)) for part in looked_up)
            return sum(self.xp.sum(self.xp.square(variable - scale)) for variable in variables)

        def step() -> Any:
            if way == "minimize":
                self.others.minimize(optimizer, loss, variables)
                return self.xp.constant(0.0)
            value, gradients = self.xp.value_and_grad(loss, variables)
            optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))
            return value

        with self.strategy.scope():
            return [self.strategy.run(step) for _ in range(times)]

    def _data(self, way: str, rows: list[float], batch: int, drop: bool, to: str | None, op: str) -> Any:
        dataset = self.xp.dataset_from_list(rows).batch(batch, drop)
        if way == "dataset":
            batches = self.strategy.experimental_distribute_dataset(self.xp.raw(dataset))
        else:
            made = self.xp.wrap_fn(lambda _: dataset)
            batches = self.strategy.distribute_datasets_from_function(made)

        def step(x: Any) -> Any:
            if to is not None:
                self.variables[to].assign_add(self.xp.sum(x))
            return x * 2.0

        found = []
        for each in batches:
            found += [each, self.strategy.reduce(op, self.strategy.run(step, args=(each,)), axis=0)]
        return found

    # ---- run ----

    def _run(self, name: str, arguments: list[str], steps: list[Any], returned: str | None, form: str) -> Any:
        def function(*given: Any) -> Any:
            locals_ = dict(zip(arguments, given, strict=True))
            replica = self.xp.get_replica_id()
            for what, *rest in steps:
                getattr(self, f"_replica_{what}")(locals_, replica, *rest)
            result = self.xp.identity(locals_[returned]) if returned is not None else None
            return {"plain": result, "tuple": (result, replica), "dict": {"a": result, "b": [replica, None]}}[form]

        got = self.strategy.run(function, args=tuple(self.registers[each] for each in arguments))
        if name:
            self.registers[name] = got if form == "plain" else got[0] if form == "tuple" else got["a"]
        return got

    def _replica_assign(self, locals_: Locals, replica: int, name: str, how: str, value: list[Any]) -> None:
        getattr(self.variables[name], how)(self._evaluated(value, locals_, replica))

    def _replica_scatter(
        self, locals_: Locals, replica: int, name: str, how: str, rows: list[int], values: list[Any], dtype: str
    ) -> None:
        getattr(self.variables[name], how)(self._slices(rows, values[replica], dtype))

    def _replica_made(
        self,
        locals_: Locals,
        replica: int,
        name: str,
        dtype: str,
        values: Any,
        sync: str,
        agg: str,
        trainable: bool | None,
    ) -> None:
        made = self.xp.Variable(values[replica], trainable, sync_of(self.xp, sync), agg_of(self.xp, agg), dtype, name)
        self.variables[name] = made

    def _replica_nest(
        self, locals_: Locals, replica: int, names: list[str], op: str, given: list[Any], way: str
    ) -> None:
        context = self.xp.dist.get_replica_context()
        values = {name: self._evaluated(each, locals_, replica) for name, each in zip(names, given, strict=True)}
        if way == "all_reduce":
            locals_ |= context.all_reduce(op_of(self.xp, op), values)
            return

        def merged(strategy: Any, parts: Any) -> Any:
            return {name: strategy.reduce(op, part, axis=None) for name, part in parts.items()}

        locals_ |= {name: self.xp.identity(part) for name, part in context.merge_call(merged, args=(values,)).items()}

    def _replica_slices(self, locals_: Locals, replica: int, name: str, op: str, rows: Any, values: Any) -> None:
        given = self.others.slices(
            self.xp.constant(values[replica]), self.xp.constant(rows[replica], "int64"), self.others.shape
        )
        got = self.xp.dist.get_replica_context().all_reduce(op_of(self.xp, op), given)
        locals_[name] = self.others.dense(got)

    def _replica_set(self, locals_: Locals, replica: int, name: str, value: list[Any]) -> None:
        locals_[name] = self._evaluated(value, locals_, replica)

    def _replica_all_reduce(self, locals_: Locals, replica: int, name: str, op: str, value: list[Any]) -> None:
        context = self.xp.dist.get_replica_context()
        locals_[name] = context.all_reduce(op_of(self.xp, op), self._evaluated(value, locals_, replica))

    def _replica_all_gather(self, locals_: Locals, replica: int, name: str, value: list[Any], axis: int) -> None:
        context = self.xp.dist.get_replica_context()
        locals_[name] = context.all_gather(self._evaluated(value, locals_, replica), axis)

    def _replica_grad(
        self, locals_: Locals, replica: int, name: str, over: str, scales: list[float], dtype: str, op: str | None
    ) -> None:
        variable = self.variables[over]

        def loss() -> Any:
            return self.xp.sum(self.xp.square(variable - self.xp.constant(scales[replica], dtype)))

        gradient = self.xp.value_and_grad(loss, [variable])[1][0]
        if gradient is None:
            gradient = self.xp.constant(-1.0, dtype) * self.xp.square(variable)
        if op is not None:
            gradient = self.xp.dist.get_replica_context().all_reduce(op_of(self.xp, op), gradient)
        locals_[name] = gradient

    def _replica_merge(
        self, locals_: Locals, replica: int, result: str, body: str, name: str, how: str, value: list[Any]
    ) -> None:
        variable = self.variables[name]

        def merged(strategy: Any, given: Any) -> Any:
            if body == "update":
                strategy.extended.update(variable, lambda v, x: getattr(v, how)(x), args=(given,))
            elif body == "assign":
                getattr(variable, how)(strategy.reduce("SUM", given, axis=None))
            elif body == "reduce":
                return strategy.reduce(how, given, axis=None)
            else:
                return self.xp.read(variable)
            return None

        context = self.xp.dist.get_replica_context()
        got = context.merge_call(merged, args=(self._evaluated(value, locals_, replica),))
        # One object for all replicas: a sum of it is refused in TensorFlow, or is not a sum.
        locals_[result] = None if got is None else self.xp.identity(got)
