"""What is kept of a value: every way to reduce it, with padding at either end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from hookline import HooklineError
from hookline.extractions.selecting import Ragged, check_reduce, name_reduce, select_rows

LENGTHS = [3, 5, 1]
LONGEST = 5


def padded(side: str, filling: float = torch.nan) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Give values with a mask, and the same sample by sample without padding."""
    own = [torch.randn(one, 2, 3) for one in LENGTHS]
    value = torch.full((len(LENGTHS), LONGEST, 2, 3), filling)
    mask = torch.zeros(len(LENGTHS), LONGEST, dtype=torch.int64)
    for row, (one, length) in enumerate(zip(own, LENGTHS, strict=True)):
        part = slice(0, length) if side == "right" else slice(LONGEST - length, LONGEST)
        value[row, part] = one
        mask[row, part] = 1
    return value, mask, own


WAYS: dict[Any, Any] = {
    "last": lambda one: one[-1],
    "first": lambda one: one[0],
    0: lambda one: one[0],
    -1: lambda one: one[-1],
    "mean": lambda one: one.mean(0),
    "max": lambda one: one.amax(0),
    "sum": lambda one: one.sum(0),
}


@pytest.mark.parametrize("filling", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("reduce", list(WAYS), ids=str)
def test_padding_never_counts(reduce: Any, side: str, filling: float) -> None:
    value, mask, own = padded(side, filling)
    found = select_rows(value, mask, reduce, count=3, name="x")
    assert isinstance(found, Tensor)
    torch.testing.assert_close(found, torch.stack([WAYS[reduce](one) for one in own]))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("reduce", [None, "tokens"], ids=str)
def test_each_sample_keeps_its_own_tokens(reduce: Any, side: str) -> None:
    value, mask, own = padded(side)
    found = select_rows(value, mask, reduce, count=3, name="x")
    assert isinstance(found, Ragged)
    assert found.lengths == LENGTHS
    assert torch.equal(found.rows, torch.cat(own))


@pytest.mark.parametrize("reduce", list(WAYS), ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_a_value_keeps_its_type(reduce: Any, dtype: torch.dtype) -> None:
    value, mask, own = padded("right")
    found = select_rows(value.to(dtype), mask, reduce, count=3, name="x")
    assert isinstance(found, Tensor)
    assert found.dtype == dtype
    expected = torch.stack([WAYS[reduce](one.to(dtype).double()) for one in own])
    torch.testing.assert_close(found, expected.to(dtype), rtol=1e-2, atol=1e-2)


def test_numbers_that_are_large_are_added_exactly() -> None:
    mask = torch.tensor([[1, 1, 0]])
    whole = torch.tensor([[2**40 + 1, 2**40 + 1, 7]])
    assert select_rows(whole, mask, "sum", count=1, name="x") == torch.tensor([2**41 + 2])
    assert select_rows(whole, mask, "max", count=1, name="x") == torch.tensor([2**40 + 1])
    small = torch.tensor([[-3, -2, 7]])
    assert select_rows(small, mask, "max", count=1, name="x") == torch.tensor([-2])
    assert select_rows(small, mask, "mean", count=1, name="x") == torch.tensor([-2.5])
    many = torch.ones(1, 4096, dtype=torch.bfloat16)
    assert select_rows(many, None, "sum", count=1, name="x") == torch.tensor([4096])
    flags = torch.tensor([[False, False, True]])
    assert select_rows(flags, mask, "max", count=1, name="x") == torch.tensor([False])


def test_without_a_mask_every_token_counts() -> None:
    value = torch.randn(2, 4, 3)
    for reduce, expected in [("last", value[:, -1]), ("mean", value.mean(1)), (2, value[:, 2])]:
        found = select_rows(value, None, reduce, count=2, name="x")  # type: ignore[arg-type]
        assert isinstance(found, Tensor)
        torch.testing.assert_close(found, expected)
    assert select_rows(value, None, None, count=2, name="x") is value
    tokens = select_rows(value, None, "tokens", count=2, name="x")
    assert isinstance(tokens, Ragged)
    assert torch.equal(tokens.rows, value.flatten(0, 1))
    assert tokens.lengths == [4, 4]


def test_spatial_is_the_mean_behind_the_channels() -> None:
    image = torch.randn(2, 3, 4, 5)
    found = select_rows(image, None, "spatial", count=2, name="x")
    assert isinstance(found, Tensor)
    torch.testing.assert_close(found, image.mean((2, 3)))
    flat = torch.randn(2, 3)
    assert select_rows(flat, None, "spatial", count=2, name="x") is flat


def test_a_function_gets_the_value_and_the_mask() -> None:
    value, mask, _ = padded("left", 0.0)

    def span(one: Tensor, own: Tensor | None) -> Tensor:
        assert own is mask
        return one.amax((1, 2, 3)) - one.amin((1, 2, 3))

    found = select_rows(value, mask, span, count=3, name="x")
    assert isinstance(found, Tensor)
    assert found.shape == (3,)
    with pytest.raises(HooklineError, match=r"a row for each of the 3 samples, and gave \[\]"):
        select_rows(value, mask, lambda one, _: one.sum(), count=3, name="x")
    with pytest.raises(HooklineError, match="and gave float"):
        select_rows(value, mask, lambda *_: 1.0, count=3, name="x")  # type: ignore[arg-type]


def test_what_cannot_be_told_is_refused() -> None:
    value, mask, _ = padded("right")
    with pytest.raises(HooklineError, match="its first dimension does not number them"):
        select_rows(value.transpose(0, 1), mask, None, count=3, name="x")
    with pytest.raises(HooklineError, match="which of it is padding cannot be told"):
        select_rows(value[:, 1:], mask, "mean", count=3, name="x")
    with pytest.raises(HooklineError, match="it has no tokens for 'last'"):
        select_rows(torch.ones(3), None, "last", count=3, name="x")
    with pytest.raises(ValueError, match="there is no token 3 in a sample of 3"):
        select_rows(value, mask, 3, count=3, name="x")
    with pytest.raises(ValueError, match="there is no token -4 in a sample of 3"):
        select_rows(value, mask, -4, count=3, name="x")
    with pytest.raises(ValueError, match="a sample without a token has nothing for 'mean'"):
        select_rows(value, mask.clone().fill_(0), "mean", count=3, name="x")
    empty = select_rows(value, torch.zeros_like(mask), "tokens", count=3, name="x")
    assert isinstance(empty, Ragged)
    assert (empty.lengths, empty.rows.shape) == ([0, 0, 0], (0, 2, 3))


@pytest.mark.parametrize("wrong", [True, False, "middle", 1.5, ("last",), ["mean"]], ids=str)
def test_other_ways_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="is no way to reduce a value"):
        check_reduce(wrong)


def test_a_way_has_a_name() -> None:
    assert [name_reduce(one) for one in (None, "last", -2)] == [None, "last", -2]
    assert name_reduce(torch.mean).endswith("mean")  # type: ignore[arg-type,union-attr]
    assert name_reduce(nn.Identity()) == "torch.nn.modules.linear:Identity"


def test_tokens_that_are_not_there_are_a_matter_of_the_sample(tmp_path: Path) -> None:
    class Embed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 3)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            out: Tensor = self.table(input_ids)
            return out

    data = [{"input_ids": list(range(one))} for one in (4, 2, 5, 3, 1)]
    out, model = tmp_path / "out", Embed()
    result = hl.extract(model, data, "table", out, reduce=2, on_error="skip", batch_size=5)
    assert sorted(result.failed) == [1, 4]
    assert "there is no token 2" in result.failed[1]
    store = result.open()
    assert store.ids.tolist() == [0, 2, 3]
    assert torch.equal(store["table"][:], model.table.weight[2].detach().expand(3, 3))


def test_left_padding_reaches_the_store_as_right_padding_does(tmp_path: Path) -> None:
    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.same = nn.Identity()

        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            out: Tensor = self.same(x)
            return out

    ways: list[Any] = ["last", "mean", "max", None]
    for reduce in ways:
        found = []
        for side in ("left", "right"):
            torch.manual_seed(0)
            value, mask, _ = padded(side)
            samples = [
                {"x": one, "attention_mask": own} for one, own in zip(value, mask, strict=True)
            ]
            out = tmp_path / f"{reduce}-{side}"
            store = hl.extract(Same(), samples, "same", out, reduce=reduce).open()
            found.append(store["same"][:])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other)
            assert one.isfinite().all()


class Pools(nn.Module):
    """Values of tokens, of samples and of queries; there are as many of each in some batches."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.pool, self.ask = nn.Embedding(50, 6), nn.Identity(), nn.Identity()
        self.score = nn.Identity()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        self.score(hidden.sum(2))
        self.ask(hidden.mean(1, keepdim=True).expand(-1, 4, -1))
        out: Tensor = self.pool(hidden.mean(1))
        return out


def words(*lengths: int) -> list[dict[str, list[int]]]:
    """Make samples of so many tokens."""
    return [{"input_ids": list(range(1, one + 1))} for one in lengths]


@pytest.mark.parametrize("lengths", [(6, 6, 6, 6), (6, 6, 2, 3), (2, 3, 6, 6), (4, 4, 6, 6)])
def test_a_pooled_value_is_a_row_also_with_as_many_channels_as_tokens(
    tmp_path: Path, lengths: tuple[int, ...]
) -> None:
    model, data = Pools(), words(*lengths)
    sites = {"pool": None, "embed:input.input": None, "score": "tokens"}
    for batch in (1, 2, 4):
        store = hl.extract(model, data, sites, tmp_path / str(batch), batch_size=batch).open()
        assert store["pool"][:].shape == (4, 6)
        assert store["score"].lengths.tolist() == list(lengths)
        ids = [one.tolist() for one in store["embed:input.input"][:]]
        assert ids == [one["input_ids"] for one in data]


def test_queries_stay_queries_where_a_batch_has_as_many_tokens(tmp_path: Path) -> None:
    model, out = Pools(), tmp_path / "out"
    data = words(5, 6, 4, 4, 4, 3)
    store = hl.extract(model, data, "ask", out, batch_size=2, limit=4).open()
    assert store["ask"][:].shape == (4, 4, 6)
    # Also where those come first, in a store that knows better.
    hl.extract(model, data, "ask", out, batch_size=1)
    assert hl.open_store(out)["ask"][:].shape == (6, 4, 6)


class Words(nn.Module):
    """Read tokens, given by position or by a name of its own, without a mask."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.embed = nn.Embedding(10, 4)
            self.mix = nn.Linear(4, 3)

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.mix(self.embed(words))
        return out


@pytest.mark.parametrize("reduce", ["last", "mean", "tokens", -2])
@pytest.mark.parametrize("is_named", [False, True])
def test_tokens_without_a_mask_of_their_own_are_not_mixed_with_padding(
    is_named: bool, reduce: Any, tmp_path: Path
) -> None:
    model = Words()
    rows = [torch.tensor(one) for one in ([1, 2, 3], [4, 5], [6, 7, 8, 9])]
    data = [{"words": one} for one in rows] if is_named else rows
    ways = {"together": {}, "alone": {"batch_size": 1}, "apart": {"deterministic": True}}
    for name, options in ways.items():
        stored = hl.extract(model, data, "mix", tmp_path / name, reduce=reduce, **options).open()
        for number, one in enumerate(rows):
            own = model(one[None])[0].detach()
            wanted = {"last": own[-1], "mean": own.mean(0), "tokens": own, -2: own[-2]}[reduce]
            torch.testing.assert_close(stored["mix"][number], wanted)


def test_what_is_kept_of_rows_of_several_lengths_has_to_be_said(tmp_path: Path) -> None:
    rows = [torch.tensor([1, 2, 3]), torch.tensor([4, 5])]
    with pytest.raises(HooklineError, match='give reduce="tokens"'):
        hl.extract(Words(), rows, "mix", tmp_path / "out", batch_size=2)
    with pytest.raises(ValueError, match="has 3 numbers in one sample and 8 in another"):
        hl.extract(
            nn.Sequential(nn.Linear(8, 2)), [torch.ones(8), torch.ones(3)], "0", tmp_path / "b"
        )
