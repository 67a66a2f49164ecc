"""Products of half types (templates/device/half.cuh) with their epilogues, run end to end on the
CPU as test_contractions_on_cpu.py does those of float32. What nvcc makes of them is seen in
test_contractions.py."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import contracted
import cpu
import pytest
import torch
from contracted import HALVES, made
from multiplied import Models, groups, loading
from test_contractions_on_cpu import judge
from torch import Tensor

from modelnew.measure.nested import cast

Draw = Callable[[torch.dtype], list[Tensor]]

TYPES = [torch.float16, torch.bfloat16]
BARE = "half bare"

# Faults planted in copies of BARE: the text, its replacement, and a form that shows it.
MISTAKES: Mapping[str, tuple[str, str, str]] = {
    "stages": ("if (++stage == kHalfStages) stage = 0, parity ^= 1;",
               "if (++stage == kHalfStages) stage = 0;", "odd"),
    "blocks apart": ("kAcross ? kHalfBlockBytes >> 4 : 0", "kAcross ? kHalfBlockBytes >> 5 : 0",
                     "tiles, NN"),
    "depth of a step": ("kAcrossB ? 16 * 128 / 16 : 2", "kAcrossB ? 16 * 128 / 8 : 2", "NN"),
    "a line across": ("across ? line : k, across ? k : line,", "across ? line : k, line,", "TT"),
    "parts": ("const int first = place.batch / p.each * p.part_k,",
                       "const int first = place.batch * p.part_k,", "batches of parts"),
    "sums of parts": ("part * count + i", "i", "parts"),
    "packs": ("lane * width / kHalfDesk", "lane * width / 16", "tiles, NT"),
    "lines that overlap": ("line >= size && ", "", "overlapping"),
    "lines of 16 bytes": ("line % 8 == 0", "line % 4 == 0", "lines of 8 bytes"),
    "where lines begin": ("reinterpret_cast<uintptr_t>(side.data) % 16 == 0", "true", "offset"),
}  # fmt: skip


# --- forms ---------------------------------------------------------------------------------------


def drawn(dtype: torch.dtype, *shape: int, across: bool = False, batches: int = 0) -> Tensor:
    first = (batches,) if batches else ()
    x = torch.randn(*first, *(reversed(shape) if across else shape)).to(dtype)
    return x.mT if across else x


def lying(layout: str, m: int, k: int, n: int) -> Draw:
    """Of each operand, T where neighbours in memory are of one column, else N."""
    first, second = (letter == "T" for letter in layout)
    return lambda dtype: [drawn(dtype, m, k, across=first), drawn(dtype, k, n, across=second)]


def special(dtype: torch.dtype) -> list[Tensor]:
    x, w = lying("NN", 70, 130, 300)(dtype)
    x[3, 5], x[20, 7], x[40, 8] = math.inf, math.nan, -math.inf
    w[9, 130], w[11, 250] = math.inf, math.nan
    x[50] = w[:, 70] = 0
    x[60] = 6e-8
    return [x, w]


# Lines of 8 elements' multiples are brought in as they lie, others are copied first.
FORMS: Mapping[str, Draw] = {
    **{
        f"{about}{layout}": lying(layout, *sizes)
        for about, sizes in (("", (72, 88, 104)), ("tiles, ", (200, 264, 328)))
        for layout in ("NN", "NT", "TN", "TT")
    },
    "odd": lying("NT", 141, 321, 267),
    "odd, across": lying("TN", 141, 97, 267),
    "lines of 8 bytes": lying("NN", 68, 100, 132),
    "one stage": lying("NT", 16, 64, 16),
    "small": lying("NN", 1, 1, 1),
    "parts": lying("NN", 24, 2176, 40),
    "parts, odd": lying("TT", 21, 2305, 41),
    "offset": lambda t: [
        x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x) for x in lying("NN", 40, 72, 48)(t)
    ],
    "steps": lambda t: [drawn(t, 40, 128)[:, ::2], drawn(t, 64, 96)[:, ::2]],
    "slices": lambda t: [drawn(t, 40, 128)[:, 8:72], drawn(t, 128, 96)[64:, 16:80]],
    "overlapping": lambda t: [drawn(t, 1384).as_strided((140, 264), (8, 1)), drawn(t, 264, 24)],
    "expanded": lambda t: [drawn(t, 1, 72).expand(70, 72), drawn(t, 72, 1).expand(72, 40)],
    "special": special,
}

# Of "half batches": n, k, m, and whether a, b lie across.
BATCHES: Mapping[str, tuple[tuple[int, int, int, int], tuple[bool, bool]]] = {
    "batches": ((3, 72, 200, 40), (False, False)),
    "batches across": ((3, 72, 200, 40), (True, True)),
    "odd batches": ((2, 133, 67, 129), (False, True)),
    "batches of parts": ((2, 24, 5600, 40), (False, False)),
}


def batches(name: str, dtype: torch.dtype) -> list[Tensor]:
    (count, n, k, m), (first, second) = BATCHES[name]
    a = drawn(dtype, n, k, across=first, batches=count)
    b = drawn(dtype, k, m, across=second, batches=count)
    return [torch.rand(n, m) > 0.5, a, b]


# --- what runs -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def texts() -> Mapping[str, str]:
    found = {name: made(name).for_small for name in HALVES}
    for number, (old, new, form) in enumerate(MISTAKES.values()):
        text = found["half batches" if form in BATCHES else BARE]
        assert old in text, old
        found[f"mistake {number}"] = text.replace(old, new)
    bare = found[BARE]
    found["a small workspace"] = bare.replace("count * int64_t(sizeof(float))", "count * 2")
    assert found["a small workspace"] != bare
    return found


@pytest.fixture(scope="module")
def cache(pytestconfig: pytest.Config) -> Path:
    assert pytestconfig.cache is not None
    return pytestconfig.cache.mkdir("solutions_on_cpu")


@pytest.fixture(scope="module")
def models(texts: Mapping[str, str], cache: Path) -> Models:
    extension = cpu.build(groups(texts, BARE), cache, brief={1, 2, 3})

    return loading(texts, cache, extension)


def judge_form(form: str, dtype: torch.dtype, models: Models, text: str | None = None) -> None:
    torch.manual_seed(2)
    name = "half batches" if form in BATCHES else BARE
    inputs = batches(form, dtype) if form in BATCHES else FORMS[form](dtype)
    judge(name, models(text or name), inputs)


# Ragged, in whole packs, and of several tiles.
@pytest.mark.parametrize("sizes", [(37, 69, 53), (152, 200, 264)], ids=str)
@pytest.mark.parametrize("name", HALVES)
def test_epilogue(name: str, sizes: tuple[int, int, int], models: Models) -> None:
    judge(name, models(name), contracted.inputs(name, *sizes))


@pytest.mark.parametrize("dtype", [*TYPES, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["half linear", "half number"])
def test_other_dtypes(name: str, dtype: torch.dtype, models: Models) -> None:
    """A file for one half type multiplies the other too; float32 is PyTorch's product."""
    inputs = cast(contracted.inputs(name, 37, 69, 53), dtype)
    judge(name, copy.deepcopy(models(name)).to(dtype), inputs)


@pytest.mark.parametrize("wide", [0, 1])
def test_operands_of_another_dtype(wide: int, models: Models) -> None:
    """What is added as float32 makes the result that: then the product is PyTorch's."""
    inputs = contracted.inputs("half number", 24, 64, 40)
    shape = [(40,), (24, 1)][wide]
    inputs = [x.float() if x.shape == shape else x for x in inputs]
    judge("half number", models("half number"), inputs)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("form", [*FORMS, *BATCHES])
def test_form(form: str, dtype: torch.dtype, models: Models) -> None:
    judge_form(form, dtype, models)


@pytest.mark.parametrize("number", range(len(MISTAKES)), ids=list(MISTAKES))
def test_planted_mistake_is_seen(number: int, models: Models) -> None:
    form = list(MISTAKES.values())[number][2]
    with pytest.raises((AssertionError, RuntimeError)):
        judge_form(form, torch.float16, models, f"mistake {number}")


@torch.no_grad()
def test_sums_are_of_float32(models: Models) -> None:
    """They are not rounded on the way: 2048 + 1 is no float16, and 1 is what is left of it."""
    x, v = torch.ones(64, 2112).half(), torch.ones(64, 2112).half()
    x[:, 0] = 2048
    x[:, 2:] = 0
    model = copy.deepcopy(models("half linear"))
    model.scale = 1.0
    row, y = torch.full((64,), -2048.0).half(), torch.zeros(64, 64).half()
    named = {"x": x, "v": v, "row": row, "y": y}
    found = model(*(named[name] for name in HALVES["half linear"].names))
    expected = torch.nn.functional.gelu(torch.ones(64, 64)).half()
    assert torch.equal(found, expected)


def test_addresses(texts: Mapping[str, str], cache: Path) -> None:
    """Under AddressSanitizer nothing is read or written outside operands, results and workspace."""
    script = """
for (n, k, m), dtype in zip([(37, 67, 41), (24, 2176, 40), (140, 264, 24)], [torch.float16] * 3):
    for across in (0, 1):
        w = torch.randn(m, k).to(dtype).T if across else torch.randn(k, m).to(dtype)
        x = torch.randn(n, k).to(dtype)
        models[0](x, w)
print("clean", flush=True)
models[1](torch.randn(24, 2176).half(), w.new_ones(2176, 40))
print("not seen")
"""
    (right,), (wrong,), *_ = groups(texts, BARE)
    extension = cpu.build(groups(texts, BARE), cache, address={0, 1}, brief={0, 1, 2, 3})
    cpu.check_addresses(script, extension, [right, wrong])
