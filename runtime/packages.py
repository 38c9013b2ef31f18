"""Checks for optional packages before they are imported; errors name the command that installs them."""

import importlib.util
import runpy
from pathlib import Path

from runtime.errors import ModelError

_REQUIREMENTS = {"torch": "torch>=2.11", "transformers": "transformers>=5,<6", "gguf": "gguf>=0.17"}


def require_packages(*names: str) -> None:
    """Raise `ModelError` with a pip command for those of `names` (import names) that are not installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        wanted = " ".join(f"'{_REQUIREMENTS.get(name, name)}'" for name in missing)
        raise ModelError(f"missing: {', '.join(missing)}. Install with: python -m pip install {wanted}")


def torch_cuda() -> str | None:
    """Return the CUDA version of the installed torch; None for a CPU build. torch itself is not imported.

    Raises `ModelError` without torch.
    """
    require_packages("torch")
    spec = importlib.util.find_spec("torch")
    assert spec is not None, "require_packages has found it"
    assert spec.submodule_search_locations is not None, "torch is a package"
    # Importing torch would cost the supervisor seconds and 200 MB for this one attribute of version.py.
    names = runpy.run_path(str(Path(spec.submodule_search_locations[0]) / "version.py"))
    cuda = names.get("cuda")
    return None if cuda is None else str(cuda)
