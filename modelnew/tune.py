"""Chooses launch configurations: pure functions of region and target, with their measurements."""

from __future__ import annotations

from dataclasses import dataclass

from modelnew.ir import ModelNewError, Pointwise

# Bytes of a result that fill the GPU with several packs a thread as well.
LARGE = 1 << 26


@dataclass(frozen=True)
class Target:
    """Facts of a GPU that heuristics need."""

    name: str
    arch: str
    copy_gb_per_s: float


TARGETS = {
    # Device copy of 6.4 GB, read and written bytes over time.
    "h200": Target("H200", "9.0", 4270.0),
}


@dataclass(frozen=True)
class Launch:
    """Threads a block, and bytes that a thread moves with one access."""

    threads: int
    vec_bytes: int


def target(name: str) -> Target:
    """The target by name. Raises ModelNewError when it has no row."""
    if name not in TARGETS:
        raise ModelNewError(f"--target {name}: known targets are {', '.join(TARGETS)}")
    return TARGETS[name]


def packs(step: Pointwise) -> int:
    """Packs that a thread of one region takes: four of a large result that is only written.

    Blocks of one pack a thread start too slowly for writes alone: the outer product of two vectors,
    [32768, 16384], takes 0.681 ms with one, 0.524 with two, 0.475 with four (H200, float32). What
    reads as much as it writes loses 3 to 8 % with more than one.
    """
    (first, *_) = step.writes
    reads_much = any(access.tensor.shape == first.shape for access in step.reads)
    return 1 if reads_much or first.bytes < LARGE else 4


def pointwise(gpu: Target) -> Launch:
    """One pack of 16 bytes a thread, blocks of 128, a grid over everything at once.

    On an H200 over [4096, 393216] float32, in ms (a copy: 3.012):

    packs x threads | LeakyReLU | ELU   | GELU  | tanh
    1 x 128         | 3.002     | 3.006 | 3.013 | 2.999
    2 x 128         | 3.024     | 3.025 | 3.024 | 3.024
    2 x 256         | 3.092     | 3.095 | 3.097 | 3.095
    32 bytes x 128  | 3.417     | 3.109 | 3.452 | 3.489

    With 256 threads ELU was 1 % slower; a persistent grid of 8 blocks an SM, 7 %; streaming
    hints on loads and stores, 3 %.

    A long body is bound by instruction issue: the epilogue of Linear + add + Swish + Tanh + GELU +
    Hardtanh keeps 87 % of the issue slots busy (ncu) at 0.86 of a same-size copy. There two packs
    a thread change nothing (23.0 us both), 256 threads cost 4 %, and an instruction fewer an
    element (of 62) is worth about 1.5 %.
    """
    return Launch(threads=128, vec_bytes=16)
