"""Runs a reference's own code under fake tensors, small tensors keeping their values.

A constructor may read what it has computed: `[x.item() for x in torch.linspace(0, rate, n)]`. So
every operator runs under the fake mode, and where its operands' values are known and its results
are small, once more for real on the CPU. Nothing of the size of an input is ever allocated, and
the model holds nothing but fake tensors.
"""

from __future__ import annotations

import contextlib
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from modelnew.ir import ModelNewError

# Elements that a tensor may have for its values to be kept. The second figure is for a constructor
# that reads a larger one (a check that a weight is orthogonal), which then costs its real time.
LIMITS = (1 << 16, 1 << 24)
BYTES = 2e9  # what all values that one run makes may take, freed or not

UNKNOWN = (DataDependentOutputException, DynamicOutputShapeException)
# Ways to read values that no operator is behind.
READERS = (torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__format__)

T = TypeVar("T")


@dataclass(frozen=True)
class _Value:
    """What a fake tensor stands for, kept in its __dict__: swap_tensors refuses weak references."""

    tensor: torch.Tensor

    def __deepcopy__(self, memo: Any) -> _Value:
        with no_dispatch():
            return _Value(self.tensor.clone())


class _FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A mode that copies of its tensors share: a constructor may deepcopy a module."""

    def __deepcopy__(self, memo: object) -> _FakeMode:
        return self


class Values:
    """The fake mode of the reference at `path`, and the values of its small tensors."""

    def __init__(self, path: Path) -> None:
        self.fake_mode = _FakeMode()
        self._path = str(path)
        self._limit = LIMITS[0]
        self._made = 0
        self._reads: list[tuple[str, Any]] = []

    def run(self, make: Callable[[], T], any_seed: bool = False) -> T:
        """What `make` gives under fake tensors; torch's random state is left as it was.

        Raises ModelNewError when `make` reads numbers that change with the seed, unless
        `any_seed`, and one of UNKNOWN when it reads numbers that are not known.
        """
        for self._limit in LIMITS:
            try:
                result, reads = self._once(make, seed=0)
                break
            except UNKNOWN:
                if self._limit == LIMITS[-1]:
                    raise
        if reads and not any_seed:
            _, others = self._once(make, seed=1)
            for (where, read), other in zip(reads, [*others, None], strict=False):
                if (where, read) != other:
                    raise ModelNewError(
                        f"{where}: the model is built by what random numbers say, so no two "
                        "are the same: make such choices with numbers that do not change"
                    )
        return result

    def _once(self, make: Callable[[], T], seed: int) -> tuple[T, list[tuple[str, Any]]]:
        self._made, self._reads = 0, []
        around = (_seeded(seed), self._settings(), self._like_real())
        with contextlib.ExitStack() as stack:
            for context in (*around, self.fake_mode, _Operators(self), _Functions(self)):
                stack.enter_context(context)
            return make(), self._reads

    @contextlib.contextmanager
    def _settings(self) -> Iterator[None]:
        """Leaves torch's settings as they were, for what comes after this reference."""
        dtype = torch.get_default_dtype()
        try:
            with torch.set_grad_enabled(torch.is_grad_enabled()):
                yield
            if torch.get_default_dtype() != dtype:
                raise ModelNewError(
                    f"{self._path}: sets torch's default dtype, which is another for the "
                    "solution: give dtype= where a tensor is made"
                )
        finally:
            torch.set_default_dtype(dtype)

    @contextlib.contextmanager
    def _like_real(self) -> Iterator[None]:
        """Lets Module.half and copy.deepcopy do with fake tensors what they do with others."""
        memo = self.fake_mode.fake_tensor_converter.meta_converter.tensor_memo
        swap: Any = torch.utils.swap_tensors

        def swap_tensors(left: torch.Tensor, right: torch.Tensor) -> None:
            memo.clear()  # holds weak references, which swap refuses
            swap(left, right)

        with (
            warnings.catch_warnings(),
            mock.patch.object(torch.utils, "swap_tensors", swap_tensors),
            mock.patch.object(torch, "set_default_device"),  # it may be a GPU that is not here
        ):
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            yield

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The real tensor beside a fake one; None when its values are not known."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        value: _Value | None = vars(tensor).get("_value")
        if value is None or (value.tensor.numel() and not value.tensor.untyped_storage().nbytes()):
            return None  # see _forget
        return value.tensor

    def _keep(self, tensor: torch.Tensor, value: torch.Tensor | None) -> None:
        vars(tensor)["_value"] = None if value is None else _Value(value)

    def fake(self, value: Any) -> Any:
        """A real tensor as the fake one that stands for it, a GPU as the CPU; else as it is."""
        if isinstance(value, torch.device | str) and str(value).split(":")[0] == "cuda":
            return torch.device("cpu")
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return value
        made = self.fake_mode.from_tensor(value)
        self._keep(made, value)
        return made

    def read(self, answer: T) -> T:
        """Takes note of an answer that left the world of tensors, and of the line that asked."""
        self._reads.append((self.line(), answer))
        return answer

    def line(self) -> str:
        """The line of the reference that runs, as "file:line"."""
        frame: Any = sys._getframe()
        while frame is not None and frame.f_code.co_filename != self._path:
            frame = frame.f_back
        return self._path if frame is None else f"{self._path}:{frame.f_lineno}"

    def really(self, func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any] | None:
        """What an operator gives for real, in a tuple; None when it cannot be known."""
        given = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        if any(self.of(tensor) is None for tensor in given):
            return None
        args, kwargs = pytree.tree_map_only(torch.Tensor, self.of, (args, kwargs))
        with contextlib.suppress(Exception), no_dispatch():
            out = func(*args, **kwargs)
            if "empty" in func.__name__:
                out.zero_()  # what memory held before must not be read
            return (out,)
        return None

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Gives the results of an operator their values, or forgets those that it wrote over."""
        results = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, FakeTensor)]
        for result in results:
            result.constant = None  # else the fake mode would answer for a buffer in forward too
        done = self.really(func, args, kwargs) if all(map(self._small, results)) else None
        if done is None:
            self._forget(func, args, kwargs)
            return
        values = [leaf for leaf in pytree.tree_leaves(done) if isinstance(leaf, torch.Tensor)]
        for result, value in zip(results, values, strict=True):
            self._keep(result, value)
            if all(r.alias_info is None for r in func._schema.returns):
                self._made += value.numel() * value.element_size()

    def _small(self, result: FakeTensor) -> bool:
        small = result.numel() <= self._limit and self._made < BYTES
        return small and result.device.type == "cpu" and result.layout == torch.strided

    def _forget(self, func: Any, args: Any, kwargs: Any) -> None:
        """Empties the storage of what was written with unknown values: all its views see it."""
        for index, spec in enumerate(func._schema.arguments):
            if spec.alias_info is not None and spec.alias_info.is_write:
                written = args[index] if index < len(args) else kwargs.get(spec.name)
                for tensor in pytree.tree_leaves(written):
                    value = self.of(tensor) if isinstance(tensor, FakeTensor) else None
                    if value is not None:
                        value.untyped_storage().resize_(0)

    def rebound(self, tensor: torch.Tensor, data: torch.Tensor) -> None:
        """Follows `tensor.data = data`, which no operator is behind."""
        self._keep(tensor, self.of(data))


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Random numbers of this seed, from wherever they are drawn on the CPU."""
    state, python, numpy = torch.random.get_rng_state(), random.getstate(), sys.modules.get("numpy")
    drawn = numpy.random.get_state() if numpy else None
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would reach the GPUs too
    random.seed(seed)
    if numpy:
        numpy.random.seed(seed)
    try:
        yield
    finally:
        torch.random.set_rng_state(state)
        random.setstate(python)
        if numpy:
            numpy.random.set_state(drawn)


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows each operator, and answers where the fake mode cannot."""

    def __init__(self, values: Values) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values = values

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values, kwargs = self.values, kwargs or {}
        if func is torch.ops.aten.lift_fresh.default:  # torch.tensor(...), a real tensor still
            with no_dispatch():
                copied = args[0].clone()
            return values.fake(copied)
        args, kwargs = pytree.tree_map(values.fake, (args, kwargs))
        try:
            out = func(*args, **kwargs)
        except UNKNOWN:
            done = values.really(func, args, kwargs)
            if done is None:
                raise
            values.read(pytree.tree_map_only(torch.Tensor, lambda t: t.shape, done[0]))
            return pytree.tree_map(values.fake, done[0])
        values.follow(func, args, kwargs, out)
        return out


class _Functions(TorchFunctionMode):
    """Answers what reaches no operator: numpy, formatted text, a GPU where there is none."""

    def __init__(self, values: Values) -> None:
        super().__init__()
        self.values = values

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in READERS:
            value = self.values.of(args[0])
            if value is None:
                raise DataDependentOutputException(func)
            with no_dispatch():
                copied = value.detach().clone()
                self.values.read(copied.tolist())
                return func(copied, *args[1:], **kwargs)
        if func == torch.Tensor.cuda:
            return args[0]
        if func == torch.Tensor.to:
            args, kwargs = pytree.tree_map(self.values.fake, (args, kwargs))
        out = func(*args, **kwargs)
        if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            self.values.rebound(*args)
        return out
