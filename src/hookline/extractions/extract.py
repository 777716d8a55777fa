"""`hl.extract`: a data set through a model, its activations into a tensor store."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from hookline.extractions.advancing import Advance, Extraction
from hookline.extractions.local_engine import Job, extract_here
from hookline.extractions.placing import place_model, unwrap
from hookline.extractions.ray_actors import Plan
from hookline.extractions.ray_cluster import RayCluster
from hookline.extractions.ray_engine import extract_with_ray
from hookline.extractions.ray_rows import RayRows, is_ray_dataset
from hookline.extractions.selecting import Reduce
from hookline.extractions.showing import showing
from hookline.extractions.sites import SiteChoice, Sites
from hookline.extractions.work import OnError, Work
from hookline.watchers.describing import read_rank

Engine = Literal["local", "ray"] | RayCluster


def extract(
    model: nn.Module | Callable[[], nn.Module],
    data: Any,
    sites: Sites,
    out: str | os.PathLike[str],
    *,
    reduce: Reduce = None,
    column: str | int | None = None,
    ids: str | None = None,
    prepare: Callable[[Any], Any] | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    batch_size: int | None = None,
    limit: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    deterministic: bool = False,
    on_error: OnError = "stop",
    overwrite: bool = False,
    shard_bytes: int = 256 << 20,
    dry_run: bool = False,
    engine: Engine = "local",
    on_progress: Callable[[Advance], None] | None = None,
    progress: bool | None = None,
) -> Extraction:
    """Send every sample through a model, and keep the values of named sites in a store on disk.

        hl.extract(model, dataset, ["layers.20"], "features", reduce="last")
        hl.open_store("features")["layers.20"][:100]

    Run again after whatever stopped it, it goes on where it was. Started by torchrun, every rank
    takes its share of the samples; where ranks hold one model together (`fully_shard`, tensor
    parallel), they run the same batches and the first of them writes. A sample's number is its
    position in the data.

    Args:
        model: any `nn.Module`; it evaluates, without gradients, and ends after the last site.
            Of a module that runs several times in one forward, the first time counts. Of
            `DistributedDataParallel` and `DataParallel` what is inside runs.
        data: a data set, a list, tensor or array, any iterable, a `DataLoader`, or the path of
            Parquet, JSON lines, text, images, `.npy` or `.safetensors`. A Ray Dataset goes, as Ray
            reads it, to a pool of actors (see `engine`); its samples are its rows, dicts.
        sites: addresses and patterns, or a dict with what is kept of each.
        out: a folder, or an address that fsspec knows, such as `s3://bucket/name`.
        reduce: what is kept of a value. Nothing: a row for each sample, or where an attention mask
            comes with the batch, a row for each token, but of a pooled value `[samples, width]` a
            row for each sample. `"tokens"`: a row for each token in any case. `"last"`,
            `"first"`, or a number: one token; `"mean"`, `"max"`, `"sum"`: over the tokens;
            `"spatial"`: the mean over all dimensions after the second. Or a function of the value
            and the mask. Padding is left out of all of them.
        column: of samples that are dicts, the field that is the sample; of tuples such as
            `(image, label)`, its place: 0.
        ids: of a Ray Dataset, the column of integers from 0 on that are the samples' numbers.
            Without it a sample's number is its place in the order that Ray gives the rows in.
        prepare: makes of a sample what the model takes, such as a tokenizer.
        collate: makes a batch of a list of samples; the usual one pads tokens.
        batch_size: samples that go through the model at once; found by itself unless given. Where
            memory does not suffice, a batch is divided.
        limit: only so many samples, from the first one on.
        device: where batches go; to the model's first parameter unless given. The model is moved
            there and stays, unless it is spread over ranks or devices.
        dtype: keep values as this type.
        deterministic: send each sample alone, on one thread, so that the same bits come out
            whatever the size of batches and the number of ranks.
        on_error: `"skip"` leaves out samples that cannot be read or that the model raises at, and
            names them in the result; `"stop"` raises at the first.
        overwrite: remove the store that is in the folder.
        shard_bytes: about how large the files become.
        dry_run: write nothing; the result's `estimate` tells how many bytes it will be and about
            how long it will take.
        engine: `"ray"`, or a `hl.RayCluster` that says which and how many actors: the same by a
            pool of actors that each hold the model. `model` may be a function that makes it, then.
        on_progress: called about twice a second.
        progress: show on the standard error how far it is: a bar on a terminal, else a line every
            30 seconds. Unless given, a bar where there is a terminal and no `on_progress`.
    """
    options: dict[str, Any] = {
        "prepare": prepare,
        "collate": collate,
        "batch_size": batch_size,
        "limit": limit,
        "device": device,
        "dtype": dtype,
        "is_deterministic": deterministic,
    }
    column = None if column is None else str(column)
    _, world = read_rank()
    if is_ray_dataset(data):
        if world > 1:
            raise ValueError(
                f"Ray deals the rows of a Ray Dataset out itself, and here are {world} ranks: "
                "start one process, without torchrun"
            )
        data = RayRows(data, column=column, ids=ids, limit=options.pop("limit"))
        engine = "ray" if engine == "local" else engine
    elif ids is not None:
        raise ValueError(
            f"ids={ids!r} names the numbers of the rows of a Ray Dataset; a sample of a "
            f"`{type(data).__name__}` has its position as its number: leave it out"
        )
    if on_error not in ("stop", "skip"):
        raise ValueError(f'on_error is "stop" or "skip", not {on_error!r}')
    cluster = _read_engine(engine)
    if cluster is not None and not dry_run:
        plan = Plan(model, data, sites, reduce, column, os.fspath(out), options, on_error)
        with showing(progress, on_progress) as tell:
            return extract_with_ray(plan, cluster, overwrite=overwrite, on_progress=tell)
    if not isinstance(model, nn.Module):
        model = model()
    model = place_model(unwrap(model), device)
    choice = SiteChoice(model, sites, reduce)
    foresee = partial(Work.plan, out=out, is_new=overwrite) if dry_run else None
    with showing(False if dry_run else progress, on_progress) as tell:
        job = Job(
            model,
            choice,
            data,
            column,
            out,
            options,
            is_new=overwrite,
            shard_bytes=shard_bytes,
            on_error=on_error,
            on_progress=tell,
        )
        return extract_here(job, plan=foresee)


def _read_engine(engine: Any) -> RayCluster | None:
    if engine == "local":
        return None
    if isinstance(engine, RayCluster):
        return engine
    if engine == "ray":
        return RayCluster()
    raise ValueError(f'engine is "local", "ray" or a `hl.RayCluster`, not {engine!r}')
