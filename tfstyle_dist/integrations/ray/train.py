"""``TfdConfig``: Ray Train says who the workers are, and the strategy does the rest."""

from __future__ import annotations

from typing import Any

from tfstyle_dist.core import launch_env, network
from tfstyle_dist.integrations.ray.elastic import TfdElasticBackend, around_training, check_ray
from tfstyle_dist.integrations.ray.upstream import get_node_ip_address, ray, ray_train

_, Backend, TorchConfig = ray_train()


class TfdConfig(TorchConfig):  # type: ignore[misc, valid-type]
    """The ``torch_config`` of a ``ray.train.torch.TorchTrainer`` whose training function makes a strategy.

    Ray starts the workers, restarts them and tells each its number; the strategy in the training function makes the
    process group itself. Beside stock ``TorchConfig``, under which a strategy adopts Ray's group, start-up and waits
    then have the limits, and errors the names, of this package (``docs/faults.md``).

    Args:
        timeout_seconds: limit of every wait of the workers; default: ``TFSTYLE_TIMEOUT_SECONDS``, else 5 minutes.
        elastic: for a ``MultiWorkerMirroredStrategy(elastic=...)``: the others go on when a worker is lost, and Ray
            starts it alone again, up to ``max_failures`` times, instead of starting all of them.

    Raises:
        ValueError: ``timeout_seconds`` is not above 0.
        NotImplementedError: this Ray cannot start single workers again.

    Example:
        >>> trainer = TorchTrainer(
        ...     train_fn, torch_config=TfdConfig(), scaling_config=ScalingConfig(num_workers=(2, 4))
        ... )
        >>> result = trainer.fit()

    Not in TensorFlow.
    """

    def __init__(self, timeout_seconds: float | None = None, elastic: bool = False) -> None:
        if timeout_seconds is not None and not timeout_seconds > 0:
            raise ValueError(f"TfdConfig(timeout_seconds={timeout_seconds!r}): write a number of seconds above 0.")
        if elastic:
            check_ray()
        super().__init__()
        self.timeout_seconds = timeout_seconds
        self.elastic = elastic

    def __repr__(self) -> str:
        return f"TfdConfig(timeout_seconds={self.timeout_seconds}, elastic={self.elastic})"

    @property
    def backend_cls(self) -> Any:
        """What Ray calls when the workers start."""
        return TfdElasticBackend if self.elastic else TfdBackend

    @property
    def train_func_context(self) -> Any:
        """What Ray does around the training function."""
        return around_training if self.elastic else super().train_func_context

    def to_dict(self) -> dict[str, Any]:
        """What Ray's dashboard shows."""
        return {"timeout_seconds": self.timeout_seconds, "elastic": self.elastic}


class TfdBackend(Backend):  # type: ignore[misc, valid-type]
    """Tells Ray's workers who they are, in torchrun's variables; made by Ray."""

    share_cuda_visible_devices = True  # as for torch: a worker's GPU is that of its local rank

    def on_start(self, worker_group: Any, backend_config: TfdConfig) -> None:
        """Chooses where the workers meet, and tells all of them."""
        address = worker_group.execute_single(0, _meeting_place)
        ranks = range(len(worker_group))
        given = [
            worker_group.execute_single_async(r, _tell, r, len(ranks), address, backend_config.timeout_seconds)
            for r in ranks
        ]
        ray.get(given)


def _meeting_place() -> tuple[str, int]:
    host = get_node_ip_address()
    return host, network.free_ports(1, host)[0]


def _tell(rank: int, size: int, address: tuple[str, int], timeout_seconds: float | None) -> None:
    context = ray_train()[0].get_context()
    launch = launch_env.Launch(rank, size, context.get_local_rank(), context.get_local_world_size())
    launch_env.set_launcher_variables(launch, address, timeout_seconds)
