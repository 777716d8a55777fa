"""Bugs that the forward does not show: in gradients, in buffers, in updates."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diff_cases import Side, bug, make_reference, override
from torch import Tensor, nn


class _Scaled(torch.autograd.Function):
    """Gives a value as it is, and its gradient times a factor."""

    @staticmethod
    def forward(ctx, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.factor * grad, None


class _WrongGelu(torch.autograd.Function):
    """GELU with the gradient of SiLU's relative."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.gelu(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * torch.sigmoid(1.702 * x)


@bug("gpt", "blocks.2", direction="backward")
def detached_branch(model):
    """What the perceptron gives, detached before it is added"""

    def forward(self, x):
        x = x + self.drop(self.attn(self.norm1(x)))
        return x + self.mlp(self.norm2(x)).detach()

    override(model.blocks[2], forward=forward)
    return model


@bug("gpt", "blocks.1", direction="backward")
def detached_input(model):
    """What the second norm gets, detached"""

    def forward(self, x):
        x = x + self.drop(self.attn(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x.detach())))

    override(model.blocks[1], forward=forward)
    return model


@bug("gpt", "blocks.2", direction="backward")
def branch_without_grad(model):
    """Attention under no_grad"""

    def forward(self, x):
        with torch.no_grad():
            y = self.attn(self.norm1(x))
        x = x + self.drop(y)
        return x + self.drop(self.mlp(self.norm2(x)))

    override(model.blocks[2], forward=forward)
    return model


@bug("gpt", "blocks.1", direction="backward")
def gradient_scale(model):
    """The gradient of one branch halved"""

    def forward(self, x):
        x = x + self.drop(_Scaled.apply(self.attn(self.norm1(x)), 0.5))
        return x + self.drop(self.mlp(self.norm2(x)))

    override(model.blocks[1], forward=forward)
    return model


@bug("gpt", "blocks.2.mlp.act", direction="backward")
def wrong_backward(model):
    """A GELU whose own backward is wrong"""
    override(model.blocks[2].mlp.act, forward=lambda self, x: _WrongGelu.apply(x))
    return model


@bug("gpt", "blocks.2.norm1", direction="backward")
def wrong_backward_beside_a_residual(model):
    """A norm whose own backward is wrong by a hundredth, with a residual around it"""

    def forward(self, x):
        y = F.layer_norm(x, (32,), self.weight, self.bias, self.eps)
        return y + _Scaled.apply(y, 0.01) - y.detach()

    override(model.blocks[2].norm1, forward=forward)
    return model


@bug("mixture", "layers.1.norm2", direction="backward")
def norm_taken_for_constant(model):
    """A norm that detaches what it divides by"""

    def forward(self, x):
        length = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * x * length.detach()

    override(model.layers[1].norm2, forward=forward)
    return model


@bug("gpt", "blocks.3.attn", direction="backward")
def gradient_of_weights_detached(model):
    """Attention that takes its weights for constants"""
    override(
        model.blocks[3].attn,
        attend=lambda self, q, k, v, mask: self.weigh(q, k, mask).detach() @ v,
    )
    return model


@bug("gpt", "blocks.1.mlp.up", direction="backward")
def backward_hook_left_on(model):
    """A backward hook of a module that scales what goes on"""
    model.blocks[1].mlp.up.register_full_backward_hook(
        lambda module, grad_input, grad_output: (0.9 * grad_input[0],)
    )
    return model


@bug("gpt", "", direction="backward")
def gradient_between_blocks(model):
    """The gradient between two blocks made smaller by a hundredth"""

    def forward(self, ids):
        x = self.embed(ids)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1:
                x = _Scaled.apply(x, 0.99)
        return self.head(self.norm(x))

    return override(model, forward=forward)


@bug("gpt", "", direction="backward")
def gradients_twice(model):
    """A backward that runs twice, so that all gradients are doubled"""
    loss = make_reference("gpt").loss
    return Side(model, loss=lambda out: 2 * loss(out))


@bug("encoder", "", direction="backward")
def loss_of_the_sum(model):
    """A loss summed over the batch where the mean is right"""
    loss = make_reference("encoder").loss
    return Side(model, loss=lambda out: 4 * loss(out))


@bug("gpt", "blocks.2.mlp.up", direction="parameter gradient")
def hook_of_a_parameter(model):
    """A hook that halves the gradient of one weight"""
    model.blocks[2].mlp.up.weight.register_hook(lambda grad: 0.5 * grad)
    return model


@bug("gpt", "blocks.1.mlp.up", direction="parameter gradient")
def frozen_layer(model):
    """A layer that is not trained"""
    model.blocks[1].mlp.up.requires_grad_(False)
    return model


@bug("gpt", "places", direction="backward")
def frozen_table(model):
    """A table of places that is not trained"""
    model.places.requires_grad_(False)
    return model


@bug("gpt", "head", direction="parameter gradient")
def tie_broken(model):
    """A head with a copy of the table"""
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


@bug("encoder", "embeddings.words", direction="parameter gradient")
def row_without_gradient(model):
    """A table with a padding index, whose row gets no gradient"""
    model.embeddings.words.padding_idx = int(make_reference("encoder").inputs[0][0, 0])
    return model


@bug("mixture", "layers.1.moe.router", direction="backward")
def router_without_gradient(model):
    """Shares detached in the router"""
    base = type(model.layers[1].moe.router).forward

    def forward(self, x):
        shares, numbers = base(self, x)
        return shares.detach(), numbers

    override(model.layers[1].moe.router, forward=forward)
    return model


@bug("cells", "", direction="backward")
def state_detached(model):
    """A hidden state that is cut after each token"""

    def forward(self, ids):
        x = self.words(ids)
        hidden = cell = self.start(x)
        states = []
        for place in range(ids.shape[1]):
            hidden, cell = self.cell(x[:, place], hidden.detach(), cell.detach())
            states.append(hidden)
        return self.head(torch.stack(states, 1))

    return override(model, forward=forward)


@bug("resnet", "stages.1.bn1", direction="backward")
def statistics_taken_for_constants(model):
    """A batch norm whose backward does not know that its statistics depend on the input"""

    def forward(self, x):
        mean, var = x.mean((0, 2, 3)).detach(), x.var((0, 2, 3), unbiased=False).detach()
        F.batch_norm(x.detach(), self.running_mean, self.running_var, training=True)
        self.num_batches_tracked += 1
        return F.batch_norm(x, mean, var, self.weight, self.bias, eps=self.eps)

    override(model.stages[1].bn1, forward=forward)
    return model


@bug("resnet", "stages.0.bn1", direction="state")
def momentum_of_batch_norm(model):
    """Running statistics that move ten times slower"""
    model.stages[0].bn1.momentum = 0.01
    return model


@bug("resnet", "stages.2.bn1", direction="state")
def statistics_not_kept(model):
    """A batch norm that no longer updates its running statistics"""
    bn = model.stages[2].bn1

    def forward(self, x):
        return F.batch_norm(x, None, None, self.weight, self.bias, training=True, eps=self.eps)

    override(bn, forward=forward)
    return model


def _split(model: nn.Module, chosen: str) -> list[int]:
    """Give the places of some parameters in the order of the model."""
    names = [name for name, _ in model.named_parameters()]
    return [place for place, name in enumerate(names) if name.startswith(chosen)]


def _grouped(model, chosen, kind, **other):
    """Make an optimizer in which some parameters have other settings."""
    places = set(_split(model, chosen))

    def make(parameters):
        listed = list(parameters)
        apart = [one for place, one in enumerate(listed) if place in places]
        rest = [one for place, one in enumerate(listed) if place not in places]
        return kind([{"params": rest}, {"params": apart, **other}])

    return Side(model, optimizer=make)


@bug("gpt_with_adamw", "blocks.0.mlp.up", direction="update")
def other_rate(model):
    """One layer with twice the rate"""
    make = make_reference("gpt_with_adamw").optimizer
    return _grouped(model, "blocks.0.mlp.up", make, lr=2e-2)


@bug("gpt_with_adamw", "blocks.1.attn.q", direction="update")
def decay_of_a_bias(model):
    """Weight decay on a bias that should have a hundredth of it"""
    make = make_reference("gpt_with_adamw").optimizer
    return _grouped(model, "blocks.1.attn.q.bias", make, weight_decay=0.5)


@bug("gpt_with_sgd", "blocks.1.norm2", direction="update")
def left_out_of_the_optimizer(model):
    """Parameters that the optimizer was not given"""
    places = set(_split(model, "blocks.1.norm2"))
    make = make_reference("gpt_with_sgd").optimizer
    return Side(
        model,
        optimizer=lambda parameters: make(
            [one for place, one in enumerate(parameters) if place not in places]
        ),
    )


@bug("gpt_with_sgd", "blocks.0.mlp.down", direction="update")
def rate_of_one_layer(model):
    """One layer whose rate is a hundredth higher"""
    return _grouped(model, "blocks.0.mlp.down", make_reference("gpt_with_sgd").optimizer, lr=0.101)
