"""Tensors under GGUF's names put together from stored ones: whole, rearranged, cut or stacked.

A `Source` is a stored tensor in one of the block formats of `quants`: `array` gives its rows, for a float
format as numbers (bfloat16 as uint16), for a block format as uint8 `[..., rows, row_bytes]`. A `Step`
changes a source on its way; `Assembly` is one tensor of the result. Steps that move rows keep every bit,
whatever the format; only `Transpose` and `PlusOne` need plain numbers.

This module does not know names, families or files.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ropewalk.checkpoint.quants import FORMATS, BlockFormat
from ropewalk.errors import CheckpointError, UnsupportedModelError

Array = NDArray[Any]
Shape = tuple[int, ...]

F32 = FORMATS["F32"]
PLAIN = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""Formats whose elements are numbers of their own, and the NumPy codes that hold their bits."""


@dataclass(frozen=True)
class Source:
    """A stored tensor: its shape in elements, its format, and a function that fetches it."""

    name: str
    shape: Shape
    format: BlockFormat
    fetch: Callable[[], Array] = field(repr=False, compare=False)

    @property
    def is_plain(self) -> bool:
        """Whether its elements are numbers of their own, in no blocks."""
        return self.format.name in PLAIN


class Step(Protocol):
    """One change of a source."""

    def shape(self, source: Source, shape: Shape) -> Shape:
        """Shape of the result; raises CheckpointError if the source has a shape that cannot be."""

    def apply(self, array: Array, matrix: bool) -> Array:
        """The result; of a `matrix` the last axis is left alone."""


@dataclass(frozen=True)
class Take:
    """Rows, or elements of a bias, in the order of `rows`; the source must have `n_rows`."""

    rows: Array
    n_rows: int

    def shape(self, source: Source, shape: Shape) -> Shape:
        axis = _row_axis(shape)
        if shape[axis] != self.n_rows:
            raise CheckpointError(
                f"tensor {source.name} has shape {list(shape)}; its configuration asks for {self.n_rows} rows"
            )
        return (*shape[:axis], len(self.rows), *shape[axis + 1 :])

    def apply(self, array: Array, matrix: bool) -> Array:
        taken: Array = np.take(array, self.rows, axis=-2 if matrix else -1)
        return taken


@dataclass(frozen=True)
class TakeLast:
    """Elements along the last axis: the biases of all experts, one row each."""

    columns: Array
    n_columns: int

    def shape(self, source: Source, shape: Shape) -> Shape:
        if shape[-1] != self.n_columns or not source.is_plain:
            raise CheckpointError(
                f"tensor {source.name} has shape {list(shape)} and type {source.format.name}; "
                f"its configuration asks for {self.n_columns} plain columns"
            )
        return (*shape[:-1], len(self.columns))

    def apply(self, array: Array, matrix: bool) -> Array:
        taken: Array = array[..., self.columns]
        return taken


@dataclass(frozen=True)
class HeadPart:
    """Of a matrix with the rows of all heads, rows `first` to `last` of each: [heads, rows, columns].

    `turned` exchanges the last two axes.
    """

    n_heads: int
    head_rows: int
    first: int
    last: int
    turned: bool

    def shape(self, source: Source, shape: Shape) -> Shape:
        if (
            len(shape) != 2
            or shape[0] != self.n_heads * self.head_rows
            or (self.turned and not source.is_plain)
        ):
            raise CheckpointError(
                f"tensor {source.name} has shape {list(shape)} and type {source.format.name}; its configuration asks "
                f"for {self.n_heads * self.head_rows} rows{' of plain numbers' if self.turned else ''}"
            )
        part = (self.last - self.first, shape[1])
        return (self.n_heads, *(part[::-1] if self.turned else part))

    def apply(self, array: Array, matrix: bool) -> Array:
        part: Array = array.reshape(self.n_heads, self.head_rows, -1)[:, self.first : self.last]
        return np.ascontiguousarray(part.swapaxes(1, 2) if self.turned else part)


@dataclass(frozen=True)
class Transpose:
    """The last two axes exchanged: some families store matrices as [inputs, outputs]."""

    def shape(self, source: Source, shape: Shape) -> Shape:
        if not source.is_plain:
            raise UnsupportedModelError(
                f"tensor {source.name} is quantized and would have to be transposed; that is not supported"
            )
        return shape if len(shape) < 2 else (*shape[:-2], shape[-1], shape[-2])

    def apply(self, array: Array, matrix: bool) -> Array:
        return np.ascontiguousarray(array.swapaxes(-1, -2)) if matrix else array


@dataclass(frozen=True)
class PlusOne:
    """1 added in float32: Gemma's norms multiply by 1 + weight, GGUF stores the factor itself."""

    def shape(self, source: Source, shape: Shape) -> Shape:
        if not source.is_plain:
            raise UnsupportedModelError(
                f"tensor {source.name} is a norm and quantized; that is not supported"
            )
        return shape

    def apply(self, array: Array, matrix: bool) -> Array:
        return array + np.float32(1)


@dataclass(frozen=True)
class Flat:
    """A leading axis of one row left out."""

    def shape(self, source: Source, shape: Shape) -> Shape:
        return shape[1:] if len(shape) > 1 and shape[0] == 1 else shape

    def apply(self, array: Array, matrix: bool) -> Array:
        return array[0] if array.ndim > 1 and len(array) == 1 else array


def _row_axis(shape: Shape) -> int:
    return max(len(shape) - 2, 0)


@dataclass(frozen=True)
class Assembly:
    """One tensor of the result: sources stacked along a new first axis (or a single one), each after `steps`."""

    name: str
    sources: Sequence[Source]
    steps: Sequence[Step] = ()
    stacked: bool = False
    exact: bool = False
    """Whether the stored type is kept even for a vector; otherwise vectors become float32, as GGUF has them."""

    @property
    def shape(self) -> Shape:
        """Shape of the result, in elements; raises CheckpointError if the sources cannot be put together so."""
        shapes = {self._shape_of(s) for s in self.sources}
        if len(shapes) > 1:
            raise CheckpointError(
                f"tensors {self.sources[0].name} and so on have different shapes: {sorted(map(list, shapes))}"
            )
        shape = shapes.pop()
        return (len(self.sources), *shape) if self.stacked else shape

    def _shape_of(self, source: Source) -> Shape:
        shape = source.shape
        for step in self.steps:
            shape = step.shape(source, shape)
        return shape

    @property
    def format(self) -> BlockFormat:
        """Format of the result; raises UnsupportedModelError for sources of different block formats."""
        formats = {s.format.name for s in self.sources}
        first = self.sources[0]
        if not formats <= PLAIN.keys():
            if len(formats) > 1:
                raise UnsupportedModelError(f"tensors {first.name} and so on have different types: {formats}")
            return first.format
        widened = len(formats) > 1 or (len(self.shape) == 1 and not self.exact)
        return F32 if widened or any(isinstance(step, PlusOne) for step in self.steps) else first.format

    def raw(self) -> NDArray[np.uint8]:
        """The rows in `format`: uint8 `[*shape[:-1], row_bytes]`."""
        shape, fmt = self.shape, self.format
        row_bytes = fmt.row_bytes(shape[-1])
        if not self.stacked:
            return self._part(self.sources[0], fmt).reshape(*shape[:-1], row_bytes)
        out = np.empty((*shape[:-1], row_bytes), np.uint8)
        for part, source in zip(out, self.sources, strict=True):
            part[:] = self._part(source, fmt).reshape(part.shape)
        return out

    def _part(self, source: Source, fmt: BlockFormat) -> NDArray[np.uint8]:
        array, matrix = source.fetch(), len(source.shape) > 1
        if source.is_plain and fmt is not source.format:
            array = to_float32(array, source.format)
        for step in self.steps:
            array = step.apply(array, matrix)
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def to_float32(array: Array, fmt: BlockFormat) -> NDArray[np.float32]:
    """Numbers of a plain format as float32, exactly."""
    if fmt.name == "BF16":
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array.astype(np.float32)


def rope_rows(n_heads: int, head_dim: int, width: int | None = None) -> Array:
    """Row order that turns a rotary layout of halves into one of neighbours, for each head.

    Row 2i of a head becomes its old row i, row 2i + 1 its old row i + width / 2; rows from `width` on stay. The
    products q·k do not change, since q and k move together.
    """
    width = head_dim if width is None else width
    head = np.arange(head_dim)
    head[:width] = np.arange(width).reshape(2, -1).T.reshape(-1)
    rows: Array = (np.arange(n_heads)[:, None] * head_dim + head).reshape(-1)
    return rows
