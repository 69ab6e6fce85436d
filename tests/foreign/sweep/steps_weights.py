"""Weights that a program writes, between runs and in a step, and conversions."""

from __future__ import annotations

import collections
import copy
import io

import torch
from programs import Net, add, case, plain, sgd, trains
from torch import nn
from torch.nn import functional as F


def between(w):

    def f(run):
        with run.scope():
            model = Net()
            optimizer = sgd(model)
        train = plain(run, model, optimizer)
        run.go(train, 2)
        w(model, optimizer, run)
        run.go(train, 3)
        return run.result(model)

    return f


torch.manual_seed(0)


def other():
    torch.manual_seed(7)
    return Net()


@torch.no_grad()
def w_inplace(model, optimizer, run):
    model.a.weight.mul_(0.5)
    model.b.bias.fill_(1)
    model.a.bias += 1
    model.b.weight[0] = 0
    torch._foreach_mul_(list(model.parameters()), 0.9)
    nn.init.zeros_(model.b.bias)


@torch.no_grad()
def w_view(model, optimizer, run):
    v = model.a.weight.view(-1)
    v[:5] = 3.0
    model.b.weight.t()[0].add_(1)
    model.a.weight.detach()[0, 0] = 9


def w_data(model, optimizer, run):
    model.a.weight.data.mul_(0.5)
    model.b.bias.data = torch.ones(3)
    model.a.bias.data[0] = 5.0
    model.b.weight.data[0].zero_()


def w_datasaved(model, optimizer, run):
    d = model.a.weight.data
    model.a.bias.data.zero_()
    d.fill_(0.1)


def w_detach(model, optimizer, run):
    model.a.weight.detach().fill_(0.3)


def w_set(model, optimizer, run):
    with torch.no_grad():
        model.a.weight.set_(torch.full((16, 6), 0.2))


def w_numpy(model, optimizer, run):
    model.a.weight.detach().numpy()[:] = 0.25


def w_vec(model, optimizer, run):
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()) * 0.5, model.parameters())


def w_copy(model, optimizer, run):
    with torch.no_grad():
        for p, q in zip(model.parameters(), other().parameters(), strict=False):
            p.copy_(q)


def w_state(model, optimizer, run):
    for p in model.parameters():
        optimizer.state[p]["momentum_buffer"].zero_()
    optimizer.param_groups[0]["lr"] = 0.02
    optimizer.param_groups[0]["momentum"] = 0.5


def w_statecl(model, optimizer, run):
    optimizer.state.clear()
    optimizer.state = collections.defaultdict(dict)


def w_pickle(model, optimizer, run):
    b = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), b)
    run.go(plain(run, model, optimizer), 2)
    b.seek(0)
    a, c = torch.load(b)
    model.load_state_dict(a)
    optimizer.load_state_dict(c)


def w_apply(model, optimizer, run):
    torch.manual_seed(3)
    model.apply(lambda value: value.reset_parameters() if hasattr(value, "reset_parameters") else None)


def w_double(model, optimizer, run):
    model.float()
    model.double()


def w_swap(model, optimizer, run):
    model.a.weight.data, model.a.weight.grad = (model.a.weight.data.clone() * 0.5, None)


ws = {k[2:]: v for k, v in list(globals().items()) if k.startswith("w_")}

NUMPY_IN_STEP = {"central": "a write through numpy leaves no mark: it is made once for each replica"}
NUMPY = {"replicas": "a write through numpy leaves no mark: the other replicas do not get it"}
for k, v in ws.items():
    add("steps", f"write-{k}", between(v), differs=NUMPY if k == "numpy" else {})

add("steps", "write-load", between(lambda model, optimizer, run: model.load_state_dict(other().state_dict())))

add(
    "steps",
    "write-load-assign",
    between(lambda model, optimizer, run: model.load_state_dict(other().state_dict(), assign=True)),
)

add(
    "steps",
    "write-load-partial",
    between(lambda model, optimizer, run: model.load_state_dict({"b.weight": torch.ones(3, 16)}, strict=False)),
)

add(
    "steps",
    "write-opt-load",
    between(lambda model, optimizer, run: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))),
)


def instep(w):

    def f(run):
        with run.scope():
            model = Net()
            optimizer = sgd(model)
        run.go(plain(run, model, optimizer, extra=lambda i: w(model, i)))
        return run.result(model)

    return f


def s_data(model, i):
    model.a.weight.data.mul_(0.9)
    model.b.bias.data = model.b.bias.data * 0.5


@torch.no_grad()
def s_ng(model, i):
    model.a.weight.clamp_(-0.1, 0.1)
    model.b.bias.copy_(model.b.bias * 0.5)


def s_set(model, i):
    with torch.no_grad():
        model.a.weight.set_(model.a.weight.detach() * 0.9)


def s_renorm(model, i):
    model.a.weight.data = F.normalize(model.a.weight.data, dim=1)


def s_wgan(model, i):
    [p.data.clamp_(-0.05, 0.05) for p in model.parameters()]


def s_load(model, i):
    model.load_state_dict({k: v * 0.9 for k, v in model.state_dict().items()})


def s_vec(model, i):
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()).detach() * 0.9, model.parameters())


def s_numpy(model, i):
    model.a.weight.detach().numpy()[:] *= 0.9


def s_grad(model, i):
    model.a.weight.grad = None


def s_assign(model, i):
    model.load_state_dict({k: v * 0.9 for k, v in model.state_dict().items()}, assign=True)


for k, v in {k[2:]: v for k, v in list(globals().items()) if k.startswith("s_")}.items():
    add("steps", f"instep-{k}", instep(v), differs=NUMPY_IN_STEP if k == "numpy" else {})


class Conv(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.w = nn.Parameter(torch.ones(6))
        self.l = nn.Linear(6, 3)
        self.w = c(self.w)

    def forward(self, x):
        return self.l(x * self.w)


for k, c in {
    "double": lambda p: p.double(),
    "to": lambda p: p.to("cpu"),
    "contiguous": lambda p: p.contiguous(),
    "cpu": lambda p: p.cpu(),
    "view": None,
}.items():
    if c:
        add("steps", f"noop-{k}", trains(lambda c=c: Conv(c)))

add("steps", "noop-module-to", trains(lambda: Net().to("cpu").double().cpu()))

add("steps", "noop-share_memory", trains(lambda: Net().share_memory()))


@case("steps", "noop-to-in-step")
def noop_to_in_step(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def step(i):
        model.to("cpu")
        model.double()
        x, y = run.xy(i)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    run.go(step)
    return run.result(model)


@case("steps", "conv-half-double")
def conv_half_double(run):
    with run.scope():
        model = Net().half().double()
        optimizer = sgd(model)
    run.go(plain(run, model, optimizer))
    return run.result(model)


add(
    "steps",
    "meta-to_empty",
    trains(
        lambda: (
            lambda model: (
                model.to_empty(device="cpu"),
                [nn.init.constant_(p, 0.1) for p in model.parameters()],
                model,
            )[2]
        )(Net().to("meta"))
    ),
)
