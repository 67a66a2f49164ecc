"""Runs many jobs: builds in parallel on the CPU, measurements one at a time on each GPU.

A job that fails in whatever way is one row. Nothing here touches a GPU or imports torch.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Protocol

from modelnew.measure import jobs
from modelnew.measure.child import Json, describe
from modelnew.measure.devices import Gpu
from modelnew.measure.jobs import Job, Place
from modelnew.measure.turn import lock_file


class Executor(Protocol):
    """Where jobs run: each call starts one step of a job and returns the answer to come."""

    def build(self, job: Job) -> Future[Json]: ...

    def measure(self, job: Job, built: Json, *, alone: bool) -> Future[Json]: ...

    def close(self) -> None:
        """Ends what still runs and waits for its end."""


def run(todo: Sequence[Job], executor: Executor, deliver: Callable[[list[Json]], None]) -> None:
    """Runs the jobs and hands each one's rows to `deliver` as they come, in this thread.

    A job that lacked memory while others prepared on its GPU is measured again at the end, alone.
    On the way out, KeyboardInterrupt included, nothing that was started goes on.
    """
    building = {executor.build(job): job for job in todo}
    measuring: dict[Future[Json], tuple[Job, Json]] = {}
    starved: list[tuple[Job, Json]] = []
    try:
        while building or measuring:
            finished, _ = wait([*building, *measuring], return_when=FIRST_COMPLETED)
            for future in finished:
                if future in building:
                    job = building.pop(future)
                    built = _answer(future)
                    if built["status"] == "ok":
                        measuring[executor.measure(job, built, alone=False)] = job, built
                    else:
                        deliver([jobs.row(job, {}, built)])
                    continue
                job, built = measuring.pop(future)
                row = jobs.row(job, built, _answer(future))
                if row.pop("starved", False):
                    starved.append((job, built))
                    continue
                other = jobs.disagreement(row)
                deliver([row, other] if other else [row])
            if not building and not measuring:
                for job, built in starved:
                    measuring[executor.measure(job, built, alone=True)] = job, built
                starved.clear()
    finally:
        executor.close()


def environment(gpus: Sequence[Gpu], compilers: int) -> dict[str, str]:
    """Environment of all children: how many compilers each may start, which GPUs to build for.

    Without the list a build would open every GPU to ask; it is what PyTorch would come to.
    """
    found = {"MAX_JOBS": str(max(1, compilers))}
    architectures = sorted({gpu.capability for gpu in gpus if gpu.capability})
    if architectures:
        found["TORCH_CUDA_ARCH_LIST"] = ";".join(architectures) + "+PTX"
    return {name: value for name, value in found.items() if not os.environ.get(name)}


def _answer(future: Future[Json]) -> Json:
    """The answer of a step; what went wrong in the runner itself is one row too."""
    try:
        return future.result()
    except Exception as error:
        return {"status": "error", "message": f"not measured: {describe(error)}"}


@dataclass
class Local:
    """This machine: `builders` builds at a time; on each GPU `preparing` processes at a time, of
    which one measures."""

    gpus: Sequence[Gpu]
    builders: int
    preparing: int
    environment: Mapping[str, str] = field(default_factory=dict)
    stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._builds = ThreadPoolExecutor(self.builders)
        self._measurements = ThreadPoolExecutor(max(1, len(self.gpus) * self.preparing))
        self._free: queue.Queue[Gpu] = queue.Queue()
        for _ in range(self.preparing):  # round robin over the GPUs first
            for gpu in self.gpus:
                self._free.put(gpu)

    def build(self, job: Job) -> Future[Json]:
        place = Place(self.environment, stop=self.stop)
        return self._builds.submit(jobs.build, job, place)

    def measure(self, job: Job, built: Json, *, alone: bool) -> Future[Json]:
        return self._measurements.submit(self._measure, job, built, alone)

    def _measure(self, job: Job, built: Json, alone: bool) -> Json:
        gpu = self._free.get()
        try:
            others = [other.id for other in self.gpus if other.id != gpu.id]
            seen = {"CUDA_VISIBLE_DEVICES": ",".join([gpu.id, *others])} if gpu.id else {}
            place = Place(
                {**self.environment, **seen}, str(lock_file(gpu.uuid)) if gpu.uuid else None,
                alone or self.preparing == 1, self.stop,
            )  # fmt: skip
            return jobs.measure(job, place, built)
        finally:
            self._free.put(gpu)

    def close(self) -> None:
        self.stop.set()
        for pool in (self._builds, self._measurements):
            pool.shutdown(wait=True, cancel_futures=True)
