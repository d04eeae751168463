"""Columns of Parquet, Arrow, CSV and data frames: opening a table, and reading it whole or in batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.dataset
import pyarrow.ipc
import pyarrow.parquet
from numpy.typing import NDArray

from valueformer.errors import InputError
from valueformer.sources.limits import check_size

__all__ = ["Batch", "Table", "is_arrow", "is_parquet", "is_text", "numbers", "unique"]

Batch = dict[str, Any]
"""Columns by name: Arrow arrays or NumPy arrays of one length."""


def is_parquet(path: Path) -> bool:
    """Whether a file starts with Parquet's magic bytes."""
    return _starts_with(path, b"PAR1")


def is_arrow(path: Path) -> bool:
    """Whether a file starts with the magic bytes of an Arrow IPC (Feather v2) file."""
    return _starts_with(path, b"ARROW1")


def is_text(path: Path) -> bool:
    """Whether a file's beginning is non-empty UTF-8 text."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(4096)
    try:
        head.decode()
    except UnicodeDecodeError as error:
        return len(head) == 4096 and error.start >= 4093  # a character cut in two
    return bool(head.strip()) and b"\0" not in head


def _starts_with(path: Path, magic: bytes) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(magic)) == magic


class Table:
    """A table in a file or in memory: its column names at once, its columns when asked for.

    Columns of structs are seen as one column per member, ``parent.child``.
    """

    def __init__(self, data: Any, source: str = "") -> None:
        self.source = source or str(data)
        self.path = data if isinstance(data, Path) else None
        self.memory: Any = data
        if self.path is None:
            self.form = "table"
            schema = self.memory.schema
        elif is_parquet(self.path):
            self.form = "parquet"
            schema = pyarrow.parquet.read_schema(self.path)
        elif is_arrow(self.path):
            self.form = "arrow"
            with pyarrow.ipc.open_file(self.path) as reader:
                schema = reader.schema
        elif is_text(self.path):
            self.form = "csv"
            schema = self._csv_schema(self.path)
        else:
            raise InputError(self.source, "a Parquet, Arrow or CSV table", "unknown content", "convert it")
        self._schema = schema
        leaves = [(name, top) for top in schema for name in _leaves(top)]
        self.names = unique((name for name, _ in leaves), self.source)
        self._original = {name: leaf for name, (leaf, _) in zip(self.names, leaves, strict=True)}
        self._top = {name: top.name for name, (_, top) in zip(self.names, leaves, strict=True)}

    def batches(
        self, names: Sequence[str], block_size: int | None, floats: Sequence[str] = (), texts: Sequence[str] = ()
    ) -> Iterator[Batch]:
        """Yield the named columns, whole or in batches of at most ``block_size`` rows.

        In text files, ``floats`` are those known to be numbers, which may first be written without a decimal point, and
        ``texts`` those to be taken as they stand: as numbers, the ids 01 and 1 would be one.
        """
        tops = list(dict.fromkeys(self._top[name] for name in names))
        tables = self._tables(tops, block_size, [self._original[n] for n in floats], [self._original[n] for n in texts])
        for table in tables if block_size is None else _ahead(tables):
            while any(pa.types.is_struct(column.type) for column in table.columns):
                table = pa.Table.from_batches([table]).flatten() if isinstance(table, pa.RecordBatch) else table.flatten()
            found = dict(zip(table.schema.names, table.columns, strict=True))
            yield {name: found[self._original[name]] for name in names}

    def _tables(self, tops: list[str], size: int | None, floats: Sequence[str], texts: Sequence[str]) -> Iterator[Any]:
        if self.path is None:
            table = self.memory.select(tops)
            yield from [table] if size is None else table.to_batches(max_chunksize=size)
        elif self.form == "parquet":
            with pyarrow.parquet.ParquetFile(self.path) as file:
                check_size(self.source, _unpacked(file, tops, size), streams=size is None)
                if size is None:
                    yield file.read(tops)
                else:
                    for group in range(file.metadata.num_row_groups):  # else the reader keeps all pages
                        yield from file.iter_batches(size, columns=tops, row_groups=[group])
        elif self.form == "arrow":
            # A compressed batch says what it unpacks to only when unpacked; its number of rows is known before.
            rows = pyarrow.dataset.dataset(self.path, format="ipc").count_rows()
            wanted = pyarrow.ipc.IpcReadOptions(included_fields=[self._schema.get_field_index(name) for name in tops])
            with pa.memory_map(str(self.path)) as file, pyarrow.ipc.open_file(file, options=wanted) as reader:
                each = rows if size is None else -(-rows // max(reader.num_record_batches, 1))
                check_size(self.source, 8 * each * max(len(tops), 1), streams=size is None)
                parts, total = [], 0
                for i in range(reader.num_record_batches):
                    table = pa.Table.from_batches([reader.get_batch(i)]).select(tops)
                    total = table.nbytes + (total if size is None else 0)  # lists say their size only when unpacked
                    check_size(self.source, total)
                    if size is None:
                        parts.append(table)
                    else:
                        yield from table.to_batches(max_chunksize=size)
                if size is None:
                    yield pa.concat_tables(parts) if parts else reader.schema.empty_table().select(tops)
        else:
            check_size(self.source, self.path.stat().st_size if size is None else 0)
            types = {name: pa.float64() for name in floats} if size is not None else {}
            types |= {name: pa.string() for name in texts}
            convert = pyarrow.csv.ConvertOptions(strings_can_be_null=True, include_columns=tops, column_types=types)
            parse = pyarrow.csv.ParseOptions(delimiter=self._delimiter)
            if size is None:
                with self.path.open("rb") as file:  # by name, Arrow would unpack what ends in .gz
                    yield pyarrow.csv.read_csv(file, parse_options=parse, convert_options=convert)
            else:
                with (
                    self.path.open("rb") as file,
                    pyarrow.csv.open_csv(file, parse_options=parse, convert_options=convert) as reader,
                ):
                    for batch in reader:
                        yield from pa.Table.from_batches([batch]).to_batches(max_chunksize=size)

    def _csv_schema(self, path: Path) -> pa.Schema:
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            header = file.readline(2**20)
        self._delimiter = max(",;\t|", key=header.count)
        parse = pyarrow.csv.ParseOptions(delimiter=self._delimiter)
        with path.open("rb") as file, pyarrow.csv.open_csv(file, parse_options=parse) as reader:
            return reader.schema


def _ahead(items: Iterator[Any]) -> Iterator[Any]:
    """Yield items, the next one being read in another thread meanwhile: Arrow works without Python's lock."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(next, items, None)
        while (item := waiting.result()) is not None:
            waiting = pool.submit(next, items, None)
            yield item


def _unpacked(file: Any, tops: Sequence[str], size: int | None) -> int:
    """Return how many bytes a Parquet file's columns take when unpacked: all of them, or in the largest batch of ``size`` rows.

    Sizes before compression say little where values repeat; the number of values says what they become. A list column's is
    known only from the metadata of its chunks, which pyarrow may crash on where they are damaged: reading a row of them first
    finds that out as an error.
    """
    lists = [top for top in tops if pa.types.is_nested(file.schema_arrow.field(top).type)]
    paths = [file.schema.column(i).path for i in range(len(file.schema))]
    inside = [i for i, path in enumerate(paths) if path.startswith(tuple(f"{top}." for top in lists))]
    sizes = []
    for number in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(number)
        values = group.num_rows * (len(tops) - len(lists))
        if lists:
            next(file.iter_batches(1, columns=lists, row_groups=[number], use_threads=False), None)
            values += sum(group.column(i).num_values for i in inside)
        share = 1.0 if size is None else min(1.0, size / max(group.num_rows, 1))
        sizes.append(int(8 * values * share))
    return (sum if size is None else max)(sizes or [0])


def unique(names: Iterable[str], source: str) -> list[str]:
    """Return names without surrounding space; raise InputError if two are equal."""
    clean = [str(name).strip() for name in names]
    twice = next((name for name in clean if clean.count(name) > 1), None) if len(set(clean)) < len(clean) else None
    if twice is not None:
        raise InputError(f"{source}: columns", "each name once", f"{twice!r} {clean.count(twice)} times", "rename or drop one")
    return clean


def numbers(name: str, column: Any) -> NDArray[Any]:
    """Return a column as an array: ``(n,)``, or ``(n, d)`` for lists of one length; text and times stay what they are.

    Raises InputError for lists of unequal length and for what is no number, text or time.
    """
    array = _from_arrow(name, column) if isinstance(column, (pa.Array, pa.ChunkedArray)) else np.asarray(column)
    if array.dtype.kind == "O" and len(array) and isinstance(array[0], (list, tuple, np.ndarray)):
        array = _stacked(name, array)
    return array


def _stacked(name: str, array: NDArray[Any]) -> NDArray[Any]:
    try:
        return np.array([np.asarray(row, dtype=np.float64).reshape(-1) for row in array])
    except (TypeError, ValueError):
        raise InputError(
            f"column {name}", "numbers, or lists of one length", "lists of unequal length", "drop odd rows"
        ) from None


def _from_arrow(name: str, column: Any) -> NDArray[Any]:
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
        if isinstance(column, pa.ChunkedArray):  # too long for one array
            column = pa.concat_arrays(column.chunks)
    rows, widths = len(column), []
    try:
        while True:
            if isinstance(column, pa.ExtensionArray):
                column = column.storage
            elif pa.types.is_dictionary(column.type):
                column = column.dictionary_decode()
            elif pa.types.is_decimal(column.type):
                column = column.cast(pa.float64())
            elif (
                pa.types.is_list(column.type) or pa.types.is_large_list(column.type) or pa.types.is_fixed_size_list(column.type)
            ):
                if column.null_count:
                    raise InputError(f"column {name}", "a list in every row", f"{column.null_count} empty cells", "fill them")
                # the wrappers of Arrow's functions are made when it is imported, out of sight of type checkers
                lengths = pc.call_function("list_value_length", [column]).to_numpy(zero_copy_only=False)
                low, high = (int(lengths.min()), int(lengths.max())) if len(lengths) else (1, 1)
                if low != high:
                    got = f"lists of {low} to {high} numbers"
                    raise InputError(f"column {name}", "numbers, or lists of one length", got, "flatten or drop it")
                column, widths = column.flatten(), [*widths, low]
            else:
                break
        array = column.to_numpy(zero_copy_only=False)
    except pa.ArrowException as error:
        got = f"type {column.type} with {column.null_count} empty cells ({str(error).splitlines()[0]})"
        raise InputError(f"column {name}", "numbers, or lists of one length", got, "flatten or drop it") from error
    return array.reshape(rows, -1) if widths else array


def _leaves(field: pa.Field, prefix: str = "") -> list[str]:
    name = prefix + field.name
    if pa.types.is_struct(field.type):
        return [leaf for child in field.type for leaf in _leaves(child, f"{name}.")]
    return [name]
