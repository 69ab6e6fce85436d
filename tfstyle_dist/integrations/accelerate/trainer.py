"""``StrategyTrainerMixin``: ``transformers.Trainer`` under a strategy."""

from __future__ import annotations

from typing import Any

from tfstyle_dist.integrations.accelerate.accelerator import attach
from tfstyle_dist.integrations.accelerate.wrappers import LocalReplicas
from tfstyle_dist.strategies import Strategy


class StrategyTrainerMixin:
    """Put it before ``Trainer``: gradients are summed by a strategy, everything else is the trainer's.

    The trainer is made with the argument ``strategy`` more: as for ``StrategyAccelerator``. Where one process sees
    several GPUs, those of the strategy compute, not the trainer's own ``DataParallel``: ``per_device_train_batch_size``
    is then the batch of the process, which its replicas divide. Under torchrun on CPUs
    ``TrainingArguments(use_cpu=True)`` joins the processes.

    Args:
        *args: those of ``transformers.Trainer``.
        strategy: as for ``StrategyAccelerator``.
        **kwargs: those of ``transformers.Trainer``.

    Raises:
        ValueError: as for ``StrategyAccelerator``.

    Example:
        >>> class StrategyTrainer(StrategyTrainerMixin, Trainer):
        ...     pass
        >>> trainer = StrategyTrainer(model, TrainingArguments(use_cpu=True), train_dataset=texts, strategy=strategy)
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        before = cls.__mro__[1 : cls.__mro__.index(StrategyTrainerMixin)]
        if any(kind.__name__ == "Trainer" and not issubclass(kind, StrategyTrainerMixin) for kind in before):
            raise TypeError(
                f"{cls.__name__} has StrategyTrainerMixin behind Trainer, which would make its own Accelerator. Write "
                f"class {cls.__name__}(StrategyTrainerMixin, Trainer)."
            )

    def __init__(self, *args: Any, strategy: Strategy | None = None, **kwargs: Any) -> None:
        self._tfstyle_given = strategy
        super().__init__(*args, **kwargs)

    @property
    def strategy(self) -> Strategy:
        """The strategy that sums the gradients."""
        me: Any = self
        strategy: Strategy = me.accelerator.strategy
        return strategy

    def create_accelerator_and_postprocess(self) -> None:
        """See ``Trainer``; the accelerator it makes gets the strategy, which also says what computes where."""
        me: Any = self
        if me.args.n_gpu > 1:  # one process that sees several GPUs: the trainer would use DataParallel on all of them
            me.args._n_gpu = 1
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        attach(me.accelerator, self._tfstyle_given)

    def prediction_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """See ``Trainer``; a model whose one copy is not where it computes is evaluated on the first replica."""
        trained = getattr(self, "model_wrapped", None)
        if isinstance(trained, LocalReplicas) and trained.module is model and trained.is_elsewhere:
            model = LocalReplicas(model, self.strategy, divides=False).train(model.training)
        return super().prediction_step(model, *args, **kwargs)  # type: ignore[misc]
