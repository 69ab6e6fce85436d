"""Other people's metrics and loops."""

from __future__ import annotations

import ignite.engine
import ignite.handlers
import ignite.metrics
import pytorch_lightning
import skorch
import torch
import torchmetrics
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.losses import MSELossFlat
from programs import BATCH, Net, case, plain, random, sgd
from torch.nn import functional as F
from torch.utils.data import DataLoader

# ---- metrics --------------------------------------------------------------------------------------------------

CLASSES = {"task": "multiclass", "num_classes": 3}


class _Quantiles(torchmetrics.CatMetric):
    """What does not depend on the order in which it was seen: replicas have theirs one after the other."""

    def compute(self):
        return super().compute().quantile(torch.tensor([0.25, 0.5, 0.75]))


METRICS = {
    "accuracy": lambda: torchmetrics.Accuracy(**CLASSES),
    "area-under-curve": lambda: torchmetrics.AUROC(**CLASSES),
    "mean": torchmetrics.MeanMetric,
    "quantiles": lambda: _Quantiles(),
    "variance": lambda: torchmetrics.ExplainedVariance(),
    "correlation": lambda: torchmetrics.PearsonCorrCoef(num_outputs=3),
    "collection": lambda: torchmetrics.MetricCollection(
        [torchmetrics.Precision(average="macro", **CLASSES), torchmetrics.Recall(average="macro", **CLASSES)]
    ),
    "sum-of-two": lambda: torchmetrics.MeanMetric() + torchmetrics.MaxMetric(),
    "extremes": lambda: torchmetrics.MinMaxMetric(torchmetrics.MeanMetric()),
}


def _metric(name, make):
    @case("libraries", f"torchmetrics.{name}")
    def program(run):
        with run.scope():
            model, metric = Net(), make()
            optimizer = sgd(model)

        def step(i):
            x, y = run.xy(i)
            classes = run.ids(i + 9, 3)
            optimizer.zero_grad()
            out = model(x)
            (F.cross_entropy(out, classes) + F.mse_loss(out, y)).backward()
            optimizer.step()
            out = out.detach()
            if name in ("accuracy", "area-under-curve", "collection"):
                metric.update(out.softmax(-1), classes)
            elif name in ("variance", "correlation"):
                metric.update(out, y)
            else:
                metric.update(out.abs().mean(1))

        run.go(step)
        first = metric.compute()
        metric.reset()
        run.go(step, 2)
        return run.result(model, metric=[first, metric.compute()])


for _name, _make in METRICS.items():
    _metric(_name, _make)


@case("libraries", "torchmetrics.in-the-model")
def metric_in_the_model(run):
    class Counting(Net):
        def __init__(self):
            super().__init__()
            self.accuracy = torchmetrics.Accuracy(**CLASSES)

        def forward(self, x, classes=None):
            out = super().forward(x)
            if classes is not None:
                self.accuracy(out.detach(), classes)
            return out

    with run.scope():
        model = Counting()
        optimizer = sgd(model)

    def step(i):
        classes = run.ids(i + 9, 3)
        optimizer.zero_grad()
        F.cross_entropy(model(run.x(i), classes), classes).backward()
        optimizer.step()

    run.go(step)
    return run.result(model, metric=model.accuracy.compute())


# ---- loops ----------------------------------------------------------------------------------------------------


@case("libraries", "ignite.Engine")
def ignite_engine(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)
        scheduler = ignite.handlers.LRScheduler(torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))
        ema = ignite.handlers.EMAHandler(model, momentum=0.1)
    step = plain(run, model, optimizer)

    def process(engine, i):
        value = run.run(step, i)
        return float(value if run.strategy is None else run.strategy.reduce("MEAN", value, axis=None))

    trainer = ignite.engine.Engine(process)
    trainer.add_event_handler(ignite.engine.Events.ITERATION_COMPLETED, scheduler)
    trainer.add_event_handler(ignite.engine.Events.ITERATION_COMPLETED, ignite.handlers.TerminateOnNan())
    ema.attach(trainer)
    ignite.metrics.RunningAverage(output_transform=lambda x: x).attach(trainer, "loss")
    trainer.run(list(range(6)), max_epochs=2)
    return run.result(model, ema.ema_model, average=trainer.state.metrics["loss"], rate=optimizer.param_groups[0]["lr"])


@case("libraries", "ignite.metrics")
def ignite_metrics(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)
    metric = ignite.metrics.MeanSquaredError()
    step = plain(run, model, optimizer)

    def seen(i):
        step(i)
        x, y = run.xy(i)
        return model(x).detach(), y

    for i in range(6):
        out, y = run.run(seen, i)
        if run.strategy is not None:
            out, y = run.strategy.gather(out, axis=0), run.strategy.gather(y, axis=0)
        metric.update((out, y))
    return run.result(model, error=metric.compute())


@case("libraries", "skorch.NeuralNetRegressor")
def skorch_net(run):
    class Distributed(skorch.NeuralNetRegressor):
        def initialize(self):
            with run.scope():
                return super().initialize()

        def train_step(self, batch, **options):
            def share():
                return super(Distributed, self).train_step(run.share(tuple(batch)), **options)

            out = run.run(share)
            if run.strategy is None:
                return out
            loss = run.strategy.reduce("MEAN", out["loss"], axis=None)
            return {"loss": loss, "y_pred": run.strategy.gather(out["y_pred"], axis=0)}

    net = Distributed(Net, max_epochs=2, lr=0.1, optimizer__momentum=0.9, batch_size=BATCH, train_split=None, verbose=0)
    net.fit(random(1, 48, 6).numpy(), random(2, 48, 3).numpy())
    return run.result(net.module_, loss=net.history[:, "train_loss"])


@case("libraries", "lightning.LightningModule")
def lightning_module(run):
    class Module(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, i):
            x, y = batch
            return F.mse_loss(self.net(x), y)

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), 0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

    with run.scope():
        module = Module()
        (optimizer,), (scheduler,) = module.configure_optimizers()

    def step(i):
        value = module.training_step(run.xy(i), i)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        scheduler.step()

    run.go(step)
    return run.result(module)


@case("libraries", "fastai.Learner")
def fastai_learner(run):
    class Share(Callback):
        def before_batch(self):
            self.learn.xb, self.learn.yb = run.share(tuple(self.xb)), run.share(tuple(self.yb))

    data = [(random(i, 6), random(i + 100, 3)) for i in range(16)]
    with run.scope():
        loaders = DataLoaders(DataLoader(data, BATCH), DataLoader(data, BATCH), device=torch.get_default_device())
        learner = Learner(loaders, Net(), loss_func=MSELossFlat(), lr=0.01, cbs=[Share()])
        learner.create_opt()
    run.run(lambda: learner.fit(2))
    return run.result(learner.model)
