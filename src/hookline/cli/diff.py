"""`hookline diff`: two runs, and the first place where they differ."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hookline.cli.failing import Failure, Misused
from hookline.cli.run_folders import complete_runs

if TYPE_CHECKING:
    from hookline.diffs.difference import Difference
    from hookline.diffs.traces import Trace
    from hookline.runs import Run

_EPILOG = """\b
exit codes:
  0  no difference
  1  they differ; with --baseline also: B died, or lacks steps that A has
  2  they cannot be compared: no recording there, not of the same model, a broken file;
     or the command line cannot be understood; with --json: {"error": ...}
"""

_DIED = {"failed": "failed", "killed": "was killed", "interrupted": "was interrupted"}


def _read_pairs(convert: Callable[[str], Any], what: str) -> Callable[..., dict[str, Any]]:
    """Make what reads options of the form NAME=VALUE."""

    def read(context: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> Any:
        found = {}
        for text in given:
            name, sign, value = text.rpartition("=")
            try:
                if not sign or not name:
                    raise ValueError
                found[name] = convert(value)
            except ValueError:
                raise click.BadParameter(f"`{text}` is not {what}") from None
        return found

    return read


def _read_limit(text: str) -> float:
    """Read a relative error: a number, 0 or more."""
    limit = float(text)
    if not math.isfinite(limit) or limit < 0:
        raise ValueError
    return limit


def _read_tolerance(
    context: click.Context, parameter: click.Parameter, given: str | None
) -> float | None:
    try:
        return None if given is None else _read_limit(given)
    except ValueError:
        raise click.BadParameter(
            f"`{given}` is no relative error: 0 or more, such as 1e-3"
        ) from None


class _JsonCommand(click.Command):
    """A command that says what went wrong as JSON too, where JSON was asked for."""

    def make_context(
        self, info_name: str | None, args: list[str], *rest: Any, **more: Any
    ) -> click.Context:
        with _telling_in_json("--json" in args):
            return super().make_context(info_name, args, *rest, **more)

    def invoke(self, ctx: click.Context) -> Any:
        with _telling_in_json(ctx.params["as_json"]):
            return super().invoke(ctx)


@contextmanager
def _telling_in_json(is_asked: bool) -> Iterator[None]:
    try:
        yield
    except click.ClickException as error:
        if is_asked:
            told = {"error": error.format_message(), "hint": getattr(error, "hint", None)}
            click.echo(json.dumps(told, indent=2))
        raise


@click.command(
    "diff", cls=_JsonCommand, short_help="Say where two runs first differ.", epilog=_EPILOG
)
@click.argument("a", shell_complete=complete_runs)
@click.argument("b", shell_complete=complete_runs)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for another program.")
@click.option(
    "--html",
    "page",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the report as one HTML file.",
)
@click.option("--all", "is_all", is_flag=True, help="Show every site, not those around the first.")
@click.option(
    "--allow",
    metavar="PATTERN=TOL",
    multiple=True,
    callback=_read_pairs(_read_limit, "PATTERN=TOL, such as 'blocks.*.attn=1e-3'"),
    help="The relative error that sites of a pattern may have; may be repeated.",
)
@click.option(
    "--tolerance",
    metavar="TOL",
    callback=_read_tolerance,
    help="The relative error that every site may have.",
)
@click.option(
    "--names",
    metavar="A=B",
    multiple=True,
    callback=_read_pairs(str, "A=B, such as 'layers=blocks'"),
    help="What a path of A is called in B, also as a regular expression; may be repeated.",
)
@click.option("--step", type=int, help="Compare this step alone.")
@click.option(
    "--baseline",
    "is_baseline",
    is_flag=True,
    help="A is a baseline that is kept: with --update, B takes its place where they differ.",
)
@click.option("--update", is_flag=True, help="With --baseline: put B in the place of A.")
def diff_runs(
    a: str,
    b: str,
    as_json: bool,
    page: Path | None,
    is_all: bool,
    allow: dict[str, float],
    tolerance: float | None,
    names: dict[str, str],
    step: int | None,
    is_baseline: bool,
    update: bool,
) -> None:
    """Say where the runs A and B first differ, and why: folders of `hookline record`.

    \b
    examples:
      hookline record -o runs/a train.py
      hookline diff runs/a runs/b
      hookline diff runs/a runs/b --allow 'blocks.*.attn=1e-3' --html diff.html
      hookline diff runs/a runs/b --json | jq .first
      hookline diff --baseline tests/baseline runs/new
    """
    if update and not is_baseline:
        raise Misused("`--update` puts B in the place of a baseline", "add `--baseline`")
    if update:
        _update(Path(a), Path(b))
        return
    with _refusing():
        from hookline.diffs.comparing import compare
        from hookline.diffs.ranking import compare_ranks
        from hookline.runs import open_run

        runs = open_run(a), open_run(b)
        lacking = _find_lacking(runs, b, step=step) if is_baseline else []

        def compare_traces(x: Trace, y: Trace) -> Difference:
            _check_step(step, {a: x, b: y})
            return compare(
                x, y, names=names or None, allow=allow or None, tolerance=tolerance, step=step
            )

        found = compare_ranks(*runs, compare_traces)
        if page is not None:
            _write_page(found, page)
        if as_json:
            more = {"same": found.same and not lacking, "lacking": lacking} if is_baseline else {}
            click.echo(json.dumps({**found.to_dict(), **more}, indent=2))
        else:
            _print(found, is_all=is_all, is_short=page is not None)
    for sentence in lacking:
        click.echo(f"difference: {sentence}", err=True)
    if not found.same or lacking:
        if is_baseline:
            hint = f"hookline diff --baseline --update {a} {b}"
            click.echo(f"hint: if it is meant to be so: `{hint}`", err=True)
        raise click.exceptions.Exit(1)


def _check_step(step: int | None, traces: Mapping[str, Trace]) -> None:
    for name, trace in traces.items():
        if step is not None and step not in trace.steps:
            raise Misused(f"`{name}` has no step {step}; it has {_list_steps(trace.steps)}")


def _find_lacking(runs: tuple[Run, Run], name: str, *, step: int | None) -> list[str]:
    """Say what a run lacks that its baseline has: an end, and steps."""
    baseline, run = runs
    found = []
    if run.status in _DIED and run.status != baseline.status:
        found.append(f"`{name}` did not come to its end: it {_DIED[run.status]}")
    if step is None:
        missing = sorted(set(map(int, baseline.steps)) - set(map(int, run.steps)))
        if missing:
            few = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
            steps = "a step" if len(missing) == 1 else f"{len(missing)} steps"
            found.append(f"`{name}` lacks {steps} that the baseline has: {few}")
    if found and not len(run.steps):
        raise Failure("; ".join(found))  # there is nothing to compare, and it is a difference
    return found


def _list_steps(steps: Sequence[int]) -> str:
    if len(steps) < 2:
        return f"step {steps[0]} alone" if len(steps) else "none"
    return f"{len(steps)} from {steps[0]} to {steps[-1]}"


def _print(found: Difference, *, is_all: bool, is_short: bool) -> None:
    if is_short and not is_all:
        click.echo(found.sentence)
        return
    from hookline.views import format_diff

    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    click.echo(format_diff(found, all=is_all, color=color))


def _write_page(found: Difference, page: Path) -> None:
    from hookline.views import write_diff_html

    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        write_diff_html(found, page)
    except OSError as error:
        raise Misused(f"`{page}` cannot be written: {error.strerror or error}") from None
    click.echo(f"page: {page}", err=True)


def _update(a: Path, b: Path) -> None:
    with _refusing():
        from hookline.comparisons.baselines import replace_run
        from hookline.diffs.reading import open_trace
        from hookline.runs.belonging import copy_run

        open_trace(b)  # refuses what is no recording
        replace_run(a, lambda made: copy_run(b, made))
    click.echo(f"`{a}` is now what `{b}` is", err=True)


@contextmanager
def _refusing() -> Iterator[None]:
    """Say what cannot be compared in one sentence, with the exit code of bad input."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (click.ClickException, click.exceptions.Exit, click.Abort)):
            raise
        if click.get_current_context().find_root().params.get("traceback"):
            raise
        from hookline._errors import HooklineError, NoSuchRun, NotRecorded

        text = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, (HooklineError, ValueError, OSError)):
            is_no_run = isinstance(error, (NoSuchRun, NotRecorded))
            hint: str | None = (
                "record one with `hookline record train.py`; `hookline ls` lists runs"
            )
            if not is_no_run:
                hint = "here it is written `--names A=B`" if "names={" in text else None
            raise Misused(text, hint) from None
        raise Misused(
            f"the runs cannot be read: {type(error).__name__}: {text}",
            "`hookline --traceback diff ...` shows where",
        ) from None
