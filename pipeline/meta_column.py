"""Builds the column of serialized MessageMeta from a record batch's KEYED_META_COLUMNS, without a loop over rows.

Writes protobuf's wire format itself: the tag, length and bytes of each field, joined by Arrow. A reader gets the same
MessageMeta as from the generated class.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tickwheel.client.messages import KEY_LENGTH_MAX, META_BYTES_MAX, TAG_RULE, TAGS_MAX, is_tag
from tickwheel.client.unique_keys import KEY_RULE, UNIQUE_KEY_BYTES_MAX
from tickwheel.proto.common_pb2 import MessageMeta

META_COLUMNS = ("key", "tags", "properties", "message_group")
"""Fields of MessageMeta; `properties` are its headers."""
KEYED_META_COLUMNS = (*META_COLUMNS, "unique_key")
"""All fields. Only the sink takes a unique key: finished files and the cold tier hold none."""
NO_TEXT = "not UTF-8"
_LENGTH_DELIMITED = 2

Mask = NDArray[np.bool_]


def _tag(number: int) -> bytes:
    return bytes([number << 3 | _LENGTH_DELIMITED])


_FIELDS = MessageMeta.DESCRIPTOR.fields_by_name
_KEY, _TAGS, _HEADERS, _GROUP, _UNIQUE_KEY = (
    _tag(_FIELDS[name].number) for name in ("key", "tags", "headers", "message_group", "unique_key")
)
_ENTRY_KEY, _ENTRY_VALUE = _tag(1), _tag(2)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _field(tag: bytes, values: pa.Array) -> pa.Array:
    """Each value encoded as a field. `values` has no nulls."""
    lengths, which = np.unique(pc.binary_length(values).to_numpy(zero_copy_only=False), return_inverse=True)
    heads = pa.array([tag + _varint(length) for length in lengths.tolist()], pa.binary())
    return pc.binary_join_element_wise(heads.take(pa.array(which)), values, b"")


def _filled(values: pa.Array) -> pa.Array:
    return pc.fill_null(values.cast(pa.binary()), b"")


def _joined(values: pa.Array, lengths: NDArray[np.int64]) -> pa.Array:
    """Consecutive values joined into one each; `lengths` are the numbers of values."""
    offsets = np.append(0, np.cumsum(lengths)).astype(np.int32)
    return pc.binary_join(pa.ListArray.from_arrays(pa.array(offsets), values), b"")


def _rows_with(bad: pa.Array, lengths: NDArray[np.int64]) -> Mask:
    """Marks the rows of which at least one value is bad."""
    owners = np.repeat(np.arange(len(lengths)), lengths)
    found = np.zeros(len(lengths), np.bool_)
    found[owners[bad.to_numpy(zero_copy_only=False)]] = True
    return found


def _lengths(column: pa.Array) -> NDArray[np.int64]:
    lengths: NDArray[np.int64] = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    return lengths.astype(np.int64)


def not_utf8(values: pa.Array) -> Mask:
    """Marks the texts that are none: Spark, Parquet and Arrow pass on any bytes as a string."""
    try:
        values.validate(full=True)
    except pa.ArrowInvalid:
        return np.array([not _is_utf8(value) for value in values.cast(pa.binary()).to_pylist()], np.bool_)
    return np.zeros(len(values), np.bool_)


def _is_utf8(value: bytes | None) -> bool:
    try:
        (value or b"").decode()
    except UnicodeDecodeError:
        return False
    return True


def _too_long(keys: pa.Array) -> Mask:
    """Marks the keys of more than KEY_LENGTH_MAX characters."""
    keys = keys.cast(pa.binary())
    found = np.array(pc.fill_null(pc.binary_length(keys), 0)) > KEY_LENGTH_MAX  # bytes
    for row in np.flatnonzero(found).tolist():
        found[row] = len(keys[row].as_py().decode(errors="replace")) > KEY_LENGTH_MAX
    return found


def _not_tags(flat: pa.Array) -> pa.Array:
    """Marks the texts that are no tags by TAG_RULE; nulls are not among them."""
    coded = flat.dictionary_encode()
    distinct = coded.dictionary.cast(pa.binary()).to_pylist()
    wrong = pa.array([not (_is_utf8(tag) and is_tag(tag.decode())) for tag in distinct], pa.bool_())
    return pc.fill_null(wrong.take(coded.indices), False)


def meta_column(
    columns: Mapping[str, pa.Array], count: int, *, checked: bool = True
) -> tuple[pa.Array | None, list[tuple[Mask, str]]]:
    """(meta of each row, None if no row has one; masks of rows whose meta is invalid, with the reason).

    `checked` False: the rows are messages already, of a cold tier that an earlier version may have written. Their texts
    are taken as they are.
    """
    parts: list[pa.Array] = []
    wrong: list[tuple[Mask, str]] = []
    for tag, name in ((_KEY, "key"), (_GROUP, "message_group"), (_UNIQUE_KEY, "unique_key")):
        text = columns.get(name)
        if text is not None and text.null_count < count:
            if checked:
                wrong.append((not_utf8(text), f"{name}: {NO_TEXT}"))
            if checked and name == "key":
                wrong.append((_too_long(text), f"key: more than {KEY_LENGTH_MAX} characters"))
            text = _filled(text)
            parts.append(pc.if_else(pc.equal(pc.binary_length(text), 0), b"", _field(tag, text)))
    tags = columns.get("tags")
    if tags is not None and tags.null_count < count:
        lengths, flat = _lengths(tags), pc.list_flatten(tags)
        if flat.null_count:
            wrong.append((_rows_with(pc.is_null(flat), lengths), "tags: one is null"))
        if checked:
            wrong.append((lengths > TAGS_MAX, f"tags: more than {TAGS_MAX}"))
            wrong.append((_rows_with(_not_tags(flat), lengths), f"tags: one is not {TAG_RULE}"))
        parts.append(_joined(_field(_TAGS, _filled(flat)), lengths))
    properties = columns.get("properties")
    if properties is not None and properties.null_count < count:
        properties = properties.cast(pa.list_(pa.struct([("key", pa.string()), ("value", pa.string())])))
        lengths, entries = _lengths(properties), pc.list_flatten(properties)
        names, values = entries.field("key"), entries.field("value")
        if values.null_count:
            wrong.append((_rows_with(pc.is_null(values), lengths), "properties: a value is null"))
        if checked:
            odd = pa.array(not_utf8(names) | not_utf8(values))
            wrong.append((_rows_with(odd, lengths), f"properties: a name or value is {NO_TEXT}"))
        whole = pc.binary_join_element_wise(
            _field(_ENTRY_KEY, _filled(names)), _field(_ENTRY_VALUE, _filled(values)), b""
        )
        parts.append(_joined(_field(_HEADERS, whole), lengths))
    keys = columns.get("unique_key")
    if keys is not None:
        sizes = pc.fill_null(pc.binary_length(keys.cast(pa.binary())), 1).to_numpy(zero_copy_only=False)
        bad = (sizes == 0) | (sizes > UNIQUE_KEY_BYTES_MAX)
        if bad.any():
            wrong.append((bad, f"unique_key: not {KEY_RULE}"))
    if not parts:
        return None, wrong
    meta = parts[0] if len(parts) == 1 else pc.binary_join_element_wise(*parts, b"")
    large = pc.greater(pc.binary_length(meta), META_BYTES_MAX).to_numpy(zero_copy_only=False)
    if large.any():
        wrong.append((large, f"{', '.join(META_COLUMNS)}: more than {META_BYTES_MAX} bytes together"))
    return meta, wrong
