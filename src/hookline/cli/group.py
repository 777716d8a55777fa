"""`hookline` itself: the options of every command, and where commands are added."""

from __future__ import annotations

import sys
from typing import Any

import click

from hookline.cli.check import check
from hookline.cli.completion import completion
from hookline.cli.diff import diff_runs
from hookline.cli.extract import extract_features
from hookline.cli.failing import explained_usage
from hookline.cli.ls import list_runs
from hookline.cli.record import record_script
from hookline.cli.report import report
from hookline.cli.run import run_script
from hookline.cli.show import show
from hookline.cli.sites import list_sites
from hookline.cli.starting import StartScript, start
from hookline.cli.verify import verify_store

_EPILOG = """\b
exit codes:
  0  done
  1  it could not be done: no such name, or the code that was run failed;
     or something was found that is an error, or a difference
  2  the command line cannot be understood
  `hookline run` gives the script's own where that is not 0

\b
examples:
  hookline run train.py --lr 3e-4      watch a training, and say what goes wrong
  hookline check train.py              judge its first steps
  hookline report                      what the newest run came to
  hookline show blocks.5.attn          the numbers of one site
  hookline extract features.toml       keep activations of a whole data set
"""


class _Commands(click.Group):
    """A group that tells of mistakes in its use, and in that of its commands, with a hint."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        script = None
        try:
            return super().main(*args, **kwargs)
        except StartScript as found:
            script = found.run
        # Out here, what the script raises has nothing of the command line in its context.
        sys.exit(start(script))

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in the order in which they are added, the first most used

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
    """See what goes on in a PyTorch training, without touching its code."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for _command in (
    run_script,
    check,
    report,
    show,
    record_script,
    diff_runs,
    extract_features,
    verify_store,
    list_runs,
    list_sites,
    completion,
):
    main.add_command(_command)
