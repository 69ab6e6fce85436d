"""Other people's optimizers of their own class, gradients of another kind, and containers."""

from __future__ import annotations

import backpack
import backpack.extensions
import fastai.optimizer
import gymnasium
import higher
import laplace
import numpy as np
import pytorch_warmup
import stable_baselines3.common.policies
import tensordict
import tensordict.nn
import torch
import torchrl.data
import torchrl.modules
import torchrl.objectives
from programs import BATCH, Net, case, plain, random, sgd
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

# ---- optimizers -----------------------------------------------------------------------------------------------

FASTAI = {
    "SGD": lambda p: fastai.optimizer.SGD(p, lr=0.1, mom=0.9, wd=0.01),
    "RMSProp": lambda p: fastai.optimizer.RMSProp(p, lr=0.01, mom=0.5),
    "Adam": lambda p: fastai.optimizer.Adam(p, lr=0.01, wd=0.01),
    "RAdam": lambda p: fastai.optimizer.RAdam(p, lr=0.01),
    "QHAdam": lambda p: fastai.optimizer.QHAdam(p, lr=0.01),
    "Larc": lambda p: fastai.optimizer.Larc(p, lr=0.1),
    "Lamb": lambda p: fastai.optimizer.Lamb(p, lr=0.01),
    "Lookahead": lambda p: fastai.optimizer.Lookahead(fastai.optimizer.Adam(p, lr=0.01)),
    "ranger": lambda p: fastai.optimizer.ranger(p, lr=0.01),
}


def _fastai(name, make):
    @case("libraries", f"fastai.{name}")
    def program(run):
        with run.scope():
            model = Net()
            optimizer = make(list(model.parameters()))
        step = plain(run, model, optimizer)
        run.go(step)
        optimizer.set_hypers(lr=0.003)
        run.go(step, 3)
        return run.result(model)


for _name, _make in FASTAI.items():
    _fastai(_name, _make)


@case("libraries", "pytorch_warmup.dampening")
def warmup(run):
    with run.scope():
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        warm = pytorch_warmup.UntunedLinearWarmup(optimizer)

    def after(i):
        with warm.dampening():
            scheduler.step()

    run.go(plain(run, model, optimizer, extra=after))
    return run.result(model, rate=optimizer.param_groups[0]["lr"])


# ---- gradients of another kind --------------------------------------------------------------------------------


@case("libraries", "higher.innerloop", reference="ranks")
def higher_inner_loop(run):
    with run.scope():
        model = Net()
        optimizer, inner = sgd(model, 0.05), torch.optim.SGD(model.parameters(), lr=0.1)

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        with higher.innerloop_ctx(model, inner, copy_initial_weights=False) as (functional, steps):
            for _ in range(2):
                steps.step(F.mse_loss(functional(x), y))
            F.mse_loss(functional(x + 0.1), y).backward()
        optimizer.step()

    run.go(step)
    return run.result(model)


@case("libraries", "backpack.DiagGGNExact")
def backpack_curvature(run):
    with run.scope():
        model = backpack.extend(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
        loss, optimizer = backpack.extend(nn.MSELoss()), sgd(model)

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        value = loss(model(x), y)
        with backpack.backpack(backpack.extensions.BatchGrad(), backpack.extensions.DiagGGNExact()):
            value.backward()
        for p in model.parameters():
            p.grad.div_(1 + run.mean(p.diag_ggn_exact.detach()))
        optimizer.step()

    run.go(step)
    return run.result(model)


@case("libraries", "laplace.Laplace")
def laplace_afterwards(run):
    with run.scope():
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    run.go(plain(run, model, sgd(model)))
    fitted = laplace.Laplace(model, "regression", subset_of_weights="all", hessian_structure="diag")
    fitted.fit(DataLoader(TensorDataset(random(1, 16, 6), random(2, 16, 3)), batch_size=8))
    mean, variance = fitted(random(5, 4, 6))
    return run.result(model, mean=mean, variance=variance)


# ---- containers, policies -------------------------------------------------------------------------------------


@case("libraries", "tensordict.TensorDictSequential")
def tensordict_modules(run):
    with run.scope():
        first = tensordict.nn.TensorDictModule(nn.Linear(6, 8), ["x"], ["hidden"])
        model = tensordict.nn.TensorDictSequential(
            first, tensordict.nn.TensorDictModule(nn.Linear(8, 3), ["hidden"], ["out"])
        )
        optimizer = sgd(model)

    def loss(x, y):
        found = model(tensordict.TensorDict({"x": x}, [len(x)]))
        return F.mse_loss(found["out"], y)

    run.go(plain(run, model, optimizer, loss))
    return run.result(model)


@case("libraries", "tensordict.TensorDictParams")
def tensordict_parameters(run):
    with run.scope():
        model = Net()
        parameters = tensordict.TensorDictParams(tensordict.TensorDict.from_module(model), no_convert=True)
        optimizer = torch.optim.Adam(parameters.parameters(), 0.01)

    def loss(x, y):
        with parameters.to_module(model):
            return F.mse_loss(model(x), y)

    run.go(plain(run, model, optimizer, loss))
    return {"outside": list(parameters.parameters()), "each": run.each(lambda: list(parameters.parameters()))}


def _transitions(run, i, action):
    x, count = run.x(i), BATCH // run.replicas
    never = torch.zeros(count, 1, dtype=torch.bool)
    after = {"observation": run.x(i + 200), "reward": run.x(i + 300, 1), "done": never, "terminated": never}
    entries = {"observation": x, "action": action, "next": tensordict.TensorDict(after, [count])}
    return tensordict.TensorDict(entries, [count])


@case("libraries", "torchrl.DQNLoss")
def torchrl_dqn(run):
    with run.scope():
        net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        actor = torchrl.modules.QValueActor(net, in_keys=["observation"], spec=torchrl.data.OneHot(3))
        loss = torchrl.objectives.DQNLoss(actor, delay_value=True, action_space="one_hot")
        target = torchrl.objectives.SoftUpdate(loss, eps=0.9)
        optimizer = torch.optim.Adam(loss.parameters(), 0.01)

    def step(i):
        optimizer.zero_grad()
        loss(_transitions(run, i, F.one_hot(run.ids(i + 4, 3), 3)))["loss"].backward()
        optimizer.step()
        target.step()

    run.go(step)
    values = run.each(lambda: list(loss.target_value_network_params.values(True, True)))
    return run.result(net, target=values)


class _Value(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, observation, action):
        return self.net(torch.cat([observation, action], -1))


@case("libraries", "torchrl.DDPGLoss", refused={"elastic": "In an elastic job"})
def torchrl_ddpg(run):
    with run.scope():
        net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
        actor = torchrl.modules.Actor(net, in_keys=["observation"], out_keys=["action"])
        value = torchrl.modules.ValueOperator(_Value(), in_keys=["observation", "action"])
        loss = torchrl.objectives.DDPGLoss(actor, value, delay_actor=True, delay_value=True)
        target = torchrl.objectives.SoftUpdate(loss, eps=0.9)
        optimizers = [
            torch.optim.Adam(p.parameters(), 0.01) for p in (loss.actor_network_params, loss.value_network_params)
        ]

    def step(i):
        out = loss(_transitions(run, i, run.x(i + 400, 2)))
        for optimizer, name in zip(optimizers, ("loss_actor", "loss_value"), strict=True):
            out[name].backward()
            optimizer.step()
            optimizer.zero_grad()
        target.step()

    run.go(step)
    return run.result(net, value)


@case("libraries", "stable_baselines3.ActorCriticPolicy", dtype="fp32")
def actor_critic(run):
    box, discrete = gymnasium.spaces.Box(-1, 1, (6,), np.float32), gymnasium.spaces.Discrete(3)
    with run.scope():
        policy = stable_baselines3.common.policies.ActorCriticPolicy(box, discrete, lambda _: 0.01)

    def step(i):
        values, logs, entropy = policy.evaluate_actions(run.x(i), run.ids(i, 3))
        policy.optimizer.zero_grad()
        ((values - 1).pow(2).mean() - logs.mean() - 0.01 * entropy.mean()).backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        policy.optimizer.step()

    run.go(step)
    return run.result(policy)
