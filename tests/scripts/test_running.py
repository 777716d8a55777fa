"""Scripts as people write them: what is watched, what is said, and how they end."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.optim import optimizer

import hookline as hl
from hookline.scripts import running, watching

RunHere = Callable[..., SimpleNamespace]


def paths(run: hl.Run) -> set[str]:
    """Give the modules of a run that were measured."""
    return {str(row["site"]).partition(":")[0] for row in run.sites(kind="value")}


def test_script_is_watched_from_its_first_step(run_here: RunHere, tmp_path: Path) -> None:
    done = run_here(
        "model = make()\n"
        "train(model, torch.optim.SGD(model.parameters(), lr=0.01))\n"
        "print('output', sys.argv[1:])\n",
        "--lr",
        "3",
    )
    run = hl.open_run(tmp_path / "run")
    assert done.code == 0
    assert done.out == "output ['--lr', '3']\n"
    assert (run.status, list(run.steps)) == ("finished", [0, 1, 2, 3, 4])
    assert paths(run) == {"", "0", "1", "2"}
    assert len(run.scalar("loss").values) == 5
    assert done.err.lstrip().startswith("No findings in 5 steps of 20 sites.")
    assert "run   run (finished, 5 steps (0 to 4), 20 sites)" in done.err


def test_numbers_are_those_of_the_script_alone(run_here: RunHere) -> None:
    """Bit for bit, with dropout and what the script prints of it."""
    text = (
        "model = nn.Sequential(make(), nn.Dropout(0.5), nn.Linear(4, 4))\n"
        "train(model, torch.optim.Adam(model.parameters(), lr=0.01), 12)\n"
        "print([one.sum().item().hex() for one in model.parameters()], torch.rand(1).item())\n"
    )
    watched = run_here(text)
    spaces: dict[str, object] = {"__name__": "__main__"}
    printed: list[str] = []
    spaces["print"] = lambda *words: printed.append(" ".join(map(str, words)))
    exec((Path.cwd() / "script.py").read_text(), spaces)
    assert watched.out == printed[0] + "\n"


def test_error_of_the_script_is_its_own(run_here: RunHere, tmp_path: Path) -> None:
    done = run_here(
        "model = make()\n"
        "train(model, torch.optim.SGD(model.parameters(), lr=0.01))\n"
        "model(torch.ones(1, 99))\n"
    )
    assert done.code == 1
    assert hl.open_run(tmp_path / "run").status == "failed"
    trace = done.err[done.err.index("Traceback") : done.err.index("No findings")]
    assert "script.py" in trace.splitlines()[1]
    assert "hookline" not in trace
    assert re.search("RuntimeError: .*mat1 and mat2", trace)
    assert done.err.index("Traceback") < done.err.index("No findings in 5 steps")


@pytest.mark.parametrize(
    ("ending", "code", "status"),
    [
        ("sys.exit(3)", 3, "failed"),
        ("sys.exit()", 0, "finished"),
        ("raise KeyboardInterrupt", 130, "interrupted"),
        ("import signal; os.kill(os.getpid(), signal.SIGTERM)", 143, "interrupted"),
    ],
)
def test_run_says_how_the_script_ended(
    run_here: RunHere, tmp_path: Path, ending: str, code: int, status: str
) -> None:
    done = run_here(
        f"model = make()\ntrain(model, torch.optim.SGD(model.parameters(), lr=0.01))\n{ending}\n"
    )
    assert done.code == code
    assert hl.open_run(tmp_path / "run").status == status
    assert "No findings in 5 steps" in done.err


NAN = """
class Bad(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.calls = make(), 0

    def forward(self, x):
        self.calls += 1
        scale = 0.0 if self.calls == 4 else 1.0
        return self.inner(x) / scale * scale


model = Bad()
train(model, torch.optim.SGD(model.parameters(), lr=0.01), 8)
"""


def test_nan_is_said_when_it_comes_and_makes_the_code_1(run_here: RunHere) -> None:
    done = run_here(NAN)
    assert done.code == 1
    lines = done.err.splitlines()
    assert lines[0].startswith("hookline: error: non-finite: ")
    assert "step 3" in lines[0]
    (finding,) = [one for one in done.done.findings if one.rule == "non-finite"]
    assert (finding.step, finding.severity) == (3, "error")
    assert finding.source.startswith("script.py:")
    assert done.done.verdict in " ".join(done.err.split())


def test_code_stays_0_where_that_is_asked_for(run_here: RunHere) -> None:
    assert run_here(NAN, fail_on="never").code == 0


def test_raise_ends_the_script(run_here: RunHere, tmp_path: Path) -> None:
    done = run_here(NAN + "print('went on')\n", on_finding="raise")
    assert (done.code, done.out) == (1, "")
    assert "BadTraining" in done.err
    assert hl.open_run(tmp_path / "run").status == "failed"


def test_quiet_says_only_a_bad_verdict(run_here: RunHere, tmp_path: Path) -> None:
    done = run_here(NAN, is_quiet=True)
    (line,) = done.err.splitlines()
    assert line.startswith("hookline: ")
    assert "step 3" in line


def test_several_models_have_their_names(run_here: RunHere, tmp_path: Path) -> None:
    """A generator and a critic, each with an optimizer; the critic is called by both."""
    run_here(
        "generator, critic = make(8, 8), make(8, 1)\n"
        "first = torch.optim.Adam(generator.parameters(), 1e-3)\n"
        "second = torch.optim.Adam(critic.parameters(), 1e-3)\n"
        "for _ in range(3):\n"
        "    second.zero_grad()\n"
        "    (critic(x).mean() - critic(generator(x).detach()).mean()).backward()\n"
        "    second.step()\n"
        "    first.zero_grad()\n"
        "    critic(generator(x)).mean().backward()\n"
        "    first.step()\n"
    )
    run = hl.open_run(tmp_path / "run")
    assert {"generator", "generator.0", "critic", "critic.2"} <= paths(run)
    assert "" not in paths(run)
    assert {"generator.0.weight:update", "critic.0.weight:update"} <= {
        str(row["site"]) for row in run.sites(kind="update")
    }


def test_models_in_a_loop_and_copies_of_them(run_here: RunHere, tmp_path: Path) -> None:
    done = run_here(
        "for _ in range(3):\n"
        "    model = make()\n"
        "    mean = copy.deepcopy(model)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "    train(model, optimizer, 2)\n"
        "    mean(x)\n"
    )
    run = hl.open_run(tmp_path / "run")
    assert done.code == 0
    assert paths(run) == {
        *("", "0", "1", "2"),
        *("model_2", "model_2.0", "model_2.1", "model_2.2"),
        *("model_3", "model_3.0", "model_3.1", "model_3.2"),
    }
    assert len(run.steps) == 6


def test_weights_changed_by_hand_make_steps_too(run_here: RunHere, tmp_path: Path) -> None:
    run_here(
        "model = make()\n"
        "for _ in range(20):\n"
        "    (model(x) - y).square().mean().backward()\n"
        "    with torch.no_grad():\n"
        "        for one in model.parameters():\n"
        "            one -= 0.01 * one.grad\n"
        "            one.grad = None\n"
    )
    assert len(hl.open_run(tmp_path / "run").steps) > 8


def test_local_gradients_are_measured_where_asked_for(run_here: RunHere, tmp_path: Path) -> None:
    run_here(
        "model = make()\ntrain(model, torch.optim.SGD(model.parameters(), lr=0.01))\n",
        has_local_gradients=True,
    )
    assert len(hl.open_run(tmp_path / "run").series("2.weight:local_grad", "rms").values) == 5


def test_micro_batches_are_one_step(run_here: RunHere, tmp_path: Path) -> None:
    run_here(
        "model = make()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "for number in range(12):\n"
        "    (model(x) - y).square().mean().backward()\n"
        "    if number % 4 == 3:\n"
        "        optimizer.step()\n"
        "        optimizer.zero_grad()\n"
    )
    assert list(hl.open_run(tmp_path / "run").steps) == [0, 1, 2]


def test_workers_of_a_loader_write_nothing(run_here: RunHere, tmp_path: Path) -> None:
    done = run_here(
        "model = make()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "data = torch.utils.data.TensorDataset(x, y)\n"
        "for _ in range(2):\n"
        "    loader = torch.utils.data.DataLoader(data, batch_size=16, num_workers=2)\n"
        "    for a, b in loader:\n"
        "        optimizer.zero_grad()\n"
        "        (model(a) - b).square().mean().backward()\n"
        "        optimizer.step()\n"
    )
    run = hl.open_run(tmp_path / "run")
    assert (done.code, run.status, len(run.steps), run.ranks) == (0, "finished", 4, (0,))


def test_loss_of_the_script_is_named_by_its_line(
    run_here: RunHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other tests of this process have compiled something, after which nobody listens there.
    if "torch._dynamo.convert_frame" in sys.modules:
        monkeypatch.setattr("torch._dynamo.convert_frame.FRAME_COUNTER", 0)
    done = run_here(
        "model = make()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "for number in range(4):\n"
        "    loss = (model(x) - y).square().mean()\n"
        "    if number == 2:\n"
        "        loss = torch.sqrt(loss - 100)\n"
        "    optimizer.zero_grad()\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
    )
    line = (
        (Path.cwd() / "script.py")
        .read_text()
        .splitlines()
        .index("        loss = torch.sqrt(loss - 100)")
    )
    (finding,) = [one for one in done.done.findings if one.rule == "non-finite"]
    assert (finding.site, finding.step) == (f"script.py:{line + 1}/sqrt", 2)


def test_loss_of_minus_infinity_is_named_by_its_line(
    run_here: RunHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "torch._dynamo.convert_frame" in sys.modules:
        monkeypatch.setattr("torch._dynamo.convert_frame.FRAME_COUNTER", 0)
    done = run_here(
        "model = make()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "for number in range(4):\n"
        "    loss = (model(x) - y).square().mean()\n"
        "    if number == 2:\n"
        "        loss = loss + torch.log(loss - loss)\n"
        "    optimizer.zero_grad()\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
    )
    lines = (Path.cwd() / "script.py").read_text().splitlines()
    line = lines.index("        loss = loss + torch.log(loss - loss)") + 1
    (finding,) = [one for one in done.done.findings if one.rule == "non-finite"]
    assert (finding.site, finding.step) == (f"script.py:{line}/log", 2)


def test_lines_outside_of_the_script_are_nobodys(run_here: RunHere) -> None:
    done = run_here(
        "first, last = nn.Linear(8, 16), nn.Linear(16, 4)\n"
        "parameters = [*first.parameters(), *last.parameters()]\n"
        "for number in range(20):\n"
        "    out = last(first(x))\n"
        "    slopes = torch.autograd.grad((out - y).square().mean(), parameters)\n"
        "    with torch.no_grad():\n"
        "        for one, slope in zip(parameters, slopes):\n"
        "            one.sub_(slope * (1e-2 if number != 12 else float('inf')))\n"
    )
    (finding,) = [one for one in done.done.findings if one.rule == "non-finite"]
    assert finding.message.startswith("weight held an infinity already when step")
    assert finding.source.startswith("script.py:")


def test_loss_is_not_blamed_for_what_came_out_of_the_model(
    run_here: RunHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight that is NaN from the start; the output is gone when it is looked for."""
    if "torch._dynamo.convert_frame" in sys.modules:
        monkeypatch.setattr("torch._dynamo.convert_frame.FRAME_COUNTER", 0)
    done = run_here(
        "model = make()\n"
        "model[0].weight.data[0, 0] = float('nan')\n"
        "train(model, torch.optim.SGD(model.parameters(), lr=0.01))\n"
    )
    (finding,) = [one for one in done.done.findings if one.rule == "non-finite"]
    assert (finding.site, finding.step) == ("0.weight", 0)


@pytest.mark.parametrize("ending", ["", "sys.exit(4)\n"])
def test_folder_that_cannot_be_written_is_said_once(
    run_here: RunHere, tmp_path: Path, ending: str
) -> None:
    (tmp_path / "taken").write_text("a file")
    done = run_here(NAN + ending, folder=tmp_path / "taken" / "run")
    assert done.code == (4 if ending else 0)
    assert done.err.count("the run is not kept, only judged") == 1
    assert "non-finite" in done.err


def test_script_without_a_model_is_told(run_here: RunHere, tmp_path: Path) -> None:
    done = run_here("with torch.no_grad():\n    make()(x)\n")
    assert done.code == 0
    assert done.err.startswith("hookline: nothing was watched: no module")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("where", ["meeting", "watching"])
def test_own_error_is_said_once_and_the_script_goes_on(
    run_here: RunHere, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("planted")

    if where == "meeting":
        monkeypatch.setattr("hookline.scripts.discovering.Census", fail)
    else:
        monkeypatch.setattr(watching, "watch", fail)
    text = (
        "model = make()\n"
        "train(model, torch.optim.SGD(model.parameters(), lr=0.01))\n"
        "print('went on')\n"
    )
    done = run_here(text)
    assert (done.code, done.out) == (0, "went on\n")
    assert done.err.count("an error of hookline's own (RuntimeError: planted)") == 1
    strict = run_here(text, is_strict=True)
    assert (strict.code, strict.out) == (1, "")


def test_disk_that_fills_up_is_no_obstacle(
    run_here: RunHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor for a script that ignores warnings."""

    def fail(writer: object, record: object) -> None:
        raise hl.RunWriteError("No space left on device")

    monkeypatch.setattr("hookline.runs.writing.RunWriter.write", fail)
    done = run_here(
        "import warnings; warnings.simplefilter('ignore')\n"
        + NAN
        + "print(sum(one.sum().item() for one in model.parameters()))\n"
    )
    assert (done.code, done.out) == (1, "nan\n")
    assert done.err.count("No space left on device") == 1
    assert "made the first infinity at step 3" in done.done.verdict


def test_pattern_that_names_nothing_is_said(run_here: RunHere, tmp_path: Path) -> None:
    done = run_here(
        "model = make()\ntrain(model, torch.optim.SGD(model.parameters(), lr=0.01))\n",
        sites=("nothing.like.it",),
    )
    assert done.code == 0
    assert "`nothing.like.it` matches no site" in done.err
    last = done.err.strip().splitlines()[-1]
    assert last.startswith("hookline: nothing was watched: `--watch nothing.like.it`: ")
    assert not (tmp_path / "run").exists()


def test_page_is_written_beside_the_run(run_here: RunHere, tmp_path: Path) -> None:
    page = tmp_path / "pages" / "report.html"
    done = run_here(NAN, page=page, has_page=True)
    assert page.read_text().startswith("<!doctype html>")
    assert "page  pages/report.html" in done.err


def test_folder_that_is_taken_is_left_alone(run_here: RunHere, tmp_path: Path) -> None:
    text = "model = make()\ntrain(model, torch.optim.SGD(model.parameters(), lr=0.01))\n"
    for _ in range(2):
        run_here(text, is_claimed=True, has_page=True)
    assert len(hl.open_run(tmp_path / "run-2").steps) == 5
    assert (tmp_path / "run-2" / "report.html").is_file()
    again = run_here(text)
    assert again.code == 0
    assert "holds a run" in again.err


def test_report_that_fails_keeps_the_run(
    run_here: RunHere, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(run: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr("hookline.views.read_report", fail)
    done = run_here("model = make()\ntrain(model, torch.optim.SGD(model.parameters(), lr=0.01))\n")
    assert done.code == 0
    assert "the report could not be made: RuntimeError: planted" in done.err
    assert hl.open_run(tmp_path / "run").status == "finished"


@pytest.mark.parametrize(
    ("severities", "least", "expected"),
    [
        (["error"], "error", True),
        (["warning"], "error", False),
        (["warning"], "warning", True),
        (["info"], "warning", False),
        (["error"], "never", False),
        ([], "error", False),
    ],
)
def test_what_is_bad_depends_on_what_is_asked(
    severities: list[str], least: str, expected: bool
) -> None:
    findings = [SimpleNamespace(severity=one) for one in severities]
    assert running.is_bad(findings, least) is expected


def test_lightning_modules_have_their_paths(run_here: RunHere, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    text = """
import logging, warnings
import lightning

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = make()

    def training_step(self, batch, number):
        return F.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)


data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
trainer = lightning.Trainer(
    max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, accelerator="cpu",
)
trainer.fit(Lit(), data)
"""
    done = run_here(text)
    run = hl.open_run(tmp_path / "run")
    assert (done.code, len(run.steps)) == (0, 8)
    assert paths(run) == {"net", "net.0", "net.1", "net.2"}


def test_trainer_of_transformers_is_followed(run_here: RunHere, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    text = """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

config = GPT2Config(
    vocab_size=50, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
)
model = GPT2LMHeadModel(config)
rows = [{"input_ids": torch.randint(0, 50, (8,)), "labels": torch.randint(0, 50, (8,))}] * 24
settings = TrainingArguments(
    output_dir="out", max_steps=3, per_device_train_batch_size=4, gradient_accumulation_steps=2,
    report_to=[], disable_tqdm=True, save_strategy="no", use_cpu=True, logging_strategy="no",
)
Trainer(model, settings, train_dataset=rows).train()
"""
    done = run_here(text)
    run = hl.open_run(tmp_path / "run")
    assert (done.code, list(run.steps)) == (0, [0, 1, 2])
    assert "transformer.h.0.attn" in paths(run)


def test_torch_is_left_as_it_was(run_here: RunHere) -> None:
    run_here("model = make()\ntrain(model, torch.optim.SGD(model.parameters(), lr=0.01))\n")
    assert torch.nn.Module.__call__.__module__ == "torch.nn.modules.module"
    assert not optimizer._global_optimizer_pre_hooks
    assert not torch.overrides._get_current_function_mode_stack()
