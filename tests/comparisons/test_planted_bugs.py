"""The bench of comparisons: the very module of each planted bug is named, benign changes pass."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

BENCH = str(Path(__file__).parents[2] / "bench")

# Only for the import: the bench has a file `models.py`, and the tests a folder of that name.
sys.path.insert(0, BENCH)
from diff_bench import CASES, Recordings, run_case  # noqa: E402 (it is found only now)
from diff_cases import WAYS, make_reference  # noqa: E402

sys.path.remove(BENCH)


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    """Share what is recorded of a model over the cases that change it."""
    return Recordings(tmp_path_factory.mktemp("recordings"))


@pytest.mark.filterwarnings("ignore")  # of torch and transformers, about how they are used here
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_case_is_judged_rightly(name, way, recordings):
    outcome = run_case(CASES[name], way, recordings)
    case = outcome.case
    assert (outcome.first, outcome.direction) == (case.at, case.direction), outcome.sentence


def test_bench_has_enough_of_both():
    bugs = [case for case in CASES.values() if case.is_bug]
    assert len(bugs) >= 60
    assert len({case.example for case in bugs}) >= 6
    assert sum(not case.is_bug for case in CASES.values()) >= 25


@pytest.mark.parametrize("name", ["tanh_gelu", "dropout_left_on", "gradient_scale"])
def test_reference_is_left_as_it_was(name, recordings):
    """What the bench shares must not change: weights, gradients, the random state."""
    model = make_reference(CASES[name].example).model
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random = torch.get_rng_state()
    run_case(CASES[name], "tensors", recordings)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
