"""The examples of docs/integrations.md run."""

import importlib.util
import re
from pathlib import Path

import pytest

from tests.integrations.conftest import KEY

PAGE = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_runs(url: str, example: str) -> None:
    package = "llama_index" if "llama_index" in example else "langchain_core"
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    names: dict[str, object] = {}
    exec(example.replace("http://127.0.0.1:8080", url).replace('api_key=""', f'api_key="{KEY}"'), names)
    for name in ("retriever", "store"):
        if name in names:
            names[name].close()  # type: ignore[attr-defined]
