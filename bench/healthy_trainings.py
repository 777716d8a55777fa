"""Trainings in which nothing is wrong: architectures of many kinds."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from rule_networks import (
    CLASSES,
    GPT,
    VAE,
    VOCABULARY,
    Experts,
    Recurrent,
    ViT,
    convnet,
    images,
    mlp,
    next_token_loss,
    points,
    texts,
)
from rule_trainings import Training, fit, healthy
from torch import Tensor, nn


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Compute the loss of a classifier."""
    return F.cross_entropy(model(batch[0]), batch[1])


@healthy
def perceptron() -> Training:
    """Three layers, Adam"""
    model = mlp()
    return fit(model, lambda n: classify(model, points()))


@healthy
def perceptron_functional() -> Training:
    """Activations as functions, SGD with momentum"""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.three(F.relu(self.two(F.relu(self.one(x)))))

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    return fit(model, lambda n: classify(model, points()), optimizer)


@healthy
def deep_perceptron() -> Training:
    """Eight layers with ReLU as torch initialises them"""
    model = mlp(48, 8)
    return fit(model, lambda n: classify(model, points()), steps=80)


@healthy
def deep_normalised_perceptron() -> Training:
    """Twelve layers with batch normalisation"""
    layers: list[nn.Module] = [nn.Linear(16, 32)]
    for _ in range(10):
        layers += [nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32)]
    model = nn.Sequential(*layers, nn.ReLU(), nn.Linear(32, CLASSES))
    return fit(model, lambda n: classify(model, points()))


@healthy
def tanh_perceptron() -> Training:
    """Six layers with tanh"""
    model = mlp(32, 6, act=nn.Tanh)
    return fit(model, lambda n: classify(model, points()))


@healthy
def shallow_sigmoid() -> Training:
    """Two hidden layers with sigmoid"""
    model = mlp(32, 3, act=nn.Sigmoid)
    return fit(model, lambda n: classify(model, points()), lr=5e-3)


@healthy
def convolutions() -> Training:
    """Convolutions with batch normalisation"""
    model = convnet()
    return fit(model, lambda n: classify(model, images()), lr=3e-3)


@healthy
def residual_network() -> Training:
    """Residual blocks whose last normalisation begins at zero"""
    model = convnet(blocks=3, is_zero=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    return fit(model, lambda n: classify(model, images()), optimizer, steps=50)


@healthy
def language_model() -> Training:
    """A GPT with masks of -inf, AdamW, clipped gradients"""
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def step(number: int) -> None:
        optimizer.zero_grad()
        next_token_loss(model, texts()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return Training(model, step, 60)


@healthy
def tied_language_model() -> Training:
    """A GPT whose head is its table of tokens"""
    model = GPT(is_tied=True, blocks=2)
    return fit(model, lambda n: next_token_loss(model, texts()), lr=1e-2)


@healthy
def image_transformer() -> Training:
    """Branches that begin with a factor of 1e-6"""
    model = ViT()
    return fit(model, lambda n: classify(model, images()))


@healthy
def image_transformer_sgd() -> Training:
    """The same with SGD, which leaves the factors small"""
    model = ViT()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return fit(model, lambda n: classify(model, images()), optimizer)


@healthy
def lstm() -> Training:
    """An LSTM that foresees the next token"""
    model = Recurrent(nn.LSTM)
    return fit(model, lambda n: next_token_loss(model, texts()), lr=1e-2)


@healthy
def gru() -> Training:
    """A GRU, with RMSprop"""
    model = Recurrent(nn.GRU)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=3e-3)
    return fit(model, lambda n: next_token_loss(model, texts()), optimizer)


@healthy
def recurrent_cells() -> Training:
    """A cell that is called for every token"""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.cell = nn.Embedding(VOCABULARY, 16), nn.GRUCell(16, 24)
            self.head = nn.Linear(24, VOCABULARY)

        def forward(self, ids: Tensor) -> Tensor:
            state, out = torch.zeros(len(ids), 24), []
            for place in range(ids.shape[1]):
                state = self.cell(self.embed(ids[:, place]), state)
                out.append(self.head(state))
            return torch.stack(out, 1)

    model = Net()
    return fit(model, lambda n: next_token_loss(model, texts(8, 10)), lr=5e-3, steps=40)


@healthy
def autoencoder() -> Training:
    """A bottleneck of four, a sigmoid at the end"""
    model = nn.Sequential(
        *mlp(32, 2, outputs=4), nn.ReLU(), *mlp(32, 2, inputs=4, outputs=16), nn.Sigmoid()
    )

    def loss(number: int) -> Tensor:
        x = points()[0].sigmoid().round()
        return F.binary_cross_entropy(model(x), x)

    return fit(model, loss, lr=3e-3)


@healthy
def variational_autoencoder() -> Training:
    """The model returns its loss"""
    model = VAE()
    return fit(model, lambda n: model(points()[0]), lr=3e-3)


@healthy
def adversarial() -> Training:
    """A generator with tanh and a critic, two optimizers, one after the other"""
    maker = nn.Sequential(*mlp(32, 3, inputs=8, outputs=16, act=nn.ReLU), nn.Tanh())
    critic = mlp(32, 3, outputs=1, act=nn.LeakyReLU)
    of_maker = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.5, 0.999))
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.999))

    def step(number: int) -> None:
        real = points()[0].tanh()
        fake = maker(torch.randn(32, 8))
        of_critic.zero_grad()
        loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
        loss.backward()
        of_critic.step()
        of_maker.zero_grad()
        F.softplus(-critic(fake)).mean().backward()
        of_maker.step()

    return Training({"maker": maker, "critic": critic}, step, 60)


@healthy
def wasserstein() -> Training:
    """A critic without bounds, whose loss has a sign, stepped three times for each of the maker"""
    maker, critic = mlp(32, 3, inputs=8, outputs=16), mlp(32, 3, outputs=1)
    of_maker = torch.optim.RMSprop(maker.parameters(), lr=5e-4)
    of_critic = torch.optim.RMSprop(critic.parameters(), lr=5e-4)

    def step(number: int) -> None:
        for _ in range(3):
            of_critic.zero_grad()
            fake = maker(torch.randn(32, 8)).detach()
            (critic(fake).mean() - critic(points()[0]).mean()).backward()
            of_critic.step()
            with torch.no_grad():
                for one in critic.parameters():
                    one.clamp_(-0.1, 0.1)
        of_maker.zero_grad()
        (-critic(maker(torch.randn(32, 8))).mean()).backward()
        of_maker.step()

    return Training({"maker": maker, "critic": critic}, step, 25)


@healthy
def chosen_experts() -> Training:
    """Each input goes to one of four experts, some of which may get none"""
    model = Experts()
    return fit(model, lambda n: classify(model, points()), lr=3e-3)


@healthy
def mixed_experts() -> Training:
    """All experts, weighted by a gate"""
    model = Experts(is_sparse=False)
    return fit(model, lambda n: classify(model, points()), lr=3e-3)


@healthy
def contrastive() -> Training:
    """Two towers, a learned temperature"""

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = mlp(32, 3, outputs=16), mlp(32, 3, outputs=16)
            self.temperature = nn.Parameter(torch.tensor(2.66))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            one, two = F.normalize(self.left(x), dim=-1), F.normalize(self.right(y), dim=-1)
            return one @ two.T * self.temperature.exp()

    model = Towers()

    def loss(number: int) -> Tensor:
        x = points()[0]
        scores = model(x, x + 0.3 * torch.randn_like(x))
        return F.cross_entropy(scores, torch.arange(len(x)))

    return fit(model, loss, lr=2e-3)


@healthy
def bert() -> Training:
    """A BERT of transformers, whose pooler nobody uses"""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
    )

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert, self.head = BertModel(config), nn.Linear(32, VOCABULARY)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.bert(input_ids=ids).last_hidden_state)

    model = Tagger()
    return fit(model, lambda n: next_token_loss(model, texts(8, 12)), steps=40)


@healthy
def gpt2() -> Training:
    """A GPT-2 of transformers, with dropout"""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)

    def loss(number: int) -> Tensor:
        ids = texts()
        return model(input_ids=ids, labels=ids).loss

    return fit(model, loss, torch.optim.AdamW(model.parameters(), lr=1e-3), steps=40)


@healthy
def graph_of_scores() -> Training:
    """A critic of states for a policy: targets that move, a Huber loss"""
    model = mlp(32, 3, outputs=4)
    frozen = mlp(32, 3, outputs=4).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(number: int) -> None:
        if number % 10 == 0:
            frozen.load_state_dict(model.state_dict())
        state, after = torch.randn(32, 16), torch.randn(32, 16)
        action = torch.randint(0, 4, (32, 1))
        reward = state[:, :4].gather(1, action).squeeze(1)
        with torch.no_grad():
            target = reward + 0.95 * frozen(after).max(1).values
        optimizer.zero_grad()
        F.smooth_l1_loss(model(state).gather(1, action).squeeze(1), target).backward()
        optimizer.step()

    return Training(model, step, 80)


@healthy
def policy_gradient() -> Training:
    """Noisy gradients, a loss of either sign, small batches"""
    model = mlp(32, 3, inputs=4, outputs=2)

    def loss(number: int) -> Tensor:
        state = torch.randn(6, 4)
        chances = torch.distributions.Categorical(logits=model(state))
        action = chances.sample()
        reward = (action == (state[:, 0] > 0)).float() * 3 - 1 + torch.randn(6)
        return -(chances.log_prob(action) * reward).mean()

    return fit(model, loss, lr=3e-3, steps=100)
