"""`hookline diff`: two runs, and the first place where they differ."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hookline.cli.failing import Misused
from hookline.cli.run_folders import complete_runs

if TYPE_CHECKING:
    from hookline.diffs.difference import Difference

_EPILOG = """\b
exit codes:
  0  no difference
  1  they differ
  2  they cannot be compared: no recording there, not of the same model, a broken file;
     or the command line cannot be understood
"""

_LEAST_SHARE = 0.25
"""Runs of which fewer values and parameters have a counterpart are of different models."""


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


@click.command("diff", short_help="Say where two runs first differ.", epilog=_EPILOG)
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
    callback=_read_pairs(float, "PATTERN=TOL, such as 'blocks.*.attn=1e-3'"),
    help="The relative error that sites of a pattern may have; may be repeated.",
)
@click.option("--tolerance", type=float, help="The relative error that every site may have.")
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
        from hookline.diffs.ranking import compare_runs
        from hookline.diffs.reading import open_trace

        traces = [open_trace(Path(one)) for one in (a, b)]
        for trace, name in zip(traces, (a, b), strict=True):
            if step is not None and step not in trace.steps:
                raise Misused(f"`{name}` has no step {step}; it has {_list_steps(trace.steps)}")
        found = compare_runs(
            Path(a),
            Path(b),
            names=names or None,
            allow=allow or None,
            tolerance=tolerance,
            step=step,
        )
        _refuse_unrelated(found, a, b)
        if as_json:
            click.echo(json.dumps(found.to_dict(), indent=2))
        else:
            _print(found, is_all=is_all, is_short=page is not None)
    if page is not None:
        _write_page(found, page)
    if not found.same:
        if is_baseline:
            hint = f"hookline diff --baseline --update {a} {b}"
            click.echo(f"hint: if it is meant to be so: `{hint}`", err=True)
        raise click.exceptions.Exit(1)


def _list_steps(steps: Sequence[int]) -> str:
    if len(steps) < 2:
        return f"step {steps[0]} alone" if len(steps) else "none"
    return f"{len(steps)} from {steps[0]} to {steps[-1]}"


def _refuse_unrelated(found: Difference, a: str, b: str) -> None:
    """Refuse runs of different models: hardly a value or parameter has a counterpart."""
    paired = sum(
        1
        for pair in found.pairs
        if pair.kind in ("value", "parameter")
        and pair.match is not None
        # What has other sizes got its partner by its name alone.
        and (pair.match.is_group or math.prod(pair.shape) == math.prod(pair.shape_b))
    )
    alone = max(
        sum(1 for site in sites if not site.endswith((".grad", ":grad", ":update")))
        for sites in (found.alone_a, found.alone_b)
    )
    if not found.same and paired < _LEAST_SHARE * (paired + alone):
        raise Misused(
            f"`{a}` and `{b}` are runs of different models: only {paired} of {paired + alone} "
            "values and parameters have a counterpart",
            "if they are not, `--names A=B` says what is called otherwise",
        )


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
        import shutil

        from hookline.comparisons.baselines import replace_run
        from hookline.diffs.reading import open_trace

        open_trace(b)  # refuses what is no recording
        replace_run(a, lambda made: shutil.copytree(b, made))
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
        from hookline._errors import HooklineError

        text = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, (HooklineError, ValueError, OSError)):
            hint = "record one with `hookline record train.py`; `hookline ls` lists runs"
            raise Misused(text, hint) from None
        raise Misused(
            f"the runs cannot be read: {type(error).__name__}: {text}",
            "`hookline --traceback diff ...` shows where",
        ) from None
