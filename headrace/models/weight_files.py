"""A model folder on disk: tensors by name from safetensors files, and a fingerprint of what they hold."""

import json
import struct
from collections.abc import Set
from pathlib import Path
from typing import Any, Protocol

import torch
from blake3 import blake3
from safetensors import safe_open
from torch import Tensor

from headrace.models.config import ModelError

SAMPLE_BYTES = 1024  # of each tensor's start, middle and end, for the fingerprint


class WeightSource(Protocol):
    """The tensors of a model by name: `WeightFiles`, or `RandomWeights`."""

    @property
    def remaining(self) -> Set[str]: ...

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor: ...

    def skip(self, *prefixes: str) -> None: ...

    def assert_all_taken(self) -> None: ...


class WeightFiles:
    """The tensors of a model folder: each is taken once, read to the device and cast there.

    Tensors left over are an error (`assert_all_taken`).
    """

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device):
        self.path = path
        self._dtype = dtype
        self._remaining: dict[str, Any] = {}  # name -> the open file that has it
        for file in safetensors_files(path):
            handle = safe_open(file, framework="pt", device=str(device))
            self._remaining.update(dict.fromkeys(handle.keys(), handle))

    @property
    def remaining(self) -> set[str]:
        """Names that have not been taken yet."""
        return set(self._remaining)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """The named tensor in the model's dtype (or `dtype`) on the model's device; its shape is checked."""
        if name not in self._remaining:
            raise ModelError(f"{self.path} has no tensor {name!r} (untaken: {_some(self._remaining)})")
        tensor = self._remaining.pop(name).get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{self.path}: {name} is {list(tensor.shape)}, the config says {list(shape)}")
        return tensor.to(dtype or self._dtype)

    def skip(self, *prefixes: str) -> None:
        """Drops tensors of parts that the engine does not run."""
        self._remaining = {n: handle for n, handle in self._remaining.items() if not n.startswith(prefixes)}

    def assert_all_taken(self) -> None:
        if self._remaining:
            raise ModelError(f"{self.path} holds unexpected tensors: {_some(self._remaining)}")


def safetensors_files(path: Path) -> list[Path]:
    """model.safetensors, or the files that model.safetensors.index.json names."""
    index = path / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        files = [path / name for name in names]
    else:
        files = [path / "model.safetensors"]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise ModelError(f"no weights: {', '.join(missing)} missing")
    return files


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


def _some(names: dict[str, Any], limit: int = 8) -> str:
    listed = sorted(names)
    rest = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + rest
