"""`hookline check`: the first steps of a script, or one batch of a model, judged."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hookline.cli.failing import Failure, Misused, running_code
from hookline.cli.run import ScriptCommand, make_launch, read_script_options, script_options
from hookline.cli.starting import StartScript

if TYPE_CHECKING:
    from hookline.scripts.options import RunOptions

_EPILOG = """\b
exit codes:
  0  nothing found that is an error (see --fail-on)
  1  a finding is an error; or the script or model failed
  2  the command line cannot be understood
"""


class _CheckCommand(ScriptCommand):
    """A command whose options may also follow, where what they follow is a model."""

    def _end_options(self, args: list[str]) -> list[str]:
        found = super()._end_options(args)
        at = self.find_target(found)
        if at < len(found) and _is_object(found[at : at + 1], None):
            return [*found[:at], *found[at + 1 :], found[at]]
        return found


@click.command(
    "check",
    cls=_CheckCommand,
    short_help="Judge the first steps of a script, or a model by one batch.",
    epilog=_EPILOG,
    context_settings={"allow_interspersed_args": False},
)
@script_options
@click.option(
    "--steps",
    metavar="N",
    type=click.IntRange(1),
    help="How many steps; 30 of a script and 1 of a model unless given.",
)
@click.option("--out", metavar="DIR", type=click.Path(path_type=Path), help="Keep the run there.")
@click.option("--batch", metavar="BATCH", help="What the model is called with: file.py:name.")
@click.option("--loss", metavar="LOSS", help="A function of the output (and the batch).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for another program.")
@click.argument("command", nargs=-1, metavar="TARGET [ARGS]...", type=click.UNPROCESSED)
def check(
    command: tuple[str, ...],
    module: str | None,
    steps: int | None,
    out: Path | None,
    batch: str | None,
    loss: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Run the first steps of a script, stop it there, and say what is wrong so far.

    TARGET is a script with its arguments, or a model as `file.py:name` or `package.module:name`
    together with a batch: then forward and backward run on that, and the model stays as it is.
    What a script prints goes to stderr, the verdict to stdout. No run is kept without --out.

    \b
    examples:
      hookline check train.py --lr 3e-4
      hookline check --steps 100 --out runs/first-hundred train.py
      hookline check train.py:model --batch train.py:batch
      hookline check train.py:make_model --batch train.py:batch --loss train.py:loss_fn
    """
    if _is_object(command, module):
        _check_model(command, batch=batch, loss=loss, steps=steps, as_json=as_json, **given)
        return
    if batch is not None or loss is not None:
        raise Misused(
            "--batch and --loss belong to a model",
            "name one: `hookline check train.py:model --batch train.py:batch`",
        )
    launch = make_launch(command, module)
    from hookline.runs.schema import is_run
    from hookline.scripts.options import RunOptions

    if out is not None and is_run(out):
        raise Failure(f"`{out}` holds a run already", "name another folder")
    options = RunOptions(
        folder=None if out is None else out.expanduser().absolute(),
        steps=steps or 30,
        has_progress=False,
        is_quiet=True,
        **read_script_options(launch, given),
    )
    raise StartScript(lambda: _check_script(launch, options, as_json=as_json))


def _check_script(launch: Any, options: RunOptions, *, as_json: bool) -> int:
    from hookline.scripts.running import ScriptRun, is_bad

    run = ScriptRun(launch, options)
    with redirect_stdout(sys.stderr):
        code = run.run()
    if not run.is_here or not (run.verdict or run.silence):
        return code
    if as_json:
        facts = {
            "verdict": run.verdict or run.silence,
            "findings": [one.to_dict() for one in run.findings],
            "steps": options.steps,
            "notes": run.notes,
        }
        click.echo(json.dumps(facts, indent=2))
    else:
        from hookline.views import format_findings

        click.echo(run.verdict or run.silence)
        if run.findings:
            click.echo("\n" + format_findings(run.findings))
    return code or int(is_bad(run.findings, options.fail_on))


def _is_object(command: Sequence[str], module: str | None) -> bool:
    if module is not None or not command:
        return False
    place, colon, name = command[0].rpartition(":")
    # A drive of Windows has a colon too, and so may the name of a file.
    return bool(colon and place) and name.split(".")[0].isidentifier() and not name.endswith(".py")


def _check_model(
    command: tuple[str, ...],
    *,
    batch: str | None,
    loss: str | None,
    steps: int | None,
    as_json: bool,
    **given: Any,
) -> None:
    from hookline.cli.loading import load, load_example, load_model

    if len(command) > 1:
        raise Misused(f"`{command[1]}` follows the model", "nothing follows it but options")
    if batch is None:
        raise Misused(
            f"there is no batch to call `{command[0]}` with",
            f"`hookline check {command[0]} --batch {command[0].rpartition(':')[0]}:batch`",
        )
    model = load_model(command[0])
    value = load_example(batch)
    function = None if loss is None else load(loss)
    from hookline.scripts.checking import check as check_model
    from hookline.scripts.running import is_bad

    with running_code("checking the model"):
        found = check_model(model, value, loss=function, steps=steps or 1)
    click.echo(json.dumps(found.to_dict(), indent=2) if as_json else str(found))
    if is_bad(list(found.findings), given["fail_on"]):
        raise click.exceptions.Exit(1)
