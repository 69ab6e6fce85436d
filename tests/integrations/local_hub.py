"""What accelerate's test scripts load from a hub, made here: a folder in which they find it without a network.

The scripts ask for ``nyu-mll/glue`` (sentence pairs), ``bert-base-cased`` (model, tokenizer) and the metric ``glue``.
The pairs made here are sentences of the Python language reference, which is part of Python: 1 where the second sentence
follows the first one, 0 where it is from another page. Two of three are 1, as in the original. The model is small and
new.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from pydoc_data.topics import topics

CARD = """---
configs:
- config_name: mrpc
  data_files:
  - split: train
    path: mrpc/train.jsonl
  - split: validation
    path: mrpc/validation.jsonl
---
"""
METRIC = '''
import datasets
import evaluate


class Glue(evaluate.Metric):
    """Accuracy and F1."""

    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        pairs = list(zip(predictions, references))
        both = sum(p and r for p, r in pairs)
        wrong = sum(p != r for p, r in pairs)
        return {"accuracy": 1 - wrong / len(pairs), "f1": 2 * both / max(2 * both + wrong, 1)}
'''


def sentences() -> list[list[str]]:
    """The sentences of each page of the reference that has some."""
    pages = [re.findall(r"[A-Z][^.\n*=]*(?:\n[^.\n*=]+)*\.", text) for text in topics.values()]
    return [[" ".join(s.split()) for s in page if 30 < len(s) < 200] for page in pages if len(page) > 10]


def pairs(count: int, seed: int) -> list[dict[str, object]]:
    """Examples as the scripts want them."""
    pages, chosen = sentences(), random.Random(seed)
    found = []
    for number in range(count):
        page, other = chosen.sample([p for p in pages if len(p) > 1], 2)
        place, follows = chosen.randrange(len(page) - 1), number % 3 != 0
        second = page[place + 1] if follows else chosen.choice(other)
        found.append({"sentence1": page[place], "sentence2": second, "label": int(follows), "idx": number})
    return found


def make(folder: Path, train: int = 96, validation: int = 40) -> None:
    """Writes data, metric, tokenizer and model into ``folder``, the working directory of the scripts."""
    data = folder / "nyu-mll" / "glue" / "mrpc"
    data.mkdir(parents=True)
    (data.parent / "README.md").write_text(CARD)
    for seed, (split, count) in enumerate({"train": train, "validation": validation}.items()):
        lines = [json.dumps(pair) for pair in pairs(count, seed)]
        (data / f"{split}.jsonl").write_text("\n".join(lines))
    (folder / "glue").mkdir()
    (folder / "glue" / "glue.py").write_text(METRIC)
    _make_model(folder / "bert-base-cased")


def _make_model(place: Path) -> None:
    import torch
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    words = BertWordPieceTokenizer(lowercase=False)
    words.train_from_iterator([s for page in sentences() for s in page], vocab_size=1000, show_progress=False)
    tokenizer = BertTokenizerFast(tokenizer_object=words._tokenizer, model_max_length=64)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=64,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(place)
    tokenizer.save_pretrained(place)
