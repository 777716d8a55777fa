"""`hookline` itself: the options of every command, and where commands are added."""

from __future__ import annotations

from typing import Any

import click

from hookline.cli.failing import explained_usage
from hookline.cli.sites import list_sites

_EPILOG = """\b
exit codes:
  0  done
  1  it could not be done: no such name, or the code that was run failed
  2  the command line cannot be understood
"""


class _Commands(click.Group):
    """A group that tells of mistakes in its use, and in that of its commands, with a hint."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with explained_usage():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with explained_usage():
            return super().invoke(ctx)


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option("--traceback", is_flag=True, help="Show where in the code an error comes from.")
@click.pass_context
def main(context: click.Context, traceback: bool) -> None:
    """See and change any value in a PyTorch model, without touching its code."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


main.add_command(list_sites)
