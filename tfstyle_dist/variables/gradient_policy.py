"""For each parameter: when its gradient is reduced, and whether the sum is divided (MEAN) or not (SUM)."""

from __future__ import annotations

from dataclasses import dataclass

from tfstyle_dist.core.enums import ReduceOp

REDUCE_AT = ("backward", "apply", "push", "elsewhere")


@dataclass
class GradientPolicy:
    """How one parameter's gradient becomes the same on all replicas.

    Attributes:
        reduce_at: ``"backward"``: by the end of ``loss.backward()`` (plain ``torch.optim``); ``"apply"``: by
            ``apply_gradients`` (TF-style optimizers); ``"push"``: by a parameter server; ``"elsewhere"``: by somebody
            else, such as FSDP.
        scale: ``MEAN`` divides the sum by the number of replicas, ``SUM`` does not.
        by_examples: whether the mean is that over the examples where the replicas' shares of a batch differ; else every
            replica weighs the same.
    """

    reduce_at: str = "backward"
    scale: ReduceOp = ReduceOp.MEAN
    by_examples: bool = True

    def __post_init__(self) -> None:
        if self.reduce_at not in REDUCE_AT:
            raise ValueError(f"reduce_at must be one of {REDUCE_AT}, got {self.reduce_at!r}.")
        self.scale = ReduceOp.from_any(self.scale)

    @property
    def weighs(self) -> bool:
        """Whether gradients of replicas with more examples count more."""
        return self.by_examples and self.scale is ReduceOp.MEAN and self.reduce_at in ("backward", "elsewhere")
