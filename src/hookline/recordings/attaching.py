"""What a recording of a training listens at, step by step, and what it keeps of calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hookline._torch import is_functorch_active, is_tracing
from hookline.addresses import Selector, resolve
from hookline.hooks.sessions import Session
from hookline.hooks.visits import Visit
from hookline.recordings.calls import INPUTS, write_call
from hookline.recordings.course import WHY_LOST, Course, MakeSite
from hookline.recordings.facts import read_facts
from hookline.recordings.listening import TraceListener
from hookline.recordings.shards import find_shard, sketch_shard
from hookline.recordings.states import Buffers
from hookline.recordings.storing import VALUES, Wanted, choose_tensors, to_site_facts, write_facts
from hookline.recordings.tracing import listen_everywhere
from hookline.recordings.unusual import find_obstacle, to_plain
from hookline.replays.randomness import take_states
from hookline.runs import DumpFile, SiteFacts
from hookline.watchers.attaching import Attachment
from hookline.watchers.delivering import Delivery
from hookline.watchers.listening import WatchListener
from hookline.watchers.options import Options
from hookline.watchers.recording import Recorder

_WITHOUT_GRAD = (
    "no value was recorded: the model ran without grad alone, which is recorded with "
    "`with_inference=True`"
)

_WITHOUT_INPUTS = (
    "the inputs are not kept: the call of the model is compiled together with it, and its "
    "arguments stay in the graph"
)


def measure(recorder: Recorder, site: int, tensor: Tensor) -> None:
    """Have a value measured; of one that is spread over ranks, what this rank has."""
    shard = find_shard(tensor)
    if shard is None:
        recorder.measure(site, tensor)
    else:
        with torch.no_grad():
            recorder.measure_part(site, shard.local, sketch_shard(shard))


class RecorderSink:
    """Have values measured by the recorder of a watch; whole tensors go into a file."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.is_kept: Callable[[SiteFacts], bool] | None = None
        """Of which sites whole tensors are kept; None: of none."""
        self.open_file: Callable[[], DumpFile | None] = lambda: None
        """What begins the file of a step."""
        self.file: DumpFile | None = None
        """The file of the step under way."""

    def number(self, make: MakeSite, tensor: Tensor) -> int:
        """Number a site."""
        return self._recorder.new_site(lambda n, value: to_site_facts(make(n, value)), tensor)

    def measure(self, site: int, tensor: Tensor) -> None:
        """Measure a value, and write it where it is kept whole."""
        if type(tensor) is Tensor:
            self._recorder.measure(site, tensor)
        else:
            measure(self._recorder, site, tensor)
        if self.is_kept is not None:
            self.keep(site, tensor)

    def share(self, site: int, first: int, tensor: Tensor) -> None:
        """Measure again what in the first step was no other site's tensor, or another's."""
        if self._recorder.facts[site].more.get("same_as") != first:
            measure(self._recorder, site, tensor)

    def keep(self, site: int, tensor: Tensor) -> None:
        """Write a tensor into the file of the step."""
        if self.is_kept is None or not self.is_kept(self._recorder.facts[site]):
            return
        tensor = getattr(tensor, "_local_tensor", tensor)
        if find_obstacle(tensor) is not None:
            return
        if self.file is None:
            self.file = self.open_file()
        if self.file is not None:
            self.file.add(str(site), to_plain(tensor))


class RecordListener(TraceListener):
    """Tell of what a training does, in the steps that are recorded."""

    __slots__ = ("attachment", "recorder", "with_inference")

    def __init__(
        self,
        *given: Any,
        attachment: TraceAttachment,
        recorder: Recorder,
        with_inference: bool,
        **more: Any,
    ) -> None:
        super().__init__(*given, **more, guard=recorder.guard.take)
        self.attachment = attachment
        self.recorder = recorder
        self.with_inference = with_inference

    def on_input(
        self, visit: Visit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not self.attachment.is_called and not visit.is_recompute:
            self._begin(visit, module, args, kwargs)
        return super().on_input(visit, module, args, kwargs)

    def _begin(
        self, visit: Visit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Tell of the first call of a step where that is of a part of the model by itself."""
        try:
            if self.hears(visit) and not is_functorch_active() and not is_tracing():
                self.attachment.begin_call(module, args, kwargs, path=self.post.path)
        except Exception as error:
            self._fail(error)

    def hears(self, visit: Visit) -> bool:
        recorder = self.recorder
        has_grad = visit.call.grad_at_start
        if has_grad and recorder.tell_begin is not None and not visit.is_recompute:
            recorder.tell_begin()
        if recorder.is_on and not has_grad and not self.with_inference:
            self.attachment.has_passed_over = True
            return False
        return recorder.is_on

    def on_begin(self, visit: Visit) -> None:
        try:
            if not visit.is_recompute and self.hears(visit) and not self.attachment.is_called:
                self.attachment.begin_unseen_call()
        except Exception as error:
            self._fail(error)
        super().on_begin(visit)

    def on_total(self, site: int, grad: Tensor) -> None:
        if self.recorder.is_on:
            super().on_total(site, grad)

    def on_delivered_total(self, site: int, grad: Tensor) -> None:
        if self.recorder.is_on:
            super().on_delivered_total(site, grad)


class TraceAttachment(Attachment):
    """The listeners of a recording, put on the models and taken off as steps ask for it."""

    _needs_visits = True

    def __init__(
        self, models: Mapping[str, nn.Module], options: Options, recorder: Recorder
    ) -> None:
        self.sink = RecorderSink(recorder)
        self.course = Course(self.sink)
        self.delivery: Delivery | None = None
        self.steps_left: int | None = None
        """How many more steps are recorded; None: all."""
        self.end: Callable[[], None] = lambda: None
        """What ends the recording."""
        self._buffers: list[Buffers] = []
        self._models = dict(models)
        self._step = 0
        self.is_called = False
        """Whether anything was called in the step under way."""
        self.has_passed_over = False
        """Whether something was not recorded because it ran without grad."""
        self._is_described = False
        self._has_kept = False
        self._has_unseen = False
        super().__init__(models, options, recorder)

    def keep_tensors(self, wanted: Wanted) -> None:
        """Keep whole tensors, of each step a file."""
        self.sink.is_kept = choose_tensors(wanted)
        self.sink.open_file = self._open_file

    def _open_file(self) -> DumpFile | None:
        writer = None if self.delivery is None else self.delivery.writer
        return None if writer is None else writer.open_dump(f"{VALUES}-{self._step:06d}")

    def _listen(self, session: Session, sites: Selector, prefix: str) -> Iterable[WatchListener]:
        assert session.tree is not None
        wanted = None
        if sites != "**":
            chosen = resolve(session.tree, sites, default_port="output")
            wanted = {id(site.module) for site in chosen}
        left_out = listen_everywhere(
            session,
            self.course,
            wanted=wanted,
            kind=RecordListener,
            prefix=prefix,
            gradients=self._options.gradients,
            attachment=self,
            recorder=self._recorder,
            with_inference=self._options.with_inference,
        )
        self.left_out.update({prefix + path: why for path, why in left_out.items()})
        if self._options.parameters is not None:
            self._buffers.append(Buffers(session.tree, self.course, prefix))
        return ()

    def _tell_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], prefix: str
    ) -> None:
        super()._tell_call(module, args, kwargs, prefix)  # it may begin a step
        if self._recorder.is_on and not self.is_called:
            self.begin_call(module, args, kwargs, path=prefix.rstrip("."))

    def begin_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, path: str
    ) -> None:
        """Take what is to be known before the first call of a step, of a model or a part of it."""
        self.is_called = True  # what is done here may call it
        with self._recorder.timed(), torch.no_grad():
            if self.sink.is_kept is not None or not self._has_kept:
                self._has_kept = True
                self._keep_call(args, kwargs, path)
        self._begin_state()

    def begin_unseen_call(self) -> None:
        """Do so for a call inside a compiled graph, where its arguments stay."""
        self.is_called = self._has_unseen = True
        self._begin_state()

    def _begin_state(self) -> None:
        with self._recorder.timed(), torch.no_grad():
            if not self._is_described:
                self._is_described = True
                self._describe_models()
            for one in self._buffers:
                one.begin()

    def _describe_models(self) -> None:
        if self.delivery is None:
            return
        documents = {
            prefix.rstrip("."): write_facts(read_facts(model))
            for prefix, model in self._models.items()
        }
        whole = next(iter(documents.values()))
        if list(documents) != [""]:
            whole = {
                **whole,
                "title": "",
                "modules": {
                    _join(name, path): one
                    for name, document in documents.items()
                    for path, one in document["modules"].items()
                },
                "ties": [
                    [_join(name, one) for one in tie]
                    for name, document in documents.items()
                    for tie in document["ties"]
                ],
            }
        self.delivery.describe("modules", whole)

    def _keep_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], path: str) -> None:
        if self.delivery is None:
            return
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        tensors, facts = write_call(args, kwargs, take_states(devices, in_full=True))
        copies = {key: one.to("cpu", copy=True) for key, one in tensors.items()}
        is_model = path in (one.rstrip(".") for one in self._models)
        part = {} if is_model else {"part": path}
        self.delivery.dump(INPUTS, copies, {"step": self._step, **part, **facts})

    def add_later(self, prefix: str, model: nn.Module) -> None:
        self._models[prefix] = model
        self._is_described = False
        super().add_later(prefix, model)

    def unheard(self) -> list[str]:
        notes = super().unheard()
        if self.has_passed_over and not any(one.kind == "value" for one in self._recorder.facts):
            notes.append(_WITHOUT_GRAD)
        if self._has_unseen and not self._has_kept:
            notes.append(_WITHOUT_INPUTS)
        return notes

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        self.course.begin_step()
        self._step = step
        self.is_called = False
        if self.steps_left == 0:
            self.steps_left = None
            self.end()

    def end_step(self, step: int) -> None:
        try:
            with self._recorder.timed(), torch.no_grad():
                for one in self._buffers if self.is_called else ():
                    one.end()
            for address in self.course.find_lost():
                self._recorder.unmeasured.setdefault(address, WHY_LOST)
            for address, why in self.course.unmeasured.items():
                self._recorder.unmeasured.setdefault(address, why)
            file, self.sink.file = self.sink.file, None
            if file is not None and self.delivery is not None:
                self.delivery.finish_dump(VALUES, file, {"step": step})
        except Exception as error:
            self._recorder.guard.take(error)
        if self.steps_left and self._recorder.has_events:
            self.steps_left -= 1


def _join(name: str, path: str) -> str:
    return f"{name}.{path}" if name and path else name or path


__all__ = ["RecordListener", "RecorderSink", "TraceAttachment"]
