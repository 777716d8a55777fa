"""`hookline report`: what a run came to."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import click

from hookline.cli.failing import Failure, running_code
from hookline.cli.run_folders import complete_runs, open_named

_EPILOG = """\b
exit codes:
  0  the report was made
  1  the run cannot be read; or, with --fail-on error, a finding is an error
  2  the command line cannot be understood
"""


@click.command("report", short_help="Say what a run came to.", epilog=_EPILOG)
@click.argument("run", required=False, shell_complete=complete_runs)
@click.option(
    "--html",
    "page",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the report as one HTML file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for another program.")
@click.option(
    "--fail-on",
    type=click.Choice(["error", "warning", "never"]),
    default="never",
    show_default=True,
    help="The least severe finding that makes the exit code 1.",
)
def report(run: str | None, page: Path | None, as_json: bool, fail_on: str) -> None:
    """Say what RUN came to: a run folder, also of a run that goes on or was killed.

    Without RUN it is the newest one below `runs`.

    \b
    examples:
      hookline report
      hookline report runs/train-20260104-101500
      hookline report runs/train-20260104-101500 --html report.html
      hookline report runs/train-20260104-101500 --json | jq '.findings[].message'
    """
    opened = open_named(run)
    from hookline.scripts.running import is_bad
    from hookline.views import format_report, read_report, write_html

    with running_code("reading the run"):
        found = read_report(opened)
    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=2))
    elif page is None:
        color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        click.echo(format_report(found, color=color))
    else:
        click.echo(found.verdict)
    if page is not None:
        try:
            page.parent.mkdir(parents=True, exist_ok=True)
            write_html(found, page)
        except OSError as error:
            raise Failure(f"`{page}` cannot be written: {error.strerror or error}") from None
        click.echo(f"page: {page}", err=True)
    if is_bad(list(found.findings), fail_on):
        raise click.exceptions.Exit(1)
