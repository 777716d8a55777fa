"""`hookline sites`: what is in a model, from the command line."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from hookline.cli.failing import running_code
from hookline.cli.loading import load_example, load_model

if TYPE_CHECKING:
    from hookline.surveys.listing import SiteTable
    from hookline.surveys.pages import SourceListing


@click.command("sites", short_help="List the values of a model, by address.")
@click.argument("model")
@click.argument("patterns", metavar="[PATTERN]...", nargs=-1)
@click.option("--source", is_flag=True, help="Show the source of each forward with addresses.")
@click.option(
    "--example",
    metavar="EXAMPLE",
    help="Run the model once on this, and show what flowed: shapes, numbers, what did not run.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for another program.")
def list_sites(
    model: str, patterns: tuple[str, ...], source: bool, example: str | None, as_json: bool
) -> None:
    """List the values of MODEL that the PATTERNs name, or all of its modules.

    MODEL is `package.module:name` or `path/to/file.py:name`: a module, or a function or class that
    is called without arguments to make one. EXAMPLE is written the same way: a value, a tuple of
    arguments, a dict of keyword arguments, or a function that makes one of these.

    \b
    examples:
      hookline sites train.py:model
      hookline sites train.py:make_model 'layers.*.mlp' --example train.py:batch
      hookline sites train.py:model 'layers.0.attn@*' --example train.py:batch
      hookline sites train.py:model layers.0.attn --source
      hookline sites torchvision.models:resnet18 '**.conv?' --json
    """
    loaded = load_model(model)
    value = None if example is None else load_example(example)
    import hookline as hl

    where = list(patterns) or "**"
    doing = "listing the model" if example is None else "running the model on the example"
    with running_code(doing, hint=f"`hookline sites {model}` lists the modules of the model"):
        found = (hl.source if source else hl.sites)(loaded, where, example=value)
    if as_json:
        click.echo(json.dumps(_describe(found), indent=2))
    else:
        click.echo(str(found))


def _describe(found: SiteTable | SourceListing) -> dict[str, object]:
    from hookline.surveys.pages import SourceListing

    if isinstance(found, SourceListing):
        return {
            "addresses": found.addresses,
            "forwards": [
                {
                    "paths": page.paths,
                    "about": page.heading,
                    "lines": [
                        {
                            "number": line.number,
                            "code": line.code,
                            "labels": [label._asdict() for label in line.labels],
                        }
                        for line in page.lines
                    ],
                    "functions": page.footing,
                }
                for page in found.pages
            ],
        }
    return {"sites": list(found), "notes": list(found.notes)}
