"""Show hookline on a small transformer: `make demo`, or `python -m hookline.demo`.

Five steps of a few lines each: capture every block with its gradients, switch one block's MLP
off, look inside a forward, see that the model is as before, and watch it train. Writes no run,
and prints the same each time.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hookline as hl

VOCABULARY, LENGTH, WIDTH, BLOCKS = 11, 8, 16, 4
STEPS = 20
LEFT_OUT = "blocks.1.mlp"


class Attention(nn.Module):
    """Let each position look at those before it, with one head."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the positions of each sequence."""
        query, key, value = self.query_key_value(x).chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed)  # type: ignore[no-any-return]


class Block(nn.Module):
    """Add attention, then an MLP, to what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Run the block."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Predict the next token of a sequence; knows nothing of hookline."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Give the logits of the token after each position."""
        x = self.embed(tokens) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def foretell(model: nn.Module, tokens: Tensor) -> Tensor:
    """Give the loss of foretelling each next token."""
    logits = model(tokens)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def run(model: nn.Module, tokens: Tensor) -> tuple[hl.Captured, float]:
    """Capture every block and its MLP, forward and backward; give that and the loss."""
    with hl.capture(model, "blocks.*", "blocks.*.mlp", grads=True) as got:
        loss = foretell(model, tokens)
        loss.backward()
    return got, loss.item()


def watch_training(model: nn.Module, tokens: Tensor) -> None:
    """Train for some steps; print the updates of the last one, and gradients over all of them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with hl.watch(model) as w:
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = foretell(model, tokens)
            loss.backward()
            w.log(loss=loss)
            optimizer.step()
    print(w.table(where="blocks.*.mlp.*.weight:update", stats=("rms", "ratio", "lost")))
    print(f"\n{w.scalar('loss')}")
    print(w.series("blocks.0:output.grad", "rms"))
    print(f"hooks on the model: {len(hl.inventory(model))}")


def main() -> None:
    """Print the demo."""
    torch.manual_seed(0)
    model = Transformer()
    tokens = torch.randint(VOCABULARY, (4, LENGTH))

    print("1. Capture: what every block gives, and the gradient that comes back to it.\n")
    print('   with hl.capture(model, "blocks.*", "blocks.*.mlp", grads=True) as got:')
    print("       loss(model(tokens)).backward()\n")
    before, loss_before = run(model, tokens)
    print(before.table())
    print(f"\nloss {loss_before:.4f}")

    print(f"\n2. Edit: `{LEFT_OUT}` gives zero, and everything after it changes.\n")
    print(f'   with hl.edit(model, {{"{LEFT_OUT}": hl.scale(0)}}):')
    print("       loss(model(tokens)).backward()\n")
    with hl.edit(model, {LEFT_OUT: hl.scale(0)}):
        edited, loss_edited = run(model, tokens)
    for number in range(BLOCKS):
        path = f"blocks.{number}"
        old, new = before[path].output, edited[path].output
        change = float((new - old).norm() / old.norm())
        print(f"{path}: output changed by {change:.1%}")
    print(f"loss {loss_before:.4f} -> {loss_edited:.4f}")

    print("\n3. Inside forward: the sum after attention, a variable between two modules.\n")
    print('   with hl.capture(model, "blocks.*@x[1]", grads=True) as got:')
    print("       loss(model(tokens)).backward()\n")
    with hl.capture(model, "blocks.*@x[1]", grads=True) as inside:
        foretell(model, tokens).backward()
    print(inside.table())
    print("\nAll there is in one forward, print(hl.source(model, 'blocks.0', example=tokens)):\n")
    print(hl.source(model, "blocks.0", example=tokens))

    print("\n4. Afterwards: the model is as it was.\n")
    after, loss_after = run(model, tokens)
    same = all(
        torch.equal(value, before.tensors()[address]) for address, value in after.tensors().items()
    )
    print(f"loss {loss_after:.4f}; values and gradients are the same bits as in 1: {same}")
    print(f"hooks on the model: {len(hl.inventory(model))}")

    print("\n5. Watch: a training as it is, and what became of every value in it.\n")
    print("   with hl.watch(model) as w:")
    print("       train(model)\n")
    watch_training(model, tokens)

    print("\nNext: README.md for the whole in a minute, docs/index.md for guides and concepts.")


if __name__ == "__main__":
    main()
