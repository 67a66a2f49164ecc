"""Text of references whose constructors are of every kind that people write, for tests."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

FORWARD = "    def forward(self, x):\n        return torch.relu(x)\n"
END = "\ndef get_inputs(): return [torch.randn(3, 7)]\n"


@dataclass(frozen=True)
class Kind:
    """A file: what is before class Model, `__init__`'s body, more members, what is after."""

    init: str = ""
    before: str = ""
    members: str = ""
    after: str = ""
    signature: str = ""
    arguments: str = ""
    model: str = "class Model(nn.Module):"

    def text(self) -> str:
        init = self.init and f"def __init__(self{self.signature}):\n    " + "    ".join(
            f"super().__init__()\n{textwrap.dedent(self.init).strip()}".splitlines(keepends=True)
        )
        members = "\n".join([init, textwrap.dedent(self.members).strip(), textwrap.dedent(FORWARD)])
        parts = [
            "" if "__future__" in self.before else "import torch\nfrom torch import nn\n",
            textwrap.dedent(self.before),
            self.model,
            textwrap.indent(members, "    "),
            textwrap.dedent(self.after),
            END,
            f"def get_init_inputs(): return [{self.arguments}]\n",
        ]
        return "\n".join(parts)


READS = {
    "item": Kind("""
        rates = [x.item() for x in torch.linspace(0, rate, 4)]
        self.layers = nn.Sequential(*(nn.Dropout(rate) for rate in rates), nn.Linear(7, 7))
        """, signature=", rate=0.3"),
    "tolist": Kind("""
        self.layers = nn.ModuleList(nn.Linear(n, n) for n in torch.arange(1, 4).tolist())
        """),
    "int_and_float": Kind("""
        self.layer = nn.Linear(int(torch.tensor([2, 3]).prod()), 5)
        self.scale = float(torch.ones(5).sum() / 2)
        """),
    "if": Kind("""
        mask = torch.tril(torch.ones(4, 4)) == 0
        if mask.any() and torch.equal(mask, mask.clone()):
            self.layer = nn.Linear(3, 3)
        """),
    "index": Kind("""
        self.sizes = [n for n in range(torch.tensor(3))]
        self.layer = nn.Linear(3, len(self.sizes))
        """),
    "numpy": Kind("""
        table = np.sqrt(torch.arange(6.0).numpy())
        self.register_buffer("table", torch.from_numpy(table))
        self.layer = nn.Linear(int(np.asarray(torch.arange(4)).sum()), 2)
        """, before="import numpy as np"),
    "format": Kind('self.add_module(f"layer{torch.tensor(3):d}", nn.Linear(2, 2))'),
    "mask": Kind("""
        values = torch.arange(10)
        self.register_buffer("even", values[values % 2 == 0])
        self.layer = nn.Linear(len(torch.nonzero(values > 3)), 2)
        """),
    "written": Kind("""
        index = torch.zeros(2, 3)
        index[:, 1] += 4
        index.view(-1)[0] = 2
        self.layer = nn.Linear(int(index.sum()), int(index.max()))
        """),
    "constant_of_the_file": Kind(
        "self.layer = nn.Linear(int(SIZES[1]), 2)", before="SIZES = torch.tensor([3, 5])"
    ),
    "large": Kind("self.layer = nn.utils.parametrizations.orthogonal(nn.Linear(300, 300))"),
    "assertion": Kind("""
        self.layer = nn.Linear(8, 8)
        assert torch.isfinite(self.layer.weight).all()
        """),
    "data": Kind("""
        self.layer = nn.Linear(3, 3)
        self.layer.weight.data = torch.eye(3)
        self.layer.weight.data.mul_(2)
        self.n = int(self.layer.weight.detach().sum())
        """),
}  # fmt: skip

TENSORS = {
    "plain": Kind("""
        self.hidden = torch.randn(4, 5)
        self.layer = nn.Linear(5, 5)
        self.pair = [torch.ones(2), {"a": torch.randn(3)}]
        """),
    "parameters": Kind("""
        self.scale = nn.Parameter(torch.randn(5))
        self.fixed = nn.Parameter(torch.ones(5), requires_grad=False)
        self.none = None
        self.register_parameter("absent", None)
        """),
    "buffers": Kind("""
        self.register_buffer("kept", torch.randn(5))
        self.register_buffer("not_kept", torch.randn(5), persistent=False)
        self.register_buffer("absent", None)
        """),
    "shared": Kind("""
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)
        self.b.weight = self.a.weight
        self.c = self.a
        """),
    "lists": Kind("""
        self.list = nn.ParameterList([nn.Parameter(torch.randn(2)) for _ in range(3)])
        self.dict = nn.ParameterDict({"b": nn.Parameter(torch.randn(1)), "a": torch.randn(2)})
        self.modules_ = nn.ModuleList([nn.Linear(2, 2), nn.BatchNorm1d(2)])
        self.named = nn.ModuleDict({"z": nn.Linear(1, 2), "a": nn.PReLU()})
        self.unregistered = [nn.Linear(2, 3), nn.Linear(3, 2)]
        """),
    "recurrent": Kind("""
        self.lstm = nn.LSTM(4, 5, num_layers=2, bidirectional=True)
        self.gru = nn.GRU(4, 5)
        self.hidden = (torch.zeros(4, 2, 5), torch.randn(4, 2, 5))
        """),
    "attention": Kind("""
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        """),
    "copies": Kind("""
        layer = nn.Linear(3, 3)
        self.layers = nn.ModuleList([copy.deepcopy(layer) for _ in range(2)])
        """, before="import copy"),
    "frozen": Kind("""
        self.norm, self.layer = nn.BatchNorm1d(7), nn.Linear(7, 7)
        self.norm.eval()
        for parameter in self.layer.parameters():
            parameter.requires_grad_(False)
        """),
    "half": Kind("""
        self.layer = nn.Linear(7, 7).half()
        self.wide = nn.Linear(2, 2, dtype=torch.double).to(torch.bfloat16)
        """),
    "normalised": Kind("""
        self.a = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
        self.b = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))
        """),
    "initialised": Kind("""
        self.layer = nn.Linear(70000, 3)
        self.conv = nn.Conv2d(3, 4, 3)
        self.apply(self._init_weights)
        """, members="""
        def _init_weights(self, module):
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
            elif isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")
                nn.init.constant_(module.bias, 0.5)
        """),
    "seeded": Kind("""
        generator = torch.Generator().manual_seed(3)
        self.register_buffer("mask", torch.rand(4, generator=generator) > 0.5)
        torch.manual_seed(5)
        self.layer = nn.Linear(int(torch.randint(2, 9, ())), 3)
        """),
    "drawn_elsewhere": Kind("""
        self.weight = nn.Parameter(torch.from_numpy(np.random.randn(3)))
        self.order = random.sample(range(5), 5)
        self.unset = nn.Parameter(torch.empty(2, 2))
        self.old = nn.Parameter(torch.Tensor(2, 2))
        nn.init.zeros_(self.unset)
        nn.init.normal_(self.old)
        """, before="import random\nimport numpy as np"),
    "views": Kind("""
        self.register_buffer("whole", torch.randn(4, 4))
        self.register_buffer("part", self.whole[1:3], persistent=False)
        self.weight = nn.Parameter(torch.empty(3, 3))
        with torch.no_grad():
            self.weight.copy_(torch.eye(3))
        """),
}  # fmt: skip

NAMES = {
    "constants": Kind(
        "self.layer = nn.Linear(WIDTH, DEPTH)\nself.eps = EPS", before="WIDTH, DEPTH = 3, 4",
        after="EPS: float = 1e-5",
    ),
    "changed_constants": Kind(
        "self.layer = nn.Linear(SIZES['a'], len(TABLE))",
        before="""
        SIZES = {"a": 1}
        TABLE = []
        SIZES["a"] += 3
        for i in range(5):
            TABLE.append(i)
        """,
    ),
    "chosen_constants": Kind(
        "self.layer = nn.Linear(N, N)",
        before="if torch.float64.is_floating_point:\n    N = 3\nelse:\n    N = 4",
    ),
    "helpers": Kind(
        "self.layer = nn.Linear(size(2), size(3, extra=1))\nself.act = make_act('relu')",
        before="""
        def size(n, factor=FACTOR, *, extra=0):
            def inner(k):
                return k * factor
            return inner(n) + extra
        ACTS = {"relu": lambda: nn.ReLU(), "id": nn.Identity}
        make_act = lambda name: ACTS[name]()
        """.replace("def size", "FACTOR = 2\n        def size"),
    ),
    "partial": Kind(
        "self.norm = Norm(4)",
        before="from functools import partial\nNorm = partial(nn.LayerNorm, eps=1e-6)",
    ),
    "defaults": Kind(
        "self.layer = nn.Linear(n, k)", before="N = 5", signature=", n=N, *, k=N + 1"
    ),
    "comprehensions": Kind(
        """
        self.layers = nn.ModuleList(nn.Linear(n, n) for n in [n + i for i in range(n)])
        self.n = [n for n in range(n)]
        """,
        before="n = 3",
    ),
    "shadows": Kind(
        """
        _size = size(3)
        self.layer = nn.Linear(_size, 2)
        self.table = [width for width in (1, 2)]
        """,
        before="width = 7\ndef size(n): return n + width",
    ),
    "class_attribute": Kind(
        "self.layer = nn.Linear(self.width, width)", before="width = 3",
        members="width = 4\nheight = width * 2",
    ),
    "global": Kind(
        "self.layer = nn.Linear(count(), count())",
        before="made = 1\ndef count():\n    global made\n    made += 1\n    return made\n",
        after="made = 1",
    ),
    "match": Kind("""
        match WIDTHS:
            case [first, *rest] if (total := sum(rest)) > 0:
                self.layer = nn.Linear(first, total)
        """, before="WIDTHS = [2, 3, 4]"),
    "registry": Kind(
        "self.block = BLOCKS['wide'](3)",
        before="""
        BLOCKS = {}
        def register(name):
            def add(cls):
                BLOCKS[name] = cls
                return cls
            return add
        @register("wide")
        class Wide(nn.Module):
            def __init__(self, n):
                super(Wide, self).__init__()
                self.layer = nn.Linear(n, 2 * n)
        """,
    ),
    "names_of_the_solution": Kind(
        "self.layer = nn.Linear(run(2), check + cuda)\nself.k = _check(3)",
        before="cuda, check = 1, 2\ndef run(n): return n + 1\ndef _check(n): return n",
    ),
    "one_name_twice": Kind(
        "self.layer = nn.Linear(size, _size)", before="size = 2\n_size = 3",
    ),
    "script_below": Kind(
        "self.layer = nn.Linear(3, 3)",
        after="""
        def main():
            print(Model())
        model = Model()
        model.eval()
        if __name__ == "__main__":
            main()
        """,
    ),
    "function_of_inputs": Kind("self.layer = nn.Linear(get_inputs()[0].shape[1], 2)"),
}  # fmt: skip

BASE = """
class Base(nn.Module):
    def __init__(self, width, bias=True, *rest, k=2, **more):
        super().__init__()
        self.layer = nn.Linear(width, k, bias=bias)
        self.build()
    def build(self):
        self.extra = None
    def forward(self, x):
        return torch.relu(x)
"""

DERIVED = "class Model(Base):"

CLASSES = {
    "helper_class": Kind("self.blocks = nn.Sequential(Block(2), Block(3))", before="""
        class Block(nn.Module):
            expansion = 2
            def __init__(self, n):
                super(Block, self).__init__()
                self.n = n
                self.layer = nn.Linear(n, self.width)
            @property
            def width(self):
                return self.grown(self.n)
            @classmethod
            def grown(cls, n):
                return n * cls.expansion
            def forward(self, x):
                return self.layer(x)
        """),
    "called_block": Kind("""
        self.features = nn.Sequential(Block(1), nn.Flatten())
        with torch.no_grad():
            size = self.features(torch.zeros(1, 1, 6, 6)).shape[1]
        self.head = nn.Linear(size, 2)
        """, before="""
        class Block(nn.Module):
            def __init__(self, n):
                super().__init__()
                self.conv = nn.Conv2d(n, 3, 3)
            def forward(self, x):
                return self.pooled(self.conv(x))
            def pooled(self, x):
                return nn.functional.max_pool2d(x, 2)
        """),
    "methods": Kind("""
        self.layer = self._make(3)
        self.size = 4
        self.twice = getattr(self, "double")(2)
        """, members="""
        def _make(self, n: int) -> nn.Module:
            return nn.Linear(n, self.half(8))
        @staticmethod
        def half(n):
            return n // 2
        def double(self, n):
            return n * 2
        @property
        def size(self):
            return self._size
        @size.setter
        def size(self, value):
            self._size = value
            self.other = nn.Linear(value, value)
        """),
    "dataclass": Kind("self.layer = nn.Linear(config.width, config.sizes[0])", before="""
        import dataclasses
        from dataclasses import dataclass, field
        from typing import ClassVar, Optional
        @dataclass
        class Config:
            width: int
            name: Optional[str] = None
            sizes: "list[int]" = field(default_factory=lambda: [3])
            count: ClassVar[int] = 0
        """, signature=", config=None", members="", arguments="Config(4)"),
    "future_annotations": Kind("self.layer = nn.Linear(Config().width, 3)", before="""
        from __future__ import annotations
        from dataclasses import dataclass
        from typing import TYPE_CHECKING
        import torch
        from torch import nn
        if TYPE_CHECKING:
            from collections.abc import Sequence
        @dataclass
        class Config:
            width: int = 4
            sizes: Sequence[int] = ()
        """),
    "named_tuple_and_enum": Kind("self.layer = nn.Linear(Shape(2).rows, Size.BIG.value)", before="""
        from enum import Enum
        from typing import NamedTuple
        class Shape(NamedTuple):
            rows: int
            columns: int = 3
        class Size(Enum):
            SMALL = 1
            BIG = 5
        """),
    "inherited": Kind(before=BASE, model=DERIVED, arguments="4"),
    "inherited_by_keyword": Kind(before=BASE, model=DERIVED, arguments="4, False, 1, 2"),
    "inherited_and_overridden": Kind(before=BASE, model=DERIVED, arguments="4", members="""
        def build(self):
            self.extra = nn.Linear(2, 2)
        """),
    "inherited_with_own": Kind(before=BASE, model=DERIVED, members="""
        def __init__(self, n):
            super().__init__(n)
            self.own = nn.Linear(n, n)
        """, arguments="4"),
    "inherited_twice": Kind(
        before=BASE + "class Mixin:\n    kind = 'm'\nclass Middle(Mixin, Base): ...",
        model="class Model(Middle):", arguments="4",
    ),
    "library_class": Kind(model="class Model(nn.Linear):", arguments="3, 4, False", members="""
        def reset_parameters(self):
            nn.init.constant_(self.weight, 2.0)
        """),
    "library_container": Kind(
        model="class Model(nn.Sequential):", arguments="nn.Linear(3, 4), nn.ReLU()"
    ),
    "alias": Kind("self.layer = nn.Linear(3, 4)\nself.kind = isinstance(self, Net)",
        model="class Net(nn.Module):", after="Model = Net"),
    "no_constructor": Kind(),
    "private": Kind("self.__weight = nn.Parameter(torch.randn(3))\nself.__build()",
        members="__size = 5\ndef __build(self):\n    self.__layer = nn.Linear(self.__size, 2)"),
    "nested_class": Kind("self.part = Model.Part(3)\nself.size = self.Config.size", members="""
        class Config:
            size = 3
        class Part(nn.Module):
            def __init__(self, n):
                super().__init__()
                self.layer = nn.Linear(n, n)
            def forward(self, x):
                return self.layer(x)
        """),
    "abstract": Kind("self.layer = self.make()", before="""
        from abc import ABC, abstractmethod
        class Maker(ABC):
            @abstractmethod
            def make(self): ...
        """, model="class Model(nn.Module, Maker):", members="""
        def make(self):
            return nn.Linear(2, 2)
        """),
    "class_keywords": Kind("self.layer = nn.Linear(self.size, 2)", before="""
        class Sized(nn.Module):
            def __init_subclass__(cls, size=1, **kwargs):
                super().__init_subclass__(**kwargs)
                cls.size = size
        """, model="class Model(Sized, size=4):"),
    "wrapped_constructor": Kind(before="""
        import functools
        def logged(function):
            @functools.wraps(function)
            def inner(self, *args, **kwargs):
                return function(self, *args, **kwargs)
            return inner
        """, members="""
        @logged
        def __init__(self, n):
            super().__init__()
            self.layer = nn.Linear(n, n)
        """, arguments="3"),
    "hooks": Kind("self.layer = nn.Linear(7, 7)\nself.layer.register_forward_hook(double)",
        before="def double(module, args, out): return out * 2"),
}  # fmt: skip

IMPORTS = {
    "star": Kind(
        "self.layer = Linear(ceil(2.5), 2)", before="from torch.nn import *\nfrom math import *"
    ),
    "dotted": Kind(
        """
        self.separator = os.path.sep
        self.layer = F.relu and xn.Linear(len(xml.dom.__name__), 2)
        self.name = xml.sax.__name__
        """,
        before="""
        import os
        import torch.nn as xn, torch.nn.functional as F
        import xml.dom
        import xml.sax
        """,
    ),
    "tried": Kind("self.layer = nn.Linear(len(fast or ''), k)", before="""
        try:
            import no_such_module as fast
            k = 1
        except ImportError:
            fast = "slow"
            k = 2
        try:
            import math
        except ImportError:
            math = None
        """),
    "conditional": Kind("self.layer = nn.Linear(int(np.ceil(2.5)), 2)", before="""
        if torch.__version__ > "1":
            import numpy as np
        else:
            np = None
        """),
    "inner": Kind("import math\nself.layer = nn.Linear(math.ceil(2.5), 2)"),
    "einops": Kind(
        "self.layers = nn.Sequential(Rearrange('b (h w) -> b h w', h=7), nn.Linear(1, 2))",
        before="from einops.layers.torch import Rearrange",
    ),
}  # fmt: skip

ARGUMENTS = {
    "variadic": Kind(
        "self.layers = nn.ModuleList(nn.Linear(n, n) for n in sizes)", signature=", *sizes",
        arguments="2, 3",
    ),
    "by_keyword": Kind(
        "self.layer = nn.Linear(k, options.get('n', 2))", signature=", *, k=3, **options"
    ),
    "positional": Kind("self.layer = nn.Linear(n, k)", signature=", n, /, k", arguments="2, 3"),
    "rebound": Kind("n = n * 2\nself.layer = nn.Linear(n, n)", signature=", n", arguments="2"),
    "early": Kind(
        "self.layer = nn.Linear(n, n)\nif n < 3:\n    return\nself.more = 1", signature=", n",
        arguments="2",
    ),
    "emptied": Kind(
        "self.layer = nn.Linear(sizes.pop(), sizes.pop())", signature=", sizes", arguments="[3, 4]"
    ),
    "tensor": Kind(
        "self.weight = nn.Parameter(weight)", signature=", weight", arguments="torch.ones(3)"
    ),
}  # fmt: skip

KINDS: Mapping[str, Kind] = {
    **{f"reads_{name}": kind for name, kind in READS.items()},
    **{f"tensors_{name}": kind for name, kind in TENSORS.items()},
    **{f"names_{name}": kind for name, kind in NAMES.items()},
    **{f"class_{name}": kind for name, kind in CLASSES.items()},
    **{f"import_{name}": kind for name, kind in IMPORTS.items()},
    **{f"arguments_{name}": kind for name, kind in ARGUMENTS.items()},
}
