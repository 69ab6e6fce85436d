"""Trains a small language model of characters with ``transformers.Trainer`` under a strategy.

    torchrun --standalone --nproc-per-node=2 examples/trainer_script.py
    torchrun --standalone --nproc-per-node=2 examples/trainer_script.py --compare
    python examples/trainer_script.py

The text is the Python language reference, which comes with Python. With --compare it trains three times, without a
strategy, with ADD_N and with TREE, and prints how far the losses of any step are apart. The exit code is 1 when the
loss does not fall.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pydoc_data.topics import topics

import torch
from accelerate import PartialState
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import tfstyle_dist as tfd
from tfstyle_dist.integrations.accelerate import StrategyTrainerMixin

METHODS = {
    "add_n": tfd.AggregationMethod.ADD_N,
    "tree": tfd.AggregationMethod.EXPERIMENTAL_TREE,
    "default": tfd.AggregationMethod.DEFAULT,
}


class StrategyTrainer(StrategyTrainerMixin, Trainer):
    """A ``Trainer`` whose gradients a strategy sums."""


class Characters(Dataset):
    """Pieces of the text, each character a number."""

    def __init__(self, text: str, length: int) -> None:
        self.alphabet = sorted(set("".join(topics.values())))
        places = {character: place for place, character in enumerate(self.alphabet)}
        self.text = torch.tensor([places[character] for character in text])
        self.length = length

    def __len__(self) -> int:
        return len(self.text) // self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        piece = self.text[index * self.length : (index + 1) * self.length]
        return {"input_ids": piece, "labels": piece}


def load_data(length: int = 64) -> tuple[Characters, Characters]:
    pages = [topics[name] for name in sorted(topics)]
    cut = len(pages) * 19 // 20
    return Characters("\n".join(pages[:cut]), length), Characters("\n".join(pages[cut:])[:8192], length)


def make_model(vocabulary: int, length: int) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=length,
        n_embd=64,
        n_layer=2,
        n_head=4,
        use_cache=False,
        loss_type="ForCausalLM",
        bos_token_id=None,
        eos_token_id=None,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


def train(options: argparse.Namespace, method: str, folder: str) -> list[float]:
    train_data, test_data = load_data()
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=not torch.cuda.is_available(),
        max_steps=options.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=options.accumulate,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        bf16=options.bf16,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=not sys.stderr.isatty(),
        seed=1,
    )
    kinds = {"model": make_model(len(train_data.alphabet), train_data.length), "args": arguments}
    data = {"train_dataset": train_data, "eval_dataset": test_data}
    if method == "stock":
        trainer = Trainer(**kinds, **data)
    else:
        ops = tfd.ReductionToOneDevice(aggregation_method=METHODS[method])
        strategy = tfd.MirroredStrategy([arguments.device], cross_device_ops=ops)
        trainer = StrategyTrainer(**kinds, **data, strategy=strategy)
    trainer.train()
    last = trainer.evaluate()["eval_loss"]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if trainer.is_world_process_zero():
        processes = trainer.accelerator.num_processes
        print(f"{method}: {processes} process(es), loss {losses[0]:.3f} -> {losses[-1]:.3f}, test {last:.4f}")
    if method != "stock":
        strategy.close()
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--accumulate", type=int, default=1, help="batches for each step")
    parser.add_argument("--method", choices=METHODS, default="tree", help="how gradients are summed")
    parser.add_argument("--compare", action="store_true", help="train without a strategy too")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    options = parser.parse_args()
    methods = ["stock", "add_n", "tree"] if options.compare else [options.method]
    with tempfile.TemporaryDirectory() as folder:
        curves = [train(options, method, folder) for method in methods]
    if options.compare and PartialState().is_main_process:
        apart = max(max(losses) - min(losses) for losses in zip(*curves, strict=True))
        print(f"losses of {len(curves[0])} steps differ by at most {apart:.1e}")
    return 0 if all(losses[-1] < 0.8 * losses[0] for losses in curves) else 1


if __name__ == "__main__":
    sys.exit(main())
