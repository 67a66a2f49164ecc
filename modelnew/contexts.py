"""The contexts of the templates: what a kernel, its wrapper and a whole file are in C++."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from modelnew.formula import WIDTH
from modelnew.ir import DTYPE_BYTES
from modelnew.moves import Mapped
from modelnew.products import BARE, Kind

C_TYPES: Mapping[str, str] = {
    "bool": "bool", "uint8": "uint8_t", "int8": "int8_t", "int16": "int16_t", "int32": "int32_t",
    "int64": "int64_t", "float32": "float",
}  # fmt: skip
AT_TYPES: Mapping[str, str] = {
    "bool": "at::kBool", "uint8": "at::kByte", "int8": "at::kChar", "int16": "at::kShort",
    "int32": "at::kInt", "int64": "at::kLong", "float32": "at::kFloat",
}  # fmt: skip

# The type parameter of masks that take part in arithmetic, and what reads them as floats.
MASK_TYPE, MASK_READ = "M", "number"
# The type parameter of operands of a half type beside float32 ones.
HALF_TYPE = "H"

# The parameter of a wrapper that says whether its results are to lie in channels_last.
TOLD = "channels_last"


@dataclass(frozen=True)
class Dtype:
    """A dtype that the file is generated for; `vec` elements of it are one vector access."""

    name: str
    ctype: str
    code: str
    at_type: str
    vec: int


def dtype(name: str, vec_bytes: int) -> Dtype:
    ctype, code, at_type = _DTYPES[name]
    return Dtype(name, ctype, code, at_type, vec_bytes // DTYPE_BYTES[name])


_DTYPES: Mapping[str, tuple[str, str, str]] = {
    "float32": ("float", "kFloat32", "at::kFloat"),
    "float16": ("__half", "kFloat16", "at::kHalf"),
    "bfloat16": ("__nv_bfloat16", "kBfloat16", "at::kBFloat16"),
}


@dataclass(frozen=True)
class Operand:
    """One tensor of a kernel, and the C text that moves it."""

    index: int
    value: str
    ctype: str
    output: bool
    dtype: str
    leaves: str = ""
    layout: str = ""
    staged: bool = False
    behind: int = 0
    maps: tuple[Mapped, ...] = ()
    given: bool = False  # as a pack: the product whose epilogue it is read in

    @property
    def moved(self) -> str:
        """C for how far behind its place element `v` of a pack is."""
        return " + ".join(mapped.text for mapped in self.maps)

    @property
    def moved_like(self) -> str:
        """C++ for the layout that the reference gives to the moved elements."""
        if all(mapped.move.rule == "flipped" for mapped in self.maps):
            return f"like({{{self.value}}})"
        grown = (f"{{{m.move.dim}, {m.move.grown}}}" for m in self.maps if m.move.grown)
        same = any(mapped.move.rule == "padding" for mapped in self.maps)
        layout = f", {self.value}.suggest_memory_format()" if same else ""
        return f"moved_like({self.value}, {{{', '.join(grown)}}}{layout})"

    @property
    def moved_dims(self) -> str:
        return ", ".join(str(mapped.move.dim) for mapped in self.maps)

    @property
    def is_number(self) -> bool:
        """Whether it is a mask that takes part in arithmetic; see emit._numbers."""
        return self.ctype == MASK_TYPE

    @property
    def tile_load(self) -> str:
        """The device function that reads it in a kernel that goes by tiles."""
        return "load_staged" if self.staged else "load"

    @property
    def follows(self) -> bool:
        """Whether its dtype is the common one, or one that kernels take beside it."""
        return self.ctype in ("T", HALF_TYPE)

    @property
    def is_bool(self) -> bool:
        return self.dtype == "bool"

    @property
    def at_type(self) -> str:
        return "at::kBool" if self.is_bool else "dtype"

    @property
    def pack(self) -> str:
        return f"{self.value}_pack"

    @property
    def to_unify(self) -> str:
        """C++ that names it among the inputs that are brought to one dtype."""
        fixed = "" if self.follows else f", {AT_TYPES[self.dtype]}"
        fixed = ", mask_type" if self.is_number else fixed
        fixed = ", at::ScalarType::Undefined, half_type" if self.ctype == HALF_TYPE else fixed
        return f'{{"{self.value}", {self.value}{fixed}}}'

    @property
    def value_type(self) -> str:
        return "bool" if self.is_bool and not self.is_number else "float"

    @property
    def read(self) -> str:
        element = f"{self.pack}.at[v]"
        if self.is_number:
            return f"{MASK_READ}({element})"
        if self.is_bool:
            return element
        return f"to_float({element})" if self.follows else f"static_cast<float>({element})"

    @property
    def write(self) -> str:
        if self.is_bool:
            return f"{self.pack}.at[v] = {self.value};"
        return f"store({self.pack}.at[v], {self.value});"


@dataclass(frozen=True)
class Statement:
    ctype: str
    name: str
    expr: str
    placed: tuple[Mapped, ...] = ()


@dataclass(frozen=True)
class Scalar:
    """A live number: its name in C and the Python text that reads it."""

    name: str
    text: str


_WITH_BIAS: Mapping[str, str] = {bare: added for added, bare in BARE.items()}


@dataclass(frozen=True)
class Factors:
    """The two operands of `product`, which ATen's operator `op` multiplies: of linear the second is
    [columns, k], else [k, columns], or a `vector` of k. See contractions for `triangle` and `bias`,
    products for `width`."""

    kind: Kind
    product: str
    first: str
    second: str
    op: str
    triangle: tuple[int, int] | None = None
    bias: str | None = None
    width: int = 0
    vector: bool = False

    @property
    def linear(self) -> bool:
        return self.op == "linear"

    @property
    def call(self) -> str:
        """PyTorch's own product, with the bias where there is one."""
        if self.linear:
            return "at::linear"
        return f"at::{_WITH_BIAS[self.op]}" if self.bias else "at::matmul"

    @property
    def multiplied(self) -> str:
        """C++ that calls it."""
        operands = [self.first, self.second]
        if self.bias:
            operands.insert(2 if self.linear else 0, self.bias)
        return f"{self.call}({', '.join(operands)})"

    @property
    def lines(self) -> str:
        """C++ for the rows and the columns that are multiplied, and the width."""
        across = not self.linear and not self.vector
        width = f", {self.width}" if self.width else ""
        return f"{self.first}, {self.second}{'.mT()' if across else ''}{width}"


@dataclass(frozen=True)
class Kernel:
    """The context of pointwise.cu.jinja and pointwise.cpp.jinja."""

    name: str
    formula: tuple[str, ...]
    outputs: tuple[Operand, ...]
    inputs: tuple[Operand, ...]
    scalars: tuple[Scalar, ...]
    statements: tuple[Statement, ...]
    calls: tuple[str, ...]
    layout_lines: tuple[str, ...]
    format: str = ""
    like: tuple[str, ...] = ()
    dense: bool = False
    same: tuple[tuple[str, str], ...] = ()
    packs: int = 1
    factors: Factors | None = None

    @property
    def product(self) -> Operand | None:
        """The product whose epilogue the kernel is."""
        name = self.factors.product if self.factors else None
        return next((o for o in self.inputs if o.value == name), None)

    @property
    def epilogue(self) -> Kernel:
        """The kernel where it is given the product."""
        return replace(self, inputs=tuple(replace(o, given=o == self.product) for o in self.inputs))

    @property
    def is_bare(self) -> bool:
        """Whether it does nothing to the product."""
        return self._copies and len(self.outputs) == 1

    @property
    def product_signature(self) -> str:
        parameters = f"const Problem& problem, const Operands& ops{self.parameters}"
        return _signature(f"{self.name}_product", f"{parameters}, cudaStream_t stream")

    @property
    def product_arguments(self) -> str:
        return ", ".join(["factors.problem", "pieces[0]", *self._further, "stream"])

    @property
    def epilogue_arguments(self) -> str:
        return ", ".join(["marked", *self._further])

    @property
    def others(self) -> str:
        """What is read beside the product and may have a say in its dtype."""
        given = (o for o in self.inputs if o.follows or o.is_number)
        return ", ".join(o.value for o in given if o != self.product)

    @property
    def operands(self) -> tuple[Operand, ...]:
        return self.outputs + self.inputs

    @property
    def moved(self) -> tuple[Operand, ...]:
        return tuple(o for o in self.inputs if o.maps)

    @property
    def mapped(self) -> tuple[Mapped, ...]:
        """The dimensions along which elements are moved or steps depend on where they are."""
        moved = (mapped for o in self.moved for mapped in o.maps)
        return (*moved, *(mapped for s in self.statements for mapped in s.placed))

    @property
    def coordinates(self) -> tuple[Mapped, ...]:
        """Those whose coordinates are an operand, in its order; one may serve several."""
        return tuple({mapped.index: mapped for mapped in self.mapped}.values())

    @property
    def by_place(self) -> bool:
        """Whether the kernel depends on where an element is."""
        return bool(self.mapped)

    @property
    def maps(self) -> str:
        """C++ that makes all maps."""
        moved = (mapped.made(o.value) for o in self.moved for mapped in o.maps)
        steps = (mapped.inside for s in self.statements for mapped in s.placed)
        return ", ".join(filter(None, [*moved, *steps]))

    @property
    def maps_type(self) -> str:
        return f"Maps<{sum(bool(mapped.move.rule) for mapped in self.mapped)}>"

    @property
    def launch_inputs(self) -> str:
        names = (mapped.name for mapped in self.coordinates)
        return ", ".join([*(o.value for o in self.inputs), *names])

    @property
    def count(self) -> int:
        return len(self.operands) + len(self.coordinates)

    @property
    def parameters(self) -> str:
        """What the kernel is given beside its operands."""
        maps = f", const {self.maps_type} maps" if self.maps else ""
        return maps + self.float_parameters

    @property
    def float_parameters(self) -> str:
        return "".join(f", float {s.name}" for s in self.scalars)

    @property
    def launch_signature(self) -> str:
        return _signature(self.name, f"const Operands& ops{self.parameters}, cudaStream_t stream")

    @property
    def run_arguments(self) -> str:
        return ", ".join([str(self.count), "stream", *self._further])

    @property
    def _further(self) -> tuple[str, ...]:
        return (*(["maps"] if self.maps else []), *(s.name for s in self.scalars))

    @property
    def float_arguments(self) -> str:
        return "".join(f", {s.name}" for s in self.scalars)

    @property
    def tiled(self) -> bool:
        """Whether it also has a kernel that goes by tiles."""
        return any(o.staged for o in self.inputs)

    @property
    def run_tiled_arguments(self) -> str:
        staged = "".join("01"[o.staged] for o in reversed(self.operands))
        roles = f"Roles{{{len(self.outputs)}, {self.count}, 0b{staged}}}"
        return ", ".join(["ops", roles, "stream", *(s.name for s in self.scalars)])

    @property
    def more_like(self) -> tuple[str, ...]:
        """Tensors that the kernel does not read, for the layout of its results alone."""
        read = {o.value for o in self.inputs}
        return tuple(name for name in self.like if name not in read)

    @property
    def is_copy(self) -> bool:
        """Whether it does nothing but change the layout of its one operand."""
        return self._copies and bool(self.format)

    @property
    def _copies(self) -> bool:
        one = len(self.inputs) == len(self.statements) == 1
        return one and self.statements[0].expr == self.inputs[0].value

    def allocate(self, output: Operand) -> str:
        """C++ that makes a result."""
        made_for = f"{output.layout}, {output.at_type}"
        device = f"{self.first_input}.device()"
        if self.format:
            return f"empty_in(format, {made_for}, {device})"
        return f"empty_as({made_for}, {device})"

    @property
    def return_type(self) -> str:
        if len(self.outputs) == 1:
            return "at::Tensor"
        return f"std::tuple<{', '.join(['at::Tensor'] * len(self.outputs))}>"

    @property
    def forward_signature(self) -> str:
        made_of = (self.factors.first, self.factors.second) if self.factors else ()
        read = (o.value for o in self.inputs if o != self.product)
        tensors = [f"at::Tensor {name}" for name in dict.fromkeys((*made_of, *read))]
        tensors += [f"const at::Tensor& {name}" for name in self.more_like]
        tensors += [f"bool {TOLD}"] if self.format.startswith(TOLD) else []
        parameters = ", ".join([*tensors, *(f"double {s.name}" for s in self.scalars)])
        return f"{self.return_type} {self.name}_forward({parameters})"

    @property
    def numbers(self) -> tuple[Operand, ...]:
        return tuple(o for o in self.inputs if o.is_number)

    @property
    def halves(self) -> tuple[Operand, ...]:
        return tuple(o for o in self.inputs if o.ctype == HALF_TYPE)

    @property
    def half_type(self) -> str:
        return at_half_type(self.halves)

    @property
    def type_parameters(self) -> str:
        more = (MASK_TYPE if self.numbers else "", HALF_TYPE if self.halves else "")
        return "".join(f", typename {name}" for name in more if name)

    def types(self, ctype: str) -> tuple[tuple[str, str], ...]:
        """The type arguments for the storage type `ctype`, each with its condition in C."""
        found = [("", ctype)]
        if self.numbers:
            is_bool = f"ops.bytes[{self.numbers[0].index}] == 1"
            found = [(is_bool, f"{ctype}, bool"), ("", f"{ctype}, {ctype}")]
        if self.halves:
            half = _DTYPES[self.halves[0].dtype][0]
            is_half = f"ops.bytes[{self.halves[0].index}] == 2"
            mixed = [(" && ".join(filter(None, [is_half, given])), f"{types}, {half}")
                     for given, types in found]  # fmt: skip
            same = [(given, f"{types}, {ctype}") for given, types in found]
            found = [*mixed, *same] if ctype == "float" else same
        return tuple(found)

    def products(self, dtypes: Sequence[Dtype]) -> tuple[tuple[str, str, str], ...]:
        """What launches the product in each dtype of its kind, with its condition in C and the type
        arguments of the epilogue; operands and result have one dtype, to which all else goes."""
        assert self.factors is not None
        kind, found = self.factors.kind, []
        if not kind.is_generic:
            (name,) = kind.dtypes
            run = f"{kind.run}<{self.factors.width}>" if self.factors.width else kind.run
            return tuple((given, run, types) for given, types in self.types(_DTYPES[name][0]))
        for type_ in dtypes:
            if type_.name in kind.dtypes:
                run = f"{kind.run}<{type_.ctype}>"
                for given, types in self.types(type_.ctype):
                    conditions = filter(None, [f"ops.dtype == {type_.code}", given])
                    found.append((" && ".join(conditions), run, types))
        return tuple(found)

    @property
    def exact(self) -> bool:
        """Whether no input is floating: the dtype that it runs in then plays no part."""
        return not any(o.follows or o.is_number for o in self.inputs)

    @property
    def launch_arguments(self) -> str:
        return ", ".join(["ops", *self._further, "stream"])

    @property
    def promoted(self) -> tuple[Operand, ...]:
        """The results whose dtype may be another than that which all inputs promote to."""
        return tuple(o for o in self.outputs if not o.is_bool) if len(self.outputs) > 1 else ()

    @property
    def returned(self) -> str:
        """The results, each in the dtype that its own operands promote to."""
        own = self.promoted
        results = [f"{o.value}.to({o.value}_dtype)" if o in own else o.value for o in self.outputs]
        return results[0] if len(results) == 1 else f"{{{', '.join(results)}}}"

    @property
    def channel_inputs(self) -> tuple[Operand, ...]:
        return tuple(o for o in self.inputs if o.behind)

    @property
    def first_input(self) -> str:
        return next((o.value for o in self.inputs if not o.behind), self.inputs[0].value)

    @property
    def input_list(self) -> str:
        return ", ".join(o.value for o in self.inputs)

    @property
    def output_list(self) -> str:
        return ", ".join(o.value for o in self.outputs)


def _signature(name: str, parameters: str) -> str:
    """The launcher's signature, on two lines where one is too short."""
    start, items = f"cudaError_t {name}_launch(", f"{parameters})"
    return start + items if len(start + items) <= WIDTH - 2 else f"{start}\n    {items}"


@dataclass(frozen=True)
class Join:
    """The context of joined.cpp.jinja: kernels that write next to each other along `dim`.

    `places` are the results of the parts in the order in which they lie.
    """

    name: str
    value: str
    dim: int
    parts: tuple[Kernel, ...]
    places: tuple[Operand, ...]

    @property
    def inputs(self) -> tuple[Operand, ...]:
        return tuple({o.value: o for part in self.parts for o in part.inputs}.values())

    @property
    def scalars(self) -> tuple[Scalar, ...]:
        return tuple({s.name: s for part in self.parts for s in part.scalars}.values())

    @property
    def forward_signature(self) -> str:
        tensors = [f"at::Tensor {o.value}" for o in self.inputs]
        parameters = ", ".join([*tensors, *(f"double {s.name}" for s in self.scalars)])
        return f"at::Tensor {self.name}_forward({parameters})"

    @property
    def numbers(self) -> tuple[Operand, ...]:
        return tuple(o for o in self.inputs if o.is_number)

    @property
    def halves(self) -> tuple[Operand, ...]:
        return tuple(o for o in self.inputs if o.ctype == HALF_TYPE)

    @property
    def half_type(self) -> str:
        return at_half_type(self.halves)

    @property
    def first_input(self) -> str:
        return self.parts[0].first_input

    @property
    def merged(self) -> bool:
        """Whether one launch writes all parts: kernels of a kind, whose parameters fit."""
        operands = max(part.count for part in self.parts)
        size = 120 + 76 * operands  # of Operands, about
        alike = not any(k.tiled or k.numbers or k.halves for k in self.parts)
        return alike and len(self.parts) * (size + 16) <= 4000

    @property
    def float_parameters(self) -> str:
        return "".join(f", float {s.name}" for s in self.scalars)

    @property
    def float_arguments(self) -> str:
        return "".join(f", {s.name}" for s in self.scalars)

    @property
    def launch_signature(self) -> str:
        parts = f"const Operands (&ops)[{len(self.parts)}]"
        return _signature(self.name, f"{parts}{self.float_parameters}, cudaStream_t stream")

    @property
    def roles(self) -> str:
        pairs = (f"{{{len(part.outputs)}, {part.count}}}" for part in self.parts)
        return f"{{{', '.join(pairs)}}}"

    @property
    def run_arguments(self) -> str:
        return ", ".join(["ops", "roles", "stream", *(s.name for s in self.scalars)])

    def outputs_of(self, part: Kernel) -> str:
        """C++ for the places that the results of one part have."""
        values = [place.value for place in self.places]
        return ", ".join(f"places[{values.index(o.value)}]" for o in part.outputs)


@dataclass(frozen=True)
class Module:
    """All that a file compiles: its kernels, the names of those that forward calls by themselves,
    and the concatenations that kernels write."""

    kernels: tuple[Kernel, ...]
    called: frozenset[str]
    joins: tuple[Join, ...]

    @property
    def launched(self) -> tuple[Kernel, ...]:
        """The kernels that have a launch of their own."""
        alone = {part.name for j in self.joins if not j.merged for part in j.parts} | self.called
        return tuple(kernel for kernel in self.kernels if kernel.name in alone)

    @property
    def wrapped(self) -> tuple[Kernel, ...]:
        """The kernels that forward calls by themselves."""
        return tuple(kernel for kernel in self.kernels if kernel.name in self.called)

    @property
    def functions(self) -> tuple[str, ...]:
        """The names of the functions that the file has to call."""
        names = (*(k.name for k in self.wrapped), *(j.name for j in self.joins))
        return tuple(f"{name}_forward" for name in names)

    @property
    def products(self) -> tuple[Kernel, ...]:
        """The kernels that are epilogues of products."""
        return tuple(k for k in self.kernels if k.product)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of its products."""
        return tuple(dict.fromkeys(k.factors.kind for k in self.kernels if k.factors))

    @property
    def by_name(self) -> Mapping[str, Kernel]:
        return {kernel.name: kernel for kernel in self.kernels}


def at_half_type(halves: Sequence[Operand]) -> str:
    """C++ for the dtype that all of `halves` have, if it is that which they were traced with."""
    names = ", ".join(o.value for o in halves)
    return f"one_type({{{names}}}, {_DTYPES[halves[0].dtype][2]})"
