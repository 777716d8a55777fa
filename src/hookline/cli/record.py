"""`hookline record`: a script as it is, its first steps kept for a comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hookline.cli.failing import Failure
from hookline.cli.run import ScriptCommand, make_launch
from hookline.cli.starting import StartScript

_STEPS = 10
"""How many steps are recorded unless another number is given."""

_EPILOG = """\b
exit codes:
  0    the script ended well
  1    it raised
  2    the command line cannot be understood; the script was not started
  n    the script's own, where that is not 0: sys.exit(n)
  130  Ctrl-C      143  SIGTERM
"""


@click.command(
    "record",
    cls=ScriptCommand,
    short_help="Run a training script, and keep its first steps for a comparison.",
    epilog=_EPILOG,
    context_settings={"allow_interspersed_args": False},
)
@click.option("-m", "--module", metavar="MODULE", help="Run a module, as python -m does.")
@click.option(
    "-o",
    "--out",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Where the recording goes; runs/SCRIPT-DATE-TIME unless given.",
)
@click.option(
    "--steps",
    metavar="N",
    type=click.IntRange(0),
    default=_STEPS,
    show_default=True,
    help="Record so many steps, 0 for all; the script goes on to its end.",
)
@click.option(
    "--every", metavar="N", type=click.IntRange(1), default=1, help="Record one step in N."
)
@click.option(
    "--sites",
    metavar="PATTERN",
    multiple=True,
    help="Record the values of these modules alone, such as 'blocks.*'; may be repeated.",
)
@click.option(
    "--tensors",
    metavar="PATTERN",
    multiple=True,
    help="Keep whole tensors of these modules and parameters, '**' for all; may be repeated.",
)
@click.option("--overwrite", is_flag=True, help="Replace the run that is in the folder.")
@click.option("--progress/--no-progress", default=None, help="The live line, also without a tty.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing.")
@click.option("--strict", is_flag=True, help="Let an error of hookline's own end the script.")
@click.argument("command", nargs=-1, metavar="SCRIPT [ARGS]...", type=click.UNPROCESSED)
def record_script(
    command: tuple[str, ...], module: str | None, out: Path | None, **given: Any
) -> None:
    """Run SCRIPT as python would, and keep what its models compute in the first steps.

    Nothing of the script changes, not a bit of what it computes. Kept are statistics and a sketch
    of every value at the border of every module, of gradients, parameters and updates: some hundred
    bytes each. Two such recordings are compared with `hookline diff`.

    \b
    examples:
      hookline record -o runs/before train.py --lr 3e-4
      hookline record -o runs/after train.py --lr 3e-4
      hookline diff runs/before runs/after
      hookline record --steps 1 --tensors 'blocks.5.**' train.py
      torchrun --nproc-per-node 2 -m hookline record -o runs/two train.py
    """
    launch = make_launch(command, module)
    from hookline.scripts.folders import choose_folder, read_rank
    from hookline.scripts.options import RunOptions
    from hookline.scripts.recording import ScriptRecord

    is_alone = read_rank()[1] == 1
    if out is not None:
        _prepare(out.expanduser(), overwrite=given["overwrite"], is_alone=is_alone)
    folder = choose_folder(launch.name) if out is None else out.expanduser().absolute()
    options = RunOptions(
        folder=folder,
        is_claimed=out is None and is_alone,
        recorded=given["steps"] or None,
        every=given["every"],
        sites=tuple(given["sites"]),
        tensors=tuple(given["tensors"]),
        is_replayed=False,
        is_quiet=given["quiet"],
        has_progress=given["progress"],
        is_strict=given["strict"],
    )
    raise StartScript(ScriptRecord(launch, options).run)


def _prepare(folder: Path, *, overwrite: bool, is_alone: bool) -> None:
    """Refuse a folder that is taken before the script starts, or remove the run that is there."""
    from hookline._errors import RunExists
    from hookline.runs.belonging import prepare_folder
    from hookline.runs.schema import is_run

    if is_alone and not overwrite and is_run(folder):
        raise Failure(
            f"`{folder}` holds a run already",
            "name another folder, or replace it with `--overwrite`",
        )
    try:
        # Of several ranks one may have begun already: none removes anything.
        prepare_folder(folder, overwrite=overwrite and is_alone)
    except RunExists as error:
        raise Failure(str(error)) from None
