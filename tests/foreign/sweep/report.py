"""The table of what was measured: totals of each group and form, what is not equal, and every case."""

from __future__ import annotations

import platform
from collections import Counter, defaultdict
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from judge import AGREES, DOCUMENTED, FOR_THE_CPU, HANGS, REFUSED, Verdict
from programs import ALL_FORMS

PACKAGES = (
    "torch", "transformers", "torchvision", "timm", "vit-pytorch", "segmentation-models-pytorch", "diffusers",
    "torch-geometric", "gpytorch", "normflows", "nflows", "pytorch-tabnet", "rtdl_revisiting_models",
    "tab-transformer-pytorch", "x-transformers", "snntorch", "vector-quantize-pytorch", "torchdiffeq", "e3nn",
    "peft", "pytorch-optimizer", "torch-optimizer", "schedulefree", "lion-pytorch", "prodigyopt", "ema-pytorch",
    "torch-ema", "heavyball", "dadaptation", "adan-pytorch", "came-pytorch", "madgrad", "ranger21", "sophia-opt",
    "adabelief-pytorch", "torch-optimi", "torchzero", "adam-atan2-pytorch", "grokfast-pytorch", "muon-optimizer",
    "geoopt", "adabound", "adamp", "pytorch-ranger", "core-optimizer", "casmo-optimizer", "entmax", "egnn-pytorch",
    "g-mlp-pytorch", "hyper-connections", "pykan", "kornia", "linformer", "local-attention", "loralib", "mambapy",
    "mixture-of-experts", "ncps", "nystrom-attention", "perceiver-pytorch", "performer-pytorch",
    "product-key-memory", "pytorch-metric-learning", "pytorch-msssim", "pytorch-tcn", "reformer-pytorch",
    "rotary-embedding-torch", "sentence-transformers", "siren-pytorch", "soft-moe-pytorch", "spikingjelly",
    "st-moe-pytorch", "torchcde", "pytorch-crf", "torchsde", "zuko", "pytorch-ignite", "skorch", "fastai", "higher",
    "backpack-for-pytorch", "laplace-torch", "tensordict", "torchrl", "gymnasium", "stable-baselines3",
    "pytorch-lightning", "pytorch-warmup", "torchmetrics", "blitz-bayesian-pytorch", "tensorly-torch",
    "neuraloperator", "pypose", "torchao", "torch-pruning", "torchinfo", "thop", "fvcore", "lightly", "piq",
    "lpips", "captum", "pykeen", "pyro-ppl", "routing-transformer", "linear-attention-transformer",
    "sinkhorn-transformer", "h-transformer-1d", "gateloop-transformer", "infini-transformer-pytorch",
)  # fmt: skip


def _versions() -> str:
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def _cell(verdicts: Sequence[Verdict]) -> str:
    if not verdicts:
        return "-"
    count = Counter(v.verdict for v in verdicts)
    besides = {REFUSED: "refused", DOCUMENTED: "documented", FOR_THE_CPU: "for the CPU"}
    judged = len(verdicts) - sum(count[word] for word in besides)
    extra = [f"{count[word]} {text}" for word, text in besides.items() if count[word]]
    return " + ".join([f"{count[AGREES]} of {judged}", *extra]) + (f", **{count[HANGS]} hang**" if count[HANGS] else "")


def _totals(verdicts: Sequence[Verdict], forms: Sequence[str]) -> list[str]:
    groups: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        groups[verdict.case.partition("/")[0]].append(verdict)
    rows = [f"| group | cases | {' | '.join(forms)} |", "|---" * (len(forms) + 2) + "|"]
    for name, found in [*sorted(groups.items()), ("**all**", list(verdicts))]:
        cells = [_cell([v for v in found if v.form == form]) for form in forms]
        rows.append(f"| {name} | {len({v.case for v in found})} | {' | '.join(cells)} |")
    return rows


def _value(verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    if verdict.verdict == AGREES and verdict.said:  # what the case is about
        return "raises as one device"
    if verdict.verdict == AGREES:
        return f"{verdict.difference:.0e}" + (" (fp64)" if verdict.dtype == "fp64" else "")
    return verdict.verdict if verdict.difference is None else f"{verdict.verdict}: {verdict.difference:.0e}"


def _said(text: str, length: int) -> str:
    line = " ".join(text.split()).replace("|", "\\|")
    return line if len(line) <= length else line[:length].rpartition(" ")[0] + " ..."


def written(verdicts: Sequence[Verdict], missing: Sequence[str], seconds: float) -> str:
    """The whole table as Markdown."""
    forms = [form for form in ALL_FORMS if any(v.form == form for v in verdicts)]
    lines = [
        "# Other people's code, against one device",
        "",
        "Written by `make foreign` (`tests/foreign/sweep`). Each case is trained on one device and in each form; equal",
        "means a largest difference of 1e-5 in fp32, or 1e-10 in fp64 where it is not that, relative to the largest",
        "value where that is above 1. The forms: `replicas` 2 in one process, `ranks` 2 processes, `central` storage",
        "with 2 replicas in one process, `shared` the same with 2 processes, `grouped` 2 processes of 2 replicas,",
        "`elastic` these as an elastic job, `servers` a parameter server with `max_staleness=0`.",
        "What is refused, or differs as documented, is explained in docs/status.md and left out of the totals.",
        "",
        f"{platform.system()}, Python {platform.python_version()}, {_versions()}. {seconds:.0f} s.",
        "",
        *_totals(verdicts, forms),
    ]
    if missing:
        lines += ["", f"Not installed, so not run: {', '.join(missing)}."]
    wrong = sorted((v for v in verdicts if not v.good), key=lambda v: (v.case, v.form))
    told = sorted((v for v in verdicts if v.good and v.verdict != AGREES), key=lambda v: (v.case, v.form))
    for title, chosen in (("What does not agree", wrong), ("What is refused, or differs as documented", told)):
        lines += ["", f"## {title}", "", "| case | form | | why |", "|---|---|---|---|"]
        lines += [f"| {v.case} | {v.form} | {_value(v)} | {_said(v.said, 300)} |" for v in chosen] or ["| none | | | |"]
    by_case: dict[str, dict[str, Verdict]] = defaultdict(dict)
    for verdict in verdicts:
        by_case[verdict.case][verdict.form] = verdict
    lines += ["", "## Every case", "", f"| case | {' | '.join(forms)} |", "|---" * (len(forms) + 1) + "|"]
    for name in sorted(by_case):
        lines.append(f"| {name} | {' | '.join(_value(by_case[name].get(form)) for form in forms)} |")
    return "\n".join(lines) + "\n"
