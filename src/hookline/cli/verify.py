"""`hookline verify`: whether a tensor store is as it was written, and repairing it if not."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from hookline.stores import Verdict

_NAMED = 10
"""So many samples that were skipped are named."""

_EPILOG = """\b
exit codes:
  0  all is as it was written
  1  something is not, also where --repair put it right; or there is no store
  2  the command line cannot be understood
"""


@click.command("verify", short_help="Check a tensor store, and repair it.", epilog=_EPILOG)
@click.argument("store", type=click.Path())
@click.option("--repair", is_flag=True, help="Put damaged shards aside, remove what is left over.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for another program.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing but what is wrong.")
def verify_store(store: str, repair: bool, as_json: bool, quiet: bool) -> None:
    """Read all of STORE, a folder or s3://bucket/name, and compare it with its checksums.

    With --repair damaged shards go to the folder `damaged` in it; the same extraction, run again,
    makes their samples anew. Nobody should write to the store meanwhile.

    \b
    examples:
      hookline verify features
      hookline verify features --repair
      hookline verify s3://bucket/features --json | jq '.problems'
    """
    from hookline._errors import HooklineError
    from hookline.cli.failing import Failure
    from hookline.stores import verify

    try:
        with _bar(quiet) as tell:
            verdict = verify(store, repair=repair, on_progress=tell)
    except (HooklineError, OSError, ImportError) as error:
        raise Failure(str(error)) from None
    if as_json:
        click.echo(json.dumps(_describe(verdict), indent=2))
    else:
        _print(store, verdict, repair, quiet)
    if not verdict.is_good:
        raise SystemExit(1)


def _describe(verdict: Verdict) -> dict[str, object]:
    return {
        "is_good": verdict.is_good,
        "shards": verdict.shards,
        "samples": verdict.samples,
        "bytes": verdict.bytes,
        "problems": [{"file": file, "what": what} for file, what in verdict.problems],
        "repairs": verdict.repairs,
        "skipped": {str(id): why for id, why in verdict.failed.items()},
    }


def _print(store: str, verdict: Verdict, repair: bool, quiet: bool) -> None:
    """Print what is wrong, what was done, and what to do."""
    from hookline.cli.extract_options import name_options

    for file, what in verdict.problems:
        click.echo(_show(f"{file}: {name_options(what)}"))
    if quiet:
        return
    many = len(verdict.problems)
    counts = (
        f"{verdict.shards:,} shard{'s' * (verdict.shards != 1)}, {verdict.samples:,} "
        f"sample{'s' * (verdict.samples != 1)}, {verdict.bytes / 2**20:,.1f} MiB"
    )
    if verdict.is_good:
        click.echo(f"all is as it was written: {counts}")
        _print_skipped(verdict.failed)
        return
    for repair_made in verdict.repairs:
        click.echo(_show(repair_made), err=True)
    click.echo(f"{many:,} problem{'s' * (many > 1)}; what is right: {counts}", err=True)
    if not repair:
        click.echo(f"hint: `hookline verify {store} --repair` repairs what can be", err=True)
    elif any("moved to" in one for one in verdict.repairs):
        click.echo("hint: run the same extraction again, to make what is missing", err=True)


def _print_skipped(failed: Mapping[int, str]) -> None:
    """Name the samples that an extraction left out."""
    if not failed:
        return
    click.echo(f"{len(failed):,} sample{'s' * (len(failed) != 1)} skipped by the extraction:")
    for id, why in list(failed.items())[:_NAMED]:
        click.echo(_show(f"  {id}: {why}"))
    if len(failed) > _NAMED:
        click.echo(f"  and {len(failed) - _NAMED:,} others; --json names all")


def _show(text: str) -> str:
    """Leave out what a terminal would obey: names in a store are anybody's."""
    return "".join(one if one.isprintable() else "?" for one in text)


@contextmanager
def _bar(is_quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Show how many bytes have been read, on a terminal."""
    if is_quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
