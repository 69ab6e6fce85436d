"""``transformers.Trainer`` with several replicas in one process, against the stock ``Trainer`` on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate_state import no_accelerate_state  # noqa: F401
from on_devices import IS_CUDA
from torch.nn.functional import cross_entropy

import tfstyle_dist as tfd
from tfstyle_dist.integrations.accelerate import StrategyTrainerMixin
from tfstyle_dist.integrations.accelerate.wrappers import LocalReplicas

transformers = pytest.importorskip("transformers")

STRATEGIES = {
    "mirrored_3": lambda: tfd.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]),
    "central_2": lambda: tfd.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"]),
}


class StrategyTrainer(StrategyTrainerMixin, transformers.Trainer):
    """The trainer of ``docs/accelerate.md``."""


def sentences(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Sentences of 3 to 12 words, of which the first few have no label: shares of a batch differ in their labels."""
    drawn = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        length = int(torch.randint(3, 13, (1,), generator=drawn))
        words = torch.randint(1, 30, (length,), generator=drawn)
        labels = words.clone()
        labels[: int(torch.randint(0, length - 1, (1,), generator=drawn))] = -100
        rows.append({"input_ids": words, "labels": labels})
    return rows


def pad(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    together = torch.nn.utils.rnn.pad_sequence
    words = [row["input_ids"] for row in rows]
    return {
        "input_ids": together(words, batch_first=True),
        "labels": together([row["labels"] for row in rows], batch_first=True, padding_value=-100),
        "attention_mask": together([torch.ones_like(one) for one in words], batch_first=True),
    }


def language_model() -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=30,
            n_positions=16,
            n_embd=16,
            n_layer=1,
            n_head=2,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            loss_type="ForCausalLM",
        )
    )


class Classifier(torch.nn.Module):
    """Has no place for the Trainer's number of items: its loss is the mean over the examples."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = torch.nn.Embedding(30, 8), torch.nn.Linear(8, 3)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.head(self.words(input_ids).mean(1))
        return {"logits": logits} if labels is None else {"loss": cross_entropy(logits, labels), "logits": logits}


def classes(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(seed)
    words, labels = torch.randint(1, 30, (count, 7), generator=drawn), torch.randint(0, 3, (count,), generator=drawn)
    return [{"input_ids": row, "labels": label} for row, label in zip(words, labels, strict=True)]


def mean_of_words(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None = None) -> torch.Tensor:
    total = cross_entropy(outputs["logits"].flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")
    return total / (labels.ne(-100).sum() if num_items_in_batch is None else num_items_in_batch)


TEXTS = {"train_dataset": sentences(22, 0), "eval_dataset": sentences(9, 7), "data_collator": pad}
KINDS = {"train_dataset": classes(22, 1), "eval_dataset": classes(9, 8)}
PROGRAMS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "sentences": (language_model, TEXTS, {}),
    "accumulated": (language_model, TEXTS, {"gradient_accumulation_steps": 3}),
    "recomputed": (language_model, TEXTS, {"gradient_checkpointing": True}),
    "smoothed": (language_model, TEXTS, {"label_smoothing_factor": 0.1}),
    "own_loss": (language_model, TEXTS | {"compute_loss_func": mean_of_words}, {"gradient_accumulation_steps": 2}),
    "tokens_of_each": (language_model, TEXTS, {"average_tokens_across_devices": False}),
    "classes": (Classifier, KINDS, {"gradient_accumulation_steps": 2}),
}


def train(program: str, folder: Path, strategy: Any) -> tuple[list[float], float, dict[str, torch.Tensor]]:
    """The loss and the norm of the gradients of each step, the loss of the test, and the weights."""
    make, data, options = PROGRAMS[program]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=not IS_CUDA,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        learning_rate=0.05,
        optim="sgd",
        num_train_epochs=1,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    torch.manual_seed(3)
    model = make()
    kind, more = (transformers.Trainer, {}) if strategy is None else (StrategyTrainer, {"strategy": strategy})
    trainer = kind(model=model, args=arguments, **data, **more)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    curve = [entry[name] for entry in steps for name in ("loss", "grad_norm")]
    return curve, trainer.evaluate()["eval_loss"], model.state_dict()


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.filterwarnings("ignore")  # of transformers
def test_the_numbers_are_those_of_one_device(program: str, tmp_path: Path) -> None:
    expected = train(program, tmp_path, None)
    for name, make in STRATEGIES.items():
        with make() as strategy:
            got = train(program, tmp_path, strategy)
            torch.testing.assert_close(
                got, expected, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_the_strategy_computes_where_the_trainer_would_use_all_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train("sentences", tmp_path, None)
    # What one process finds on a machine with two GPUs.
    setup = transformers.TrainingArguments.__post_init__

    def with_two_gpus(arguments: Any) -> None:
        setup(arguments)
        arguments._n_gpu = 2

    monkeypatch.setattr(transformers.TrainingArguments, "__post_init__", with_two_gpus)
    with STRATEGIES["mirrored_3"]() as strategy:
        got = train("sentences", tmp_path, strategy)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


class Noting(Classifier):
    """Writes down how many sentences each call is given."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[bool, int]] = []

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        self.sizes.append((self.training, len(input_ids)))
        return super().forward(input_ids, labels)


@pytest.mark.parametrize("is_elsewhere", [True, False])
@pytest.mark.filterwarnings("ignore")  # of transformers
def test_an_evaluation_takes_whole_batches(is_elsewhere: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """True: as where parameters are on the CPU and the replicas on GPUs; the first one has copies of them then."""
    monkeypatch.setattr(LocalReplicas, "is_elsewhere", is_elsewhere)
    monkeypatch.setitem(PROGRAMS, "noting", (Noting, KINDS, {}))
    calls: list[bool] = []
    inner = LocalReplicas.forward
    monkeypatch.setattr(
        LocalReplicas, "forward", lambda self, *a, **k: [calls.append(self.training), inner(self, *a, **k)][1]
    )
    expected = train("noting", tmp_path, None)
    with STRATEGIES["central_2"]() as strategy:
        made: list[Noting] = []
        monkeypatch.setitem(PROGRAMS, "noting", (lambda: made.append(Noting()) or made[0], KINDS, {}))
        got = train("noting", tmp_path, strategy)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert [size for training, size in made[0].sizes if training][:2] == [2, 2]
    assert [size for training, size in made[0].sizes if not training] == [4, 4, 1]
    assert calls.count(False) == (3 if is_elsewhere else 0)
