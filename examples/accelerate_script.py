"""A script for Hugging Face accelerate that trains under a strategy: handwritten digits, gradients summed as a tree.

    torchrun --standalone --nproc-per-node=2 examples/accelerate_script.py
    python examples/accelerate_script.py --replicas 2         # two replicas in one process
    accelerate launch --cpu --num_processes 1 --module torch.distributed.run --nproc-per-node=2 \
        examples/accelerate_script.py

Two lines differ from a script without a strategy: the import of the class, and the argument ``strategy``. Leave the
argument out, and the strategy is made of the processes that accelerate finds. The exit code is 1 when the test
accuracy is below 94 %.
"""

from __future__ import annotations

import argparse
import sys
import tempfile

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import tfstyle_dist as tfd
from tfstyle_dist.integrations.accelerate import StrategyAccelerator as Accelerator

NUM_TEST = 357
METHODS = {
    "add_n": tfd.AggregationMethod.ADD_N,
    "tree": tfd.AggregationMethod.EXPERIMENTAL_TREE,
    "default": tfd.AggregationMethod.DEFAULT,
}


def load_data() -> tuple[TensorDataset, TensorDataset]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[NUM_TEST:], order[:NUM_TEST]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def make_strategy(replicas: int, method: str) -> tfd.MirroredStrategy:
    ops = tfd.ReductionToOneDevice(aggregation_method=METHODS[method])
    devices = [f"cpu:{number}" for number in range(replicas)] if replicas > 1 else None
    return tfd.MirroredStrategy(devices, cross_device_ops=ops)


def train(accelerator: Accelerator, epochs: int) -> float:
    torch.manual_seed(0)
    train_data, test_data = load_data()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=200, gamma=0.5)
    batches = DataLoader(train_data, batch_size=32, shuffle=True)  # 32 for each process
    model, optimizer, batches, test_batches, scheduler = accelerator.prepare(
        model, optimizer, batches, DataLoader(test_data, batch_size=64), scheduler
    )
    with tqdm(total=epochs * len(batches), unit="step", disable=not accelerator.is_main_process) as bar:
        for _ in range(epochs):
            for images, labels in batches:
                with accelerator.accumulate(model):
                    loss = cross_entropy(model(images), labels)
                    accelerator.backward(loss)
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                bar.update()
            bar.set_postfix(loss=f"{accelerator.reduce(loss.detach(), 'mean'):.3f}")
    accuracy = evaluate(accelerator, model, test_batches)
    check_saved_state(accelerator, model)
    return accuracy


def evaluate(accelerator: Accelerator, model: nn.Module, batches: DataLoader) -> float:
    model.eval()
    right, seen = 0, 0
    for images, labels in batches:
        with torch.no_grad():
            predictions = model(images).argmax(1)
        predictions, labels = accelerator.gather_for_metrics((predictions, labels))
        right, seen = right + int((predictions == labels).sum()), seen + len(labels)
    accelerator.print(f"test accuracy {right / seen:.3f} ({right} of {seen})")
    return right / seen


def check_saved_state(accelerator: Accelerator, model: nn.Module) -> None:
    with tempfile.TemporaryDirectory() as folder:  # of this process: each saves and loads its own
        before = [p.detach().clone() for p in model.parameters()]
        accelerator.save_model(model, folder)
        accelerator.save_state(folder)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            with torch.no_grad():
                next(model.parameters()).zero_()
            accelerator.load_state(folder)
            equal = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            print(f"weights come back: {equal}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--replicas", type=int, default=1, help="replicas in this process")
    parser.add_argument("--method", choices=METHODS, default="tree", help="how gradients are summed")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    options = parser.parse_args()
    with make_strategy(options.replicas, options.method) as strategy:
        accelerator = Accelerator(
            strategy=strategy,
            cpu=not torch.cuda.is_available(),
            mixed_precision="bf16" if options.bf16 else "no",
        )
        accelerator.print(f"{strategy.num_replicas_in_sync} replica(s), {options.method}: {strategy!r}")
        accuracy = train(accelerator, options.epochs)
        accelerator.end_training()
    return 0 if accuracy >= 0.94 else 1


if __name__ == "__main__":
    sys.exit(main())
