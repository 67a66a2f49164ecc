"""Runs jobs on a Ray cluster: builds on its CPUs, measurements on workers with one GPU each.

Files travel by content, so that workers need no shared folder; a built extension travels from the
worker that compiled it to the one that measures, and is compiled again there only where the two
machines differ. Ray retries the step of a lost worker once.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import os
import tarfile
import tempfile
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from modelnew.ir import ModelNewError
from modelnew.measure import devices, jobs, runner
from modelnew.measure.child import PACKAGE_PARENT, Json, describe
from modelnew.measure.jobs import Job, Place

RETRIES = 1  # of a step whose worker was lost
Texts = tuple[str, str]


class Cluster:
    """The Ray cluster at `address` ("auto": the one running here, "local": one started for this).

    Raises ModelNewError when Ray is not installed, not reachable, or has no GPU although `gpus`
    asks for them.
    """

    def __init__(self, address: str, *, gpus: bool = True) -> None:
        try:
            ray: Any = importlib.import_module("ray")  # an extra: nothing else needs it
        except ImportError:
            raise ModelNewError("--ray needs Ray: pip install 'ray>=2.40'") from None
        self._ray = ray
        try:
            ray.init(
                address, runtime_env={"py_modules": [str(PACKAGE_PARENT / "modelnew")]},
                log_to_driver=False, configure_logging=False,
            )  # fmt: skip
        except Exception as error:  # Ray has some ten kinds for a cluster that does not answer
            raise ModelNewError(f"--ray {address}: {describe(error)}") from error
        self._started: list[Any] = []
        self._environment: dict[str, str] = runner.environment([], 1)
        if gpus:
            if not ray.cluster_resources().get("GPU"):
                raise ModelNewError(f"--ray {address}: this cluster has no GPU")
            found = ray.get(ray.remote(num_gpus=1)(devices.visible).remote())
            self._environment = runner.environment(found, 1)
        worker = {"num_cpus": 1, "max_retries": RETRIES}
        self._build = ray.remote(**worker)(_build)
        self._measure = ray.remote(**worker, num_gpus=1 if gpus else 0)(_measure)

    def build(self, job: Job) -> Future[Json]:
        return self._start(self._build, job, _texts(job), self._environment)

    def measure(self, job: Job, built: Json, *, alone: bool) -> Future[Json]:
        return self._start(self._measure, job, _texts(job), self._environment, built)

    def _start(self, function: Any, *arguments: Any) -> Future[Json]:
        reference = function.remote(*arguments)
        self._started.append(reference)
        future: Future[Json] = reference.future()
        return future

    def close(self) -> None:
        for reference in self._started:
            self._ray.cancel(reference, force=True)
        self._ray.shutdown()


def _texts(job: Job) -> Texts:
    """The contents of reference and solution; empty for a file that is missing."""
    reference, solution = (
        path.read_text(encoding="utf-8") if path.exists() else "" for path in _paths(job)
    )
    return reference, solution


def _paths(job: Job) -> tuple[Path, Path]:
    return job.reference, job.solution


# --- on a worker ---------------------------------------------------------------------------------


def _build(job: Job, texts: Texts, environment: dict[str, str]) -> Json:
    if not texts[1]:
        return {"status": "error", "message": f"{job.solution}: not rendered yet"}
    there, root = _placed(job, texts)
    answer = jobs.build(there, Place({**environment, **_extensions(root)}))
    return {**answer, "extensions": _packed(root)} if answer["status"] == "ok" else answer


def _measure(job: Job, texts: Texts, environment: dict[str, str], built: Json) -> Json:
    there, root = _placed(job, texts)
    _unpack(root, built["extensions"])
    return jobs.measure(there, Place({**environment, **_extensions(root)}), built)


def _placed(job: Job, texts: Texts) -> tuple[Job, Path]:
    """The job with its files on this machine, in a folder that has the same name everywhere:
    ninja takes a build for finished only where it was made."""
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
    root = Path(tempfile.gettempdir(), f"modelnew-ray-{os.getuid()}", digest)
    paths = []
    for kind, path, text in zip(("reference", "solution"), _paths(job), texts, strict=True):
        place = root / kind / path.name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
        paths.append(place)
    return replace(job, reference=paths[0], solution=paths[1]), root


def _extensions(root: Path) -> dict[str, str]:
    return {"TORCH_EXTENSIONS_DIR": str(root / "extensions")}


def _packed(root: Path) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as archive:
        if (root / "extensions").exists():
            archive.add(root / "extensions", "extensions")
    return sink.getvalue()


def _unpack(root: Path, archive: bytes) -> None:
    """Unpacks the built extension where this machine has none, times of change included."""
    if not (root / "extensions").exists():
        with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
            packed.extractall(root, filter="data")
