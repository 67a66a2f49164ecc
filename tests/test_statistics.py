"""Normalizations in parts (modelnew/statistics.py), run on the CPU (see cpu.py) and by nvcc."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import cpu
import pytest
import torch
from references import reference_text
from test_solutions import asked, compiled, needs_nvcc, ptx_faults, text_faults
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from modelnew import invariants, statistics
from modelnew.interpret import interpret
from modelnew.ir import Library, Plan
from modelnew.measure.gate import compare
from modelnew.measure.variants import channels_last
from modelnew.plan import plan
from modelnew.reference import Reference, load
from modelnew.render import Options, render
from modelnew.trace import trace

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Each with the steps of its plan.
REFERENCES: Mapping[str, tuple[str, list[str]]] = {
    "layer": (
        reference_text(
            "def forward(self, x): return F.gelu(self.norm(x * 2)) * self.scale",
            "torch.randn(3, 5, n)",
            "self.norm, self.scale = nn.LayerNorm(n), 0.5",
            n=24,
        ),
        ["mul", "row_statistics", "layer_normalized_gelu_mul"],
    ),
    "layer of several dimensions": (
        reference_text(
            "def forward(self, x, y):\n    z = self.norm(x.mT)\n    return z, torch.relu(z) + y",
            "torch.randn(3, 6, n, 4), torch.randn(3, 6, 4, n)",
            "self.norm = nn.LayerNorm([6, 4, n], bias=False)",
            n=10,
        ),
        ["mT", "row_statistics", "layer_normalized_relu_add"],
    ),
    "layer, plain, of one tensor twice": (
        reference_text(
            "def forward(self, x):\n    a = F.layer_norm(x, (n,))\n"
            "    return F.layer_norm(x, (4, n), eps=0.1) - a",
            "torch.randn(3, 4, n)",
            n=7,
        ),
        ["row_statistics", "row_statistics", "layer_normalized_layer_normalized_sub"],
    ),
    "group": (
        reference_text(
            "def forward(self, x): return torch.tanh(self.norm(x)), F.group_norm(x, 3) * 2",
            "torch.randn(3, 6, 2, 3, n)",
            "self.norm = nn.GroupNorm(2, 6)",
            n=5,
        ),
        ["group_statistics", "group_statistics", "group_normalized_tanh_group_normalized_mul"],
    ),
    "group of features": (
        reference_text(
            "def forward(self, x): return self.norm(x).relu()",
            "torch.randn(7, n)",
            "self.norm = nn.GroupNorm(3, n)",
            n=24,
        ),
        ["group_statistics", "group_normalized_relu"],
    ),
    "instance": (
        reference_text(
            "def forward(self, x): return self.norm(x) / 3, F.instance_norm(x)",
            "torch.randn(3, 4, 3, n)",
            "self.norm = nn.InstanceNorm2d(4, affine=True, eps=0.1)",
            n=5,
        ),
        ["group_statistics", "group_statistics", "instance_normalized_div_instance_normalized"],
    ),
    "instance, plain": (
        reference_text(
            "def forward(self, x): return F.instance_norm(x)", "torch.randn(3, 4, 3, 8)"
        ),
        ["group_statistics", "instance_normalized"],
    ),
}


@dataclass(frozen=True)
class Subject:
    ref: Reference
    plan: Plan
    model_new: type[nn.Module]
    steps: list[str]

    def models(self) -> tuple[nn.Module, nn.Module]:
        """The reference's and ours with the same weights, none of them one or zero."""
        torch.manual_seed(0)
        theirs, ours = self.ref.namespace["Model"](), self.model_new()
        for parameter in theirs.parameters():
            nn.init.uniform_(parameter, 0.5, 2.0)
        ours.load_state_dict(theirs.state_dict())
        return theirs, ours


@pytest.fixture(scope="module")
def subjects(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Mapping[str, Subject]:
    folder = tmp_path_factory.mktemp("statistics")
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "WORTH", 0)
        patch.setattr(statistics, "SPATIAL", 0)
        for name, (text, _) in REFERENCES.items():
            path = folder / f"{name.replace(', ', '_').replace(' ', '_')}.py"
            path.write_text(text)
            ref = load(path)
            made[name] = ref, plan(trace(ref))
            invariants.check_plan(made[name][1])
    texts = {name: render(*pair) for name, pair in made.items()}
    assert not any(map(text_faults, texts.values()))
    assert pytestconfig.cache is not None
    cache = pytestconfig.cache.mkdir("solutions_on_cpu")
    built = cpu.build([list(texts.values())], cache)
    return {
        name: Subject(
            *made[name],
            cpu.load_on_cpu(texts[name], cache, built)["ModelNew"],
            REFERENCES[name][1],
        )
        for name in REFERENCES
    }


each = pytest.mark.parametrize("name", REFERENCES)


def inputs_of(subject: Subject, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(1)
    given: list[Tensor] = subject.ref.namespace["get_inputs"]()
    return [(x * 3 + 2).to(dtype) for x in given]


@torch.no_grad()
def judge(theirs: nn.Module, ours: nn.Module, inputs: list[Tensor]) -> None:
    """Values as accurate as the reference's, in its layout on a GPU and its dtype."""
    wide = copy.deepcopy(theirs).double()(*(x.double() for x in inputs))
    own, found = theirs(*inputs), ours(*inputs)
    if isinstance(getattr(theirs, "norm", None), nn.GroupNorm):  # that of the CPU keeps a layout
        own = tree_map(Tensor.contiguous, own)
    verdict = compare(found, own, wide)
    assert verdict.ok, verdict.message


@each
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.filterwarnings("ignore:var_mean:UserWarning")  # of an empty batch
def test_values(name: str, subjects: Mapping[str, Subject], dtype: torch.dtype) -> None:
    theirs, ours = (model.to(dtype) for model in subjects[name].models())
    inputs = inputs_of(subjects[name], dtype)
    judge(theirs, ours, inputs)
    judge(theirs, ours, [torch.cat([x, -x * 100]) for x in inputs])
    if not name.startswith("instance"):  # PyTorch's own fails
        judge(theirs, ours, [x[:0] for x in inputs])
    judge(theirs, ours, [torch.stack([x, x], -1)[..., 0] for x in inputs])
    judge(theirs, ours, list(map(channels_last, inputs)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_channels(subjects: Mapping[str, Subject], dtype: torch.dtype) -> None:
    """An instance_norm without parameters takes any number of them."""
    theirs, ours = (model.to(dtype) for model in subjects["instance, plain"].models())
    judge(theirs, ours, [torch.randn(3, 5, 6, 7).to(dtype)])
    judge(theirs, ours, [torch.randn(2, 1, 1, 9).to(dtype)])


@each
def test_interpreter(name: str, subjects: Mapping[str, Subject]) -> None:
    subject = subjects[name]
    theirs, _ = subject.models()
    inputs = inputs_of(subject, torch.float32)
    found = interpret(
        subject.plan, theirs, dict(zip(subject.plan.graph.inputs, inputs, strict=True))
    )
    with torch.no_grad():
        torch.testing.assert_close(found, theirs(*inputs))


@each
def test_steps(name: str, subjects: Mapping[str, Subject]) -> None:
    steps = subjects[name].plan.steps
    found = [s.node.packet if isinstance(s, Library) else s.name for s in steps]
    assert found == subjects[name].steps


def test_eps_is_live(subjects: Mapping[str, Subject]) -> None:
    theirs, ours = subjects["layer"].models()
    theirs.norm.eps = ours.norm.eps = 40.0  # type: ignore[union-attr]
    inputs = inputs_of(subjects["layer"], torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(ours(*inputs), theirs(*inputs))


def test_weights_of_another_dtype_are_refused(subjects: Mapping[str, Subject]) -> None:
    """PyTorch would give a half result, promotion a float32 one."""
    _, ours = subjects["layer"].models()
    with torch.no_grad(), pytest.raises(RuntimeError, match="ModelNew takes norm_weight of Half"):
        ours(*inputs_of(subjects["layer"], torch.float16))


@pytest.mark.parametrize(
    ("call", "shape", "apart"),
    [
        ("F.layer_norm(x, (64,))", "1 << 16, 64", True),  # rows too short for a block of threads
        ("F.layer_norm(x, (1024,))", "1 << 16, 1024", False),
        ("F.layer_norm(x, (1 << 20,))", "4, 1 << 20", True),  # too few for the GPU
        ("F.layer_norm(x, (64,))", "1 << 10, 64", False),  # too small to gain
        ("F.group_norm(x, 4)", "64, 16, 64, 64", True),
        ("F.group_norm(x, 4)", "1 << 10, 1 << 12", False),  # statistics as large as x
        ("F.instance_norm(x)", "64, 16, 64, 64", True),
        ("F.instance_norm(x)", "4, 16, 64, 64", False),
        # What a convolution rounds is as the reference has it.
        ("F.conv2d(F.group_norm(x, 4).relu(), self.w)", "64, 16, 64, 64", False),
        ("F.group_norm(F.conv2d(x, self.w), 4)", "64, 16, 64, 64", True),
    ],
)
def test_where_it_pays(call: str, shape: str, apart: bool, tmp_path: Path) -> None:
    path = tmp_path / "reference.py"
    parameter = "self.w = nn.Parameter(torch.ones(16, 16, 1, 1))"
    path.write_text(
        reference_text(f"def forward(self, x): return {call}", f"torch.randn({shape})", parameter)
    )
    steps = plan(trace(load(path))).steps
    found = {step.node.packet for step in steps if isinstance(step, Library)}
    assert bool(found & {"row_statistics", "group_statistics"}) is apart


@needs_nvcc
def test_nvcc(subjects: Mapping[str, Subject], pytestconfig: pytest.Config) -> None:
    """Both parts of a file whose kernel reads float32 beside half types."""
    assert pytestconfig.cache is not None
    subject = subjects["layer"]
    cuda = asked(render(subject.ref, subject.plan, Options()))["cuda_sources"]
    built = compiled(cuda, "90", "c++17", pytestconfig.cache.mkdir("nvcc"))
    assert built.problem == ""
    assert not ptx_faults(built, cuda)
