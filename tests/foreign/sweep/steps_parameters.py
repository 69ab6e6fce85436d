"""Parameters that come late, are tied, frozen, thawed, replaced or parametrized."""

from __future__ import annotations

import torch
from programs import Net, add, case, plain, sgd, trains
from torch import nn, optim
from torch.nn import functional as F, utils
from torch.nn.utils import parametrizations as PZ, parametrize


def lazy(mk, shape=(6,)):

    def f(run):
        with run.scope():
            model = mk()
            model(torch.zeros(2, *shape))
            optimizer = sgd(model)

        def step(i):
            optimizer.zero_grad()
            z = model(run.x(i, *shape))
            z.pow(2).mean().backward()
            optimizer.step()

        run.go(step)
        return run.result(model)

    return f


add("steps", "lazy-Linear", lazy(lambda: nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(3))))

add(
    "steps",
    "lazy-Conv2d",
    lazy(lambda: nn.Sequential(nn.LazyConv2d(4, 3), nn.Tanh(), nn.Flatten(), nn.LazyLinear(3)), (2, 5, 5)),
)

add("steps", "lazy-BatchNorm1d-eval", lazy(lambda: nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d()).eval()))


@case("steps", "lazy-in-run", reference="ranks")
def lazy_in_run(run):
    with run.scope():
        model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.LazyLinear(3))

    def fwd(i):
        model(run.x(i))

    run.run(fwd, 0)
    with run.scope():
        optimizer = sgd(model)
    run.go(plain(run, model, optimizer))
    return run.result_with_own_buffers(model)


@case("steps", "lazy-opt-before")
def lazy_opt_before(run):
    with run.scope():
        model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(3))
        optimizer = sgd(model)
    run.go(plain(run, model, optimizer))
    return run.result(model)


add(
    "steps", "par-orthogonal", trains(lambda: nn.Sequential(PZ.orthogonal(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 3)))
)

add(
    "steps",
    "par-orthogonal-cayley",
    trains(lambda: nn.Sequential(PZ.orthogonal(nn.Linear(6, 6), orthogonal_map="cayley"), nn.Tanh(), nn.Linear(6, 3))),
)

add(
    "steps",
    "par-weight_norm",
    trains(lambda: nn.Sequential(PZ.weight_norm(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 3))),
)

add(
    "steps",
    "par-spectral_norm",
    trains(lambda: nn.Sequential(PZ.spectral_norm(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 3))),
)

add(
    "steps",
    "par-old-weight_norm",
    trains(lambda: nn.Sequential(utils.weight_norm(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 3))),
)

add(
    "steps",
    "par-old-spectral_norm",
    trains(lambda: nn.Sequential(utils.spectral_norm(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 3))),
)


class Sym(nn.Module):
    def forward(self, X):
        return X.triu() + X.triu(1).mT

    def right_inverse(self, A):
        return A.triu()


@case("steps", "par-own-assign")
def par_own_assign(run):
    with run.scope():
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        parametrize.register_parametrization(model[0], "weight", Sym())
        optimizer = sgd(model)
    run.go(plain(run, model, optimizer), 3)
    with torch.no_grad():
        model[0].weight = torch.eye(6)
    run.go(plain(run, model, optimizer), 3)
    return run.result(model)


@case("steps", "par-cached-remove")
def par_cached_remove(run):
    with run.scope():
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        parametrize.register_parametrization(model[0], "weight", Sym())
        optimizer = sgd(model)

    def loss(x, y):
        with parametrize.cached():
            return F.mse_loss(model(model[0](x)[:, :6]), y)

    run.go(plain(run, model, optimizer, loss))
    parametrize.remove_parametrizations(model[0], "weight")
    with run.scope():
        optimizer = sgd(model)
    run.go(plain(run, model, optimizer), 3)
    return run.result(model)


@case("steps", "par-prune")
def par_prune(run):
    with run.scope():
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        import torch.nn.utils.prune as prune

        prune.l1_unstructured(model[0], "weight", 0.3)
        optimizer = sgd(model)
    run.go(plain(run, model, optimizer), 3)
    prune.random_unstructured(model[2], "weight", 0.2)
    prune.remove(model[0], "weight")
    with run.scope():
        optimizer = sgd(model)
    run.go(plain(run, model, optimizer), 3)
    return run.result(model)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(12, 5)
        self.d = nn.Linear(5, 12, bias=False)
        self.d.weight = self.e.weight

    def forward(self, i):
        return self.d(torch.tanh(self.e(i)))


@case("steps", "tied")
def tied(run):
    with run.scope():
        model = Tied()
        optimizer = sgd(model)

    def step(i):
        optimizer.zero_grad()
        F.cross_entropy(model(run.ids(i, 12)), run.ids(i + 9, 12)).backward()
        optimizer.step()

    run.go(step)
    assert model.d.weight is model.e.weight
    return run.result(model)


@case("steps", "freeze-thaw-between")
def freeze_thaw_between(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)
    train = plain(run, model, optimizer)
    run.go(train, 2)
    model.a.requires_grad_(False)
    run.go(train, 2)
    model.a.requires_grad_(True)
    model.b.bias.requires_grad_(False)
    run.go(train, 3)
    return run.result(model)


@case("steps", "freeze-thaw-in-step")
def freeze_thaw_in_step(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def step(i):
        model.a.requires_grad_(i % 2 == 0)
        x, y = run.xy(i)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    run.go(step)
    return run.result(model)


@case("steps", "add_param_group")
def add_param_group(run):
    with run.scope():
        model = Net()
        optimizer = optim.SGD(model.b.parameters(), lr=0.1)
    model.a.requires_grad_(False)
    train = plain(run, model, optimizer)
    run.go(train, 3)
    model.a.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.a.parameters()), "lr": 0.05})
    run.go(train, 3)
    return run.result(model, o=optimizer)


@case("steps", "register_parameter-between")
def register_parameter_between(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def loss(x, y):
        p = model(x)
        return F.mse_loss(p + model.extra if hasattr(model, "extra") else p, y)

    train = plain(run, model, optimizer, loss)
    run.go(train, 2)
    model.register_parameter("extra", nn.Parameter(torch.zeros(3)))
    optimizer.add_param_group({"params": [model.extra]})
    run.go(train, 3)
    return run.result(model)


@case("steps", "replace-head-in-scope")
def replace_head_in_scope(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)
    train = plain(run, model, optimizer)
    run.go(train, 2)
    with run.scope():
        model.b = nn.Linear(16, 3)
        optimizer = sgd(model)
    run.go(plain(run, model, optimizer), 3)
    return run.result(model)


@case("steps", "replace-head-outside")
def replace_head_outside(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)
    train = plain(run, model, optimizer)
    run.go(train, 2)
    model.b = nn.Linear(16, 3)
    optimizer = sgd(model)
    run.go(plain(run, model, optimizer), 3)
    return run.result(model)


@case("steps", "replace-parameter-outside")
def replace_parameter_outside(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)
    run.go(plain(run, model, optimizer), 2)
    model.a.weight = nn.Parameter(model.a.weight.detach().clone() * 2)
    optimizer = sgd(model)
    run.go(plain(run, model, optimizer), 3)
    return run.result(model)


@case("steps", "grow-network")
def grow_network(run):
    with run.scope():
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        model.append(nn.Linear(6, 3))
        optimizer = sgd(model)
    run.go(plain(run, model, optimizer), 2)
    with run.scope():
        model.insert(0, nn.Linear(6, 6))
        optimizer.add_param_group({"params": list(model[0].parameters())})
    run.go(plain(run, model, optimizer), 3)
    return run.result(model)
