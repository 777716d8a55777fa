"""`hookline completion`: the line that lets a shell complete commands, runs and sites."""

from __future__ import annotations

import click

_LINES = {
    "bash": 'eval "$(_HOOKLINE_COMPLETE=bash_source hookline)"',
    "zsh": 'eval "$(_HOOKLINE_COMPLETE=zsh_source hookline)"',
    "fish": "_HOOKLINE_COMPLETE=fish_source hookline | source",
}
_FILES = {"bash": "~/.bashrc", "zsh": "~/.zshrc", "fish": "~/.config/fish/config.fish"}


@click.command("completion", short_help="Print the line that makes a shell complete.")
@click.argument("shell", type=click.Choice(sorted(_LINES)))
def completion(shell: str) -> None:
    """Print the line that lets SHELL complete commands, options, runs and sites.

    \b
    examples:
      hookline completion bash >> ~/.bashrc
      hookline completion zsh >> ~/.zshrc
      hookline completion fish >> ~/.config/fish/config.fish
    """
    click.echo(_LINES[shell])
    click.echo(f"put it into {_FILES[shell]}, then open a new shell", err=True)
