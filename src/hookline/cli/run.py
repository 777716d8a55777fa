"""`hookline run`: a script as it is, watched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hookline.cli.failing import Failure, Misused
from hookline.cli.starting import StartScript

_EPILOG = """\b
exit codes:
  0    the script ended well, and no finding is an error
  1    it ended well, and a finding is an error (see --fail-on); or it raised
  2    the command line cannot be understood; the script was not started
  n    the script's own, where that is not 0: sys.exit(n)
  130  Ctrl-C      143  SIGTERM
"""


class ScriptCommand(click.Command):
    """A command whose options end where the script, or the module after -m, begins."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._end_options(args))

    def _end_options(self, args: list[str]) -> list[str]:
        """Put `--` behind the name of a module: what follows is the module's."""
        at = self.find_target(args)
        before = args[:at]
        for place, word in enumerate(before):
            if word in ("-m", "--module"):
                return [*args[: place + 2], "--", *args[place + 2 :]]
            if word.startswith(("-m", "--module=")):
                return [*args[: place + 1], "--", *args[place + 1 :]]
        return args

    def find_target(self, args: list[str]) -> int:
        """Find where the options of hookline end: the place of the first word that is none."""
        valued = {
            option
            for one in self.params
            if isinstance(one, click.Option) and not one.is_flag
            for option in one.opts
        }
        at = 0
        while at < len(args) and args[at].startswith("-") and args[at] not in ("-", "--"):
            at += 2 if args[at] in valued else 1
        return at


def script_options(command: Any) -> Any:
    """Add the options that `run` and `check` share."""
    options = [
        click.option("-m", "--module", metavar="MODULE", help="Run a module, as python -m does."),
        click.option(
            "--watch",
            "sites",
            metavar="PATTERN",
            multiple=True,
            help="Watch only what this names, such as 'blocks.*.attn'; may be repeated.",
        ),
        click.option("--rules", metavar="A,B", multiple=True, help="Judge by these rules alone."),
        click.option("--without-rule", metavar="A,B", multiple=True, help="Judge without these."),
        click.option("--no-replay", is_flag=True, help="Do not search for the exact operation."),
        click.option(
            "--fail-on",
            type=click.Choice(["error", "warning", "never"]),
            default="error",
            show_default=True,
            help="The least severe finding that makes the exit code 1.",
        ),
        click.option(
            "--strict", is_flag=True, help="Let an error of hookline's own end the script."
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.command(
    "run",
    cls=ScriptCommand,
    short_help="Run a training script, and say what goes wrong in it.",
    epilog=_EPILOG,
    context_settings={"allow_interspersed_args": False},
)
@script_options
@click.option(
    "--every", metavar="N", type=click.IntRange(1), help="Watch one step in N, whatever it costs."
)
@click.option(
    "--budget",
    metavar="PERCENT",
    type=click.FloatRange(0, 1000, min_open=True),
    help="After the first 100 steps and ten seconds of cost, watch as many as cost at most so much "
    "of the time: 5 unless given. One in 20 at least.",
)
@click.option(
    "--local-gradients",
    is_flag=True,
    help="Measure each rank's own gradients of parameters too, before they are reduced.",
)
@click.option(
    "--on-finding",
    type=click.Choice(["continue", "dump", "raise"]),
    default="continue",
    show_default=True,
    help="What a finding that is an error does: go on; keep the batch in the run; end the script.",
)
@click.option(
    "--out",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Where the run goes; runs/SCRIPT-DATE-TIME unless given.",
)
@click.option(
    "--html",
    "page",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where the HTML report goes; report.html in the run unless given.",
)
@click.option("--no-html", is_flag=True, help="Write no HTML report.")
@click.option("--progress/--no-progress", default=None, help="The live line, also without a tty.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing but a bad verdict.")
@click.argument("command", nargs=-1, metavar="SCRIPT [ARGS]...", type=click.UNPROCESSED)
def run_script(
    command: tuple[str, ...],
    module: str | None,
    out: Path | None,
    page: Path | None,
    no_html: bool,
    **given: Any,
) -> None:
    """Run SCRIPT as python would, and watch every model that it trains.

    Nothing of the script changes. Models and optimizers are found as they are used. What goes wrong
    is said on stderr when it happens, and at the end in one sentence: what, where, and why. Options
    of hookline come before the script; what follows is the script's.

    \b
    examples:
      hookline run train.py --lr 3e-4
      hookline run -m project.train --epochs 2
      hookline run --watch 'blocks.*.attn' --every 10 train.py
      hookline run --on-finding raise --out runs/try-3 train.py
      hookline run --budget 2 train.py
      torchrun --nproc-per-node 2 -m hookline run train.py
    """
    launch = make_launch(command, module)
    from hookline.runs.schema import is_run
    from hookline.scripts.folders import choose_folder, read_rank
    from hookline.scripts.options import RunOptions
    from hookline.scripts.running import ScriptRun

    if out is not None and is_run(out) and read_rank()[1] == 1:
        raise Failure(
            f"`{out}` holds a run already, and nothing is overwritten",
            f"name another folder, or look at it with `hookline report {out}`",
        )
    folder = choose_folder(launch.name) if out is None else out.expanduser().absolute()
    options = RunOptions(
        folder=folder,
        is_claimed=out is None and read_rank()[1] == 1,
        has_page=not no_html,
        page=None if page is None else page.expanduser().absolute(),
        every=given["every"] or 1,
        budget=_choose_budget(given["every"], given["budget"]),
        has_local_gradients=given["local_gradients"],
        on_finding=given["on_finding"],
        is_quiet=given["quiet"],
        has_progress=given["progress"],
        **read_script_options(launch, given),
    )
    raise StartScript(ScriptRun(launch, options).run)


_BUDGET = 5.0


def _choose_budget(every: int | None, percent: float | None) -> float | None:
    """Give the share of the time that watching may take; who names a stride has chosen."""
    if percent is None and every is not None:
        return None
    return (_BUDGET if percent is None else percent) / 100


def make_launch(command: tuple[str, ...], module: str | None) -> Any:
    """Tell what is to be run; raise where there is nothing of that name."""
    name = click.get_current_context().info_name or "run"
    from hookline.scripts.launching import NoSuchScript, split_command

    launch = split_command(command, module=module)
    if launch is None or (launch.target == "-" and not launch.is_module):
        what = "a script is read from a file" if launch else "there is no script to run"
        raise Misused(what, f"name one: `hookline {name} train.py`, or `-m package.module`")
    try:
        launch.check()
    except NoSuchScript as error:
        raise Failure(str(error), error.hint or None) from None
    return launch


def read_script_options(launch: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Give the options that `run` and `check` share, checked."""
    rules, without = _split(given["rules"]), _split(given["without_rule"])
    _check_rules(launch, (*rules, *without))
    return {
        "sites": tuple(given["sites"]),
        "rules": rules,
        "without": without,
        "is_replayed": not given["no_replay"],
        "fail_on": given["fail_on"],
        "is_strict": given["strict"],
    }


def _split(words: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(one.strip() for word in words for one in word.split(",") if one.strip())


def _check_rules(launch: Any, names: tuple[str, ...]) -> None:
    """Refuse the name of a rule before hours are spent; a script may register its own."""
    if not names:
        return
    from hookline.scripts.choosing import NoSuchRule, choose_rules

    text = "" if launch.is_module else Path(launch.target).read_text("utf-8", errors="replace")
    try:
        choose_rules([name for name in names if name not in text])
    except NoSuchRule as error:
        raise Misused(str(error), "`hookline run --help` shows how it is used") from None
