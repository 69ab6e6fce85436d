"""Runs one case in all its forms and says of each whether it is as on one device."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import servers
import torch
from forms import DEVICE, Answer, answers_of
from programs import CASES, REPLICAS, Case, Each

TOLERANCE = {"fp32": 1e-5, "fp64": 1e-10}
AGREES, REFUSED, DOCUMENTED = "agrees", "refused", "differs as documented"
DIFFERS, RAISES, HANGS, INVALID = "differs", "raises", "hangs", "is no case"
STALE = "agrees, documented to differ"
FOR_THE_CPU = "is written for the CPU"
"""One device raises, and is no CPU: it names that, or draws with a generator of the CPU."""
GOOD = (AGREES, REFUSED, DOCUMENTED, FOR_THE_CPU)
REFUSALS = {
    "central": re.compile(
        r"^RuntimeError: .*\b[Uu]nder central storage\b|which the first replica makes for all with", re.DOTALL
    ),
    "elastic": re.compile(
        r"^UnavailableError: .* a step raised here|^NotImplementedError: .* In an elastic job", re.DOTALL
    ),
    "servers": re.compile(
        r"A scheduled function (changed settings of|wrote to the parameter|put another tensor in the place)"
        r"|cannot be sent to another process|step\(closure\) under a parameter server|LBFGS needs the loss again"
        r"|have changed since the parameter servers were told|was made inside a scheduled function"
        r"|lives? on parameter servers already|on the parameter servers and cannot become"
        r"|Parameter servers make (the|its) steps?|The parameter groups of \w+ are of the class"
        r"|has a hook that was registered with register_step|parameter servers take over plain parameters"
        r"|was given the memory of|of the buffer '\w+' of|its copies already share memory"
        r"|The state of \w+ is on the parameter servers"
    ),
}
"""What refusals of whole classes of programs say: what would be written for each replica where there is one copy
(docs/central_storage.md), steps that raise, and what comes into being in a step (docs/elastic.md), what a worker cannot
do with what the servers have (docs/parameter_server.md)."""


@dataclass(frozen=True)
class Verdict:
    """What came of one case in one form.

    Attributes:
        case: its title.
        form: its name.
        verdict: one of the words above.
        difference: the largest, relative to the largest value where that is above 1.
        dtype: in which it was measured.
        said: of an exception, of what differs, or why that is right.
    """

    case: str
    form: str
    verdict: str
    difference: float | None = None
    dtype: str = ""
    said: str = ""

    @property
    def good(self) -> bool:
        return self.verdict in GOOD

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _distance(reference: torch.Tensor, found: torch.Tensor) -> float:
    if reference.shape != found.shape:
        return math.inf
    if not reference.numel() or torch.equal(reference, found):
        return 0.0
    same = (reference == found) | (reference.isnan() & found.isnan())
    apart = (reference - found).abs().masked_fill(same, 0.0).max().item()
    finite = reference[reference.isfinite()]
    largest = finite.abs().max().item() if finite.numel() else 0.0
    return math.inf if math.isnan(apart) else apart / max(1.0, largest)


def difference(reference: Mapping[str, Any], found: Mapping[str, Any], rank: int = 0) -> tuple[float, str]:
    """The largest difference between the results of a program, and in which of its values.

    Args:
        reference: what is expected; of what differs by replica, one value for all, or one for each replica of the job.
        found: in one process.
        rank: its number.
    """
    worst, where = 0.0, ""
    for key in {**reference, **found}:
        expected, value = reference.get(key), found.get(key)
        if isinstance(expected, str) or isinstance(value, str) or expected is None or value is None:
            apart = 0.0 if expected == value else math.inf
        else:
            wanted = expected if isinstance(expected, Each) else [expected]
            values = value if isinstance(value, Each) else [value]
            if len(wanted) > len(values):
                wanted = wanted[rank * len(values) : (rank + 1) * len(values)]
            elif len(wanted) != len(values):
                wanted = [wanted[0]] * len(values)
            apart = max((_distance(w, v) for w, v in zip(wanted, values, strict=True)), default=0.0)
        if apart > worst:
            worst, where = apart, key
    return worst, where


def _joined(answers: Sequence[Answer]) -> Answer:
    """The answer of all ranks: their replicas' values together, or the first thing that went wrong."""
    for wrong in ("hang", "raised"):
        for kind, value in answers:
            if kind == wrong:
                return kind, value
    values = dict(answers[0][1])
    for _, other in answers[1:]:
        for key, value in other.items():
            if isinstance(value, Each):
                values[key] = Each([*values[key], *value])
    return "values", values


def _without_numbers(values: Mapping[str, Any]) -> list[str]:
    """The values of a program that are NaN throughout: what agrees with them says nothing."""
    found = []
    for key, value in values.items():
        tensors = [] if isinstance(value, str) else value if isinstance(value, Each) else [value]
        if any(tensor.numel() and tensor.isnan().all() for tensor in tensors):
            found.append(key)
    return found


def expected(table: Mapping[str, str], form: str) -> str | None:
    """What a table says of a form."""
    return table.get(form, table.get("*"))


def _judged(case: Case, form: str, dtype: str, reference: Answer, answers: Sequence[Answer]) -> Verdict:
    def verdict(word: str, apart: float | None = None, said: str = "") -> Verdict:
        return Verdict(case.title, form, word, apart, dtype, said)

    refused = expected(case.refused, form)
    if form == "servers" and all(kind != "raised" for kind, _ in answers):
        refused = case.refused.get(form)  # what is refused of several replicas may be right with one
    if any(kind == "hang" for kind, _ in answers):
        return verdict(HANGS, said=_joined(answers)[1])
    if refused is not None:
        as_always = REFUSALS.get(form, re.compile("(?!)"))
        wrong = [v for kind, v in answers if kind != "raised" or not (re.search(refused, v) or as_always.search(v))]
        return verdict(RAISES, said=f"no refusal: {wrong[0]!s:.300}") if wrong else verdict(REFUSED, said=answers[0][1])
    kind, value = _joined(answers)
    if reference[0] != "values":
        if case.raises is None or reference[0] != "raised" or not re.search(case.raises, reference[1]):
            elsewhere = DEVICE != "cpu" and reference[0] == "raised"
            return verdict(FOR_THE_CPU if elsewhere else INVALID, said=f"one device: {reference[1]}")
        alike = kind == "raised" and re.search(case.raises, value)
        return verdict(AGREES if alike else DIFFERS, 0.0 if alike else None, f"one device raises; here: {value!s:.300}")
    if nothing := _without_numbers(reference[1]):
        return verdict(INVALID, said=f"one device has nothing but NaN in {', '.join(nothing)}")
    own = servers.differs(case.title) if form == "servers" else None
    if kind == "raised":
        refuses = form in REFUSALS and REFUSALS[form].search(value)
        return verdict(REFUSED if refuses else DOCUMENTED if own else RAISES, said=value)
    found = [difference(reference[1], v, rank) for rank, (_, v) in enumerate(answers)]
    apart, where = max(found, key=lambda pair: pair[0])
    why = own or expected(case.differs, form)
    if apart <= (case.tolerance or TOLERANCE[dtype]):
        # What "*" says may not concern one replica, and devices may keep apart what shares memory on the CPU.
        stale = why is not None and (own is not None or form != "servers") and DEVICE == "cpu"
        return verdict(STALE, apart, why or "") if stale else verdict(AGREES, apart)
    # Nothing in common is no difference that a reason explains, but for lists that were filled in a worker's copy.
    if why is None or not (math.isfinite(apart) or own == servers.IN_COPIES):
        return verdict(DIFFERS, apart, where)
    return verdict(DOCUMENTED, apart, why)


def _references(
    case: Case, form: str, dtype: str, folder: Path, known: dict[tuple[str, int], list[Answer]], together: bool
) -> list[Answer]:
    """The answers that together are expected: one device's, or those of all ranks."""
    shares = REPLICAS[form] if case.reference == "shares" else 1
    key = (dtype, shares)
    if key not in known:
        source = "ranks" if case.reference == "ranks" else "one"
        known[key] = answers_of(case, source, dtype, folder, shares, together)
    return known[key]


def judge(title: str, forms: Sequence[str], together: bool = False) -> list[dict[str, Any]]:
    """Runs a case in those of its forms that are asked for; ``together``: in processes that stay for the next."""
    case = CASES[title]
    known: dict[tuple[str, int], list[Answer]] = {}
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="foreign-") as name:
        folder = Path(name)
        for form in [f for f in case.forms if f in forms]:
            for dtype in ("fp32", "fp64") if case.dtype == "auto" else (case.dtype,):
                references = _references(case, form, dtype, folder, known, together)
                if case.reference == "ranks" and form == "ranks":
                    answers = references  # each rank is compared with the first, but for what is each replica's own
                else:
                    answers = answers_of(case, form, dtype, folder, together=together)
                verdict = _judged(case, form, dtype, _joined(references), answers)
                if verdict.verdict != DIFFERS:
                    break
            verdicts.append(verdict.as_dict())
    return verdicts
