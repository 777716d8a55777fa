"""Which rules judge, by their names."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence

from hookline._errors import HooklineError
from hookline.rules import Rule, make_rules


class NoSuchRule(HooklineError, LookupError):
    """Say that there is no rule of a name, and which are near."""


def choose_rules(names: Collection[str] = (), *, without: Collection[str] = ()) -> list[Rule]:
    """Make the rules of these names, or all, without some."""
    rules = make_rules()
    known = [rule.name for rule in rules]
    for name in (*names, *without):
        if name not in known:
            raise explain_rule(name, known)
    return [
        rule for rule in rules if (not names or rule.name in names) and rule.name not in without
    ]


def explain_rule(name: str, known: Sequence[str]) -> NoSuchRule:
    """Say what is near a name that no rule has."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    nearest = f" Nearest: {', '.join(f'`{one}`' for one in near)}." if near else ""
    return NoSuchRule(f"there is no rule `{name}`.{nearest} There are {', '.join(known)}.")
