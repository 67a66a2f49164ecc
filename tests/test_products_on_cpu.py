"""The plain maths of products (templates/device), compiled for the host: scales and pairs as the
emulation of test_split_product.py has them, what they suit, and how a product is cut into
tiles, parts of k and workspace."""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import cpu
import pytest
import test_split_product as emulated
import torch
from contracted import made
from torch import Tensor

from modelnew import ir
from modelnew.products import Product, split_tiles

NAMES = (
    "narrow", "long_is_a", "halves", "tile_rows", "tile_columns", "row_tiles", "column_tiles",
    "parts", "part_k", "pieces", "batches", "turned",
)  # fmt: skip


class Areas(ctypes.Structure):
    """How a product is cut: the bytes of its workspace, where six areas begin in it (-1: not there)
    and what has to fit into each, and the numbers of NAMES."""

    bytes: int
    begin: list[int]
    size: list[int]
    _fields_ = [
        ("bytes", ctypes.c_int64), ("begin", ctypes.c_int64 * 6), ("size", ctypes.c_int64 * 6),
        *((name, ctypes.c_int) for name in NAMES),
    ]  # fmt: skip


EXPORTS = """
extern "C" {
float scale_for(uint32_t largest) { return scale_of(largest); }

// Of rows and then columns: scale, tiny, small and large ones, k, what it is padded to.
int do_suit(const float* scales, const int* counts, const int* k) {
    Reach reaches[2];
    for (int n = 0; n < 2; ++n, counts += 3, k += 2) {
        const uint32_t head = head_of(scales[n], {counts[0], counts[1], counts[2]}, k[0], k[1]);
        if (undo_of(head) != (scales[n] ? 1 / scales[n] : 0)) return -1;
        reaches[n].include(reach_of(kNoHead));
        reaches[n].include(reach_of(head));
    }
    return suits(reaches[0], reaches[1]);
}

void make_pairs(const float* x, float scale, uint16_t* hi, uint16_t* lo, int* to) {
    float eight[8];
    memcpy(eight, x, sizeof eight);
    Counts counts = {};
    const Pairs made = pairs_of(eight, scale, counts);
    memcpy(hi, &made.hi, 16);
    memcpy(lo, &made.lo, 16);
    to[0] = counts.tiny, to[1] = counts.small, to[2] = counts.large;
}

int parts_for(int64_t tiles, int k, int processors) { return parts_of(tiles, k, processors); }

// Strides in elements: of batches, rows and k.
void split_all(const float* data, const int64_t* strides, int batches, int rows, int k, int parts,
               int part_k, uint16_t* pairs, uint32_t* heads) {
    const Factor f = {data, strides[0], strides[1], strides[2], batches, rows, k, parts, part_k,
                      part_k / kPiece, reinterpret_cast<uint4*>(pairs), heads};
    cpu_runtime::last_error = split(f, nullptr);
}

struct Areas {
    int64_t bytes, begin[6], size[6];
    int narrow, long_is_a, halves, tile_rows, tile_columns, row_tiles, column_tiles, parts;
    int part_k, pieces, batches, turned;
};

void form_for(const float* data, const int64_t* sizes, const int64_t* a, const int64_t* b,
              Areas* to) {
    const int batches = sizes[0], rows = sizes[1], columns = sizes[2], k = sizes[3];
    Problem problem = {};
    problem.a = {data, rows, a[0], a[1], a[2]};
    problem.b = {data, columns, b[0], b[1], b[2]};
    problem.batches = batches, problem.k = k, problem.processors = sizes[4];
    const Form form = form_of(problem);
    Arena arena = {};
    const Work work = work_of(problem, form, arena);
    const Product& p = work.product;
    *to = {};
    to->bytes = workspace_bytes(problem);
    const void* const begin[6] = {work.a.pairs, work.a.heads, work.b.pairs, work.b.heads,
                                  p.wide, p.partial};
    const int64_t parts = work.a.parts, a_lines = parts * batches * rows,
                  b_lines = parts * batches * columns,
                  tiles = int64_t(p.row_tiles) * p.column_tiles * p.batches;
    // The first area begins at 0, which is also what those without memory say.
    const bool a_split = p.row_heads != nullptr, b_split = p.column_heads != nullptr;
    const bool has[6] = {a_split, a_split, b_split, b_split, true, p.partial != nullptr};
    const int64_t count = parts * batches * rows * columns;
    const int64_t size[6] = {a_lines * work.a.pieces * 128, a_lines * 4,
                             b_lines * work.b.pieces * 128, b_lines * 4,
                             tiles * kWarps,                count * 4};
    for (int i = 0; i < 6; ++i) {
        to->begin[i] = has[i] ? reinterpret_cast<int64_t>(begin[i]) : -1;
        to->size[i] = size[i];
    }
    to->narrow = form.narrow, to->long_is_a = form.long_is_a, to->halves = form.halves;
    to->tile_rows = p.tile_rows, to->tile_columns = p.tile_columns;
    to->row_tiles = p.row_tiles, to->column_tiles = p.column_tiles;
    to->parts = parts, to->part_k = work.a.part_k, to->pieces = p.pieces;
    to->batches = p.batches, to->turned = p.turned;
}

void places(const int* sizes, int triangle, int64_t diagonal, int* to) {
    Product p = {};
    p.row_tiles = sizes[0], p.column_tiles = sizes[1], p.batches = sizes[2];
    p.tile_rows = sizes[3], p.tile_columns = sizes[4];
    p.triangle = triangle, p.diagonal = diagonal;
    for (int tile = 0; tile < p.row_tiles * p.column_tiles * p.batches; ++tile) {
        const Place place = place_of(p, tile);
        *to++ = place.batch, *to++ = place.row_tile, *to++ = place.column_tile;
        *to++ = place.matters;
    }
}
}
"""


# A mistake in what each of these tests is about, all planted in one copy.
MISTAKES: Mapping[str, tuple[str, str]] = {
    "test_scale": ("exponent < 79", "exponent < 80"),
    "test_pairs": ("v.y - near.y", "v.y - near.x"),
    "test_suits": ("max(4, k / 256)", "max(4, k / 257)"),
    "test_split": ("kLines + at % kPiece / 8", "kLines + at % kPiece / 9"),
    "test_parts": ("/ parts + 63) / 64 * 64", "/ parts + 63) / 64 * 63"),
    "test_forms": ("+ 1023) / 1024 * 1024", "+ 1023) / 1024 * 512"),
    "test_places": ("first + inside % rows", "first + inside % kGroup"),
}  # fmt: skip


@pytest.fixture(scope="module")
def libraries(pytestconfig: pytest.Config) -> list[Any]:
    """The functions of EXPORTS behind the device code of a file with a product, as it is and with
    MISTAKES. The epilogues, which they do not need, are left out."""
    assert pytestconfig.cache is not None
    folder = pytestconfig.cache.mkdir("solutions_on_cpu")
    found = cpu.sources(made("bare", ("float32",)).text)
    assert found is not None
    right = found.cuda[: found.cuda.index("// mm = ")]
    wrong = right
    for old, new in MISTAKES.values():
        assert old in wrong
        wrong = wrong.replace(old, new)
    marker = "// run_product("  # by which cpu.py knows what it has
    units = [
        cpu.kernel_unit([replace(found, cuda=f"{text}{marker}\n")], EXPORTS)
        for text in (right, wrong)
    ]
    with ThreadPoolExecutor(2) as pool:
        paths = pool.map(lambda unit: cpu.library(unit, folder), units)
        opened = [ctypes.CDLL(str(path)) for path in paths]
    for library in opened:
        library.scale_for.restype = ctypes.c_float
    return opened


@pytest.fixture(scope="module")
def device(libraries: list[Any]) -> Any:
    return libraries[0]


@pytest.mark.parametrize("name", MISTAKES)
def test_planted_mistake_is_seen(name: str, libraries: list[Any]) -> None:
    given = ["32 lanes a row"] if name == "test_split" else []
    with pytest.raises(AssertionError):
        globals()[name](*given, libraries[1])


def data(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


def part_of(k: int, parts: int) -> int:
    """The k of a part, a multiple of 64."""
    each = (k + parts - 1) // parts
    return (each + 63) // 64 * 64


def of_longs(*values: int) -> Any:
    return (ctypes.c_int64 * len(values))(*values)


# --- pairs ---------------------------------------------------------------------------------------


def test_scale(device: Any) -> None:
    """That of the emulation, for all magnitudes: of every exponent the first, a middle one, the
    last; with infinities and NaN."""
    bits = torch.tensor([e << 23 | m for e in range(256) for m in (0, 1, 0x345678, 0x7FFFFF)])
    expected = emulated.scale_of(bits.int().view(torch.float32).unsqueeze(1)).squeeze(1)
    found = torch.tensor([device.scale_for(int(b)) for b in bits])
    assert torch.equal(found, expected)


def test_pairs(device: Any) -> None:
    """Bit by bit those of the emulation, and as many tiny, small and large ones."""
    torch.manual_seed(0)
    x = torch.randn(200, 8) * 2.0 ** -torch.randint(0, 40, (200, 8))
    x[:9, 3] = 0
    x[9:15, 5] = 1e-41
    hi, lo, scale = emulated.split(x)
    counts = emulated.counts(x)
    high, low = torch.empty(8, dtype=torch.float16), torch.empty(8, dtype=torch.float16)
    found = torch.empty(3, dtype=torch.int32)
    for n, row in enumerate(x):
        at = ctypes.c_float(scale[n])
        device.make_pairs(data(row), at, data(high), data(low), data(found))
        assert found.tolist() == counts[n].tolist()
        assert torch.equal(high.view(torch.int16), hi[n].view(torch.int16))
        assert torch.equal(low.view(torch.int16), lo[n].view(torch.int16))


def test_suits(device: Any) -> None:
    """Few tiny elements suit anything; of more, large ones have to outnumber the other's small ones
    by far, whatever the units in which a head counts them. Padding is not counted."""
    for k in (64, 1023, 1024, 1280, 8192, 524288, 1 << 30):
        most, padded = max(4, k // 256), k + -k % 64
        for scale, tiny, large, small, expected in (
            (1.0, most, 0, k, 1), (1.0, most + 1, 0, 0, 0), (1.0, most + 1, k // 2, 0, 1),
            (1.0, k // 2, k // 2, k // 16, 1), (1.0, k // 2, k // 2, k // 4, 0),
            (1.0, k // 2, k // 16, k // 16, 0), (0.0, 0, k, 0, 0), (2.0**-60, 0, 0, k, 1),
            (2.0**60, 0, 0, k, 1),
        ):  # fmt: skip
            own, other = (tiny, tiny, large), (0, small, 0)
            for counts, scales in (((own, other), (scale, 1.0)), ((other, own), (1.0, scale))):
                flat = [
                    count + (padded - k) * (n == 1) for c in counts for n, count in enumerate(c)
                ]
                found = device.do_suit(
                    (ctypes.c_float * 2)(*scales), (ctypes.c_int * 6)(*flat),
                    (ctypes.c_int * 4)(k, padded, k, padded),
                )  # fmt: skip
                assert found == expected, (k, scale, tiny, large, small)


def wide(*shape: int) -> Tensor:
    """Rows of many ranges: such as have scales, zeros, infinities, NaN, denormals."""
    x = torch.randn(shape)
    rows = x.view(-1, shape[-1])
    for n, change in enumerate((0.0, torch.inf, torch.nan, 1e-41, 1e30, 1e-30)):
        rows[n * 3, : 1 + n % 2 * (shape[-1] - 1)] = change
    rows[1::4] *= 2.0 ** -torch.randint(0, 24, rows[1::4].shape).float()
    return x


def apart(x: Tensor) -> Tensor:
    """With rows that do not begin at multiples of 16 bytes."""
    return torch.empty(*x.shape[:-1], x.shape[-1] + 1)[..., 1:].copy_(x)


# By the kernel that splits: batches, rows and k of an operand, how it lies, and parts of k.
SPLITS: dict[str, tuple[tuple[int, int, int], Callable[[Tensor], Tensor], int]] = {
    "8 lanes a row": ((2, 21, 200), Tensor.contiguous, 1),
    "32 lanes a row": ((1, 21, 996), Tensor.contiguous, 1),
    "a block a row": ((1, 20, 1100), Tensor.contiguous, 1),
    "a block a row, more": ((1, 20, 9000), Tensor.contiguous, 1),
    "a block a row, twice": ((1, 20, 17000), Tensor.contiguous, 1),
    "one by one": ((2, 20, 1003), apart, 1),
    "parts": ((2, 20, 1340), Tensor.contiguous, 3),
    "parts, one by one": ((1, 20, 1341), apart, 2),
    "columns": ((2, 36, 200), lambda x: x.mT.contiguous().mT, 1),
    "columns, clusters": ((1, 40, 2000), lambda x: x.mT.contiguous().mT, 1),
    "columns, read twice": ((1, 32, 9000), lambda x: x.mT.contiguous().mT, 1),
    "columns, one by one": ((2, 37, 301), lambda x: x.mT.contiguous().mT, 1),
    "columns, parts": ((1, 37, 1341), lambda x: x.mT.contiguous().mT, 3),
    "steps": ((1, 20, 300), lambda x: torch.empty(1, 40, 600)[:, ::2, ::2].copy_(x), 1),
    "one k": ((1, 20, 1), Tensor.contiguous, 1),
}


@pytest.mark.parametrize("name", SPLITS)
def test_split(name: str, device: Any) -> None:
    """The kernels make the emulation's pairs: pieces of 32 hi and 32 lo, parts of k padded with
    zeros, and what undoes the scales with how far rows reach."""
    torch.manual_seed(3)
    (batches, rows, k), lay, parts = SPLITS[name]
    x = lay(wide(batches, rows, k))
    part_k = part_of(k, parts)
    made = torch.full((parts, batches, rows, part_k // 32, 2, 32), 7, dtype=torch.float16)
    heads = torch.empty(parts, batches, rows, dtype=torch.int32)
    device.split_all(
        data(x), of_longs(*x.stride()), batches, rows, k, parts, part_k, data(made), data(heads)
    )
    for part in range(parts):
        own = x[..., part * part_k : (part + 1) * part_k].contiguous()
        padded = torch.nn.functional.pad(own, (0, part_k - own.shape[-1]))
        hi, lo, scale = emulated.split(padded)
        reach = emulated.Reach.of(own, part_k)
        assert torch.equal(heads[part], reach.head(own))
        assert len(reach.large.unique()) > 3 or k == 1
        well = scale.squeeze(-1) > 0
        for found, right in ((made[part, ..., 0, :], hi), (made[part, ..., 1, :], lo)):
            found, right = found.reshape(right.shape)[well], right[well]
            assert torch.equal(found.view(torch.int16), right.view(torch.int16))


# --- forms ---------------------------------------------------------------------------------------


def test_parts(device: Any) -> None:
    """They cover k, none is empty, each is a multiple of 64 but for the last, and of what is cut
    each has 512 at least, so that the sums which go through memory are few."""
    draw = random.Random(0)
    sizes = [1, 2, 63, 64, 65, 511, 1023, 1024, 1025, 4096, 8191, 524288, 1 << 24, (1 << 30) - 1]
    sizes += [draw.randrange(1, 1 << draw.randrange(1, 31)) for _ in range(300)]
    seen = set()
    for k, processors in itertools.product(sizes, (1, 78, 114, 132)):
        for tiles in (1, 2, 7, 66, 131, 132, 133, 265, 1000, 100000):
            parts = device.parts_for(ctypes.c_int64(tiles), k, processors)
            part_k = part_of(k, parts)
            seen.add(parts)
            assert (parts - 1) * part_k < k <= parts * part_k, (tiles, k, processors)
            assert parts == 1 or k // parts >= 448
            assert parts <= 4 * processors
    assert len(seen) > 20


def test_long_products_are_cut(device: Any) -> None:
    """One tile of a long k is not left to one multiprocessor, many tiles are not cut."""
    assert device.parts_for(ctypes.c_int64(1), 524288, 132) >= 66
    assert device.parts_for(ctypes.c_int64(132), 8192, 132) == 1
    assert device.parts_for(ctypes.c_int64(1000), 8192, 132) == 1
    assert device.parts_for(ctypes.c_int64(1), 600, 132) == 1


Shape = tuple[int, int, int, int]


def shapes() -> list[Shape]:
    """Batches, rows, columns, k: such as the host lets through, and small ones."""
    draw = random.Random(1)
    found: list[Shape] = [
        (1, 1, 1, 1), (1, 1024, 8192, 8192), (1, 128, 8192, 8192), (1, 8192, 128, 8192),
        (1, 512, 8192, 8192), (1, 513, 8192, 8192), (1, 256, 256, 524288), (128, 512, 2048, 1024),
        (1, 32768, 32768, 64), (1 << 23, 16, 16, 48), (1, (1 << 31) // 16 - 1, 16, 48),
        (1, 16, 16, (1 << 30) - 1), (1, 46340, 46340, 50000), (1, 1000, 8190, 8100),
    ]  # fmt: skip
    while len(found) < 3000:
        batches, rows, columns, k = (1 << draw.randrange(0, n) for n in (8, 17, 17, 22))
        shape = tuple(draw.randrange(1, 2 * n) for n in (batches, rows, columns, k))
        if shape[0] * shape[1] * shape[2] < 1 << 31:
            found.append(shape)  # type: ignore[arg-type]
    return found


def form(device: Any, shape: Shape, across: tuple[bool, bool], processors: int = 132) -> Areas:
    batches, rows, columns, k = shape
    strides = []
    for size, turned in zip((rows, columns), across, strict=True):
        strides.append(of_longs(size * k, *((1, size) if turned else (k, 1))))
    found = Areas()
    operand = ctypes.c_void_p(256)
    sizes = of_longs(batches, rows, columns, k, processors)
    device.form_for(operand, sizes, *strides, ctypes.byref(found))
    return found


def test_forms(device: Any) -> None:
    """Tiles cover the result and none is empty, numbers of tiles and lines fit in 32 bits, and the
    areas of the workspace lie in it one behind the other, as large as they have to be."""
    kinds = set()
    for number, shape in enumerate(shapes()):
        batches, rows, columns, k = shape
        made = form(device, shape, (number % 2 == 1, number % 3 == 1))
        kinds.add((made.narrow, made.long_is_a, made.halves if made.narrow else 0, made.parts > 1))
        assert (made.row_tiles - 1) * made.tile_rows < rows <= made.row_tiles * made.tile_rows
        assert (
            (made.column_tiles - 1) * made.tile_columns < columns
            <= made.column_tiles * made.tile_columns
        )  # fmt: skip
        assert (made.parts - 1) * made.part_k < k <= made.parts * made.part_k
        assert made.part_k % 64 == 0
        assert made.pieces == made.part_k // 32
        assert made.batches == made.parts * batches
        assert made.row_tiles * made.column_tiles * made.batches * 8 < 1 << 31, shape
        assert made.batches * max(rows, columns) < 1 << 31, shape
        assert made.turned == (made.narrow and not made.long_is_a)
        assert_areas(made)
    assert len(kinds) >= 10, kinds


def test_tiles_are_those_that_the_planner_counts(device: Any) -> None:
    kinds = set()
    for shape in shapes():
        batches, rows, columns, k = (-(-size // 4) * 4 for size in shape)
        if batches * rows * columns >= 1 << 31:
            continue
        made = form(device, (batches, rows, columns, k), (False, False))
        left, right = (ir.Tensor("", (batches, n, k), "float32") for n in (rows, columns))
        tiles = batches * made.row_tiles * made.column_tiles
        assert split_tiles(Product(left, right, True)) == (tiles, made.narrow and made.halves == 1)
        kinds.add((made.narrow, made.halves))
    assert len(kinds) == 4


def assert_areas(made: Areas) -> None:
    end = 0
    for begin, size in zip(made.begin, made.size, strict=True):
        if begin >= 0:
            assert begin == end, "areas overlap, or memory is left unused"
            assert begin % 1024 == 0
            end = begin + -(-size // 1024) * 1024
    assert made.bytes == end
    split = made.begin[0] >= 0, made.begin[2] >= 0
    assert split == (
        (True, True) if not made.narrow else (not made.long_is_a, bool(made.long_is_a))
    )
    assert (made.begin[5] >= 0) == (made.parts > 1)


def test_places(device: Any) -> None:
    """Each tile is visited once. Of a triangle, those with an element that matters do matter and
    come first in their batch."""
    for rows, columns, batches in itertools.product((1, 2, 7, 16, 17, 40), (1, 3, 16, 33), (1, 3)):
        for tile, triangle, diagonal in (
            ((128, 256), 0, 0), ((128, 256), 1, 0), ((128, 128), -1, 0), ((128, 256), -1, 300),
            ((256, 128), 1, -1000), ((128, 256), 1, 100000), ((128, 256), -1, -100000),
            ((128, 256), 1, -100000), ((128, 256), -1, 100000), ((128, 256), 1, -1),
        ):  # fmt: skip
            count = rows * columns * batches
            found = torch.empty(count, 4, dtype=torch.int32)
            sizes = (ctypes.c_int * 5)(rows, columns, batches, *tile)
            device.places(sizes, triangle, ctypes.c_int64(diagonal), data(found))
            places = [tuple(place) for place in found[:, :3].tolist()]
            every = itertools.product(range(batches), range(rows), range(columns))
            assert sorted(places) == sorted(every)
            matter = found[:, 3].tolist()
            own = needed(rows, columns, tile, triangle, diagonal)
            assert matter == [place[1:] in own for place in places]
            if triangle:
                each = rows * columns
                for n in range(batches):
                    batch = matter[n * each : (n + 1) * each]
                    assert batch == sorted(batch, reverse=True)


def needed(
    rows: int, columns: int, tile: tuple[int, int], triangle: int, diagonal: int
) -> set[tuple[int, int]]:
    """The tiles with an element whose column is at most, or least, `diagonal` right of its row."""
    found = set()
    for r, c in itertools.product(range(rows), range(columns)):
        first, last = c * tile[1] - ((r + 1) * tile[0] - 1), (c + 1) * tile[1] - 1 - r * tile[0]
        lower, upper = first <= diagonal, last >= diagonal
        if triangle == 0 or (lower if triangle > 0 else upper):
            found.add((r, c))
    return found
