"""Tensors of a model directory, by name: safetensors only, whole or in shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import ModelError
from engine.models.spec import read_json


class Weights:
    """Named tensors that are taken one by one."""

    def __init__(self, origin: object, readers: Mapping[str, Callable[[], torch.Tensor]]) -> None:
        """origin  whose they are, for messages"""
        self._origin = origin
        self._readers = readers
        self._asked: set[str] = set()

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor `name`, in the dtype of the file; ModelError if it is missing or of another shape."""
        if name not in self._readers:
            raise ModelError(f"{self._origin}: the weights lack {name}")
        tensor = self._readers[name]()
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{self._origin}: {name} is {list(tensor.shape)}, config.json asks for {list(shape)}")
        self._asked.add(name)
        return tensor

    def expect_all_taken(self, but: Iterable[str] = ()) -> None:
        """ModelError if tensors are left: a model that has more than we compute would be silently wrong.

        Rotary tables are recomputed, so old files that carry them are fine; so are the names in `but`.
        """
        left = self._readers.keys() - self._asked - set(but)
        unknown = sorted(name for name in left if not name.endswith("rotary_emb.inv_freq"))
        if unknown:
            raise ModelError(f"{self._origin}: the weights hold {unknown[0]}, which is not part of this model type")


class Checkpoint(Weights):
    """The tensors of a model directory. Each is read from disk when it is taken."""

    def __init__(self, directory: Path) -> None:
        """Raises ModelError if the directory holds no safetensors file, or a broken one."""
        readers: dict[str, Callable[[], torch.Tensor]] = {}
        for path in weight_files(directory):
            try:
                handle: Any = safe_open(path, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{path} cannot be read as safetensors: {error}") from error
            readers |= {name: partial(handle.get_tensor, name) for name in list(handle.keys())}
        super().__init__(directory, readers)


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files that make up a model directory's weights; ModelError if there are none."""
    whole, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if index.is_file():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        if any(Path(name).name != name for name in names):
            raise ModelError(f"{index} names files outside the model directory")
        return [directory / name for name in names]
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern))
    if pickles:
        raise ModelError(f"{directory}: {pickles[0]} is a pickle and could run code: only safetensors are loaded")
    raise ModelError(f"{directory} holds no model.safetensors")
