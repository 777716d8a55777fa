"""Rules: from the steps of a training to findings; they know numbers and no models.

    findings.py      what a rule concludes
    rule.py          the contract of a rule, and which are applied by default
    steps.py         what a rule sees of a step
    roster.py        the sites by what they are, as arrays
    built_in.py      the rules of hookline, each beside its kind: non_finite.py, depth.py, ...
    telling.py       what the finding of a NaN says
    judging.py       the judge: all rules over all steps, live or from a run folder
    linking.py       which finding follows from which
    verdicts.py      findings folded by root cause, and the one sentence

A rule sees numbers by site and step, never a tensor: the same one judges live and later.
"""

from __future__ import annotations

from hookline.rules.built_in import checkup_rules
from hookline.rules.findings import SEVERITIES, Finding
from hookline.rules.judging import Judge, judge_run
from hookline.rules.rule import Rule, make_rules, register_rule
from hookline.rules.steps import Step, name_site
from hookline.rules.verdicts import Group, fold, say_verdict

__all__ = [
    "SEVERITIES",
    "Finding",
    "Group",
    "Judge",
    "Rule",
    "Step",
    "checkup_rules",
    "fold",
    "judge_run",
    "make_rules",
    "name_site",
    "register_rule",
    "say_verdict",
]
