"""`hookline extract`: a data set through a model, its activations into a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hookline.cli.extract_options import (
    LoadModel,
    name_options,
    read_config,
    read_data,
    read_dtype,
    read_engine,
    read_prepare,
    read_sites,
)
from hookline.cli.failing import Misused, running_code

_EPILOG = """\b
exit codes:
  0    all samples are in the store
  1    it could not be done, or samples were skipped (0 then under torchrun, which would stop all)
  2    the command line cannot be understood
  130  Ctrl-C: what was done is kept, the same command goes on

\b
A file of options has the long names without dashes, and `sites` as a list or a table:
  model = "model.py:make"
  data = "texts.jsonl"
  tokenizer = "path/to/tokenizer"
  out = "features"
  [sites]
  "layers.20" = "last"
"""

_NAMED = 10
"""So many samples that were skipped are named."""


@click.command(
    "extract", short_help="Keep a model's activations of a whole data set.", epilog=_EPILOG
)
@click.argument("config", required=False, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--model", metavar="MODEL", help="file.py:name or package.module:name.")
@click.option(
    "--data",
    metavar="DATA",
    help="Parquet, JSON lines, text, a folder of images, .npy, .safetensors, or file.py:name.",
)
@click.option(
    "--site", "sites", metavar="SITE", multiple=True, help="Such as layers.20; repeatable."
)
@click.option("-o", "--out", metavar="DIR", help="A folder, or s3://bucket/name.")
@click.option(
    "--reduce",
    metavar="HOW",
    help="last, first, mean, max, sum, tokens, spatial, a token's number, or file.py:name.",
)
@click.option("--column", metavar="NAME", help="The field of a sample that is used.")
@click.option("--prepare", metavar="FUNCTION", help="Makes the model's input of a sample.")
@click.option("--tokenizer", metavar="NAME", help="A tokenizer of transformers, for texts.")
@click.option("--length", metavar="N", type=click.IntRange(1), help="The most tokens of a text.")
@click.option(
    "--batch-size", metavar="N", type=click.IntRange(1), help="Found by itself unless given."
)
@click.option("--limit", metavar="N", type=click.IntRange(1), help="Only the first N samples.")
@click.option("--device", metavar="DEVICE", help="Such as cuda:0; moves the model there.")
@click.option("--dtype", metavar="DTYPE", help="Keep values as this type, such as bfloat16.")
@click.option("--deterministic", is_flag=True, help="The same bits in any batch size; slow.")
@click.option(
    "--on-error", type=click.Choice(["stop", "skip"]), help="What to do with bad samples."
)
@click.option("--overwrite", is_flag=True, help="Remove the store that is in the folder.")
@click.option(
    "--dry-run", is_flag=True, help="Say how many bytes and about how long; write nothing."
)
@click.option(
    "--engine", type=click.Choice(["local", "ray"]), help="Who does it; this process unless given."
)
@click.option("--address", metavar="ADDRESS", help="Of a cluster of Ray; auto for this machine's.")
@click.option(
    "--actors", metavar="N[:N]", help="How many hold the model; 4:64 for the fewest and the most."
)
@click.option("--gpus", metavar="N", type=float, help="GPUs of each actor; 0.5 for two on one.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing but the result.")
def extract_features(config: Path | None, dry_run: bool, quiet: bool, **given: Any) -> None:
    """Send all samples of DATA through MODEL, and keep the values of named sites on disk.

    CONFIG is a file of options, TOML, JSON or YAML; what is given here counts more. Stopped by
    anything at all, the same command goes on where it was. Under torchrun every rank takes its
    share of the samples.

    \b
    examples:
      hookline extract --model model.py:make --prepare model.py:prepare --data images/ \\
          --site layer4 --reduce spatial -o out
      hookline extract --model lm.py:make --data texts.jsonl --column text --tokenizer gpt2 \\
          --site 'layers.*' --reduce last --dtype bfloat16 -o features --dry-run
      hookline extract features.toml
      hookline extract features.toml --engine ray --address auto --actors 8 --gpus 1
      torchrun --nproc-per-node 8 -m hookline extract features.toml
      hookline verify features
    """
    options = read_config(config) if config is not None else {}
    options |= {key: value for key, value in given.items() if value not in (None, (), False)}
    for need in ("model", "data", "sites", "out"):
        if not options.get(need):
            name = "site" if need == "sites" else need
            raise Misused(f"there is no --{name}", "`hookline extract --help` has examples")
    try:
        _extract(options, dry_run=dry_run, quiet=quiet)
    except KeyboardInterrupt:
        click.echo(
            f"stopped: what was done is kept in {options['out']}; the same command goes on",
            err=True,
        )
        raise SystemExit(130) from None


def _extract(options: dict[str, Any], *, dry_run: bool, quiet: bool) -> None:
    from hookline import extract
    from hookline.cli.loading import load_model
    from hookline.extractions.teams import is_spread
    from hookline.watchers.describing import read_rank

    engine = read_engine(options)
    model: Any = LoadModel(options["model"])
    if engine == "local":
        model = load_model(options["model"])
        if options.get("device"):
            from hookline.extractions.placing import place_model

            with running_code("moving the model"):
                model = place_model(model, options["device"])
    sites, reduce = read_sites(options)
    if engine == "local":
        from hookline.extractions.sites import SiteChoice

        hint = f"`hookline sites {options['model']}` lists the modules of the model"
        with running_code("finding the sites", hint=hint, reword=name_options):
            SiteChoice(model, sites, reduce)
    with running_code("the extraction", reword=name_options):
        result = extract(
            model,
            read_data(options["data"]),
            sites,
            options["out"],
            reduce=reduce,
            column=options.get("column"),
            prepare=read_prepare(options),
            batch_size=options.get("batch_size"),
            limit=options.get("limit"),
            device=options.get("device"),
            dtype=read_dtype(options.get("dtype")),
            deterministic=bool(options.get("deterministic")),
            on_error=options.get("on_error", "stop"),
            overwrite=bool(options.get("overwrite")),
            dry_run=dry_run,
            engine=engine,
            progress=not quiet,
        )
    rank, world = read_rank()
    if rank and engine == "local" and is_spread(model):
        return  # all ranks did the same, and the first of them says so
    click.echo(str(result))
    for id, why in list(result.failed.items())[:_NAMED]:
        click.echo(f"  skipped sample {id}: {why}", err=True)
    if len(result.failed) > _NAMED:
        click.echo(f"  and {len(result.failed) - _NAMED:,} others", err=True)
    if len(result.failed) > _NAMED or (result.failed and world > 1):
        click.echo(f"hint: `hookline verify {result.out}` names all that were skipped", err=True)
    if result.failed and world == 1:
        raise SystemExit(1)
