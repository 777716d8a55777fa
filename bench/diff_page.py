"""Writes what the bench of comparisons came to: totals, margins, and a row for each case."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import torch
import transformers
from diff_cases import BENIGN, BUGS, WAYS, Case, Outcome, make_other, make_reference
from diff_rivals import RULES, Value, ask_rivals, follow

import hookline as hl

PAGE = Path(__file__).parent / "DIFF.md"

_LABELS = {
    "tensors": "hookline, live, from tensors",
    "sketches": "hookline, two recordings, sketches",
    "floors": "hookline, two recordings, sketches and floors",
}


@cache
def _follow_reference(name: str) -> list[Value]:
    return follow(make_reference(name))


def ask(case: Case) -> dict[str, str | None]:
    """Give what the rules of others say of a case."""
    return ask_rivals(_follow_reference(case.example), follow(make_other(case)))


def write_page(outcomes: Sequence[Outcome], *others: Sequence[Outcome]) -> None:
    """Write the page: how it was made, the totals, the margins, each case.

    Cases are listed with the first seed; of the others only what went wrong.
    """
    cases = list(dict.fromkeys(one.case.name for one in outcomes))
    answers = {name: ask({**BUGS, **BENIGN}[name]) for name in cases}
    by_case = {(one.case.name, one.way): one for one in outcomes}
    examples = {one.case.example for one in outcomes if one.case.is_bug}
    lines = [
        "# Where two models part, tried on planted bugs",
        "",
        f"Made by `python bench/diff_bench.py --seeds {1 + len(others)} --write`.",
        f"{time.strftime('%Y-%m-%d')}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, hookline {getattr(hl, '__version__', '0.1.0')}, "
        "one thread of a CPU.",
        "",
        f"{sum(name in BUGS for name in cases)} bugs planted in {len(examples)} small models, one "
        f"at a time, and {sum(name in BENIGN for name in cases)} changes that compute the same up "
        "to rounding.",
        "A bug is found exactly when the very module in which it lives is named, by its path, and "
        "the direction is right; the module whose own forward is wrong, not the next one that "
        "shows it.",
        "A benign change is right when nothing is found.",
        "",
        *_totals(cases, by_case, answers),
        "",
        "The rules of others are given what modules give, in order, then the gradients of that, "
        "then those of parameters, then updates, and name the module of the first tensor that they "
        "flag; tensors are paired by name.",
        "Their thresholds are the usual ones: cosine similarity below 0.99; `torch.allclose` as it "
        "is by default; a largest error of 1e-3; one of largest, smallest, mean or norm off by "
        "half.",
        "",
        "The constants of the verdict were chosen with these cases at hand, so this is what they "
        "must do and no measure of how they do on others.",
        *_tell_seeds(others),
        "",
        "What is below the limit stays unseen: without floors, and with no setting that differs, a "
        "difference of less than 2e-5 in float32 is not one.",
        "",
        *_margins(outcomes),
        "",
        "## Bugs",
        "",
        "What the rules of others name is shown where it is another module; `-` where they flag "
        "nothing.",
        "",
        _row("model", "bug", "lives in", "shows", "hookline", *RULES),
        _row(*["---"] * (5 + len(RULES))),
        *(_bug_row(BUGS[name], by_case, answers[name]) for name in cases if name in BUGS),
        "",
        "## Benign changes",
        "",
        _row("model", "change", "hookline", *RULES),
        _row(*["---"] * (3 + len(RULES))),
        *(_benign_row(BENIGN[name], by_case, answers[name]) for name in cases if name in BENIGN),
    ]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _tell_seeds(others: Sequence[Sequence[Outcome]]) -> list[str]:
    """Say what came of other weights and batches."""
    if not others:
        return []
    lines = ["The same with other weights and batches:", ""]
    for seed, outcomes in enumerate(others, 1):
        wrong = [f"{one.case.name} by {one.way}" for one in outcomes if not one.is_right]
        rest = f" (wrong: {', '.join(wrong)})" if wrong else ""
        count = f"{len(outcomes) - len(wrong)} of {len(outcomes)}"
        lines.append(f"- seed {seed}: {count} comparisons right{rest}")
    return lines


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _totals(
    cases: Iterable[str],
    by_case: dict[tuple[str, str], Outcome],
    answers: dict[str, dict[str, str | None]],
) -> list[str]:
    """Count for each way and rule what was exact, late or wrong, missed, and false alarms."""
    cases = list(cases)
    lines = [
        _row("verdict", "exact module", "late or wrong", "missed", "benign alarms"),
        _row(*["---"] * 5),
    ]
    named = {
        f"**{_LABELS[way]}**": {name: by_case[name, way].first for name in cases}
        for way in WAYS
        if all((name, way) in by_case for name in cases)
    }
    named |= {rule: {name: answers[name][rule] for name in cases} for rule in RULES}
    for label, said in named.items():
        bugs = [(said[name], BUGS[name].at) for name in cases if name in BUGS]
        benign = [said[name] for name in cases if name in BENIGN]
        exact = sum(first == at for first, at in bugs)
        missed = sum(first is None for first, _ in bugs)
        alarms = sum(first is not None for first in benign)
        lines.append(
            _row(
                label,
                f"{exact}/{len(bugs)}",
                str(len(bugs) - exact - missed),
                str(missed),
                f"{alarms}/{len(benign)}",
            )
        )
    return lines


def _margins(outcomes: Sequence[Outcome]) -> list[str]:
    """Say how near the nearest cases are to the limit, on both sides."""
    lines = [
        "How far the cases are from the limit, as relative error over limit: of a bug at the place "
        "found, of a benign change the largest of all, but for gradients that are nothing but "
        "rounding.",
        "A bug below its limit was told by more than its size: a setting that differs, a gradient "
        "that one side does not want, or values before it that are equal to the last bit.",
        "",
        _row(
            "way",
            "smallest bug past its limit",
            "which",
            "bugs below their limits",
            "largest benign",
            "which",
        ),
        _row(*["---"] * 6),
    ]
    for way in WAYS:
        bugs = [one for one in outcomes if one.way == way and one.case.is_bug and one.is_right]
        benign = [one for one in outcomes if one.way == way and not one.case.is_bug]
        past = [one for one in bugs if one.over > 1]
        if past and benign:
            small = min(past, key=lambda one: one.over)
            large = max(benign, key=lambda one: one.over)
            below = ", ".join(one.case.name for one in bugs if not one.over > 1)
            lines.append(
                _row(
                    way,
                    f"{small.over:.2g}",
                    small.case.name,
                    below or "none",
                    f"{large.over:.2g}",
                    large.case.name,
                )
            )
    return lines


def _say(case: Case, by_case: dict[tuple[str, str], Outcome]) -> str:
    """Say by which ways a case came out right."""
    wrong = [one for way in WAYS if (one := by_case.get((case.name, way))) and not one.is_right]
    if not wrong:
        return "right"
    return "; ".join(f"**{one.way}: {_path(one.first)} {one.direction}**" for one in wrong)


def _path(path: str | None) -> str:
    if path is None:
        return "-"
    return f"`{path}`" if path else "the model"


def _bug_row(
    case: Case, by_case: dict[tuple[str, str], Outcome], answers: dict[str, str | None]
) -> str:
    said = ("exact" if answers[rule] == case.at else _path(answers[rule]) for rule in RULES)
    about = f"{case.name}: {case.about}"
    shows = case.direction or ""
    return _row(case.example, about, _path(case.at), shows, _say(case, by_case), *said)


def _benign_row(
    case: Case, by_case: dict[tuple[str, str], Outcome], answers: dict[str, str | None]
) -> str:
    said = (f"alarm at {_path(answers[r])}" if answers[r] is not None else "-" for r in RULES)
    return _row(case.example, f"{case.name}: {case.about}", _say(case, by_case), *said)
