"""Optional packages: looked for before they are imported, and named with the command that installs them."""

import importlib.util

from runtime.errors import ModelError

_REQUIREMENTS = {"torch": "torch>=2.6", "transformers": "transformers>=5,<6", "gguf": "gguf>=0.17"}


def require_packages(*names: str) -> None:
    """Raise `ModelError` with a pip command for those of `names` (import names) that are not installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        wanted = " ".join(f"'{_REQUIREMENTS.get(name, name)}'" for name in missing)
        raise ModelError(f"missing: {', '.join(missing)}. Install with: python -m pip install {wanted}")
