"""`compiled="eager"` and the stances that others set: torch has one of them for the process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl


@pytest.fixture(autouse=True)
def take_the_stance_back() -> Iterator[None]:
    yield
    torch.compiler.set_stance("default")


class Telling(nn.Module):
    """Tell whether it was compiled."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if torch.compiler.is_compiling() else x


class Model:
    """A compiled model, and what it ran as when it was called."""

    def __init__(self) -> None:
        self.compiled = torch.compile(Telling(), backend="eager")
        self.x = torch.zeros(2)
        assert not self.is_eager()

    def is_eager(self) -> bool:
        return torch.equal(self.compiled(self.x), self.x)

    def open(self) -> hl.Handle:
        return hl.hook(self.compiled, "", lambda value, at: None, compiled="eager")


def current() -> str:
    stances: Any = torch._dynamo.eval_frame
    found: str = stances._stance.stance
    return found


def test_users_block_may_end_before_the_session() -> None:
    model = Model()
    with torch.compiler.set_stance("eager_on_recompile"):
        handle = model.open()
        assert model.is_eager()
    assert model.is_eager()
    handle.remove()
    assert current() == "default"
    assert not model.is_eager()


def test_session_may_end_inside_of_users_block() -> None:
    model = Model()
    handle = model.open()
    with torch.compiler.set_stance("fail_on_recompile"):
        assert model.is_eager()
        handle.remove()
        assert current() == "fail_on_recompile"
        assert not model.is_eager()
    assert current() == "default"
    assert not model.is_eager()


def test_users_block_may_lie_inside_of_the_session() -> None:
    model = Model()
    with model.open():
        with torch.compiler.set_stance("fail_on_recompile"):
            assert model.is_eager()
        assert model.is_eager()
    assert current() == "default"


def test_users_block_may_lie_around_the_session() -> None:
    model = Model()
    with torch.compiler.set_stance("fail_on_recompile"):
        with model.open():
            assert model.is_eager()
        assert current() == "fail_on_recompile"
    assert current() == "default"


def test_stance_that_is_set_for_good_takes_effect_when_all_have_closed() -> None:
    model = Model()
    first, second = model.open(), model.open()
    torch.compiler.set_stance("eager_on_recompile")
    first.remove()
    assert model.is_eager()
    second.remove()
    assert current() == "eager_on_recompile"
    with model.open():
        torch.compiler.set_stance("default")
    assert current() == "default"


def test_stances_of_blocks_that_cross_are_put_back() -> None:
    model = Model()
    outer, inner = torch.compiler.set_stance("eager_on_recompile"), None
    with outer:
        first = model.open()
        inner = torch.compiler.set_stance("fail_on_recompile")
        with inner:
            second = model.open()
            first.remove()
            assert model.is_eager()
        assert model.is_eager()
    second.remove()
    assert current() == "default"


def test_function_with_a_stance_runs_eagerly_and_keeps_it() -> None:
    model = Model()

    @torch.compiler.set_stance("fail_on_recompile")
    def is_eager() -> bool:
        return model.is_eager()

    with model.open():
        assert is_eager()
    assert not is_eager()
    assert current() == "default"


def test_stance_of_another_thread_is_put_back() -> None:
    model = Model()
    has_set, may_end, seen = threading.Event(), threading.Event(), list[bool]()

    def run() -> None:
        with torch.compiler.set_stance("eager_on_recompile"):
            seen.append(model.is_eager())
            has_set.set()
            may_end.wait(10)

    thread = threading.Thread(target=run)
    with model.open():
        thread.start()
        has_set.wait(10)
        assert model.is_eager()
    assert current() == "eager_on_recompile"
    may_end.set()
    thread.join()
    assert seen == [True]
    assert current() == "default"
