"""The metrics of engines that are not ours, each sample with the name of the worker that it is of."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

_PREFIX = "vllm:"  # what else its process exports (Python's garbage, HTTP's own) says nothing of the engine


def engine_families(files: Mapping[str, Path]) -> Iterator[Metric]:
    """Of the workers by name, from the files in which their last ones lie. What is no metrics is left out."""
    families: dict[str, Metric] = {}
    for worker, file in files.items():
        with contextlib.suppress(OSError, ValueError):  # ValueError: not what the format allows
            for family in _parsed(file.read_text()):
                merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                merged.samples += [s._replace(labels={"worker": worker} | s.labels) for s in family.samples]
    yield from families.values()


def _parsed(text: str) -> Iterable[Metric]:
    return [found for found in text_string_to_metric_families(text) if found.name.startswith(_PREFIX)]
