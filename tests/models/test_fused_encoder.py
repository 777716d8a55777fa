"""`nn.TransformerEncoder` in eval mode without grad is fused; hooks switch that off, and say so."""

from __future__ import annotations

import warnings

import pytest
import torch
from model_runs import assert_no_trace, assert_same_tensors, plain_hooks, tensors_of
from tiny_models import make_encoder, numbers

import hookline as hl


def test_capture_of_a_fused_encoder_is_close_and_noted() -> None:
    model, x = make_encoder().eval(), numbers(2, 5, 8)
    with torch.no_grad():
        fused = model(x)
        with pytest.warns(hl.HooklineWarning, match="fused kernel"), hl.capture(model, "**") as got:
            watched = model(x)
        assert model(x).equal(fused)
    notes = got.report().notes
    assert len(notes) == 2
    for index, note in enumerate(notes):
        assert f"`layers.{index}`" in note
    torch.testing.assert_close(watched, fused)
    assert_no_trace(model)


def test_capture_of_a_fused_encoder_equals_plain_hooks() -> None:
    """A plain hook switches the kernel off too: what it sees is the same to the bit."""
    model, x = make_encoder().eval(), numbers(2, 5, 8)
    with torch.no_grad(), plain_hooks(model) as seen:
        by_hand = model(x)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=hl.HooklineWarning)
        with torch.no_grad(), hl.capture(model, "**") as got:
            watched = model(x)
    assert watched.equal(by_hand)
    assert {visit.path for visit in got} == seen.keys()
    for visit in got:
        assert_same_tensors(tensors_of(visit.output), seen[visit.path][visit.visit])


def test_capture_with_grad_is_exact_and_has_no_note() -> None:
    model, x = make_encoder().train(), numbers(2, 5, 8)
    torch.manual_seed(0)
    plain = model(x)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        # Only `out_proj` of the attention, whose weight is used in a function.
        warnings.filterwarnings("ignore", message="hookline: not everything")
        with hl.capture(model, "**") as got:
            watched = model(x)
    assert watched.equal(plain)
    assert got.report().notes == []


def test_nested_tensor_path_of_a_padded_batch_is_noted() -> None:
    """With a padding mask the encoder packs the batch; with hooks it does not, values agree."""
    model, x = make_encoder().eval(), numbers(2, 5, 8)
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[1, 3:] = True
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*nested tensors is in prototype")
        with torch.no_grad():
            fused = model(x, src_key_padding_mask=mask)
    with (
        torch.no_grad(),
        pytest.warns(hl.HooklineWarning, match="fused kernel"),
        hl.capture(model, "layers.*"),
    ):
        watched = model(x, src_key_padding_mask=mask)
    torch.testing.assert_close(watched[~mask], fused[~mask])
