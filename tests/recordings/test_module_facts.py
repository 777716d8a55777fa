"""What is known of a model besides its numbers."""

from __future__ import annotations

import enum
import functools
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from traced_models import Small, tokens

import hookline as hl
from hookline.recordings.facts import read_facts


class Mode(enum.Enum):
    FAST = "fast"


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 0.5
        self.name = "mine"
        self.dims = (1, 2)
        self.mode = Mode.FAST
        self.kind = torch.float16
        self.act = F.gelu
        self.tanh = functools.partial(F.gelu, approximate="tanh")
        self.nothing = None
        self.data = object()
        self.many = list(range(100))
        self._hidden = 3

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_plain_attributes_are_read_as_text() -> None:
    config = read_facts(Custom()).modules[""].config
    assert config == {
        "scale": "0.5",
        "name": "'mine'",
        "dims": "(1, 2)",
        "mode": "Mode.FAST",
        "kind": "float16",
        "act": config["act"],
        "tanh": config["tanh"],
        "nothing": "None",
    }
    assert "gelu" in config["act"]
    assert config["tanh"] == f"{config['act']}(approximate='tanh')"


def test_what_torch_modules_print_is_split_into_settings() -> None:
    facts = read_facts(nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU("tanh"), nn.LayerNorm(4)))
    assert facts.modules["0"].config["kernel_size"] == "(3, 3)"
    assert facts.modules["0"].config["[0]"] == "3"
    assert facts.modules["1"].config["approximate"] == "'tanh'"
    assert facts.modules["2"].config["eps"] == "1e-05"
    assert facts.modules["2"].is_torch
    assert facts.modules["2"].type == "LayerNorm"


def test_a_forward_of_its_own_and_hooks_are_named_but_not_those_of_hookline() -> None:
    model = Small()
    model.head.forward = lambda x: x  # type: ignore[method-assign]
    with hl.capture(model, "**"):
        facts = read_facts(model)
        model(tokens())
    assert "lambda" in facts.modules["head"].config["forward"]
    assert "hooks" not in facts.modules["head"].config
    assert not any("forward" in facts.modules[path].config for path in ("", "embed", "blocks.0"))


def test_flags_names_ties_and_sources_are_there() -> None:
    model = Small()
    model.blocks[1].mlp.eval()
    facts = read_facts(model)
    assert facts.modules["blocks.1.mlp"].training is False
    assert facts.modules["blocks.1"].training is True
    assert not facts.modules["blocks.1"].is_torch
    assert "traced_models.py:" in facts.modules["blocks.1"].source
    assert facts.ties == (("embed.weight", "head.weight"),)
    assert (facts.title, facts.autocast) == ("Small", "")
    with torch.autocast("cpu", torch.bfloat16):
        assert read_facts(model).autocast == "bfloat16"


def test_a_config_object_is_flattened_at_the_root() -> None:
    model: Any = Custom()
    model.config = SimpleNamespace(width=3, _private=1, deep=SimpleNamespace(x=1))
    config = read_facts(model).modules[""].config
    assert config["config.width"] == "3"
    assert not any("private" in name or "deep" in name for name in config)


def test_a_text_that_fails_is_left_out() -> None:
    class Failing(nn.Linear):
        def extra_repr(self) -> str:
            raise RuntimeError

    assert read_facts(Failing(2, 3)).modules[""].config["out_features"] == "3"
