"""Constructors of every kind: loaded, copied, and the same model from the same seed."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from constructors import KINDS, Kind
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import cpp_extension

from modelnew import render as rendering
from modelnew.ir import ModelNewError
from modelnew.pipeline import generate
from modelnew.reference import load
from modelnew.render import Options
from modelnew.source import RESERVED, constructor
from modelnew.values import Values


def executed(text: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {}  # as a harness does, without a __name__
    with mock.patch.object(cpp_extension, "load_inline", return_value=None):
        exec(compile(text, "<text>", "exec", dont_inherit=True), namespace)
    return namespace


def tensors(value: Any) -> list[torch.Tensor]:
    return [v for v in torch.utils._pytree.tree_leaves(value) if isinstance(v, torch.Tensor)]


def facts(model: nn.Module) -> list[Any]:
    """All that a constructor leaves behind that can be compared."""
    seen: dict[int, str] = {}
    found: list[Any] = []
    for path, module in model.named_modules():
        found.append((path, module.training))
        found.append([name.replace("ModelNew", "Model") for name in vars(module)])
        for name, value in vars(module).items():
            if isinstance(value, int | float | str):
                found.append((path, name, value))
            found.append([t.tolist() for t in tensors(value)])
    for name, tensor in [*model.state_dict(keep_vars=True).items(), *model.named_buffers()]:
        first = seen.setdefault(id(tensor), name)
        found.append((name, first, tensor.dtype, tensor.requires_grad, tensor.tolist()))
    return found


@pytest.mark.parametrize("name", KINDS)
def test_one_seed_gives_one_model(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(KINDS[name].text())
    state = torch.random.get_rng_state()
    text = generate(path, {}, Options()).text
    assert torch.equal(torch.random.get_rng_state(), state)
    made = []
    for class_name, namespace in (
        ("Model", executed(path.read_text())),
        ("ModelNew", executed(text)),
    ):
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        given = executed(path.read_text())["get_init_inputs"]()
        made.append(facts(namespace[class_name](*given)))
    differing = [pair for pair in zip(*made, strict=False) if pair[0] != pair[1]]
    assert not differing, differing[0]
    assert len(made[0]) == len(made[1])


# --- loading -------------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "model.py"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize("name", [name for name in KINDS if name.startswith(("tensors", "reads"))])
def test_loaded_models_hold_fake_tensors(name: str, written: Callable[[str], Path]) -> None:
    ref = load(written(KINDS[name].text()))
    for module in ref.model.modules():
        for tensor in tensors([vars(module), module._parameters, module._buffers]):
            assert isinstance(tensor, FakeTensor)
            assert tensor.fake_mode is ref.fake_mode
            assert tensor.constant is None, "a buffer's value is not part of the graph"
        assert all(
            isinstance(p, nn.Parameter) for p in module._parameters.values() if p is not None
        )


def test_sharing_survives_loading(written: Callable[[str], Path]) -> None:
    shared = load(written(KINDS["tensors_shared"].text())).model
    assert shared.a.weight is shared.b.weight
    assert shared.c is shared.a
    lstm = load(written(KINDS["tensors_recurrent"].text())).model.lstm
    assert all(a is b for a, b in zip(lstm._flat_weights, lstm.parameters(), strict=True))


def test_nothing_large_is_made(written: Callable[[str], Path]) -> None:
    kind = Kind("""
        self.table = nn.Embedding(10**10, 16)
        self.layer = nn.Linear(int(torch.linspace(1, 4, 4)[-1]), 2)
        """)
    assert load(written(kind.text())).model.layer.in_features == 4


def test_settings_of_torch_are_left_alone(written: Callable[[str], Path]) -> None:
    before = "torch.set_default_device('cuda')\ntorch.set_grad_enabled(False)"
    load(written(Kind("self.layer = nn.Linear(3, 3)", before=before).text()))
    assert torch.is_grad_enabled()
    assert torch.get_default_device().type == "cpu"


def test_inputs_may_be_chosen_by_random_numbers_and_on_a_gpu(
    written: Callable[[str], Path],
) -> None:
    inputs = "torch.randn(int(torch.randint(2, 9, ())), 7, device='cuda').cuda().to('cuda:0')"
    text = KINDS["tensors_shared"].text().replace("[torch.randn(3, 7)]", f"[{inputs}]")
    first, second = (load(written(text)).inputs[0] for _ in range(2))
    assert first.shape == second.shape
    assert first.device.type == "cpu"


def test_tensors_of_a_library_belong_to_no_reference(
    written: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "tables_of_a_library.py").write_text(
        "import torch\nTABLE = torch.arange(3)"
    )
    monkeypatch.syspath_prepend(tmp_path / "lib")
    kind = Kind("""
        self.register_buffer("table", TABLE)
        self.same = TABLE
        self.layer = nn.Linear(int((TABLE + 1).max()), 2)
        """, before="from tables_of_a_library import TABLE")  # fmt: skip
    for _ in range(2):
        model = load(written(kind.text())).model
        assert isinstance(model.table, FakeTensor)
        assert model.same is model.table


def test_values_that_are_written_over_are_forgotten(tmp_path: Path) -> None:
    """What a large tensor is written to is not known, in any view of it."""
    values = Values(tmp_path / "model.py")
    pairs = []

    def make() -> None:
        small, large = torch.zeros(4), torch.ones(1 << 25)
        view, other = small[1:], torch.zeros(2)
        view.copy_(large[:3])
        pairs.extend([(small, None), (view, None), (large, None), (other, [0.0, 0.0])])

    values.run(make)
    for tensor, expected in pairs:
        value = values.of(tensor)
        assert (None if value is None else value.tolist()) == expected


# --- arguments that the file was generated for ---------------------------------------------------


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("arguments_variadic", (2, 4), "sizes = (2, 3)"),
        ("arguments_rebound", (3,), "n = 2"),
        ("arguments_early", (1,), "n = 2"),
        ("arguments_emptied", ([4, 3],), "sizes = [3, 4]"),
        ("arguments_positional", (2, 4), "k = 3"),
        ("class_inherited", (5,), "width = 4"),
        ("class_inherited_by_keyword", (4, False, 2, 2), "rest = (1, 2)"),
        ("class_library_class", (3, 5, False), "out_features = 4"),
        ("class_wrapped_constructor", (4,), "n = 3"),
    ],
)
def test_other_arguments_are_refused(
    name: str, given: tuple[Any, ...], message: str, written: Callable[[str], Path]
) -> None:
    path = written(KINDS[name].text())
    cls = executed(generate(path, {}, Options()).text)["ModelNew"]
    with pytest.raises(ValueError, match=re.escape(message)):
        cls(*given)


def test_other_keywords_are_refused(written: Callable[[str], Path]) -> None:
    path = written(KINDS["arguments_by_keyword"].text())
    cls = executed(generate(path, {}, Options()).text)["ModelNew"]
    with pytest.raises(ValueError, match=re.escape("options = {}")):
        cls(n=3)


def test_a_model_may_be_built_of_arguments_by_name(written: Callable[[str], Path]) -> None:
    ref = load(written(KINDS["class_inherited_by_keyword"].text()))
    named = ref.arguments()
    assert named == {"width": 4, "bias": False, "rest": (1, 2), "k": 2, "more": {}}
    assert ref.build(**{**named, "k": 5}).layer.out_features == 5


# --- what the text is like -----------------------------------------------------------------------


def test_methods_that_construction_does_not_need_are_left_out(
    written: Callable[[str], Path],
) -> None:
    ref = load(written(KINDS["class_helper_class"].text()))
    (block,) = constructor(ref).definitions
    assert "def grown" in block
    assert "forward" not in block


def test_names_of_the_solution_are_reserved() -> None:
    template = (rendering.TEMPLATES / "solution.py.jinja").read_text()
    defined = re.findall(r"^(?:def |class )?(_\w+)(?= = |\(|:)", template, re.MULTILINE)
    assert set(defined) == RESERVED


# --- what cannot be done -------------------------------------------------------------------------

BAD = {
    "no_class": (
        Kind("self.layer = nn.Linear(3, 3)", model="class Net(nn.Module):", after="""
        def Model():
            return Net()
        """),
        "Model is not a class",
    ),
    "calls_itself": (Kind("self.size = self(torch.zeros(1, 7)).shape"), "calls the model itself"),
    "calls_forward": (
        Kind("self.size = self.forward(torch.zeros(1, 7)).shape"), "uses self.forward"
    ),
    "sets_forward": (
        Kind("self.forward = self.other", members="def other(self, x): return x"),
        "uses self.forward",
    ),
    "by_name": (
        Kind("self.layer = globals()['Block'](3)", before="""
        class Block(nn.Linear):
            def __init__(self, n):
                super().__init__(n, n)
        """),
        "globals finds names",
    ),
    "changed_class": (
        Kind("self.layer = nn.Linear(3, self.size)", members="size = 1", after="Model.size = 2"),
        "changes class Model",
    ),
    "generated_constructor": (
        Kind(before="import dataclasses", members="""
        n: int = 3
        def __post_init__(self):
            super().__init__()
            self.layer = nn.Linear(self.n, 2)
        """, model="@dataclasses.dataclass(eq=False)\nclass Model(nn.Module):"),
        "from a decorator: write it out",
    ),
    "lazy": (Kind("self.layer = nn.LazyLinear(3)"), "use one that is given its size"),
    "default_dtype": (
        Kind(before="torch.set_default_dtype(torch.float64)"), "give dtype= where a tensor is made"
    ),
    "random_decision": (
        Kind("self.layer = nn.Linear(int(torch.randint(2, 99, ())), 2)"),
        "by what random numbers say",
    ),
    "random_number": (Kind("self.scale = torch.rand(1).item()"), "by what random numbers say"),
    "large_values": (
        Kind("self.scale = torch.randn(10**5, 10**5).sum().item()"),
        "with Python numbers or numpy",
    ),
    "hidden_name": (
        Kind("self.layer = nn.Linear(SIZE, 3)", before="""
        import sys
        setattr(sys.modules[__name__], "SIZE", 3)
        """),
        "does not stand alone: NameError: name 'SIZE' is not defined",
    ),
    "name_of_the_class": (
        Kind("if type(self).__name__ == 'Model':\n    self.layer = nn.Linear(3, 3)"),
        "makes another model",
    ),
    "missing_library": (Kind(before="import no_such_library.part"), "pip install no_such_library"),
    "file_beside": (Kind(before="from beside import N"), "copy what is needed of beside"),
    "relative": (Kind(before="from .beside import N"), "copy what is needed into the reference"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_copied_is_said(
    name: str, written: Callable[[str], Path], tmp_path: Path
) -> None:
    kind, message = BAD[name]
    (tmp_path / "beside.py").write_text("N = 3")
    path = written(kind.text())
    with pytest.raises(ModelNewError, match=message) as caught:
        generate(path, {}, Options())
    place = ": " if name in ("no_class", "default_dtype") else r":\d+: "
    assert re.match(re.escape(str(path)) + place, str(caught.value)), caught.value
