"""Where the float64 truth comes from when memory lacks, and tasks whose output proves nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import LAYERS, LAYERS_NEW, POINTWISE, examine, pointwise, write

from modelnew.measure import gate, load, truth
from modelnew.measure.subject import Arguments, Skip, Subject, build_subject

CPU = torch.device("cpu")
FAULT = "y = y * (1 + 1e-3 * (torch.arange(len(y)) == len(y) - 1).reshape(-1, 1))"  # the last row


@pytest.fixture
def subject(tmp_path: Path) -> Callable[..., tuple[Subject, Any]]:
    def make(reference: str, solution: str, train: bool = True) -> tuple[Subject, Any]:
        files = load.load_files(*write(tmp_path, reference, solution), {})
        arguments = Arguments(tuple(files.get_init_inputs()))
        made = build_subject(files, torch.float32, CPU, arguments, perturb=True)
        made.train(train)
        return made, load.own_inputs(files, 0, CPU)

    return make


@pytest.fixture
def memory_for(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """Makes float64 runs of more rows than that lack memory; returns the rows of the others."""

    def limit(rows: int) -> list[int]:
        ran: list[int] = []
        original = truth._truth_run
        kinds = torch.OutOfMemoryError("planted"), RuntimeError("CUDA error: out of memory")
        errors = cycle(kinds)

        def limited(subject: Subject, inputs: Any) -> Any:
            if len(inputs[0]) > rows:
                raise next(errors)
            ran.append(len(inputs[0]))
            return original(subject, inputs)

        monkeypatch.setattr(truth, "_truth_run", limited)
        return ran

    return limit


@pytest.mark.parametrize(("rows", "sizes"), [(12, [12]), (5, [3] * 4), (4, [3] * 4)])
def test_the_truth_comes_in_slices_where_memory_lacks(
    subject: Callable[..., Any], memory_for: Callable[[int], list[int]], rows: int, sizes: list[int]
) -> None:
    probes = 0 if rows == 12 else 3
    made, inputs = subject(POINTWISE, pointwise(FAULT))
    ran = memory_for(rows)
    verdict = truth.judge(made, inputs)
    assert ran[probes:] == sizes
    assert verdict.truth == ("CPU" if rows == 12 else "GPU, by slices")
    assert not verdict.ok, "the fault is in the last slice"
    made, inputs = subject(POINTWISE, pointwise(""))
    assert truth.judge(made, inputs).ok


def test_a_model_that_joins_rows_is_not_sliced(
    subject: Callable[..., Any], memory_for: Callable[[int], list[int]]
) -> None:
    joined = POINTWISE.replace(
        "return torch.where(x > 0, x, x * self.slope)", "return x - x.mean()"
    )
    made, inputs = subject(joined, pointwise("y = x - x.mean()"))
    assert not truth._separable(made, inputs, 12)
    made, inputs = subject(joined.replace("mean()", "mean(1, keepdim=True)"), pointwise(""))
    assert truth._separable(made, inputs, 12)
    for value in (math.nan, math.inf):
        inputs[0][1, 1] = value
        assert truth._separable(made, inputs, 12)
    made, inputs = subject(LAYERS, LAYERS_NEW, train=False)
    assert truth._separable(made, inputs, 32)
    made, inputs = subject(LAYERS, LAYERS_NEW, train=True)
    assert not truth._separable(made, inputs, 32)


def test_on_the_cpu_a_random_model_has_no_truth(subject: Callable[..., Any]) -> None:
    made, inputs = subject(LAYERS, LAYERS_NEW)
    own = truth.own_run(made, inputs)
    with pytest.raises(Skip, match="the model is random"):
        truth._judged_on_cpu(made, inputs, own, own)
    made, inputs = subject(LAYERS, LAYERS_NEW, train=False)
    own = truth.own_run(made, inputs)
    assert truth._judged_on_cpu(made, inputs, own, own).ok


def test_with_others_on_the_gpu_lack_of_memory_is_no_verdict(
    subject: Callable[..., Any], memory_for: Callable[[int], list[int]]
) -> None:
    import dataclasses

    made, inputs = subject(POINTWISE, pointwise(""))
    memory_for(4)
    with pytest.raises(torch.OutOfMemoryError):
        truth.judge(dataclasses.replace(made, alone=False), inputs)


def test_a_verdict_that_is_wrong_by_little_is_appealed(
    subject: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, inputs = subject(POINTWISE, pointwise(""))
    verdicts = [gate.Verdict(False, 3.0, 1.0, 1.5, "m", "CPU", {"k": gate.Metric(3.0, 1.0, 0.0)})]
    seen = []

    def judged(_: Subject, given: Any) -> gate.Verdict:
        seen.append(given[0])
        own = 1.0 if len(seen) == 1 else 2.0
        return gate.Verdict(True, 1.0, own, 0.5, "", "CPU", {"k": gate.Metric(1.0, own, 0.0)})

    def first(_: Subject, given: Any) -> gate.Verdict:
        return verdicts.pop() if verdicts else judged(_, given)

    monkeypatch.setattr(truth, "_judged", first)
    assert truth.judge(made, inputs).ok
    assert len(seen) == truth.DRAWS - 1
    assert all(x.stride() == inputs[0].stride() for x in seen)
    assert not any(torch.equal(x, inputs[0]) for x in seen)
    assert torch.allclose(seen[0], inputs[0], rtol=2.0**-8)
    assert torch.equal(seen[0] == 0, inputs[0] == 0)


@pytest.mark.parametrize("same", [True, False])
def test_what_circumstances_do_not_change_is_judged_as_a_plain_call(
    subject: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, same: bool
) -> None:
    made, inputs = subject(POINTWISE, pointwise("y = y * 1.00001"))
    own, true = truth.reference_runs(made, inputs)
    found = truth.forward(made, made.solution, inputs)["output"]
    monkeypatch.setattr(truth, "APPEAL", math.inf)
    monkeypatch.setattr(truth, "judge", lambda *_: gate.Verdict(True))
    assert truth.judge_output(made, inputs, found if same else found + 1, own, true).ok is same
    with monkeypatch.context() as patch:
        patch.setattr(truth, "APPEAL", 1.0)
        assert not truth.judge_output(made, inputs, found, own, true).ok, "wrong by much"


@pytest.mark.parametrize("layout", ["expand", "transpose", "slice"])
def test_shaken_inputs_keep_their_layout(layout: str) -> None:
    base = torch.randn(6, 8)
    x = {"expand": base[:1].expand(6, 8), "transpose": base.t(), "slice": base[1::2, ::3]}[layout]
    x.view_as(x)[0, 0] = float("nan") if layout == "slice" else 0.0
    before, moved = x.clone(), truth._shaken(x)
    assert torch.equal(x, before) or layout == "slice"
    assert moved.stride() == x.stride()
    assert torch.allclose(moved, x, rtol=2.0**-8, atol=0, equal_nan=True)
    assert not torch.equal(moved, x)
    assert torch.equal(truth._shaken(torch.arange(4)), torch.arange(4))


# --- degenerate tasks ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (torch.randn(50), torch.randn(50), []),
        (torch.randn(50) * 1e-5, torch.randn(50) * 1e-5, ["zero", "constant", "depend"]),
        (torch.full((50,), 3.0), torch.full((50,), 5.0), ["constant"]),
        (torch.arange(50.0), torch.arange(50.0), ["depend"]),
        (torch.tensor(4.0), torch.tensor(5.0), []),
        (torch.tensor(4.0), torch.tensor(4.0), ["depend"]),
        (torch.zeros(0), torch.zeros(0), []),
        (torch.full((50,), float("nan")), torch.full((50,), float("nan")), []),
    ],
)
def test_degenerate_outputs(first: torch.Tensor, second: torch.Tensor, said: list[str]) -> None:
    found = gate.degenerate(first, second)
    assert len(found) == len(said)
    assert all(word in text for word, text in zip(said, found, strict=True))


def test_all_outputs_must_be_degenerate() -> None:
    sound, flat = torch.randn(50), torch.zeros(50)
    assert gate.degenerate([flat, flat], [flat, flat])
    assert not gate.degenerate([flat, sound], [flat, torch.randn(50)])


def test_a_degenerate_task_is_marked_in_its_row(tmp_path: Path) -> None:
    tiny = POINTWISE.replace("torch.where(x > 0, x, x * self.slope)", "x * 1e-9")
    row = examine(tmp_path, tiny, pointwise("y = x * 1e-9"), "own")
    assert row["status"] == "ok", row["message"]
    assert "within the tolerance of zero" in row["degenerate"][0]
    row = examine(tmp_path, tiny, pointwise("y = x * 0"), "own")
    assert row["status"] == "wrong", "our gate is relative: zeros do not satisfy it"
    row = examine(tmp_path, POINTWISE, pointwise(""), "own")
    assert row["degenerate"] == []


def test_an_appeal_shakes_the_parameters_of_all_three_models_alike(
    subject: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, inputs = subject(LAYERS, LAYERS_NEW, train=False)
    models = (made.reference, made.solution, made.truth)
    before = [{k: v.clone() for k, v in m.state_dict().items()} for m in models]
    seen: list[list[torch.Tensor]] = []

    def judged(made: Subject, _: Any) -> gate.Verdict:
        mine, *others = (list(m.parameters()) for m in models)
        assert all(
            torch.equal(a.double(), b.double())
            for other in others
            for a, b in zip(mine, other, strict=True)
        )
        seen.append([p.detach().clone() for p in mine])
        return gate.Verdict(False, 3.0, 1.0, 1.5, "m", "CPU", {"k": gate.Metric(3.0, 1.0, 0.0)})

    monkeypatch.setattr(truth, "_judged", judged)
    assert not truth.judge(made, inputs).ok
    assert len(seen) == truth.DRAWS
    assert not any(torch.equal(a, b) for a, b in zip(seen[0], seen[1], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(seen[1], seen[2], strict=True))
    for model, state in zip(models, before, strict=True):
        assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_shaken_inputs_do_not_overflow(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = torch.tensor([largest, -largest, 1.0, 0.0, float("inf"), float("nan")], dtype=dtype)
    shaken = truth._shaken(x.repeat(100)).view(100, 6)
    assert (shaken[:, 0] == largest).all()
    assert (shaken[:, 1] == -largest).all()
    assert (shaken[:, 2] != 1).any()
    assert (shaken[:, 3] == 0).all()
    assert shaken[:, 4].isinf().all()
    assert shaken[:, 5].isnan().all()
