"""A model's weights as its directory has them: safetensors files, mapped and not read before they are used."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from runtime.errors import ModelError

_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"


class WeightFiles:
    """The tensors in `model.safetensors`, or in the files that `model.safetensors.index.json` names."""

    def __init__(self, directory: Path) -> None:
        """Raises `ModelError` for a file that is missing or damaged."""
        self._directory = directory
        self._file_of: dict[str, Path] = {}
        try:
            for path in self._paths():
                with safe_open(path, framework="pt") as file:
                    self._file_of |= dict.fromkeys(file.keys(), path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            raise ModelError(f"cannot load the model in {directory}: {error}") from error

    def _paths(self) -> list[Path]:
        index = self._directory / _INDEX
        if not index.is_file():
            return [self._directory / _WHOLE]
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [self._directory / Path(name).name for name in sorted(names)]

    def require(self, names: list[str]) -> None:
        """Raise `ModelError` if one of them is not there: a model does not go on with random numbers in its place."""
        if missing := sorted(set(names) - self._file_of.keys()):
            raise ModelError(f"the weights in {self._directory} lack {len(missing)} tensors, such as {missing[0]}")

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """It as float32; what is float32 in its file is mapped, by a mapping of its own, and shared with all processes
        that have it. Raises `ModelError` for another shape."""
        try:
            with safe_open(self._file_of[name], framework="pt") as file:
                found: torch.Tensor = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"cannot load the model in {self._directory}: {error}") from error
        if tuple(found.shape) != shape or not found.is_floating_point():
            raise ModelError(
                f"{name} in {self._directory} is {found.dtype} {list(found.shape)}; config.json says {list(shape)}"
            )
        return found.float()
