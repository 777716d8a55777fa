"""Measure what it costs to keep a GPU's values on the host: `python bench/gpu_capture.py`.

Tables for a Llama of a billion parameters with random weights: how fast the machine copies,
the time of an inference and of a training step with and without capturing what its blocks return,
how fast those copies ran, and the same where the copies are the limit. `--tiny` runs everything on
whatever there is, to see that it works.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tables import Table
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

import hookline as hl

BATCH, LENGTH = 4, 2048
BLOCKS = "model.layers.*"
LINEAR = "**.*_proj"
Attach = Callable[[nn.Module], contextlib.AbstractContextManager[Any]]


def make_model(is_tiny: bool) -> tuple[nn.Module, Tensor]:
    """Make the model and a batch for it."""
    sizes = {
        "num_hidden_layers": 2 if is_tiny else 16,
        "hidden_size": 64 if is_tiny else 2048,
        "intermediate_size": 128 if is_tiny else 8192,
        "num_attention_heads": 4 if is_tiny else 32,
        "num_key_value_heads": 2 if is_tiny else 8,
        "vocab_size": 128 if is_tiny else 32000,
        "max_position_embeddings": LENGTH,
        "attn_implementation": "sdpa",
        "use_cache": False,
    }
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**sizes)).to(torch.bfloat16)
    shape = (2, 16) if is_tiny else (BATCH, LENGTH)
    return model, torch.randint(0, sizes["vocab_size"], shape, device=device)


def wait() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure_copies(size: int) -> tuple[Table, float]:
    """Measure how fast one large copy to the host goes, into each kind of memory."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    has_pinned = torch.cuda.is_available()
    targets = {
        "page-locked": torch.empty(size, dtype=torch.uint8, pin_memory=has_pinned),
        "ordinary": torch.zeros(size, dtype=torch.uint8),
    }
    table = Table(f"One copy of {size / 2**20:.0f} MiB to the host", ["memory", "GB/s"])
    rates = {}
    for name, target in targets.items():
        taken = []
        for _ in range(6):
            wait()
            begin = time.perf_counter()
            target.copy_(source, non_blocking=True)
            wait()
            taken.append(time.perf_counter() - begin)
        rates[name] = size / min(taken) / 1e9
        table.rows.append([name, f"{rates[name]:.1f}"])
    return table, rates["page-locked"]


@contextlib.contextmanager
def attach_nothing(model: nn.Module) -> Iterator[None]:
    """Run the model as it is."""
    yield


def capture(where: str, **options: Any) -> Attach:
    """Capture with hookline."""
    return lambda model: hl.capture(model, where, **options)


def hook_by_hand(copy: Callable[[Tensor], Tensor]) -> Attach:
    """Hook every block and keep a copy of what it returns."""

    @contextlib.contextmanager
    def attach(model: nn.Module) -> Iterator[list[Tensor]]:
        kept: list[Tensor] = []

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            kept.append(copy((output if isinstance(output, Tensor) else output[0]).detach()))

        handles = [block.register_forward_hook(keep) for block in model.model.layers]
        try:
            yield kept
        finally:
            for handle in handles:
                handle.remove()

    return attach


WAYS: dict[str, Attach] = {
    "plain": attach_nothing,
    "plain again (noise)": attach_nothing,
    "hand: output.cpu() in a hook": hook_by_hand(lambda value: value.cpu()),
    "hand: output.clone(), on the device": hook_by_hand(lambda value: value.clone()),
    "hl.capture, on the device": capture(BLOCKS),
    'hl.capture, device="cpu"': capture(BLOCKS, device="cpu"),
    'hl.capture, device="cpu", gradients': capture(BLOCKS, device="cpu", grads=True),
}


def measure_ways(
    title: str,
    run: Callable[[], Any],
    model: nn.Module,
    *,
    ways: dict[str, Attach],
    rounds: int,
    runs: int = 2,
) -> Table:
    """Run the model each way in turn; a turn ends when all has arrived."""
    walls: dict[str, list[float]] = {name: [] for name in ways}
    hosts: dict[str, list[float]] = {name: [] for name in ways}
    kept: dict[str, int] = {}
    firsts: dict[str, float] = {}
    for turn in range(rounds + 2):
        for name, attach in ways.items():
            wait()
            begin = time.perf_counter()
            for _ in range(runs):  # as in a loop: what the first left is let go in the second
                with attach(model) as got:
                    run()
            host = time.perf_counter() - begin
            if isinstance(got, hl.Captured):
                got.tensors()  # reading waits for what is copied again in a thread
            wait()
            wall = time.perf_counter() - begin
            if turn == 0:
                firsts[name] = wall / runs * 1000
                kept[name] = count_bytes(got)
            if turn > 1:
                walls[name].append(wall / runs * 1000)
                hosts[name].append(host / runs * 1000)
            del got
    header = ["way", "wall ms", "x plain", "host ms", "first ms", "MB kept", "GB/s kept / wall"]
    table = Table(title, header)
    for name in ways:
        ratio = statistics.median(
            one / other for one, other in zip(walls[name], walls["plain"], strict=True)
        )
        wall = statistics.median(walls[name])
        row = [name, f"{wall:.2f}", f"{ratio:.3f}", f"{statistics.median(hosts[name]):.2f}"]
        row += [f"{firsts[name]:.0f}", f"{kept[name] / 1e6:.0f}", f"{kept[name] / wall / 1e6:.1f}"]
        table.rows.append(row)
    table.notes = [
        f"Medians of {rounds} turns of {runs} runs each, until all is on the host. *first*: a run "
        "of the first turn, in which page-locked memory is made."
    ]
    return table


def count_bytes(got: Any) -> int:
    """Count the bytes that a way has kept."""
    if isinstance(got, list):
        return sum(tensor.nbytes for tensor in got)
    return 0 if got is None else int(got.nbytes)


def measure_rate(run: Callable[[], Any], model: nn.Module, best: float, **options: Any) -> Table:
    """Profile a capture; compare the rate of its own copies with that of one large copy."""
    header = ["kept", "copies", "GB", "GB/s while copying", "x one large copy", "target"]
    table = Table("The copies of a capture, while the model runs", header)
    for title, where in {"blocks": BLOCKS, "linear layers": LINEAR}.items():
        with hl.capture(model, where, **options):
            run()
        wait()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
            with hl.capture(model, where, **options) as got:
                run()
            wait()
        copies = [one for one in profiled.events() if one.name.startswith("Memcpy DtoH")]
        taken = sum(one.device_time for one in copies) * 1e-6
        if not taken:
            table.rows.append([title, "no device", "", "", "", ""])
            continue
        rate = got.nbytes / taken / 1e9
        met = "met" if rate >= 0.9 * best else "MISSED"
        row = [title, str(len(copies)), f"{got.nbytes / 1e9:.2f}", f"{rate:.1f}"]
        table.rows.append([*row, f"{rate / best:.2f}", f">= 0.90 {met}"])
        names = sorted({one.name for one in copies})
        table.notes.append(f"{title}: {', '.join(names)}.")
        del got
    return table


def main() -> None:
    """Measure all, and print each table as it is ready."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, also without a GPU")
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.tiny:
        parser.error("there is no GPU here; --tiny runs without one")
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print(f"{name}, torch {torch.__version__}\n")
    table, best = measure_copies(2**20 if options.tiny else 2**30)
    print(table.markdown(), end="\n\n", flush=True)
    model, tokens = make_model(options.tiny)
    count = sum(one.numel() for one in model.parameters()) / 1e6
    described = (
        f"Llama, {count:.0f}M parameters, bfloat16, batch {' x '.join(map(str, tokens.shape))}"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def infer() -> None:
        with torch.inference_mode():
            model(tokens)

    def train() -> None:
        optimizer.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()

    forward_ways = {name: way for name, way in WAYS.items() if "gradients" not in name}
    linear = {"plain": attach_nothing, LINEAR: capture(LINEAR, device="cpu")}
    rounds = options.rounds
    for measure in (
        lambda: measure_ways(
            f"Inference: {described}", infer, model, ways=forward_ways, rounds=rounds
        ),
        lambda: measure_ways(
            f"A training step: {described}", train, model, ways=WAYS, rounds=rounds
        ),
        lambda: measure_rate(infer, model, best, device="cpu"),
        lambda: measure_ways(
            "Inference where the copies are the limit", infer, model, ways=linear, rounds=3, runs=1
        ),
        lambda: measure_ways(
            "The same, more than may stay page-locked", infer, model, ways=linear, rounds=2
        ),
    ):
        try:
            print(measure().markdown(), end="\n\n", flush=True)
        except Exception:
            traceback.print_exc()


if __name__ == "__main__":
    main()
