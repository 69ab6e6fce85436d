"""Draws programs over ``tf.distribute``: what each does is a list of operations, the same for TensorFlow and for us.

A change of what is drawn changes all programs: record anew then (``record_drawn.py``).
"""

from __future__ import annotations

import random
from typing import Any

KINDS = [("mirrored", 2), ("mirrored", 2), ("mirrored", 3), ("one_device", 1), ("central_storage", 2), ("mirrored", 1)]
WORKERS = [("multi_worker", 2)]
SHAPES: list[list[int]] = [[], [2], [2, 3]]
DTYPES = ["float32", "float32", "float32", "float64", "int64", "int32"]
SYNC = ["AUTO", "ON_WRITE", "ON_READ"]
AGG = ["NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"]
SCATTER = ["scatter_add", "scatter_sub", "scatter_mul", "scatter_div", "scatter_min", "scatter_max", "scatter_update"]
MERGED = ["update", "update", "assign", "reduce", "read"]
HOW = ["assign", "assign_add", "assign_sub"]
OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("GradientDescentOptimizer", {}),
    ("MomentumOptimizer", {"momentum": 0.5}),
    ("MomentumOptimizer", {"momentum": 0.9, "use_nesterov": True}),
    ("AdamOptimizer", {}),
    ("AdagradOptimizer", {}),
    ("RMSPropOptimizer", {"momentum": 0.5}),
    ("RMSPropOptimizer", {"centered": True}),
    ("FtrlOptimizer", {"l1_regularization_strength": 0.01}),
    ("AdadeltaOptimizer", {}),
]


Locals = dict[str, dict[str, Any]]
"""What a replica has at hand in a run: of each name the dtype and the shape."""


class Drawing:
    """One program in the making.

    Args:
        seed: of what is drawn.
        kinds: of strategies, with their numbers of replicas.
    """

    def __init__(self, seed: int, kinds: list[tuple[str, int]] = KINDS) -> None:
        self.chance = random.Random(seed)
        self.kind, self.n = self.chance.choice(kinds)
        self.variables: Locals = {}
        self.registers: Locals = {}
        self.trainable: list[str] = []
        self.policies: dict[str, tuple[str, str]] = {}
        self.optimizers: list[str] = []
        self.saved: list[str] | None = None
        self._names = 0

    def draw(self) -> dict[str, Any]:
        """The whole program."""
        operations = [self._variable() for _ in range(self.chance.randint(1, 3))]
        for _ in range(self.chance.randint(4, 12)):
            operations.append(self._operation())
        return {"kind": self.kind, "n": self.n, "operations": operations}

    def _name(self, letter: str) -> str:
        self._names += 1
        return f"{letter}{self._names}"

    def _number(self, dtype: str) -> float:
        return self.chance.randint(-6, 9) if "int" in dtype else self.chance.randint(-8, 12) * 0.25

    def _op(self) -> str:
        return self.chance.choice(["SUM", "MEAN"])

    def _value(self, dtype: str, shape: list[int]) -> Any:
        if not shape:
            return self._number(dtype)
        return [self._value(dtype, shape[1:]) for _ in range(shape[0])]

    # ---- operations of the program ----

    def _operation(self) -> list[Any]:
        likely = {
            self._run: 12, self._assign: 3, self._reduce: 4, self._gather: 2, self._values: 2, self._update: 2,
            self._reduce_to: 1, self._variable: 1, self._optimizer: 1, self._train: 5, self._data: 2,
            self._arithmetic: 1, self._scatter: 2,
            **({} if self.kind == "multi_worker" else {self._save: 2, self._restore: 2}),  # a folder of each worker's
        }  # fmt: skip
        return self.chance.choices(list(likely), list(likely.values()))[0]()

    def _variable(self) -> list[Any]:
        dtype, shape = self.chance.choice(DTYPES), self.chance.choice(SHAPES)
        sync, agg = self.chance.choice(SYNC), self.chance.choice(AGG)
        if "int" in dtype and agg == "MEAN" and self.chance.random() < 0.97:
            agg = "SUM"
        if self.kind == "central_storage" and agg == "NONE" and self.chance.random() < 0.9:
            agg = "MEAN" if "float" in dtype else "ONLY_FIRST_REPLICA"
        trainable = self.chance.choice([None, None, True, False])
        name = self._name("v")
        self.variables[name] = {"dtype": dtype, "shape": shape}
        self.policies[name] = sync, agg
        if (trainable if trainable is not None else sync != "ON_READ") and (sync, agg) != ("ON_READ", "NONE"):
            self.trainable.append(name)
        return ["variable", name, dtype, self._value(dtype, shape), sync, agg, trainable]

    def _of(self, dtype: str, shape: list[int]) -> list[Any]:
        """What is written to a variable outside of run: a number, a constant, a variable, a register."""
        alike = [r for r, about in self.registers.items() if about["dtype"] == dtype and about["shape"] == shape]
        others = [v for v, about in self.variables.items() if about == {"dtype": dtype, "shape": shape}]
        kinds = ["c", "c", *(["v"] if others else []), *(["g"] if alike else []), *([] if shape else ["py"])]
        what = self.chance.choice(kinds)
        if what == "c":
            return ["c", self._value(dtype, shape), dtype]
        if what == "py":
            return ["py", self._number(dtype)]
        return [what, self.chance.choice(others if what == "v" else alike)]

    def _assign(self) -> list[Any]:
        name = self.chance.choice(list(self.variables))
        about = self.variables[name]
        value = self._of(about["dtype"], about["shape"])
        if self.policies[name][0] == "ON_READ" and value[0] in "vg":
            # TensorFlow refuses what is distributed, and reads a variable anew for each copy that it has written.
            value = ["c", self._value(about["dtype"], about["shape"]), about["dtype"]]
        return ["assign", name, self.chance.choice(HOW), value]

    def _source(self) -> list[Any]:
        found = [["g", r] for r in self.registers] * 3 + [["v", v] for v in self.variables]
        return (
            self.chance.choice(found) if self.chance.random() < 0.95 else ["c", self._value("float32", [2]), "float32"]
        )

    def _reduce(self) -> list[Any]:
        return ["reduce", self._op(), self._source(), self.chance.choice([None, None, 0, 1, -1])]

    def _gather(self) -> list[Any]:
        return ["gather", self._source(), self.chance.choice([0, 0, 1])]

    def _values(self) -> list[Any]:
        dtype, shape = self.chance.choice(DTYPES), self.chance.choice(SHAPES)
        uneven = shape and self.chance.random() < 0.3
        values = [
            self._value(dtype, [self.chance.randint(0 if len(shape) == 1 else 1, 3), *shape[1:]] if uneven else shape)
            for _ in range(self.n)
        ]
        name = self._name("g")
        self.registers[name] = {"dtype": dtype, "shape": ["?"] if uneven else shape}
        return ["values", name, values, dtype]

    def _update(self) -> list[Any]:
        name = self.chance.choice(list(self.variables))
        about = self.variables[name]
        return [
            "update",
            name,
            self.chance.choice(HOW),
            self._of(about["dtype"], about["shape"]),
            self.chance.random() < 0.5,
        ]

    def _reduce_to(self) -> list[Any]:
        to = self.chance.choice(list(self.variables)) if self.chance.random() < 0.7 else None
        return ["reduce_to", self._op(), self._source(), to]

    def _arithmetic(self) -> list[Any]:
        name = self.chance.choice(list(self.variables))
        about = self.variables[name]
        return ["arithmetic", self.chance.choice("+-*"), ["v", name], self._of(about["dtype"], about["shape"])]

    def _save(self) -> list[Any]:
        self.saved = list(self.variables)
        return ["save", self.saved]

    def _restore(self) -> list[Any]:
        """Into the variables themselves, or into others of another strategy."""
        if self.saved is None:
            return self._save()
        if self.chance.random() < 0.3:
            return ["restore", self.saved]
        made = [[name, *self.variables[name].values(), *self.policies[name]] for name in self.saved]
        return ["move", *self.chance.choice(KINDS), made]

    def _optimizer(self) -> list[Any]:
        kind, more = self.chance.choice(OPTIMIZERS)
        name = self._name("o")
        self.optimizers.append(name)
        return ["optimizer", name, kind, {"learning_rate": self.chance.choice([0.1, 0.5]), **more}]

    def _train(self) -> list[Any]:
        """Steps of an optimizer over some variables, with a loss that differs from replica to replica."""
        floats = [v for v in self.trainable if self.variables[v]["dtype"] == "float32"]
        if not floats:
            return self._variable()
        if not self.optimizers:
            return self._optimizer()
        over = self.chance.sample(floats, self.chance.randint(1, len(floats)))
        scales = [self._number("float32") for _ in range(self.n)]
        way = self.chance.choice(["apply", "apply", "minimize", "sparse", "sparse"])
        return ["train", self.chance.choice(self.optimizers), over, scales, self.chance.randint(1, 3), way]

    def _data(self) -> list[Any]:
        """Batches of a dataset, each through a step that adds to a variable."""
        floats = [v for v, about in self.variables.items() if about == {"dtype": "float32", "shape": []}]
        rows, batch = self.chance.randint(1, 9), self.chance.randint(1, 5)
        drop, way = self.chance.random() < 0.3, self.chance.choice(["dataset", "dataset", "function"])
        if way == "function":  # TensorFlow drops batches that are left over for some replicas only; here they come
            rows = batch * self.n * self.chance.randint(1, 2)
        to = self.chance.choice(floats) if floats and self.chance.random() < 0.7 else None
        return ["data", way, self._value("float32", [rows]), batch, drop, to, self._op()]

    def _scatter(self) -> list[Any]:
        """Writes to some rows of a variable."""
        found = self._rows_of_one()
        return self._variable() if not found else ["scatter", *found]

    def _rows_of_one(self) -> list[Any]:
        rowed = [v for v, about in self.variables.items() if about["shape"]]
        if not rowed:
            return []
        name = self.chance.choice(rowed)
        dtype, shape = self.variables[name]["dtype"], self.variables[name]["shape"]
        rows = [self.chance.randrange(shape[0]) for _ in range(self.chance.randint(1, 3))]
        how, (sync, agg) = self.chance.choice(SCATTER), self.policies[name]
        refused = sync == "ON_READ" or (agg in ("SUM", "MEAN") and how in SCATTER[4:])
        if refused and self.kind == "mirrored" and self.chance.random() < 0.95:
            return []
        if how in ("scatter_update", "scatter_div"):
            rows = rows[:1]
        values = [[self._value(dtype, shape[1:]) for _ in rows] for _ in range(self.n)]
        if how == "scatter_div":
            values = [[[2] * shape[1] if shape[1:] else 2 for _ in rows] for _ in range(self.n)]
        return [name, how, rows, values, dtype]

    # ---- run ----

    def _run(self) -> list[Any]:
        arguments = self.chance.sample(list(self.registers), min(len(self.registers), self.chance.randint(0, 2)))
        locals_ = {register: self.registers[register] for register in arguments}
        steps = [step for _ in range(self.chance.randint(1, 5)) if (step := self._step(locals_))]
        returned = self.chance.choice(list(locals_)) if locals_ else None
        name = "" if returned is None else self._name("g")
        if returned is not None:
            self.registers[name] = locals_[returned]
        return ["run", name, arguments, steps, returned, self.chance.choice(["plain", "plain", "tuple", "dict"])]

    def _in_replica(self, dtype: str, shape: list[int], locals_: Locals, deep: int = 1) -> list[Any]:
        alike = [name for name, about in locals_.items() if about == {"dtype": dtype, "shape": shape}]
        others = [v for v, about in self.variables.items() if about == {"dtype": dtype, "shape": shape}]
        kinds = [
            "c",
            "i",
            "i",
            "i",
            *(["t"] * 2 if alike else []),
            *(["v"] if others else []),
            *("+-*" if deep else []),
        ]
        # Of a number that is the same on all replicas there is no sum; TensorFlow makes exceptions where one is alone.
        alone = self.n == 1 or self.kind == "multi_worker"
        if not shape and deep == 1 and not alone and self.chance.random() < 0.1:
            return ["py", self._number(dtype)]
        what = self.chance.choice(kinds)
        if what == "c":
            return ["c", self._value(dtype, shape), dtype]
        if what == "i":
            return ["i", [self._value(dtype, shape) for _ in range(self.n)], dtype]
        if what in ("t", "v"):
            return [what, self.chance.choice(alike if what == "t" else others)]
        return [what, *(self._in_replica(dtype, shape, locals_, 0) for _ in range(2))]

    # ---- operations of a replica ----

    def _step(self, locals_: Locals) -> list[Any]:
        """One of them; empty if nothing fits."""
        likely = {
            self._assign_here: 4, self._set: 1, self._all_reduce: 2, self._all_gather: 1, self._nest: 1,
            self._slices: 1, self._merge: 2, self._gradient: 1, self._make: 1,
            self._scatter_here: 0 if self.kind == "central_storage" else 1,  # there nobody says in which order
        }  # fmt: skip
        return self.chance.choices(list(likely), list(likely.values()))[0](locals_)

    def _local(self, locals_: Locals, dtype: str, shape: list[Any]) -> str:
        name = self._name("t")
        locals_[name] = {"dtype": dtype, "shape": shape}
        return name

    def _kind_of_value(self) -> tuple[str, list[int]]:
        return self.chance.choice(DTYPES), self.chance.choice(SHAPES)

    def _assign_here(self, locals_: Locals) -> list[Any]:
        name = self.chance.choice(list(self.variables))
        return ["assign", name, self.chance.choice(HOW), self._in_replica(**self.variables[name], locals_=locals_)]

    def _scatter_here(self, locals_: Locals) -> list[Any]:
        found = self._rows_of_one()
        return ["scatter", *found] if found else []

    def _set(self, locals_: Locals) -> list[Any]:
        dtype, shape = self._kind_of_value()
        given = self._in_replica(dtype, shape, locals_, 2)
        return ["set", self._local(locals_, dtype, shape), given]

    def _all_reduce(self, locals_: Locals) -> list[Any]:
        (dtype, shape), op = self._kind_of_value(), self._op()
        given = self._in_replica(dtype, shape, locals_, 2)
        becomes = "?" if "int" in dtype and op == "MEAN" else dtype  # float64 there, float32 here
        return ["all_reduce", self._local(locals_, becomes, shape), op, given]

    def _all_gather(self, locals_: Locals) -> list[Any]:
        dtype, shape = self.chance.choice(DTYPES), self.chance.choice(SHAPES[1:])
        given = self._in_replica(dtype, shape, locals_, 2)
        return ["all_gather", self._local(locals_, dtype, ["?"]), given, self.chance.randrange(len(shape))]

    def _nest(self, locals_: Locals) -> list[Any]:
        """Several values reduced by one call, as a dict."""
        kinds = [(self.chance.choice(DTYPES[:4]), self.chance.choice(SHAPES)) for _ in range(self.chance.randint(1, 3))]
        given = [self._in_replica(dtype, shape, locals_, 2) for dtype, shape in kinds]
        names = [self._local(locals_, dtype, shape) for dtype, shape in kinds]
        return ["nest", names, self._op(), given, self.chance.choice(["all_reduce", "merge"])]

    def _slices(self, locals_: Locals) -> list[Any]:
        """Rows of a tensor of 3, from each replica others, reduced."""
        rows = [[self.chance.randrange(3) for _ in range(self.chance.randint(1, 3))] for _ in range(self.n)]
        values = [[self._value("float32", [2]) for _ in each] for each in rows]
        return ["slices", self._local(locals_, "float32", [3, 2]), self._op(), rows, values]

    def _merge(self, locals_: Locals) -> list[Any]:
        """A ``merge_call`` that does something with a variable, or reduces a value."""
        name, body = self.chance.choice(list(self.variables)), self.chance.choice(MERGED)
        dtype, shape = self.variables[name]["dtype"], self.variables[name]["shape"]
        given = self._in_replica(dtype, shape, locals_, 2)
        how = self.chance.choice(HOW) if body != "reduce" else "SUM" if "int" in dtype else self._op()
        result = self._local(locals_, dtype, shape) if body in ("reduce", "read") else self._name("t")
        return ["merge", result, body, name, how, given]

    def _gradient(self, locals_: Locals) -> list[Any]:
        """The gradient of a variable, of a loss that differs from replica to replica; perhaps reduced."""
        floats = [v for v, about in self.variables.items() if about["dtype"].startswith("float")]
        if not floats:
            return []
        over = self.chance.choice(floats)
        dtype, name = self.variables[over]["dtype"], self._local(locals_, **self.variables[over])
        scales = [self._number(dtype) for _ in range(self.n)]
        return ["grad", name, over, scales, dtype, self.chance.choice([None, "SUM", "MEAN"])]

    def _make(self, locals_: Locals) -> list[Any]:
        """A variable that is made by the replicas, which give it different values."""
        _, name, dtype, _, *rest = self._variable()
        values = [self._value(dtype, self.variables[name]["shape"]) for _ in range(self.n)]
        return ["made", name, dtype, values, *rest]


def drawn(seed: int, kinds: list[tuple[str, int]] = KINDS) -> dict[str, Any]:
    """The program of a seed."""
    return Drawing(seed, kinds).draw()
