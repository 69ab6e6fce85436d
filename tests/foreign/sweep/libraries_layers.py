"""Other people's layers, losses and models, as a part of a step of one's own."""

from __future__ import annotations

import copy

import captum.attr
import lightly.loss
import lightly.models.utils
import lightly.utils.lars
import lightly.utils.scheduler
import lpips
import piq
import pykeen.models
import pypose
import pyro
import pyro.distributions
import pyro.infer
import pyro.infer.autoguide
import pyro.nn
import thop
import tltorch
import torch
import torch_pruning
import torchinfo
from blitz.modules import BayesianLinear
from fvcore.nn import FlopCountAnalysis
from gateloop_transformer import Transformer as GateLoop
from h_transformer_1d import HTransformer1D
from infini_transformer_pytorch import InfiniTransformer
from linear_attention_transformer import LinearAttentionTransformerLM
from neuralop.models import FNO
from programs import BATCH, Net, Run, add, case, integers, plain, random, sgd, trains
from pykeen.triples import CoreTriplesFactory
from routing_transformer import RoutingTransformerLM
from sinkhorn_transformer import SinkhornTransformerLM
from torch import nn
from torch.nn import functional as F
from torchao.quantization import quantize_
from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig


def _seeded(run):
    if run.strategy is not None:
        run.strategy.seed_replicas(7)


# ---- layers ---------------------------------------------------------------------------------------------------


@case("libraries", "blitz.BayesianLinear", reference="ranks")
def bayesian(run):
    with run.scope():
        model = nn.Sequential(BayesianLinear(6, 8), nn.Tanh(), BayesianLinear(8, 3))
        optimizer = sgd(model)
    _seeded(run)
    run.go(plain(run, model, optimizer))
    return run.result_with_own_buffers(model)


def _factorized():
    layer = tltorch.FactorizedLinear.from_linear(nn.Linear(16, 16), rank=0.5, n_tensorized_modes=2)
    return nn.Sequential(nn.Linear(6, 16), layer, nn.Tanh(), nn.Linear(16, 3))


add("libraries", "tltorch.FactorizedLinear", trains(_factorized))


@case("libraries", "neuralop.FNO", dtype="fp32", tolerance=1e-4)
def fourier(run):
    with run.scope():
        model = FNO(n_modes=(4, 4), hidden_channels=8, in_channels=1, out_channels=1, n_layers=2)
        optimizer = sgd(model, 0.01)

    def step(i):
        x = run.x(i, 1, 8, 8)
        optimizer.zero_grad()
        F.mse_loss(model(x), x * 2).backward()
        optimizer.step()

    run.go(step, 4)
    return {"outside": list(model.parameters()), "each": run.each(lambda: list(model.parameters()))}


class _Posed(nn.Module):
    def __init__(self):
        super().__init__()
        self.pose = pypose.Parameter(pypose.SE3(torch.tensor([0.1, 0.2, 0.3, 0.0, 0.0, 0.0, 1.0])))
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.pose.Act(self.layer(x))


add("libraries", "pypose.Parameter", trains(_Posed, lambda model: sgd(model, 0.01)))


@case("libraries", "torchao.QATConfig", dtype="fp32")
def quantized(run):
    with run.scope():
        model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
        tokens = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
        weights = IntxFakeQuantizeConfig(torch.int4, group_size=32)
        quantize_(model, QATConfig(activation_config=tokens, weight_config=weights, step="prepare"))
        optimizer = sgd(model, 0.01)

    def step(i):
        x = run.x(i, 32)
        optimizer.zero_grad()
        F.mse_loss(model(x), x).backward()
        optimizer.step()

    run.go(step)
    return run.result(model)


@case("libraries", "torch_pruning.MagnitudePruner")
def pruned(run):
    with run.scope():
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    run.go(plain(run, model, sgd(model)), 3)
    with run.scope():
        importance = torch_pruning.importance.MagnitudeImportance(p=2)
        kept = [model[4]]
        torch_pruning.pruner.MagnitudePruner(
            model, random(1, 2, 6), importance=importance, pruning_ratio=0.5, ignored_layers=kept
        ).step()
        optimizer = sgd(model)
    run.go(plain(run, model, optimizer), 3)
    return run.result(model, count=sum(p.numel() for p in model.parameters()))


@case("libraries", "torchinfo+thop+fvcore")
def measured(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)
    run.go(plain(run, model, optimizer), 2)
    torchinfo.summary(model, (2, 6), verbose=0, dtypes=[torch.get_default_dtype()])
    thop.profile(model, (random(1, 2, 6),), verbose=False)
    FlopCountAnalysis(model, random(1, 2, 6)).unsupported_ops_warnings(False).total()
    run.go(plain(run, model, optimizer), 3)
    return run.result(model)


# ---- losses ---------------------------------------------------------------------------------------------------

LIGHTLY = {
    "BarlowTwinsLoss": lambda: lightly.loss.BarlowTwinsLoss(),
    "VICRegLoss": lambda: lightly.loss.VICRegLoss(),
    "NegativeCosineSimilarity": lambda: lightly.loss.NegativeCosineSimilarity(),
    "DCLLoss": lambda: lightly.loss.DCLLoss(),
    "TiCoLoss": lambda: lightly.loss.TiCoLoss(),
}


def _lightly(name, make):
    @case("libraries", f"lightly.{name}", reference="ranks")  # of a share: each replica has the views of its own
    def program(run):
        with run.scope():
            model, criterion = Net(), make()
            optimizer = sgd(model)
        run.go(plain(run, model, optimizer, lambda x, y: criterion(model(x), model(x + 0.1))))
        return {**run.result_with_own_buffers(model), "loss": run.each(lambda: list(criterion.buffers()))}


for _name, _make in LIGHTLY.items():
    _lightly(_name, _make)


@case("libraries", "lightly.update_momentum")
def momentum_encoder(run):
    with run.scope():
        model = Net()
        slow = copy.deepcopy(model)
        lightly.models.utils.deactivate_requires_grad(slow)
        optimizer = lightly.utils.lars.LARS(model.parameters(), lr=0.5, momentum=0.9, weight_decay=1e-4)
        scheduler = lightly.utils.scheduler.CosineWarmupScheduler(optimizer, warmup_epochs=2, max_epochs=8)

    def loss(x, y):
        lightly.models.utils.update_momentum(model, slow, 0.9)
        with torch.no_grad():
            key = slow(x + 0.1)
        return F.mse_loss(model(x), key + y)

    run.go(plain(run, model, optimizer, loss, lambda i: scheduler.step()))
    return run.result(model, slow, rate=optimizer.param_groups[0]["lr"])


def _of_images(name, make):
    @case("libraries", name, dtype="fp32", tolerance=1e-4)
    def program(run):
        with run.scope():
            model, loss = nn.Conv2d(3, 3, 3, padding=1), make()
            optimizer = sgd(model, 0.01)

        def step(i):
            x = torch.sigmoid(run.x(i, 3, 32, 32))
            optimizer.zero_grad()
            loss(torch.sigmoid(model(x)), x).mean().backward()
            optimizer.step()

        run.go(step, 3)
        return run.result(model)


_of_images("piq.SSIMLoss", lambda: piq.SSIMLoss(data_range=1.0, kernel_size=5))
_of_images("lpips.LPIPS", lambda: lpips.LPIPS(net="squeeze", pretrained=False, pnet_rand=True, verbose=False))


@case("libraries", "captum.IntegratedGradients")
def attributed(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)
    gradients, layer = captum.attr.IntegratedGradients(model), captum.attr.LayerActivation(model, model.a)

    def loss(x, y):
        seen = gradients.attribute(x, target=0, n_steps=4).sum() + layer.attribute(x).detach().mean()
        optimizer.zero_grad()
        return F.mse_loss(model(x), y) + 0.0 * seen

    run.go(plain(run, model, optimizer, loss))
    return run.result(model)


# ---- models ---------------------------------------------------------------------------------------------------


def _triples():
    numbers = torch.arange(30)
    triples = torch.stack([numbers % 10, numbers % 3, (numbers * 7) % 10], 1)
    return CoreTriplesFactory.create(triples, num_entities=10, num_relations=3)


def _graph(name):
    @case("libraries", f"pykeen.{name}")
    def program(run):
        with run.scope():
            kind = getattr(pykeen.models, name)
            model = kind(triples_factory=_triples(), embedding_dim=8, random_seed=1).to(torch.get_default_dtype())
            optimizer = torch.optim.Adam(model.parameters(), 0.01)

        def triples(i):
            whole = [integers(i, 10, BATCH), integers(i + 5, 3, BATCH), integers(i + 9, 10, BATCH)]
            return run.share(torch.stack(whole, 1))

        def step(i):
            optimizer.zero_grad()
            F.relu(1 + model.score_hrt(triples(i + 50)) - model.score_hrt(triples(i))).mean().backward()
            optimizer.step()
            model.post_parameter_update()

        run.go(step)
        return run.result(model)


for _name in ("TransE", "ComplEx", "RotatE", "DistMult", "HolE"):
    _graph(_name)


class _Bayes(pyro.nn.PyroModule):
    def __init__(self):
        super().__init__()
        self.layer = pyro.nn.PyroModule[nn.Linear](6, 3)
        prior = pyro.distributions.Normal(0.0, 1.0).expand([3, 6]).to_event(2)
        self.layer.weight = pyro.nn.PyroSample(prior)

    def forward(self, x, y):
        mean = self.layer(x)
        with pyro.plate("data", len(x)):
            pyro.sample("obs", pyro.distributions.Normal(mean, 1.0).to_event(1), obs=y)


@case("libraries", "pyro.Trace_ELBO", reference="ranks")
def variational(run):
    pyro.clear_param_store()
    with run.scope():
        model = _Bayes()
        guide = pyro.infer.autoguide.AutoNormal(model)
        guide(random(3, 4, 6), random(4, 4, 3))
        optimizer = torch.optim.Adam([*guide.parameters(), *model.parameters()], 0.01)
    _seeded(run)
    loss = pyro.infer.Trace_ELBO().differentiable_loss
    run.go(plain(run, model, optimizer, lambda x, y: loss(model, guide, x, y)))
    return run.result(guide, model)


def _mean(model, tokens):
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def _clustered(model, tokens):
    out, extra = model(tokens)
    return F.cross_entropy(out.flatten(0, 1), tokens.flatten()) + extra


SIZES = {"num_tokens": 16, "dim": 16, "depth": 1, "heads": 2, "max_seq_len": 32}
LANGUAGE = {
    "routing-transformer": (lambda: RoutingTransformerLM(**SIZES, window_size=8, causal=True), _clustered, "ranks"),
    "linear-attention-transformer": (lambda: LinearAttentionTransformerLM(**SIZES, causal=True), _mean, "one"),
    "sinkhorn-transformer": (lambda: SinkhornTransformerLM(**SIZES, bucket_size=8), _mean, "ranks"),
    "h-transformer-1d": (lambda: HTransformer1D(**SIZES, causal=True, dim_head=8, block_size=8), _mean, "one"),
    "gateloop-transformer": (lambda: GateLoop(num_tokens=16, dim=16, depth=2, use_gate_looped_attn=True), _mean, "one"),
    "infini-transformer": (
        lambda: InfiniTransformer(num_tokens=16, dim=16, depth=2, dim_head=8, heads=2, use_mem_delta_rule=True),
        lambda model, tokens: F.cross_entropy(model(tokens)[0].flatten(0, 1), tokens.flatten()), "one",
    ),
}  # fmt: skip


def _language(name, make, loss, reference):
    @case("libraries", name, reference=reference)
    def program(run: Run):
        torch.manual_seed(2)
        with run.scope():
            model = make()
            optimizer = sgd(model, 0.01)
        _seeded(run)

        def step(i):
            optimizer.zero_grad()
            loss(model, run.ids(i, 16, 32)).backward()
            optimizer.step()

        run.go(step, 4)
        return run.result_with_own_buffers(model)


for _name, _of in LANGUAGE.items():
    _language(_name, *_of)
