"""Activations of a whole data set: its samples through a model, what is kept of them into a store.

    extract.py          `hl.extract`
    local_engine.py     by this process, alone or as one of several ranks
    teams.py            ranks that hold one model together, and run the same batches
    work.py             one extraction in one process
    features.py         `hl.AddFeatures`: activations as columns of batches of others
    ray_engine.py       the same by a pool of actors of Ray; ray_cluster.py which cluster
    ray_actors.py       the actors; ray_rows.py rows of a Ray Dataset; ray_dealing.py these to those
    sites.py            which values are kept; selecting.py what of each
    feeding.py          the next batches, made beside the model; sizing.py how large they are
    running.py          a batch through the model
    saving.py           what came of it to the store, beside the model
    advancing.py        what an extraction tells of itself
    tokenizing.py       texts as a language model takes them
    sources.py          `open_source`: from what was given to a source
    samples.py          what every source can do; a sample that cannot be read
    probing.py          a few samples in short, to tell other data of the same length apart
    wanted.py           which ids are to be read, as ranges and shares
    object_sources.py   rows, streams and data loaders
    file_sources.py     lines of text and JSON, and rows of `.npy` and `.safetensors` files
    parquet_files.py    rows of Parquet files
    image_files.py      images of a folder
    finding_files.py    which files a path, a folder or a pattern means
    collating.py        from samples to a batch, and from a batch to a call

A sample's id is its position in the data, whatever the batch size or the number of ranks.
"""

from __future__ import annotations

from hookline.extractions.advancing import Advance, Estimate, Extraction
from hookline.extractions.extract import extract
from hookline.extractions.features import AddFeatures
from hookline.extractions.ray_cluster import RayCluster

__all__ = ["AddFeatures", "Advance", "Estimate", "Extraction", "RayCluster", "extract"]
