"""A model folder on disk: tensors by name from safetensors files, and a fingerprint of what they hold."""

import json
import struct
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace.kernels.dense.fp8 import Matrix
from headrace.kernels.moe.experts import Experts
from headrace.models.config import ModelError, UnsupportedModel
from headrace.models.raw_config import read_json_object, shown

SAMPLE_BYTES = 1024  # of each tensor's start, middle and end, for the fingerprint
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of stored tensors. Others come from quantised checkpoints, whose values mean nothing without their scales."""


class WeightSource(Protocol):
    """The tensors of a model by name: `WeightFiles`, or `RandomWeights`."""

    @property
    def remaining(self) -> Set[str]: ...

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor: ...

    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix: ...

    def experts(self, name: str, shape: tuple[int, int, int]) -> Experts: ...

    def skip(self, *prefixes: str) -> None: ...

    def assert_all_taken(self) -> None: ...


class _Stored(NamedTuple):
    """A tensor's file, and that file opened."""

    file: Path
    handle: Any


class WeightFiles:
    """The tensors of a model folder: each is taken once, read to the device and cast there.

    Tensors left over are an error (`assert_all_taken`).
    """

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device):
        self.path = path
        self._dtype = dtype
        self._remaining: dict[str, _Stored] = {}
        for file in safetensors_files(path):
            with _reading(file):
                handle = safe_open(file, framework="pt", device=str(device))
                self._remaining.update(dict.fromkeys(handle.keys(), _Stored(file, handle)))
        self._files = {name: stored.file for name, stored in self._remaining.items()}

    @property
    def remaining(self) -> set[str]:
        """Names that have not been taken yet."""
        return set(self._remaining)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """The named tensor in the model's dtype (or `dtype`) on the model's device; its shape is checked."""
        return self._cast(self._read(name, shape), name, dtype)

    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        """The named weights of a `LinearWeight`: as `take`, but what is stored in FP8 stays in FP8."""
        return self.take(name, shape)

    def experts(self, name: str, shape: tuple[int, int, int]) -> Experts:
        """The named matrices of all experts, [E, rows, columns], as `take`."""
        return self.take(name, shape)

    def _read(self, name: str, shape: tuple[int, ...] | None) -> Tensor:
        """The named tensor as it is stored; `shape` None: whatever it is."""
        if name not in self._remaining:
            raise ModelError(f"{self.path} has no tensor {name!r} (untaken: {_some(self._remaining)})")
        file, handle = self._remaining.pop(name)
        with _reading(file):
            stored_shape = handle.get_slice(name).get_shape()
            if shape is not None and tuple(stored_shape) != shape:
                raise ModelError(f"{file}: {name} is {stored_shape}, the config says {list(shape)}")
            tensor: Tensor = handle.get_tensor(name)
        return tensor

    def _cast(self, tensor: Tensor, name: str, dtype: torch.dtype | None) -> Tensor:
        if tensor.dtype not in DTYPES:
            raise UnsupportedModel(
                f"{self._files[name]}: {name} is {_name(tensor.dtype)}: only {', '.join(map(_name, DTYPES))} are "
                "supported; give a checkpoint that is not quantised"
            )
        return tensor.to(dtype or self._dtype)

    def skip(self, *prefixes: str) -> None:
        """Drops tensors of parts that the engine does not run."""
        self._remaining = {n: stored for n, stored in self._remaining.items() if not n.startswith(prefixes)}

    def assert_all_taken(self) -> None:
        if self._remaining:
            raise ModelError(f"{self.path} holds unexpected tensors: {_some(self._remaining)}")


def safetensors_files(path: Path) -> list[Path]:
    """model.safetensors, or the files that model.safetensors.index.json names."""
    index = path / "model.safetensors.index.json"
    files = [path / "model.safetensors"]
    if index.exists():
        weight_map = read_json_object(index).get("weight_map")
        if not (isinstance(weight_map, dict) and all(isinstance(name, str) for name in weight_map.values())):
            raise ModelError(f"{index}: weight_map {shown(weight_map)}: must name the file of each tensor")
        files = [path / name for name in sorted(set(weight_map.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelError(f"{path}: no weights: {_some(missing)} missing; give a complete checkpoint's folder")
    return files


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Names the file in errors of reading it."""
    try:
        yield
    except SafetensorError as error:
        raise ModelError(f"{file}: {error}; is it truncated, or a Git LFS pointer? Copy the file again") from error
    except OSError as error:
        raise ModelError(f"{file}: {error.strerror or error}; give weights that this user can read") from error


def fingerprint(path: Path, config: str) -> str:
    """A digest of the config, the tensor headers and a sample of every tensor: reads kilobytes of gigabytes.

    Two finetunes of one architecture have different fingerprints; two shardings of the same weights may, too.
    """
    digest = blake3(config.encode())
    for file in safetensors_files(path):
        with file.open("rb") as handle:
            (header_bytes,) = struct.unpack("<Q", handle.read(8))
            header = handle.read(header_bytes)
            digest.update(header)
            for name, entry in sorted(json.loads(header).items()):
                if name == "__metadata__":
                    continue
                begin, end = entry["data_offsets"]
                for offset in (begin, (begin + end) // 2, max(begin, end - SAMPLE_BYTES)):
                    handle.seek(8 + header_bytes + offset)
                    digest.update(handle.read(min(SAMPLE_BYTES, end - offset)))
    return digest.hexdigest()


def _some(names: Iterable[str], limit: int = 8) -> str:
    listed = sorted(names)
    rest = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + rest


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
