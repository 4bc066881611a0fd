"""The safetensors files of a model folder, read by their headers only.

Owns the check that the files are whole: a truncated download, a shard left out, or a pointer file in place of
the data is found here, before anything is loaded. Imports nothing but the standard library.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

_LENGTH_BYTES = 8  # a safetensors file starts with the length of its JSON header, little-endian
_MAX_HEADER_BYTES = 100_000_000  # the limit of the format
_GIT_LFS_PREFIX = b"version https://git-lfs"
_DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as a header declares it; `dtype` in the words of the format (`BF16`, `F32`)."""

    dtype: str
    shape: tuple[int, ...]
    file: str


@dataclass(frozen=True)
class WeightFiles:
    """All weight files of a folder, each as long as its header says."""

    paths: tuple[Path, ...]
    tensors: Mapping[str, StoredTensor]


def read_weight_files(folder: Path) -> WeightFiles:
    """Read the headers of `model.safetensors`, or of every shard the index names.

    Raises:
        ValueError: no safetensors files, a shard or a tensor missing, a file shorter or longer than declared.
    """
    index_path = folder / INDEX_NAME
    if index_path.is_file():
        return _read_shards(folder, _weight_map(index_path))
    single = folder / SINGLE_NAME
    if not single.is_file():
        raise ValueError(
            f"{folder} holds no weights: neither {SINGLE_NAME} nor {INDEX_NAME} is there. "
            "Other formats (.bin, .gguf) are not read: save the model with `save_pretrained`"
        )
    return WeightFiles(paths=(single,), tensors=_read_header(single))


def _read_shards(folder: Path, weight_map: Mapping[str, str]) -> WeightFiles:
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"{folder / INDEX_NAME} names {len(names)} weight files, {len(missing)} of them missing "
            f"(first: {missing[0]}): copy or download the folder again"
        )
    headers = {name: _read_header(folder / name) for name in names}
    for tensor, name in weight_map.items():
        if tensor not in headers[name]:
            raise ValueError(f"{folder / name} lacks the tensor {tensor} that {INDEX_NAME} places there")
    tensors = {tensor: headers[name][tensor] for tensor, name in weight_map.items()}
    return WeightFiles(paths=tuple(folder / name for name in names), tensors=tensors)


def _weight_map(path: Path) -> Mapping[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a safetensors index with a weight_map ({error!r})") from error
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(_is_file_name(x) for x in weight_map.values())
    ):
        raise ValueError(f"{path} is not a safetensors index: weight_map must map tensor names to file names")
    return weight_map


def _is_file_name(value: Any) -> bool:
    return isinstance(value, str) and value not in ("", ".", "..") and Path(value).name == value


def _read_header(path: Path) -> dict[str, StoredTensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(_GIT_LFS_PREFIX))
        if start == _GIT_LFS_PREFIX:
            raise ValueError(f"{path} is a Git LFS pointer, not the weights: fetch them with `git lfs pull`")
        length = int.from_bytes(start[:_LENGTH_BYTES], "little")
        if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
            raise ValueError(
                f"{path} ({size} bytes) is truncated or not a safetensors file: its header is incomplete"
            )
        file.seek(_LENGTH_BYTES)
        header = file.read(length)
    return _parse_header(path, header, data_bytes=size - _LENGTH_BYTES - length)


def _parse_header(path: Path, header: bytes, *, data_bytes: int) -> dict[str, StoredTensor]:
    try:
        entries = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        ends = {name: _checked_end(name, entry) for name, entry in entries.items()}
        tensors = {
            name: StoredTensor(dtype=str(entry["dtype"]), shape=tuple(entry["shape"]), file=path.name)
            for name, entry in entries.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a safetensors file: broken header ({error})") from error
    declared = max(ends.values(), default=0)
    if declared != data_bytes:
        kind = "truncated" if data_bytes < declared else "longer than its header says"
        raise ValueError(
            f"{path} is {kind}: the header declares {declared} bytes of data, {data_bytes} are there. "
            "Copy or download it again"
        )
    return tensors


def _checked_end(name: str, entry: Mapping[str, Any]) -> int:
    """Where a tensor's data ends, after checking that its length fits its shape."""
    begin, end = entry["data_offsets"]
    item = _DTYPE_BYTES.get(entry["dtype"])
    if item is not None and end - begin != item * math.prod(entry["shape"]):
        raise ValueError(f"{name} has shape {entry['shape']} but {end - begin} bytes")
    return int(end)
