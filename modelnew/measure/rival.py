"""Eager PyTorch with cudnn.benchmark, timed in a process of its own, call by call on request.

cuDNN keeps the first plan that was chosen for a shape in a process, so the two settings cannot
share one; and they must be interleaved, so both processes live side by side and take turns.
"""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch

from modelnew.measure.child import Json, describe, die_with_parent
from modelnew.measure.load import construct, draw_inputs, execute_reference, resolve


class Rival:
    """The other process, seen from the one that measures.

    It is forked, so it must be made before this process opens the GPU; it loads the model when
    `start` says that it will be needed.
    """

    def __init__(self, payload: Json) -> None:
        self._payload = payload
        self._ready = False
        asked, ask = os.pipe()
        answered, answer = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            os.close(ask)
            os.close(answered)
            _serve(asked, answer)
        os.close(asked)
        os.close(answer)
        self._ask, self._answers = os.fdopen(ask, "w"), os.fdopen(answered)

    def __enter__(self) -> Rival:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._ask.close()
        self._answers.close()

    def start(self) -> None:
        """Has the model loaded there, beside what this process does in the meantime."""
        self._send(self._payload)

    def milliseconds(self) -> float:
        """Has one call timed there. Raises RuntimeError with what went wrong."""
        if not self._ready:
            self._receive()
            self._ready = True
        self._send({})
        return float(self._receive()["ms"])

    def _send(self, question: Json) -> None:
        try:
            print(json.dumps(question), file=self._ask, flush=True)
        except BrokenPipeError:
            raise RuntimeError("the other process ended") from None

    def _receive(self) -> Json:
        answer: Json = json.loads(self._answers.readline() or "{}")
        if "ms" not in answer:
            raise RuntimeError(answer.get("error", "the other process ended"))
        return answer


def _serve(asked: int, answer: int) -> None:
    """The other process: each question, the payload first, gets one answer, {"ms": ...}."""
    die_with_parent()
    with os.fdopen(asked) as questions, os.fdopen(answer, "w") as answers:
        try:
            _answer_all(questions, answers)
        finally:
            os._exit(0)  # never back into what the parent was doing


def _answer_all(questions: IO[str], answers: IO[str]) -> None:
    timed: Any = None
    for line in questions:
        try:
            if timed is None:
                timed = _prepare(json.loads(line))
                found: Json = {"ms": 0.0}
            else:
                with torch.no_grad():
                    found = {"ms": timed()}
        except Exception as error:
            found = {"error": describe(error)}
        print(json.dumps(found), file=answers, flush=True)


def _prepare(payload: Json) -> Any:
    from modelnew.measure.bench import Timer

    torch.backends.cudnn.benchmark = True
    module: Any = execute_reference(Path(payload["reference"]), payload["overrides"])
    device = resolve(payload["device"])
    inputs = draw_inputs(module.get_inputs, 0, device)
    args: Any = getattr(module, "get_init_inputs", list)()
    model = construct(module.Model, device, args, {})
    return partial(Timer.on(device), partial(model, *inputs))
