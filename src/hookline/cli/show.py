"""`hookline show`: the numbers of a site over the steps of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hookline.cli.failing import Failure, Misused
from hookline.cli.run_folders import complete_runs, open_named
from hookline.cli.sparklines import draw

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from hookline.runs import Run, Series, SiteFacts

_STATS = {"update": ("rms", "ratio", "lost"), "": ("rms", "absmax", "mean", "nan", "inf")}
_MOST_ROWS = 20
_WIDTH = 40


def _complete(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete a run, then the sites of that run."""
    from click.shell_completion import CompletionItem

    given = context.params.get("words") or ()
    if not given:
        return complete_runs(context, parameter, incomplete)
    try:
        sites = open_named(given[0]).sites()
    except click.ClickException:
        return []
    names = [str(row["site"]) for row in sites]
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


@click.command("show", short_help="Show the numbers of a site over the steps of a run.")
@click.argument("words", nargs=-1, metavar="[RUN] SITE...", shell_complete=_complete)
@click.option(
    "--stat", "stats", metavar="STAT", multiple=True, help="What to show; may be repeated."
)
@click.option("--rank", type=int, help="Of one rank alone.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for another program.")
def show(words: tuple[str, ...], stats: tuple[str, ...], rank: int | None, as_json: bool) -> None:
    """Show what is known of SITE in RUN: facts, findings, and its numbers over the steps.

    SITE is an address or a pattern; one that names several gives a list. It may also be a number of
    the steps themselves: loss, lr, seconds. Without RUN it is the newest one below `runs`.

    \b
    examples:
      hookline show blocks.5.attn
      hookline show runs/train-20260104-101500 blocks.5.attn --stat absmax
      hookline show 'blocks.*.attn:output.grad'
      hookline show head.weight:update --stat ratio --json
      hookline show loss
    """
    from hookline._errors import AmbiguousRead, HooklineError, NoSuchSite
    from hookline.runs.schema import is_run

    is_named = bool(words) and (is_run(Path(words[0])) or Path(words[0]).is_dir())
    if not words[is_named:]:
        raise Misused(
            "there is no site to show",
            "name one: `hookline show RUN blocks.0`; or list them: `hookline show RUN '**'`",
        )
    run = open_named(words[0] if is_named else None)
    try:
        if len(words[is_named:]) == 1:
            try:
                facts = run.site(words[-1])
            except AmbiguousRead:
                pass
            except NoSuchSite:
                if words[-1] not in run.scalars or stats:
                    raise
                _show_scalar(run, words[-1], rank=rank, as_json=as_json)
                return
            else:
                _show_one(run, facts, stats, rank=rank, as_json=as_json)
                return
        _show_many(run, list(words[is_named:]), stats, rank=rank, as_json=as_json)
    except HooklineError as error:
        hint = f"`hookline show {words[0]} '**'`" if is_named else "`hookline show '**'`"
        raise Failure(str(error), f"{hint} lists the sites of the run") from None


def _show_one(
    run: Run, facts: SiteFacts, stats: tuple[str, ...], *, rank: int | None, as_json: bool
) -> None:
    chosen = stats or _STATS.get(facts.kind, _STATS[""])
    series = {stat: run.series(facts.address, stat, rank=rank) for stat in chosen}
    findings = [one for one in run.findings if _is_about(one, facts)]
    steps = [int(step) for step in next(iter(series.values())).steps]
    if as_json:
        described = {
            "site": _describe(facts),
            "findings": findings,
            "steps": steps,
            "stats": {
                stat: [_plain(one) for one in found.values] for stat, found in series.items()
            },
        }
        click.echo(json.dumps(described, indent=2))
        return
    shape = "x".join(map(str, facts.shape))
    click.echo(f"{facts.address}  {facts.type}  {facts.kind}  {shape}  {facts.dtype}")
    if facts.source:
        click.echo(facts.source)
    for one in findings:
        click.echo(f"{one.get('severity')}: {one.get('rule')}: {one.get('message')}")
    click.echo("")
    _print_series(series, steps)


def _show_scalar(run: Run, name: str, *, rank: int | None, as_json: bool) -> None:
    found = run.scalar(name, rank=rank)
    steps = [int(step) for step in found.steps]
    if as_json:
        values = [_plain(one) for one in found.values]
        click.echo(json.dumps({"scalar": name, "steps": steps, "values": values}, indent=2))
    else:
        _print_series({name: found}, steps)


def _print_series(series: Mapping[str, Series], steps: list[int]) -> None:
    """Draw numbers over the steps, and list them under that."""
    from hookline._tables import Table, format_number

    width = max(map(len, series))
    for stat, found in series.items():
        finite = [value for value in map(float, found.values) if math.isfinite(value)]
        reach = (
            f"{format_number(min(finite))} to {format_number(max(finite))}" if finite else "nothing"
        )
        click.echo(f"{stat:<{width}}  {draw(found.values, _WIDTH)}  {reach}")
    click.echo("")
    picked = _pick(len(steps), _MOST_ROWS)
    rows = [(steps[at], *(_cell(found.values[at]) for found in series.values())) for at in picked]
    notes = []
    if len(picked) < len(steps):
        notes.append(f"{len(picked)} of {len(steps)} steps; all of them with --json")
    click.echo(str(Table(("step", *series), rows, notes=notes)))


def _show_many(
    run: Run, where: list[str], stats: tuple[str, ...], *, rank: int | None, as_json: bool
) -> None:
    import numpy as np

    from hookline._tables import Table

    if len(stats) > 1:
        raise Misused("several sites are shown by one statistic", f"leave `--stat {stats[0]}`")
    stat = stats[0] if stats else "rms"
    found = run.map(stat, where=where, rank=rank)
    if as_json:
        described = {
            "stat": stat,
            "steps": [int(step) for step in found.steps],
            "sites": [
                {"address": address, "values": [_plain(one) for one in values]}
                for address, values in zip(found.addresses, found.values, strict=True)
            ],
        }
        click.echo(json.dumps(described, indent=2))
        return
    rows = []
    for address, values in zip(found.addresses, found.values, strict=True):
        there = values[~np.isnan(values)]
        ends = [_cell(there[0]), _cell(there[-1]), _cell(there.max())] if len(there) else [None] * 3
        rows.append((address, *ends, draw(values, 24)))
    title = f"{stat} of {len(rows)} sites over {len(found.steps)} steps"
    click.echo(
        str(Table(("site", "first", "last", "largest", "over the steps"), rows, title=title))
    )


def _is_about(finding: dict[str, Any], facts: SiteFacts) -> bool:
    """Tell whether a finding names a site, or the module that it is of."""
    names = (str(finding.get("site", "")), *map(str, finding.get("others", ())))
    return any(name in (facts.address, facts.module) and name for name in names)


def _describe(facts: SiteFacts) -> dict[str, Any]:
    names = ("address", "kind", "module", "type", "dtype", "source")
    return {name: getattr(facts, name) for name in names} | {"shape": list(facts.shape)}


def _plain(value: Any) -> float | str | None:
    """Write a number as JSON can hold it."""
    number = float(value)
    if math.isnan(number):
        return None
    return number if math.isfinite(number) else ("inf" if number > 0 else "-inf")


def _cell(value: Any) -> float | None:
    return None if math.isnan(float(value)) else float(value)


def _pick(count: int, most: int) -> list[int]:
    """Choose places spread over a range, with the first and the last."""
    if count <= most:
        return list(range(count))
    return sorted({round(at * (count - 1) / (most - 1)) for at in range(most)})
