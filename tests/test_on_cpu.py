"""Solutions run end to end on the CPU (see cpu.py) and judged against their references.

Zeros are compared without their sign: PyTorch's own CPU and CUDA kernels disagree about it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import cpu
import pytest
import torch
from cpu import unsigned_zeros
from references import reference_text
from torch import Tensor, nn
from torch.autograd import forward_ad

from modelnew.measure.gate import compare
from modelnew.measure.nested import cast, tensors
from modelnew.plan import plan
from modelnew.reference import Reference, load
from modelnew.render import render
from modelnew.trace import trace

MODELS = Path(__file__).resolve().parent.parent / "reference_models"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Constants that the solution is rendered for, where the rest of the file depends on them.
OVERRIDES: Mapping[str, Mapping[str, str]] = {
    "linear_swish_tanh_gelu_hardtanh": {"in_features": "67", "out_features": "131"},
    "broadcast_row": {"cols": "67"},
    "swiglu": {"cols": "24"},
    **{
        name: {"batch_size": "2", "channels": "5"}
        for name in ("channels_last_bias", "channels_last_residual", "reflection_pad",
                     "residual_channel_bias", "zero_pad")
    },
}  # fmt: skip
# Constants that set the number of rows and of columns of the inputs, at run time only.
ROWS = ("batch_size", "heads", "rows", "height")
COLUMNS = ("dim", "cols", "length", "width")
# The last dimension: ragged, whole packs of any dtype, of float32 only, one, none.
SIZES = ((3, 1031), (3, 18), (16, 64), (7, 12), (5, 1), (1, 1), (1, 4099), (1, 8), (0, 17), (5, 0))

Models = tuple[nn.Module, nn.Module, nn.Module]


MANY = [f"a{i}" for i in range(40)]
EXTRA: Mapping[str, str] = {
    "three_outputs": reference_text(
        """
        def forward(self, x, y):
            return x * 2, x * 2 + y, x > 0
        """,
        "torch.randn(3, n), torch.randn(3, n)",
    ),
    "bool_output": reference_text(
        """
        def forward(self, x, y):
            return x > y
        """,
        "torch.randn(3, n), torch.randn(3, n)",
    ),
    "outputs_of_two_shapes": reference_text(
        """
        def forward(self, x, bias):
            scaled = bias * 2
            return {"scaled": scaled, "sum": [x + scaled]}
        """,
        "torch.randn(3, n), torch.randn(n)",
    ),
    "forty_inputs": reference_text(
        f"""
        def forward(self, {", ".join(MANY)}):
            return {" + ".join(f"{name} * {i + 1}" for i, name in enumerate(MANY))}
        """,
        "*(torch.randn(2, n) for _ in range(40))",
    ),
    "sixty_inputs": reference_text(
        f"""
        def forward(self, {", ".join(f"a{i}" for i in range(60))}):
            return {" + ".join(f"a{i}" for i in range(60))}
        """,
        "*(torch.randn(2, n) for _ in range(60))",
    ),
    "in_place": reference_text(
        """
        def forward(self, x):
            x = self.linear(x)
            x += 1
            torch.nn.functional.relu_(x)
            return x
        """,
        "torch.randn(n, 7)",
        "self.linear = nn.Linear(7, 12)",
    ),
    "sum_5d": reference_text(
        """
        def forward(self, x, y):
            return x * 0.5 + y
        """,
        "torch.randn(2, 3, 2, 4, n), torch.randn(2, 3, 2, 4, n)",
    ),
    "scalar_operand": reference_text(
        """
        def forward(self, x, s, y):
            return x * s + y
        """,
        "torch.randn(3, n), torch.tensor(0.3), torch.randn(3, n)",
    ),
    "integer_operand": reference_text(
        """
        def forward(self, x, k):
            return torch.sigmoid(x) * k
        """,
        "torch.randn(3, n), torch.arange(n)",
    ),
    "row_and_column": reference_text(
        """
        def forward(self, x, scale, shift):
            return x * scale + shift
        """,
        "torch.randn(3, n), torch.randn(3, 1), torch.randn(n)",
    ),
    "masks_as_numbers": reference_text(
        """
        def forward(self, x, mask, other):
            return x * mask + other, torch.where(x > 0, x, x * mask)
        """,
        "torch.randn(3, n), torch.rand(3, n) > 0.5, torch.rand(n) > 0.5",
    ),
    "fill": reference_text(
        """
        def forward(self, x, mask):
            return x.masked_fill(mask, float("-inf"))
        """,
        "torch.randn(3, n), torch.rand(n) > 0.5",
    ),
}
# The block's file runs in test_modes.py, planned as if its small tensors were large.
NAMES = sorted({path.stem for path in MODELS.glob("*.py")} - {"residual_block"})
ALL = [*NAMES, *EXTRA]
# Those of one input, elementwise, for which any rank is right.
UNARY = (
    "elu", "gelu", "gelu_tanh", "hardsigmoid", "hardtanh", "leaky_relu", "matrix_scalar",
    "mingpt_gelu", "relu", "scalar_tensor", "selu", "sigmoid", "softplus", "softsign", "swish",
    "tanh",
)  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """A reference and the solution rendered from it, both ready to be built and called."""

    ref: Reference
    model_new: type[nn.Module]
    built: dict[torch.dtype, Models] = field(default_factory=dict)

    def models(self, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Models:
        """The solution, the reference, and the reference in float64, with the same parameters."""
        init = args if args or kwargs else self.ref.init_inputs
        torch.manual_seed(0)
        theirs = self.ref.namespace["Model"](*init, **kwargs).to(dtype)
        mine = self.model_new(*init, **kwargs).to(dtype)
        mine.load_state_dict(theirs.state_dict())
        return mine, theirs, copy.deepcopy(theirs).double()

    def inputs(self, dtype: torch.dtype, rows: int = 7, columns: int = 53) -> list[Any]:
        space: Any = self.ref.namespace
        fixed = OVERRIDES.get(self.ref.path.stem, {})
        for names, size in ((ROWS, rows), ((*COLUMNS, "n"), columns)):
            space.update({n: size for n in names if n in space and n not in fixed})
        torch.manual_seed(1)
        return list(cast(space["get_inputs"](), dtype))


def memory(inputs: Sequence[Any]) -> list[Tensor]:
    """The bytes of the inputs' whole storages, gaps between strided elements included."""
    empty = torch.empty(0, dtype=torch.uint8)
    return [empty.new_empty(0).set_(x.untyped_storage()).clone() for x in tensors(inputs)]


def judge(subject: Subject, inputs: Sequence[Any], dtype: torch.dtype) -> None:
    if dtype not in subject.built:
        subject.built[dtype] = subject.models(dtype)
    judge_models(*subject.built[dtype], inputs)


@torch.no_grad()
def judge_models(
    mine: nn.Module, theirs: nn.Module, true: nn.Module, inputs: Sequence[Any]
) -> None:
    """The solution's outputs are right in value, dtype, shape and strides; inputs are untouched."""
    try:
        own = theirs(*inputs)
    except RuntimeError:  # more padding than there are pixels
        with pytest.raises(RuntimeError):
            mine(*inputs)
        return
    truth = true(*cast(inputs, torch.float64))
    before = memory(inputs)
    found = mine(*inputs)
    assert all(map(torch.equal, memory(inputs), before)), "an input is changed"
    verdict = compare(*(unsigned_zeros(tree) for tree in (found, own, truth)))
    layout = [(tuple(x.shape), x.stride(), x.dtype) for x in tensors(inputs)]
    assert verdict.ok, f"{verdict.message} for {layout}"


def render_text(path: Path) -> tuple[Reference, str]:
    ref = load(path, OVERRIDES.get(path.stem))
    return ref, render(ref, plan(trace(ref)))


# Tests that fail because of a fault of the product, by the pattern of their names.
# Mistakes planted in the text of leaky_relu, which must be seen: (pattern, replacement).
MISTAKES = {
    "alignment": (r"reinterpret_cast<uintptr_t>\(ops\.data\[o\]\)", "uintptr_t(0)"),
    "count": (r"ops\.count = iter\.numel\(\);", "ops.count = iter.numel() + 1;"),
}
# Those that also run under AddressSanitizer, whose objects cost more time to build.
ADDRESS = ["leaky_relu", "masked_where", "swish", "leaky_relu/count"]


@dataclass
class Collection:
    """All files of this module, rendered, and their kernels in one extension."""

    references: Mapping[str, Reference]
    texts: Mapping[str, str]
    problems: Mapping[str, Exception]
    folder: Path
    subjects: dict[str, Subject] = field(default_factory=dict)

    def subject(self, name: str) -> Subject:
        if name in self.problems:
            raise self.problems[name]
        if name not in self.subjects:
            space = cpu.load_on_cpu(self.texts[name], self.folder, self.extension)
            ref = self.references[name.split("/")[0]]
            self.subjects[name] = Subject(ref, space["ModelNew"])
        return self.subjects[name]

    @cached_property
    def extension(self) -> Path:
        return self.build()

    def build(self, *, address: bool = False) -> Path:
        others = [text for name, text in self.texts.items() if name not in ADDRESS]
        groups = [
            [self.texts[name] for name in ADDRESS if name in self.texts],
            others[::3],
            others[1::3],
            others[2::3],
        ]
        return cpu.build(groups, self.folder, address={0} if address else ())


@pytest.fixture(scope="session")
def collection(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Collection:
    folder = tmp_path_factory.mktemp("references")
    for name, text in EXTRA.items():
        (folder / f"{name}.py").write_text(text)
    references: dict[str, Reference] = {}
    texts: dict[str, str] = {}
    problems: dict[str, Exception] = {}
    for name in ALL:
        path = (MODELS if name in NAMES else folder) / f"{name}.py"
        try:
            references[name], texts[name] = render_text(path)
        except Exception as problem:  # it fails the tests of its own file, not of all
            problems[name] = problem
    for name, (right, wrong) in MISTAKES.items():
        texts[f"leaky_relu/{name}"], count = re.subn(right, wrong, texts["leaky_relu"])
        assert count == 1, f"the text has no place for the mistake {name}"
    cache = pytestconfig.cache
    assert cache is not None
    return Collection(references, texts, problems, cache.mkdir("solutions_on_cpu"))


@pytest.fixture
def subject(request: pytest.FixtureRequest, collection: Collection) -> Subject:
    """The subject of the parameter `name`."""
    return collection.subject(request.getfixturevalue("name"))


each = pytest.mark.parametrize("name", ALL)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


# --- values --------------------------------------------------------------------------------------


@each
@each_dtype
def test_sizes(name: str, subject: Subject, dtype: torch.dtype) -> None:
    for size in SIZES:
        if name != "causal_decay" or size[1] < 2000:  # its result has length x length elements
            judge(subject, subject.inputs(dtype, *size), dtype)


def offset(x: Tensor) -> Tensor:
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


def transposed(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT if x.dim() > 1 else x


def reversed_dims(x: Tensor) -> Tensor:
    order = tuple(reversed(range(x.dim())))
    return x.permute(order).contiguous().permute(order)


def step_last(x: Tensor) -> Tensor:
    wide = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1]) if x.dim() else x
    return wide[..., ::2].copy_(x) if x.dim() else x


def step_first(x: Tensor) -> Tensor:
    return x.new_zeros(2 * x.shape[0], *x.shape[1:])[::2].copy_(x) if x.dim() else x


def window(x: Tensor) -> Tensor:
    """Rows of a wider tensor, from its second column on."""
    return x.new_zeros(*x.shape[:-1], x.shape[-1] + 3)[..., 1:-2].copy_(x) if x.dim() else x


def expanded_first(x: Tensor) -> Tensor:
    return x[:1].expand(x.shape) if x.dim() else x


def expanded_last(x: Tensor) -> Tensor:
    return x[..., :1].expand(x.shape) if x.dim() else x


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


LAYOUTS: Sequence[Callable[[Tensor], Tensor]] = (
    offset,
    transposed,
    reversed_dims,
    step_last,
    step_first,
    window,
    expanded_first,
    expanded_last,
    channels_last,
)


@each
@each_dtype
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_layouts(
    name: str, subject: Subject, dtype: torch.dtype, layout: Callable[[Tensor], Tensor]
) -> None:
    """All operands laid out alike, the first only, all but the first."""
    if name == "reflection_pad" and layout is channels_last:
        pytest.skip("PyTorch's CPU keeps channels_last in padding, its CUDA kernels do not")
    for size in ((7, 53), (16, 64), (1, 24), (24, 1)):
        inputs = subject.inputs(dtype, *size)
        places = [i for i, x in enumerate(inputs) if isinstance(x, Tensor)]
        for chosen in [places] if len(places) == 1 else (places, places[:1], places[1:]):
            judge(subject, [layout(x) if i in chosen else x for i, x in enumerate(inputs)], dtype)


@pytest.mark.parametrize("name", UNARY)
@each_dtype
def test_ranks(name: str, subject: Subject, dtype: torch.dtype) -> None:
    rest = subject.inputs(dtype)[1:]
    for shape in ((), (1,), (1031,), (2, 3, 4, 5, 6), (1, 1, 1), (2, 0, 3)):
        judge(subject, [torch.randn(shape).to(dtype), *rest], dtype)
    permuted = torch.randn(3, 5, 2, 7, 8).to(dtype).permute(4, 1, 3, 0, 2)[:, ::2]
    judge(subject, [permuted, *rest], dtype)


def special_values(dtype: torch.dtype) -> Tensor:
    info = torch.finfo(dtype)
    least = info.smallest_normal * info.eps
    positive = [0.0, least, 3 * least, info.smallest_normal, info.eps, 0.5, 1.0, 3.0, 6.0, 20.0]
    positive += [20.5, 88.0, 104.0, info.max / 4, info.max, float("inf")]
    return torch.tensor([float("nan"), *positive, *(-x for x in positive)], dtype=dtype)


@each
@each_dtype
@pytest.mark.parametrize("columns", [48, 67])
def test_special_values(name: str, subject: Subject, dtype: torch.dtype, columns: int) -> None:
    values = special_values(dtype)
    inputs = subject.inputs(dtype, len(values), columns)
    for shift in range(0, len(values), 5) if len(inputs) > 1 else (0,):
        for number, x in enumerate(inputs):
            if isinstance(x, Tensor) and x.is_floating_point():
                # Row r starts with value r, so that each value stands in each column.
                rows = torch.arange(x.numel()) // max(x.shape[-1] if x.dim() else 1, 1)
                place = rows + torch.arange(x.numel()) + number * shift
                inputs[number] = values[place % len(values)].view(x.shape)
        judge(subject, inputs, dtype)


# --- dtypes and errors ---------------------------------------------------------------------------


WITH_PARAMETERS = (
    "broadcast_row", "channels_last_bias", "residual_channel_bias", "scalar_tensor",
)  # fmt: skip
OF_ONE_INPUT = (
    *UNARY, "broadcast_row", "channels_last_bias", "in_place", "linear_swish_tanh_gelu_hardtanh",
    "periodic_laplacian", "reflection_pad", "swiglu", "zero_pad",
)  # fmt: skip
MIXABLE = [name for name in ALL if name not in OF_ONE_INPUT]


@pytest.mark.parametrize("name", MIXABLE)
@pytest.mark.parametrize("first", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("others", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_mixed_dtypes(name: str, subject: Subject, first: torch.dtype, others: torch.dtype) -> None:
    inputs = subject.inputs(others, 5, 24)
    inputs[0] = inputs[0].to(first)
    judge(subject, inputs, others)


@each_dtype
@pytest.mark.parametrize("mask", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("name", ["masks_as_numbers"])
def test_masks_cast_to_floating_numbers(
    name: str, subject: Subject, dtype: torch.dtype, mask: torch.dtype
) -> None:
    x, first, second = subject.inputs(dtype, 3, 18)
    for given in ((first.to(mask), second.to(mask)), (first.to(mask) / 3, second)):
        judge(subject, [x, *given], torch.promote_types(dtype, mask))


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("scalar", [*DTYPES, torch.float64, torch.int64])
@each_dtype
@pytest.mark.parametrize("name", ["scalar_operand", "clamp_tensors", "forty_inputs"])
def test_zero_dim_operand(
    name: str, subject: Subject, dtype: torch.dtype, scalar: torch.dtype, place: int
) -> None:
    inputs = subject.inputs(dtype, 5, 24)
    inputs[place] = torch.tensor(1.25).to(scalar)
    judge(subject, inputs, dtype)


@each
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.complex64])
def test_unknown_dtype(name: str, subject: Subject, dtype: torch.dtype) -> None:
    inputs = [
        x.to(dtype) if isinstance(x, Tensor) and x.dtype != torch.bool else x
        for x in subject.inputs(torch.float32)
    ]
    if dtype == torch.int64 and name in WITH_PARAMETERS:
        judge(subject, inputs, torch.float32)  # a parameter makes all of it floating
        return
    message = r"generated for|same dtype|takes"
    with pytest.raises((RuntimeError, ValueError), match=message):
        subject.models(torch.float32)[0](*inputs)


@pytest.mark.parametrize("name", ["masked_where", "fill"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.int64])
def test_mask_of_unknown_dtype(name: str, subject: Subject, dtype: torch.dtype) -> None:
    x, mask = subject.inputs(torch.float32)
    with pytest.raises(RuntimeError, match="takes mask of Bool"):
        subject.models(torch.float32)[0](x, mask.to(dtype))


@pytest.mark.parametrize("name", MIXABLE)
def test_shapes_that_do_not_broadcast(name: str, subject: Subject) -> None:
    mine, theirs, _ = subject.models(torch.float32)
    own, refused = subject.inputs(torch.float32), 0
    for place, x in enumerate(own):
        for dim in range(x.dim()):
            inputs = [*own[:place], torch.cat([x, x], dim), *own[place + 1 :]]
            try:
                theirs(*inputs)
            except RuntimeError:
                refused += 1
                with pytest.raises((RuntimeError, ValueError), match=r"size|shape"):
                    mine(*inputs)
    assert refused or name == "outer_product"


@each
def test_other_device(name: str, subject: Subject) -> None:
    """The CPU stands for the GPU here, the meta device for the CPU."""
    model = subject.models(torch.float32)[0].to("meta")
    inputs = [x.to("meta") if isinstance(x, Tensor) else x for x in subject.inputs(torch.float32)]
    with pytest.raises(RuntimeError, match=r"needs .* on a GPU"):
        model(*inputs)


# --- the module ----------------------------------------------------------------------------------


@each
def test_state(name: str, subject: Subject) -> None:
    states = []
    for build in (subject.model_new, subject.ref.namespace["Model"]):
        torch.manual_seed(3)
        states.append(build(*subject.ref.init_inputs).state_dict())
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


@each
def test_copies_and_modes(name: str, subject: Subject) -> None:
    mine, theirs, true = subject.models(torch.float32)
    inputs = subject.inputs(torch.float32)
    for change in (copy.deepcopy, nn.Module.eval, nn.Module.train):
        judge_models(change(mine), change(theirs), change(true), inputs)


@each
def test_constructor_arguments_are_live_or_refused(name: str, subject: Subject) -> None:
    arguments = subject.ref.arguments()
    for key, value in arguments.items():
        changed = {**arguments, key: value * 1.5 + 0.125 if type(value) is float else 17}
        if type(value) is float:
            models = subject.models(torch.float32, **changed)
            judge_models(*models, subject.inputs(torch.float32))
        else:
            with pytest.raises(ValueError, match=key):
                subject.model_new(**changed)


@pytest.mark.parametrize("name", ["leaky_relu"])
def test_attribute_set_later(name: str, subject: Subject) -> None:
    models = subject.models(torch.float32)
    for model in models:
        model.negative_slope = 0.2
    judge_models(*models, subject.inputs(torch.float32))


@each
def test_backward_raises(name: str, subject: Subject) -> None:
    mine, theirs, _ = subject.models(torch.float32)
    inputs = subject.inputs(torch.float32)
    given = [
        x.requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs
    ]
    outputs = [tensors(model(*given)) for model in (mine, theirs)]
    assert [x.requires_grad for x in outputs[0]] == [x.requires_grad for x in outputs[1]]
    for output in outputs[0]:
        if output.requires_grad:
            with pytest.raises(RuntimeError, match="no backward"):
                output.sum().backward()


# --- several outputs, layouts that do not merge --------------------------------------------------


def judge_one_shape(name: str, subject: Subject, inputs: list[Tensor], dtype: torch.dtype) -> None:
    """The results of one kernel have one shape; inputs that give them several are refused."""
    if name == "three_outputs" and inputs[0].shape != (inputs[0] + inputs[1]).shape:
        with pytest.raises(RuntimeError, match="one shape"):
            subject.models(dtype)[0](*inputs)
    else:
        judge(subject, inputs, dtype)


@pytest.mark.parametrize("name", ["sum_5d", "three_outputs", "bool_output"])
@each_dtype
def test_operands_whose_dimensions_do_not_merge(
    name: str, subject: Subject, dtype: torch.dtype
) -> None:
    x = torch.randn(3, 5, 2, 7, 8).to(dtype).permute(4, 1, 3, 0, 2)
    y = torch.randn(16, 5, 7, 3, 4).to(dtype)[::2, :, :, :, ::2]
    for inputs in ([x, y], [y, x], [x, y.contiguous()], [x, y[:1]], [x[:, :, :1], y]):
        judge_one_shape(name, subject, inputs, dtype)


@pytest.mark.parametrize("name", ["three_outputs", "outputs_of_two_shapes"])
@each_dtype
def test_outputs_of_different_layouts(name: str, subject: Subject, dtype: torch.dtype) -> None:
    x, y = torch.randn(24, 16).to(dtype), torch.randn(16, 24).to(dtype)
    for inputs in ([x.T, y], [x, y.T], [x[:1], x], [x, x[:, :1]], [x, x[0]]):
        if name == "three_outputs" or inputs[1].numel() == 16:
            judge_one_shape(name, subject, inputs, dtype)


@pytest.mark.parametrize("name", ["scalar_operand", "sum_5d"])
def test_strides_follow_one_operator_after_the_other(name: str, subject: Subject) -> None:
    """The result of x * s is dense, whatever x is, and comes before y in the sum."""
    inputs = subject.inputs(torch.float32, 3, 8)
    inputs[0] = inputs[0][..., :1].expand(inputs[0].shape)
    inputs[-1] = reversed_dims(inputs[-1])
    judge(subject, inputs, torch.float32)


@pytest.mark.parametrize("name", UNARY)
def test_negative_bit(name: str, subject: Subject) -> None:
    """The imaginary part of a conjugate is a view that holds its values negated."""
    x = torch.randn(4, 9, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    judge(subject, [x, *subject.inputs(torch.float32)[1:]], torch.float32)


@pytest.mark.parametrize("name", ["leaky_relu"])
def test_too_many_dimensions(name: str, subject: Subject) -> None:
    x = torch.randn((4,) * 9)[(slice(None, None, 2),) * 9]
    with pytest.raises(RuntimeError, match="8 dimensions"):
        subject.models(torch.float32)[0](x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own forward-mode code
@pytest.mark.parametrize("name", ["leaky_relu"])
def test_forward_mode_is_not_silently_without_tangent(name: str, subject: Subject) -> None:
    x = torch.randn(4, 9)
    with forward_ad.dual_level(), pytest.raises((RuntimeError, NotImplementedError)):
        subject.models(torch.float32)[0](forward_ad.make_dual(x, torch.ones_like(x)))


# --- the harness itself --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["leaky_relu/alignment"])
@each_dtype
def test_misaligned_access_is_seen(name: str, subject: Subject, dtype: torch.dtype) -> None:
    judge(subject, [torch.randn(64).to(dtype)], dtype)
    with pytest.raises(RuntimeError, match=r"misaligned .* in a kernel"):
        judge(subject, [offset(torch.randn(64).to(dtype))], dtype)


RUN = """
masked, mistake, *right = models
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    for n in (0, 1, 7, 8, 16, 257, 1031):
        dense, wide = torch.randn(n).to(dtype), torch.randn(3, 2 * n + 1).to(dtype)
        views = dense[1:], wide[:, 1::2], wide[:, -n:], wide.T, wide[1:2].expand(5, -1)
        for x in (dense, wide, *views):
            for model in right:
                model(x)
            masked(x, x > 0)
            masked(x, torch.ones(x.shape[-1], dtype=torch.bool))
            masked(x, torch.ones(*x.shape[:-1], 1, dtype=torch.bool))
print("clean", flush=True)
mistake(torch.randn(257))
print("not seen")
"""


def test_address_sanitizer(collection: Collection) -> None:
    """No access outside of exactly sized buffers, and one planted access is seen."""
    names = ["masked_where", "leaky_relu/count", "leaky_relu", "swish"]
    texts = [collection.texts[name] for name in names]
    cpu.check_addresses(RUN, collection.build(address=True), texts)
