"""Measure what watching a compiled training costs on a GPU: `python bench/gpu_compiled.py`.

A table for each way to compile: the time of a step, what the first step took, and how many graphs
were compiled while a watch was opened and closed. `--model llama` trains a Llama of a billion
parameters with random weights in the place of a GPT. `--tiny` runs on whatever there is.
"""

from __future__ import annotations

import argparse
import functools
import gc
import traceback
from collections.abc import Callable

import torch
from compiled import (
    Figures,
    Way,
    compare_compiling,
    compare_figures,
    compile_model,
    describe_compiling,
    make_ways,
    take_turns,
    warm_up,
)
from gpu_watch import LARGE, TINY, Stopwatch, name_device
from models import Size, TrainedGPT
from tables import Table
from torch import nn
from trainings import Training

LARGE_LLAMA = Size(blocks=16, width=2048, heads=32, vocabulary=32000, length=2048, batch=4)
MODES = ("eager", "default", "reduce-overhead", "max-autotune-no-cudagraphs")
TARGETS = {"eager": 1.10}
"""The most that a watched step should take, in plain ones; 1.15 for what is not named."""


def make_llama(size: Size) -> nn.Module:
    """Make a Llama with a quarter as many heads of keys as of queries."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=size.blocks,
        hidden_size=size.width,
        intermediate_size=4 * size.width,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads // 4,
        vocab_size=size.vocabulary,
        max_position_embeddings=size.length,
        attn_implementation="sdpa",
        use_cache=False,
    )
    return LlamaForCausalLM(config)


MODELS: dict[str, tuple[Callable[[Size], nn.Module], Size]] = {
    "gpt": (TrainedGPT, LARGE),
    "llama": (make_llama, LARGE_LLAMA),
}


def main() -> None:
    """Measure what was asked for, and print each table as it is ready."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="gpt")
    parser.add_argument("--only", choices=MODES, action="append", help="which modes; may be given")
    parser.add_argument("--ways", default="", help="ways whose name has one of these: a,b")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, also without a GPU")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10, help="steps in a row in a round; tens")
    parser.add_argument("--compilings", type=int, default=1, help="how often it is compiled")
    parser.add_argument(
        "--deterministic", action="store_true", help="so that more than the first loss compares"
    )
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.tiny:
        parser.error("there is no GPU here; --tiny runs without one")
    torch.use_deterministic_algorithms(options.deterministic, warn_only=True)
    print(f"{name_device(device)}, torch {torch.__version__}\n")
    warm_up(device)
    for mode in options.only or MODES[:3]:
        try:
            print(measure_mode(mode, device, options).markdown(), end="\n\n", flush=True)
        except Exception:  # what the other modes take is worth knowing still
            traceback.print_exc()
        torch._dynamo.reset()
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def measure_mode(mode: str, device: str, options: argparse.Namespace) -> Table:
    """Train with every way to watch in turn, compiled in one mode."""
    make_model, size = MODELS[options.model]
    size = TINY if options.tiny else size
    training = Training(size, device=device, dtype=torch.bfloat16, make_model=make_model)
    ways = choose_ways(mode, options.ways)
    compile_model(training, mode)
    plain, watched = compare_compiling(training, [ways[0], ways[2]], options.compilings)
    stopwatch = Stopwatch(device)
    measure = functools.partial(time_steps, stopwatch=stopwatch, steps=options.steps)
    figures, graphs = take_turns(training, ways, rounds=options.rounds, measure=measure)
    kind = mode if mode == "eager" else f"compiled, {mode}, fullgraph"
    header = ["way", "device ms", "wall ms", "host ms", "device x plain", "95% interval", "target"]
    table = Table(f"{options.model}, {kind}: a training step", header)
    table.rows = compare_figures(ways, figures)
    table.notes = [
        f"{training.describe()}, bfloat16, {size.batch} sequences of {size.length} tokens, fused "
        f"AdamW; medians of {options.rounds} rounds of {options.steps} steps.",
        describe_compiling(plain, watched, graphs=graphs, by="wall"),
    ]
    return table


def choose_ways(mode: str, wanted: str) -> list[Way]:
    """Give the ways that are asked for; plain, its control and the watched one always."""
    ways = make_ways(TARGETS.get(mode, 1.15), 1.02)
    names = wanted.split(",")
    return [*ways[:3], *(way for way in ways[3:] if any(name in way.name for name in names))]


def time_steps(training: Training, *, stopwatch: Stopwatch, steps: int) -> Figures:
    """Time steps in a row."""
    taken = stopwatch.time(training.step, steps)
    training.attached.settle()
    return taken


if __name__ == "__main__":
    main()
