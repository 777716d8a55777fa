"""What the arguments of a watch mean for the models at hand: which parameters, which rules."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping

from torch import nn

from hookline._errors import NoSuchSite
from hookline.addresses import ModuleTree, resolve
from hookline.addresses.pattern import compile_path
from hookline.rules import Rule
from hookline.watchers.options import Options


def choose_all(models: Mapping[str, nn.Module], options: Options) -> Callable[[str], object]:
    """Make what tells whether a parameter is watched; raise where a pattern names none."""
    if options.sites is None:
        _check_strides(models, options.strides)
    tests = [choose_parameters(models, pattern) for pattern in options.parameter_patterns]
    return lambda name: any(test(name) for test in tests)


def choose_parameters(
    models: Mapping[str, nn.Module], pattern: str | None
) -> Callable[[str], object]:
    """Make what tells whether a parameter is watched; raise where the pattern names none."""
    if pattern is None:
        return lambda name: False
    is_wanted = compile_path(pattern)
    trees = [ModuleTree(model) for model in models.values()]
    names = [name for tree in trees for one in tree.parameters for name in one.names]
    if names and pattern != "**" and not any(map(is_wanted, names)):
        near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3)
        if any(is_wanted(name.rpartition(".")[0]) for name in names):
            near = [f"{pattern}.*"]  # it names modules
        shown = f" Nearest: {', '.join(f'`{one}`' for one in near)}." if near else ""
        raise NoSuchSite(
            f"parameters={pattern!r} matches none of {len(names)} parameters.{shown} "
            "List them with `dict(model.named_parameters())`."
        )
    return is_wanted


def _check_strides(models: Mapping[str, nn.Module], strides: Mapping[str, int]) -> None:
    """Raise where the pattern of a stride names nothing in any model."""
    trees = [ModuleTree(model) for model in models.values()]
    for pattern in strides if trees else ():
        errors = []
        for tree in trees:
            try:
                resolve(tree, pattern)
            except NoSuchSite as error:
                errors.append(error)
        if len(errors) == len(trees):
            raise errors[0]


def list_rules(options: Options) -> list[Rule] | None:
    """Give the rules that were asked for; None for those by default."""
    return None if isinstance(options.rules, bool) else list(options.rules)


def is_judged_by(options: Options, name: str) -> bool:
    """Tell whether a rule of a name judges."""
    if isinstance(options.rules, bool):
        return options.rules
    return any(one.name == name for one in options.rules)
