"""`hl.watch`: statistics of sites over the steps of a training."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookline._errors import NoSuchSite, NotRecorded, RunWriteError, SessionError
from hookline._tables import Table
from hookline.addresses import Selector
from hookline.hooks.compiler_notes import CompilerNotes
from hookline.hooks.uncompiled import outside_of_graphs
from hookline.replays import Origin
from hookline.rules import Judge, Rule, say_verdict
from hookline.runs import OF_STEPS, History, RunWriter, Series, describe_environment, name_ending
from hookline.watchers.attaching import Attachment, Models, name_models
from hookline.watchers.choosing import choose_all, is_judged_by, list_rules
from hookline.watchers.clocks import Clock
from hookline.watchers.delivering import Delivery
from hookline.watchers.describing import Descriptions, read_rank
from hookline.watchers.findings import Findings, show_verdict
from hookline.watchers.options import Options
from hookline.watchers.pacing import Cost, Pace
from hookline.watchers.pausing import Pause
from hookline.watchers.progress import ProgressLine
from hookline.watchers.reacting import OnFinding, Reaction
from hookline.watchers.recording import Recorder
from hookline.watchers.seeking import Seeker
from hookline.watchers.sinks import Sink
from hookline.watchers.stepping import Steps
from hookline.watchers.strangers import RULE, Strangers
from hookline.watchers.turns import Turns
from hookline.watchers.unclosed import unclosed
from hookline.watchers.weights import Weights
from hookline.watchers.working import say


@outside_of_graphs
def watch(
    model: Models,
    run_dir: str | os.PathLike[str] | None = None,
    *,
    sites: Selector | None = "**",
    every: int | Mapping[str, int] = 1,
    gradients: bool = True,
    parameters: str | Sequence[str] | None = "**",
    updates: bool = True,
    local_gradients: bool = False,
    sketch_every: int | None = None,
    counts_every: int | None = None,
    moments_every: int | None = None,
    units_every: int | None = None,
    budget: float | None = None,
    budget_from: int = 0,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
    with_inference: bool = False,
    first_step: int | None = None,
    resume: bool = False,
    keep: int = 100,
    to: Sink | Sequence[Sink] = (),
    progress: bool = False,
    rules: bool | Rule | Sequence[Rule] = True,
    on_finding: OnFinding = "continue",
    replay: bool = True,
    strict: bool = False,
) -> Watch:
    """Measure every value of a model while it trains, judge it, and say what is wrong.

        with hl.watch(model, "runs/a") as w:
            train()
        hl.open_run("runs/a").series("layers.3.mlp", "rms")

    Measured are the values that `sites` names and, with `gradients`, the gradients that reach
    them; and, for the parameters that the patterns `parameters` name (None: for none), the value,
    the gradient that the optimizer is given and, with `updates`, the change that it makes; with
    `local_gradients` also what this rank alone computed of that gradient, before ranks reduce it
    (`fc.weight:local_grad`). A step is one of an optimizer: micro-batches before it are merged.

    Some is taken in one watched step of `sketch_every`, `counts_every` and `moments_every` alone:
    a sketch of each value; the counts of zeros, tiny and huge elements with the exponent
    histogram; the optimizers' moments. 0 means never, None one step in ten, or fewer where that
    would cost more than two percent. `units_every` is the same for single channels; None looks at
    them in the first forty watched steps and then in one of ten.

    `every` is a stride, or strides by pattern, of which the last that matches counts:
    `{"**": 10, "head": 1}`. `budget=0.03` watches as
    many steps as keep the measured cost under three percent, after the first `budget_from`, which
    are watched whatever that costs. Calls without grad are left out unless `with_inference`.
    `optimizers` names those whose steps count, where not all do. Several models come as a list or a
    dict. Without `run_dir` the latest `keep` steps stay in memory.
    `resume` goes on in a folder that holds a run, with the step after its last or `first_step`.
    `to` are functions that get the scalars of each step.

    Each step is judged by `rules`: all that are registered, or those given. `w.findings` has what
    they find and `w.verdict` says it in a sentence. `on_finding` is `"continue"`, `"raise"` (an
    error among them raises `hl.BadTraining` in the training), `"dump"` (the batch is kept in the
    run), or a function. With `replay`, a step in which something is not finite is run again to find
    the operation that made it. An error inside hookline ends the watch and not the training, unless
    it is `strict`.
    """
    options = Options(
        sites=sites,
        every=every,
        gradients=gradients,
        parameters=parameters,
        updates=updates,
        local_gradients=local_gradients,
        sketch_every=sketch_every,
        counts_every=counts_every,
        moments_every=moments_every,
        units_every=units_every,
        budget=budget,
        budget_from=budget_from,
        optimizers=[optimizers] if isinstance(optimizers, Optimizer) else optimizers,
        with_inference=with_inference,
        first_step=first_step,
        resume=resume,
        keep=keep,
        to=[to] if callable(to) else to,
        progress=progress,
        rules=[rules] if isinstance(rules, Rule) else rules,
        on_finding=on_finding,
        replay=replay,
        strict=strict,
    )
    return Watch(name_models(model), None if run_dir is None else Path(run_dir), options)


class Watch:
    """A watch of a training: what was measured, and the way to end it. Made by `hl.watch`."""

    _listens_by: type[Attachment] = Attachment
    _weighs_by: type[Weights] = Weights

    def __init__(
        self, models: Mapping[str, nn.Module], folder: Path | None, options: Options
    ) -> None:
        self.folder = folder
        """The run folder; None where steps are kept in memory only."""
        self.is_open = True
        """Whether it still measures."""
        self._options = options
        self._remarks: list[str] = []
        self._recorder = Recorder(strict=options.strict)
        self._attachment = self._listens_by(models, options, self._recorder)
        self._compiler = CompilerNotes(models.values())
        strides = options.strides.values()
        self._pace = Pace(*strides, budget=options.budget, free=options.budget_from)
        self._is_wanted = choose_all(models, options)
        self._descriptions = Descriptions()
        for prefix, model in models.items():
            self._descriptions.add(prefix, model)
        writer, first_step = self._make_writer(options)
        rank = read_rank()[0]
        self._reaction = Reaction(options.on_finding, None if writer is None else writer.dump)
        self._delivery = Delivery(
            writer,
            keep=options.keep,
            sinks=options.to,
            progress=ProgressLine() if options.progress else None,
            judge=None if options.rules is False else Judge(list_rules(options), rank=rank),
            reaction=self._reaction,
            guard=self._recorder.guard,
        )
        named = [(prefix, model, self._is_wanted) for prefix, model in models.items()]
        self._weights = self._weighs_by(
            self._recorder,
            named,
            updates=options.updates,
            strides=options.strides,
            local_gradients=options.local_gradients,
        )
        self._seeker = Seeker(
            self._recorder,
            is_wanted=options.replay and options.rules is not False,
            is_kept=self._reaction.wants_calls,
        )
        self._steps = Steps(
            self._recorder,
            self._weights,
            self._pace,
            first=first_step,
            turns=Turns(
                options.extras_every, moments=options.moments_every, units=options.units_every
            ),
            optimizers=options.optimizers,
            seeker=self._seeker,
            reaction=self._reaction,
            delivery=self._delivery,
            abandon=self._let_go,
            strangers=Strangers(self._weights) if is_judged_by(options, RULE) else None,
        )
        self._clock = Clock(self._steps, self._recorder.guard)
        if self._recorder.has_given_up:
            self.close("failed")
            return
        self._clock.start()
        try:
            self._attachment.start(self._steps)
            self._steps.start(self._attachment)
        except BaseException:  # what is asked cannot be asked of these models
            self._let_go()
            raise
        unclosed.add(self)

    def _make_writer(self, options: Options) -> tuple[RunWriter | None, int]:
        """Open the run folder, and say which step comes first."""
        first = options.first_step or 0
        if self.folder is None:
            return None, first
        rank, world = read_rank()
        try:
            writer = RunWriter(self.folder, rank=rank, world=world, resume=options.resume)
            writer.describe("environment", describe_environment())
            writer.describe("watch", options.facts())
            for name, facts in self._descriptions.documents():
                writer.describe(name, facts)
        except RunWriteError as error:
            if options.strict:
                raise
            self._recorder.give_up()
            say(f"nothing is watched, and the training goes on. {error}")
            return None, first
        if options.first_step is None and writer.last_step is not None:
            first = writer.last_step + 1
        return writer, first

    def add_model(self, model: nn.Module, name: str) -> None:
        """Watch another model from now on; `name` comes first in its addresses, "" for none."""
        self._check_open()
        if not self.is_open or self._recorder.has_given_up:
            return
        try:
            prefix = f"{name}." if name else ""
            self._attachment.add_later(prefix, model)
            self._weights.add((prefix, model, self._is_wanted))
            self._descriptions.add(prefix, model)
            for document, facts in self._descriptions.documents():
                self._delivery.describe(document, facts)
        except Exception as error:
            self._recorder.guard.take(error)

    def note_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, prefix: str = ""
    ) -> None:
        """Learn of a call of a part by itself, so that it can be repeated if it goes wrong."""
        if self.is_open and torch.is_grad_enabled() and not self._recorder.is_deaf:
            try:
                self._steps.on_call(module, args, kwargs, prefix)
            except Exception as error:
                self._recorder.guard.take(error)

    @property
    def origin_seekers(self) -> list[Callable[[], Origin | None]]:
        """Who is asked for the origin of a non-finite value where no kept call shows it."""
        return self._seeker.others

    @property
    def findings(self) -> Findings:
        """What rules have found so far, in the order in which they found it."""
        self.flush()
        return Findings(self._delivery.findings)

    @property
    def current_findings(self) -> Findings:
        """What rules have found so far, without waiting for what is still being judged."""
        return Findings(tuple(self._delivery.findings))

    @property
    def is_replaying(self) -> bool:
        """Whether it calls the models itself now, to find an operation."""
        return self._recorder.is_deaf

    @property
    def failure(self) -> BaseException | None:
        """The error of hookline's own that ended it before its time."""
        return self._recorder.guard.failure

    @property
    def write_failure(self) -> RunWriteError | None:
        """Why nothing is kept in the folder any more; steps are judged all the same."""
        return self._delivery.write_failure

    @property
    def gap(self) -> str:
        """What was not judged since it stopped before its time; empty where it did not."""
        if self.failure is None:
            return self._delivery.gap
        last = self._delivery.last_step
        if last is None:
            return "The watch stopped before the first step ended: nothing was judged."
        return f"The watch stopped at step {last}: nothing after that was judged."

    @property
    def verdict(self) -> str:
        """Say in one sentence how the training stands."""
        self.flush()
        if self._options.rules is False:
            return "Nothing was judged: rules=False."
        delivery = self._delivery
        said = say_verdict(delivery.findings, steps=delivery.steps, sites=len(self._recorder.facts))
        return f"{self.gap} {said}" if self.gap else said

    @property
    def step_number(self) -> int:
        """The number of the step under way."""
        return self._steps.number

    @outside_of_graphs
    def step(self) -> None:
        """End the step under way: for loops without an optimizer of torch's."""
        self._check_open()
        try:
            self._steps.end_by_hand()
        except Exception as error:
            self._recorder.guard.take(error)

    def log(self, **values: float | Tensor) -> None:
        """Note numbers of the step under way, such as the loss; a tensor is not waited for."""
        self._check_open()
        taken = [name for name in OF_STEPS if name in values]
        if taken:
            raise ValueError(
                f"{taken[0]!r} is a number that the run keeps of every step by itself; log yours "
                f"by another name, such as my_{taken[0]}=..."
            )
        for name, value in values.items():
            self._recorder.add_scalar(name, value)

    def pause(self) -> Pause:
        """Measure nothing until `resume`, or until the end of a `with w.pause():`."""
        self._check_open()
        self._steps.pause()
        return Pause(self)

    def resume(self) -> None:
        """Go on after `pause`."""
        self._check_open()
        self._steps.resume()

    def flush(self) -> None:
        """Wait until every step that has ended is kept, on disk where there is a folder."""
        if self._delivery.is_own_thread:  # somebody who is told of a step looks back
            return
        if self.is_open and self._steps.is_complete and self._steps.is_here:
            self._steps.advance()
        self._delivery.flush()

    def table(self, step: int = -1, **options: Any) -> Table:
        """Give the statistics of a step, the latest if none is named: one row a site."""
        with self._reading():
            found = self._delivery.recent.table(step=step, **options)
        if not len(found) and (why := self._attachment.explain_silence()):
            return Table(found.columns, (), title=found.title, notes=(*found.notes, why))
        return found

    def series(self, site: str, stat: str = "rms", **options: Any) -> Series:
        """Give a statistic of a site over the steps that are still in memory."""
        with self._reading():
            return self._delivery.recent.series(site, stat, **options)

    def scalar(self, name: str) -> Series:
        """Give a number that was logged, over the steps that are still in memory."""
        self._catch_up()
        return self._delivery.recent.scalar(name)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Have all steps at hand; where there is nothing to find, say why."""
        self._catch_up()
        try:
            yield
        except (NotRecorded, NoSuchSite) as error:
            why = self._attachment.explain_silence()
            if not why:
                raise
            raise type(error)(f"{error} So far {why}.") from None

    def _catch_up(self) -> None:
        self.flush()
        if self._delivery.is_own_thread:
            return
        is_first = not len(self._delivery.recent.steps)
        if is_first and self.is_open and self._recorder.has_events and self._steps.is_here:
            self._steps.advance()  # nothing has ever stepped: what there is so far is the step
            self._delivery.flush()

    def add_finding(self, finding: Mapping[str, Any]) -> None:
        """Note in the run what was concluded from it."""
        self._delivery.add_finding(finding)

    def add_note(self, text: str) -> None:
        """Note what is to be known when the run is read."""
        if text not in self._remarks:
            self._remarks.append(text)

    def dump(self, name: str, tensors: Mapping[str, Tensor], **facts: Any) -> None:
        """Keep whole tensors in the run; they are copied at once and written later."""
        if self._delivery.writer is None:
            raise SessionError("there is no run folder to dump to: hl.watch(model, run_dir)")
        copies = {key: value.detach().to("cpu", copy=True) for key, value in tensors.items()}
        self._delivery.dump(name, copies, {"step": self.step_number, **facts})

    @property
    def history(self) -> History:
        """The steps that are still in memory, read as a run is: sites, maps, histograms."""
        self._catch_up()
        return self._delivery.recent

    @property
    def cost(self) -> Cost:
        """What watching costs, measured in this run."""
        return self._pace.cost()

    @property
    def notes(self) -> list[str]:
        """What could not be measured, and why."""
        found = [f"`{where}`: {why}" for where, why in self._recorder.unmeasured.items()]
        if self.failure is not None:
            why = str(self.failure) or type(self.failure).__name__
            found.append(f"the watch stopped before the training did: {why}")
        found += [*self._delivery.notes, *self._seeker.notes, *self._remarks]
        found += [] if self._weights.local is None else self._weights.local.notes
        compiler = self._compiler
        found += compiler.list() if self._recorder.has_graphs else compiler.list_limits()
        silence = self._attachment.explain_silence()
        return [*found, *([silence] if silence else []), *self._attachment.unheard()]

    @outside_of_graphs
    def close(self, status: str = "finished") -> None:
        """End the watch: the models are as before, the run is complete on disk."""
        if not self.is_open:
            return
        self.is_open = False
        unclosed.discard(self)
        if not self._steps.is_here:
            return
        notes = self.notes
        for end in (self._let_go, self._steps.stop):
            try:
                end()
            except Exception as error:
                self._recorder.guard.note(error)
        self._delivery.close(status, self.cost, notes, gap=lambda: self.gap)

    def abandon(self, error: BaseException) -> None:
        """End it before its time, for an error of whoever has it; the error was said."""
        guard = self._recorder.guard
        guard.failure = guard.failure or error
        self.close("failed")

    def _let_go(self) -> None:
        """Take everything off the models and the optimizers."""
        self._clock.stop()
        self._attachment.stop()
        if self._weights.local is not None:
            self._weights.local.detach()

    def give_up(self) -> None:
        """Measure nothing any more, and leave what there is as it is: for a forked process."""
        self._recorder.give_up()

    @outside_of_graphs
    def __enter__(self) -> Watch:
        return self

    @outside_of_graphs
    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(name_ending(error))
        if error is None:
            self._recorder.guard.raise_failure()
            self._reaction.raise_waiting()

    def _check_open(self) -> None:
        if not self.is_open and not self._recorder.has_given_up:
            raise SessionError("this watch is closed; make a new one with hl.watch(...)")

    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed"
        where = "in memory" if self.folder is None else str(self.folder)
        sites = len(self._recorder.facts)
        found = len(self._delivery.findings)
        findings = f", {found} finding{'' if found == 1 else 's'}" if found else ""
        return f"<hl.watch {where}, {state}, step {self.step_number}, {sites} sites{findings}>"

    def _repr_html_(self) -> str:
        return show_verdict(self.verdict, self._delivery.findings)
