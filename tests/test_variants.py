"""Input variants: sizes that agree, layouts, special values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from modelnew.measure import variants


def kept(*shapes: tuple[int, ...]) -> Any:
    return variants.templates([torch.rand(shape) for shape in shapes])


@pytest.mark.parametrize("kind", ["odd", "prime", "mid", "ones", "empty"])
def test_sizes_that_agree_still_agree(kind: str) -> None:
    tree = kept((6, 10), (10, 14), (14,))
    for sizing in variants.sizings(kind, tree, torch.device("cpu")):
        if sizing.mode == "all":
            first, second, third = (sizing(t.shape) for t in variants.listed(tree))
            assert first[1] == second[0]
            assert second[1] == third[0]


def test_modes_come_from_thorough_to_modest() -> None:
    tree = kept((8, 3, 32, 32))
    found = list(variants.sizings("odd", tree, torch.device("cpu")))
    assert [s.mode for s in found] == sorted((s.mode for s in found), key=variants.MODES.index)
    assert {s((8, 3, 32, 32)) for s in found if s.mode == "first"} >= {(37, 3, 32, 32)}
    assert all(s((8, 3, 32, 32))[1] == 3 for s in found if s.mode == "keep channels")
    assert all(s((8, 3, 32, 32))[3] == 32 for s in found if s.mode == "keep last")


def test_middle_sizes_are_multiples_of_sixteen_and_ordered() -> None:
    tree = kept((2, 3, 5, 7), (7, 11))
    sizing = next(variants.sizings("mid", tree, torch.device("cpu")))
    sizes = [size for t in variants.listed(tree) for size in sizing(t.shape)]
    assert all(size % 16 == 0 for size in sizes)
    assert sorted(set(sizes)) == sorted({sizing.sizes[s] for s in (2, 3, 5, 7, 11)})
    assert sizing.sizes[2] <= sizing.sizes[3] <= sizing.sizes[5]


def test_special_values_reach_every_index_modulo_sixteen() -> None:
    for shape in ((64, 256), (16, 32, 48), (37, 129), (1031,)):
        x = variants.sprinkle(torch.zeros(shape), [math.nan])
        place = torch.isnan(x.view(-1)).nonzero().view(-1)
        assert {int(p) % 16 for p in place} == set(range(16))
        assert place.numel() <= 40
    values = list(variants.specials(torch.float16).values())
    mixed = variants.sprinkle(torch.zeros(4096, dtype=torch.float16), values)
    assert torch.isnan(mixed).any()
    assert (mixed == 65504).any()
    assert (mixed == 2**-24).any()


@pytest.mark.parametrize("name", variants.LAYOUTS)
def test_layouts_keep_the_values(name: str) -> None:
    layout = variants.LAYOUTS[name]
    changed = 0
    for shape in ((), (5,), (4, 6), (2, 3, 4), (2, 3, 4, 5), (2, 3, 2, 3, 4)):
        x = torch.rand(shape)
        y = layout(x)
        assert y.shape == x.shape
        assert torch.equal(y, x) or name == "expanded"
        changed += y.stride() != x.stride() or y.storage_offset() != x.storage_offset()
    assert changed >= 2


def test_own_values_and_python_numbers_survive() -> None:
    tree = variants.templates([torch.full((4, 6), 3.0), 2, None, [torch.arange(6)]])
    filling = variants.Filling("own", torch.float16, torch.device("cpu"))
    x, number, none, nested = variants.make(tree, variants.Sizing("all", {4: 5, 6: 2}), filling)
    assert (number, none) == (2, None)
    assert torch.equal(x, torch.full((5, 2), 3.0, dtype=torch.float16))
    assert int(nested[0].max()) < 2
