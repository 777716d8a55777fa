"""The test bench of the rules: healthy trainings give no finding, broken ones the right one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

BENCH = str(Path(__file__).parents[2] / "bench")

# Only for the import: the bench has a file `models.py`, and the tests a folder of that name.
sys.path.insert(0, BENCH)
from rules_bench import CASES, run_case  # noqa: E402 (it is found only now)

sys.path.remove(BENCH)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore")  # of torch and transformers, about trainings made to fail
@pytest.mark.parametrize("name", CASES)
def test_training_is_judged_rightly(name):
    outcome = run_case(CASES[name])
    assert outcome.is_right, [str(one) for one in outcome.findings]


def test_bench_has_enough_of_both():
    assert sum(case.is_healthy for case in CASES.values()) >= 24
    assert sum(not case.is_healthy for case in CASES.values()) >= 26
