"""The form ``servers``: a parameter server whose one worker makes a step at a time; one cluster for all cases.

The program runs in the coordinator's process; what it gives to ``run.run`` is scheduled.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from programs import Each, Run, flat

import tfstyle_dist as tfd

SECONDS = 60.0
_clusters: list[Any] = []
IN_COPIES = "a worker has copies of a program's own objects, and what a function counts or keeps in them stays there"
NO_TRAVEL = "a function travels by pickle, and finds modules of Python as the worker has them"
OF_THE_SERVER = "an optimizer draws random numbers of the server, and makes tensors of its default type"
NO_GRAPH = "a server has gradients, and no graph of them"
_DIFFER = {
    IN_COPIES: {
        "packages": """
            x_transformers.alibi
        """,
        "libraries": """
            torchmetrics.accuracy torchmetrics.area-under-curve torchmetrics.mean torchmetrics.quantiles
            torchmetrics.variance torchmetrics.correlation torchmetrics.collection torchmetrics.sum-of-two
            torchmetrics.extremes torchmetrics.in-the-model skorch.NeuralNetRegressor laplace.Laplace
            pykeen.ComplEx pykeen.DistMult
        """,
        "schedulers": """
            transformers-constant-in-scope-in-step transformers-constant-outside-in-step
            transformers-reduce_lr_on_plateau-in-scope-in-step transformers-reduce_lr_on_plateau-outside-in-step
        """,
        "optimizers": """
            ema_pytorch.KarrasEMA-outside-in-step
        """,
        "torch.optim": """
            scaler-in-scope-unscale-inf scaler-in-scope-unscale scaler-in-scope-inf scaler-in-scope
            scaler-outside-unscale-inf scaler-outside-unscale scaler-outside-inf scaler-outside
            scaler-update-after-run scaler-in-parts-outside scaler-in-parts-unscale scaler-in-parts-step
            scaler-in-parts-unscale-step scaler-in-parts-no_unscale scaler-in-parts-no_unscale-step
            average-plain-outside-in-step average-ema-outside-in-step average-ema-foreach-outside-in-step
            average-swa-foreach-outside-in-step average-buffers-outside-in-step average-own-outside-in-step
        """,
        "steps": """
            attr-counter attr-containers attr-plain-tensors step-outside-run grads-edited-outside
            opt-own-group-step state-dataclass ema-inplace-out ema-grad-out ema-sd-out ema-load-out
            ema-data-out ema-foreach-out ema-EMA-in-step ema-EMA-out-step ema-EMADict-in-step
            ema-EMADict-out-step ema-swap-in-step trainer-lambda trainer-lightning-like write-statecl
            exception-after-backward step-kwargs step-callable param-keyed-dict
            meter-object raises-before-backward-buffer raises-after-backward-buffer
            stop-iteration-ends-an-epoch tensors-that-a-list-of-the-step-gets-late helper-of-a-module-counts
            shadow-of-three-hundred-parameters object-with-a-long-list-of-tensors-and-a-model
            gradients-are-views-of-one-tensor parameters-are-views-of-one-tensor
            optimizer-over-views-of-one-tensor state-is-a-view-of-a-parameter latest-weights-averaged
            module-is-a-dataclass
        """,
    },
    NO_TRAVEL: {
        "libraries": """
            torchinfo+thop+fvcore
        """,
        "optimizers": """
            ema_pytorch.EMA-in-scope-in-step ema_pytorch.EMA-in-scope-after-run
            ema_pytorch.EMA-outside-in-step ema_pytorch.EMA-outside-after-run heavyball.SplitOpt
        """,
        "steps": """
            par-orthogonal par-orthogonal-cayley par-spectral_norm par-own-assign
            par-cached-remove jit-trace jit-script spectral-gan-in-one-step step-static step-classmethod
            step-other-module step-other-module-lambda step-other-module-state vq-ema-all_reduce
            kept-in-in-sys kept-in-other-module lazy-opt-before written-lazy_layers write-numpy
            channels_last
        """,
    },
    OF_THE_SERVER: {
        "optimizers": """
            pytorch_optimizer.Gravity pytorch_optimizer.Kron pytorch_optimizer.APOLLO-low-rank
        """,
        "steps": """
            written-optimizer_that_draws_random_numbers
        """,
    },
    NO_GRAPH: {
        "optimizers": """
            pytorch_optimizer.AdaHessian pytorch_optimizer.SophiaH torch_optimizer.Adahessian
        """,
    },
}


def differs(title: str) -> str | None:
    """Why a case differs, or raises, where its steps are made by a worker and its updates by a server."""
    group, _, name = title.replace(" ", "_").partition("/")
    return next((why for why, groups in _DIFFER.items() if name in groups.get(group, "").split()), None)


@contextlib.contextmanager
def cluster() -> Iterator[None]:
    """The cluster of ``strategy``; its processes import the modules of the cases."""
    before, here = os.environ.get("PYTHONPATH"), Path(__file__).parent
    os.environ["PYTHONPATH"] = os.pathsep.join([str(here), str(here.parent), *([before] if before else [])])
    try:
        with tfd.Server.local_cluster(workers=1, ps=1) as started:
            _clusters.append(started)
            yield
    finally:
        _clusters.clear()
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


@contextlib.contextmanager
def strategy() -> Iterator[Any]:
    """A new strategy on the cluster, which the next one can use as well."""
    made = tfd.ParameterServerStrategy(_clusters[0], max_staleness=0)
    try:
        yield made
    finally:
        if made.coordinator is not None:
            made.coordinator.close(end_workers=False)
        made.servers.close()
        made.context.close()


class ServersRun(Run):
    """What a program sees of parameter servers; on a worker it is the run of one device.

    Args:
        strategy: of the servers.
    """

    def __init__(self, strategy: Any) -> None:
        super().__init__("servers", strategy)
        self._coordinator = tfd.coordinator.ClusterCoordinator(strategy)

    def __reduce__(self) -> Any:
        return Run, ("one",)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        work = _Work(torch.get_default_dtype(), function)
        result = self._coordinator.schedule(work, args=args, kwargs=kwargs)
        self._coordinator.join(timeout=SECONDS)
        return result.get(timeout=SECONDS)

    def local(self, value: Any) -> list[Any]:
        return [value]

    def each(self, function: Callable[[], Any]) -> Each:
        """The values that the coordinator's program sees."""
        return Each([flat(function())])

    def mean(self, gradients: Any) -> Any:
        return gradients


class _Work:
    def __init__(self, dtype: torch.dtype, function: Callable[..., Any]) -> None:
        self._dtype, self._function = dtype, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        torch.set_default_dtype(self._dtype)
        return self._function(*args, **kwargs)
