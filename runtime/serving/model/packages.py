"""Optional packages: looked for before they are imported, and named with the command that installs them."""

import importlib.util
import runpy
from pathlib import Path

from runtime.errors import ModelError

_REQUIREMENTS = {"torch": "torch>=2.6", "transformers": "transformers>=5,<6", "gguf": "gguf>=0.17"}


def require_packages(*names: str) -> None:
    """Raise `ModelError` with a pip command for those of `names` (import names) that are not installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        wanted = " ".join(f"'{_REQUIREMENTS.get(name, name)}'" for name in missing)
        raise ModelError(f"missing: {', '.join(missing)}. Install with: python -m pip install {wanted}")


def torch_cuda() -> str | None:
    """The CUDA version that the installed torch was built for; None if for none. torch itself is not imported.

    Raises `ModelError` without torch.
    """
    require_packages("torch")
    spec = importlib.util.find_spec("torch")
    assert spec is not None, "it has just been found"
    assert spec.submodule_search_locations is not None, "torch is a package"
    # The file says what was built, and importing torch to ask it costs seconds and 200 MB of a supervisor that needs
    # nothing else of it.
    found = runpy.run_path(str(Path(spec.submodule_search_locations[0]) / "version.py"))
    cuda = found.get("cuda")
    return None if cuda is None else str(cuda)
