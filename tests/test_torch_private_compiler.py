"""The private corners of torch's compiler that hookline stands on behave as it relies on."""

from __future__ import annotations

import torch
from torch import nn

from hookline import _compiler
from hookline.hooks.limits import count_graphs_per_limit


def test_is_compiled_knows_both_ways_to_compile() -> None:
    module = nn.Linear(1, 1)
    assert not _compiler.is_compiled(module)
    assert _compiler.is_compiled(torch.compile(module, backend="eager"))
    module.compile(backend="eager")
    assert _compiler.is_compiled(module)


def test_compiled_parts_of_a_model_are_found() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    assert not _compiler.has_compiled_part(model)
    model[1].compile(backend="eager")
    assert _compiler.has_compiled_part(model)


def test_graph_breaks_and_limits_of_the_compiler_are_told() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    torch._dynamo.reset()
    before, limits = len(_compiler.list_graph_breaks()), _compiler.count_recompile_limits()
    with torch._dynamo.config.patch(recompile_limit=1):
        compiled = torch.compile(broken, backend="eager", dynamic=False)
        compiled(torch.ones(2))
        (where, why), *_ = _compiler.list_graph_breaks()[before:]
        assert where.startswith("test_torch_private_compiler.py:")
        assert "break" in why
        assert _compiler.count_recompile_limits() == limits
        compiled(torch.ones(3))
        assert broken.__code__ in _compiler.list_spent_codes(count_graphs_per_limit)
    assert _compiler.count_recompile_limits() > limits
    assert broken.__code__ not in _compiler.list_spent_codes(
        count_graphs_per_limit
    )  # more are allowed now
    torch._dynamo.reset()


def test_functions_that_a_compiled_module_begins_with_are_found() -> None:
    class Own(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    torch._dynamo.reset()
    seen = torch._dynamo.convert_frame.input_codes
    for model in (Own(), nn.Sequential(nn.Tanh())):
        compiled = torch.compile(model, backend="eager")
        compiled(torch.ones(2))
        assert any(code in seen for code in _compiler.list_compiled_codes(compiled))


def test_is_compile_forced_eager_follows_the_stance() -> None:
    import torch._dynamo

    assert not _compiler.is_compile_forced_eager()
    with torch.compiler.set_stance("force_eager"):
        assert _compiler.is_compile_forced_eager()
    assert not _compiler.is_compile_forced_eager()


def test_forced_eager_holds_and_gives_way_to_what_was_set_meanwhile() -> None:
    import torch._dynamo

    end = _compiler.force_eager()
    torch.compiler.set_stance("fail_on_recompile")
    assert _compiler.is_compile_forced_eager()
    end()
    assert torch._dynamo.eval_frame._stance.stance == "fail_on_recompile"
    torch.compiler.set_stance("default")
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_inductor_is_noticed_when_it_is_loaded() -> None:
    import torch._inductor.compile_fx  # noqa: F401

    assert _compiler.has_inductor()
