"""Objects that hold models and optimizers, and the modules of torch that are built out of copies."""

from __future__ import annotations

import copy

import torch
from programs import Net, add, case, sgd
from torch import nn, optim
from torch.nn import functional as F


class Trainer:
    def __init__(self, run, build=True):
        self.E = run
        self.n = 0
        self.losses = []
        self.meter = {"n": 0}

    def build(self):
        self.model = Net()
        self.opt = sgd(self.model)
        self.sched = optim.lr_scheduler.StepLR(self.opt, 2, 0.5)
        self.best = None

    def train_step(self, i):
        x, y = self.E.xy(i)
        self.opt.zero_grad()
        value = F.mse_loss(self.model(x), y)
        value.backward()
        self.opt.step()
        self.sched.step()
        self.n += 1
        self.meter["n"] += 1
        self.losses.append(1.0)
        return value.detach()

    def fit(self):
        for i in range(6):
            self.E.run(self.train_step, i)


@case("steps", "trainer-bound")
def trainer_bound(run):
    with run.scope():
        t = Trainer(run)
        t.build()
    t.fit()
    return {"m": t.model, "n": t.n, "l": len(t.losses), "mt": t.meter, "e": run.each(lambda: [t.model, t.opt, t.n])}


@case("steps", "trainer-lambda")
def trainer_lambda(run):
    t = Trainer(run)
    with run.scope():
        t.build()
    for i in range(6):
        run.run(lambda i=i: t.train_step(i))
    return {"m": t.model, "n": t.n, "mt": t.meter}


class Base(Trainer):
    def train_step(self, i):
        r = super().train_step(i)
        self.hook(i)
        return r

    def hook(self, i):
        pass


class Sub(Base):
    def hook(self, i):
        if i == 2:
            self.opt.param_groups[0]["lr"] *= 0.1
            self.frozen = True


@case("steps", "trainer-subclass")
def trainer_subclass(run):
    t = Sub(run)
    with run.scope():
        t.build()
    t.fit()
    return {"m": t.model, "n": t.n, "lr": t.opt.param_groups[0]["lr"]}


class Callback:
    def __init__(self, t):
        self.t = t
        self.k = 0

    def on_step(self):
        self.k += 1
        self.t.opt.param_groups[0]["lr"] *= 1 / (1 + self.k)


class CBTrainer(Trainer):
    def train_step(self, i):
        super().train_step(i)
        [c.on_step() for c in self.callbacks]


@case("steps", "trainer-callbacks")
def trainer_callbacks(run):
    t = CBTrainer(run)
    with run.scope():
        t.build()
    t.callbacks = [Callback(t)]
    t.fit()
    return {"m": t.model, "n": t.n, "k": t.callbacks[0].k, "lr": t.opt.param_groups[0]["lr"]}


class LitModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()
        self.global_step = 0
        self.logs = {}

    def configure(self):
        self.opt = sgd(self)
        return self.opt

    def training_step(self, x, y):
        self.global_step += 1
        value = F.mse_loss(self.net(x), y) / self.global_step
        self.logs["l"] = value.detach()
        return value

    def opt_step(self, x, y):
        self.opt.zero_grad()
        self.training_step(x, y).backward()
        self.opt.step()


@case("steps", "trainer-lightning-like")
def trainer_lightning_like(run):
    with run.scope():
        model = LitModule()
        model.configure()

    def step(i):
        model.opt_step(*run.xy(i))

    run.go(step)
    return {"m": model, "g": model.global_step, "each": run.each(lambda: [model, model.global_step])}


class Agent:
    """actor critic with target nets, one/two levels"""

    def __init__(self):
        self.actor, self.critic = (Net(), nn.Linear(9, 1))
        self.target = copy.deepcopy(self.critic)
        self.oa, self.oc = (sgd(self.actor, 0.05), sgd(self.critic, 0.05))
        self.it = 0

    def update(self, x, y):
        self.it += 1
        with torch.no_grad():
            tq = self.target(torch.cat([x, self.actor(x)], 1)) + 1
        lc = F.mse_loss(self.critic(torch.cat([x, y], 1)), tq)
        self.oc.zero_grad()
        lc.backward()
        self.oc.step()
        if self.it % 2 == 0:
            la = -self.critic(torch.cat([x, self.actor(x)], 1)).mean()
            self.oa.zero_grad()
            la.backward()
            self.oa.step()
            for p, q in zip(self.critic.parameters(), self.target.parameters(), strict=False):
                q.data.copy_(0.1 * p.data + 0.9 * q.data)


class Runner:
    def __init__(self, a):
        self.agent = a
        self.total = 0


@case("steps", "trainer-actor-critic")
def trainer_actor_critic(run):
    with run.scope():
        a = Agent()
    R = Runner(a)

    def step(i):
        R.agent.update(*run.xy(i))
        R.total += 1

    run.go(step, 8)
    return {"m": [a.actor, a.critic, a.target], "it": a.it, "each": run.each(lambda: [a.actor, a.critic, a.target])}


def tr(mk, loss=None):

    def f(run):
        with run.scope():
            model = mk()
            h = nn.Linear(8, 3)
            optimizer = optim.SGD([*model.parameters(), *h.parameters()], lr=0.05)

        def step(i):
            x = run.x(i, 4, 8)
            y = run.x(i + 50, 3)
            optimizer.zero_grad()
            z = model(x, x) if isinstance(model, nn.Transformer) else model(x)
            z = z[0] if isinstance(z, tuple) else z
            F.mse_loss(h(z).mean(1), y).backward()
            optimizer.step()

        run.go(step)
        return run.result(model, h)

    return f


add("steps", "nn-Transformer", tr(lambda: nn.Transformer(8, 2, 2, 2, 16, 0.0, batch_first=True)))

add(
    "steps",
    "nn-TransformerEncoder",
    tr(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 3)),
)

add(
    "steps", "nn-deepcopied-list", tr(lambda: nn.Sequential(*[copy.deepcopy(value) for value in [nn.Linear(8, 8)] * 3]))
)

add(
    "steps",
    "nn-clones",
    tr(
        lambda: (
            nn.ModuleList([copy.deepcopy(nn.Linear(8, 8)) for _ in range(2)]).append(nn.Tanh())
            and nn.Sequential(nn.Linear(8, 8), copy.deepcopy(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))))
        )
    ),
)

add("steps", "nn-LSTM", tr(lambda: nn.LSTM(8, 8, 2, batch_first=True)))

add("steps", "nn-GRU-bi", tr(lambda: nn.GRU(8, 4, bidirectional=True, batch_first=True)))

add("steps", "nn-RNN", tr(lambda: nn.RNN(8, 8, batch_first=True)))


class MHA(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.MultiheadAttention(8, 2, batch_first=True)
        self.n = nn.LayerNorm(8)

    def forward(self, x):
        z, self.attn = self.a(x, x, x)
        return self.n(x + z)


add("steps", "nn-MHA-keeps-attn", tr(MHA))

add(
    "steps",
    "nn-LSTM-flatten",
    tr(lambda: (lambda value: (value.flatten_parameters(), value)[1])(nn.LSTM(8, 8, batch_first=True))),
)
