"""Tests of probe triggers: when an answer probes, and which passages it accepts."""

import logging
import tomllib
from collections.abc import Callable, Iterator
from math import log
from pathlib import Path

import numpy as np
import pytest

from runtime.engines.openai.engine import check_default_trigger
from runtime.errors import ConfigError, InvalidRequest
from runtime.node.retrieval_config import ProbesSection, installed_triggers
from runtime.retrieval.passages import Passage
from runtime.serving.http.api_types import RetrievalOptions
from runtime.serving.messages import Retrieval
from runtime.serving.triggers import Trigger, counts_tokens, entropy, trigger_of, trigger_type
from tests.fork_server import ROOT

SURE = np.array([9.0, 0.0, 0.0, 0.0], np.float32)
TORN = np.zeros(4, np.float32)


def trigger(kind: str, threshold: float = 0.0) -> Trigger:
    found = trigger_of(Retrieval("docs", every_tokens=4, trigger=kind, threshold=threshold))
    assert found is not None
    return found


def test_the_uncertainty_trigger_probes_only_uncertain_rows_at_intervals() -> None:
    unsure = trigger("unsure", 1.0)
    assert not any(unsure.should_probe(n, 0, SURE) for n in range(40))
    last_probe_at = 0
    places = []
    for n in range(1, 16):
        scores = SURE if n in (4, 5) else TORN
        if unsure.should_probe(n, last_probe_at, scores):
            places.append(last_probe_at := n)
    assert places == [6, 10, 14]
    assert not unsure.should_probe(9, 0, None), "without scores the model's certainty is unknown"


def test_a_drifting_answer_accepts_passages_only_if_none_in_use_is_near() -> None:
    drift = trigger("drift", 0.5)
    found = [Passage("new", "", 0.2), Passage("used", "", 0.5), Passage("other", "", 0.7)]
    assert not drift.accepts(found, {"used"})
    assert drift.accepts(found, {"other"}), "in use, but farther than the limit"
    assert drift.accepts(found, {"elsewhere"}), "in use, but not among the nearest"
    assert drift.accepts(found, set())
    assert trigger("every").accepts(found, {"used"})


def test_entropy_is_that_of_the_softmax_and_handles_impossible_tokens() -> None:
    assert entropy(TORN) == pytest.approx(log(4))
    assert entropy(SURE) < 0.01
    logits = np.array([1.0, 2.0, 0.5, -np.inf], np.float32)
    shares = np.exp(logits - 2.0) / np.exp(logits - 2.0).sum()
    assert entropy(logits) == pytest.approx(-sum(p * log(p) for p in shares if p > 0), rel=1e-5)
    assert entropy(logits + 1000) == pytest.approx(entropy(logits), rel=1e-3), "a shift of all logits changes nothing"


def retrieval_of(probes: ProbesSection, **own: object) -> Retrieval:
    options = RetrievalOptions.model_validate(own)
    return Retrieval("docs", **options.with_defaults(probes, "retrieval"))


def test_a_node_says_how_answers_probe_and_a_request_may_say_otherwise() -> None:
    node = ProbesSection(every_tokens=16, mode="prefetch", trigger="drift")
    default = retrieval_of(node, k=2)
    assert (default.every_tokens, default.probe_mode, default.trigger, default.threshold) == (
        16,
        "prefetch",
        "drift",
        0.5,
    )
    own = retrieval_of(node, every_tokens=0, probe_mode="wait", probe_trigger="unsure", probe_threshold=1.5)
    assert (own.every_tokens, own.probe_mode, own.trigger, own.threshold) == (0, "wait", "unsure", 1.5)
    with pytest.raises(InvalidRequest, match="probe_threshold requires a probe_trigger that has one"):
        retrieval_of(node, probe_trigger="every", probe_threshold=0.3)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path, dict[str, str]], None]]:
    """Return a function that installs triggers, name -> module:class, from a folder of modules."""

    def install(folder: Path, triggers: dict[str, str]) -> None:
        metadata = tmp_path / "site" / "triggers-0.1.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: triggers\nVersion: 0.1\n")
        lines = [f"{name} = {value}\n" for name, value in triggers.items()]
        (metadata / "entry_points.txt").write_text("[trinity.triggers]\n" + "".join(lines))
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.syspath_prepend(str(metadata.parent))
        installed_triggers.cache_clear()

    yield install
    monkeypatch.undo()
    installed_triggers.cache_clear()


def test_a_node_s_default_trigger_that_another_engine_cannot_use_is_refused_at_its_start(
    install: Callable[[Path, dict[str, str]], None],
) -> None:
    install(ROOT / "docs" / "examples" / "trigger", {"margin": "margin_trigger:MarginTrigger", "lost": "nowhere:None"})
    check_default_trigger(ProbesSection(trigger="drift"))
    with pytest.raises(ConfigError, match=r"probes.trigger = 'margin' reads tokens or the model's confidence"):
        check_default_trigger(ProbesSection(trigger="margin"))
    with pytest.raises(ConfigError, match=r"probes.trigger: .*'lost' \(nowhere:None\) cannot be used"):
        check_default_trigger(ProbesSection(trigger="lost"))


def test_the_example_s_trigger_probes_when_two_tokens_are_close(
    install: Callable[[Path, dict[str, str]], None],
) -> None:
    folder = ROOT / "docs" / "examples" / "trigger"
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    install(folder, project["entry-points"]["trinity.triggers"])
    retrieval = retrieval_of(ProbesSection(trigger="margin"), every_tokens=4)
    assert retrieval.threshold == 1.0
    margin = trigger_of(retrieval)
    assert margin is not None
    assert margin.needs_logits
    assert not counts_tokens("margin"), "an engine without logits cannot use it"
    close = np.array([3.0, 2.5, 0.0], np.float32)
    assert [n for n in range(1, 9) if margin.should_probe(n, 0, close)] == [4, 5, 6, 7, 8]
    assert not margin.should_probe(9, 0, SURE)
    assert not margin.should_probe(7, 4, close), "too early after the last probe"
    assert margin.accepts([Passage("new", "", 0.2)], {"old"})


def test_an_installed_trigger_that_fails_ends_its_answer_s_probes_only(
    install: Callable[[Path, dict[str, str]], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "faulty_trigger.py").write_text(
        "class Faulty:\n"
        "    needs_logits = False\n"
        "    default_threshold = None\n"
        "    def __init__(self, tokens, threshold): pass\n"
        "    def should_probe(self, generated, last_probe_at, scores): return 1 // (generated - 3) >= 0\n"
        "    def accepts(self, found, used): return True\n"
        "class Odd:\n"
        "    needs_logits = 'yes'\n"
        "    default_threshold = None\n"
        "class Strict(Faulty):\n"
        "    default_threshold = 0.5\n"
        "    def __init__(self, tokens, threshold):\n"
        "        if threshold > 1: raise ValueError('threshold > 1')\n"
    )
    names = {"faulty": "Faulty", "odd": "Odd", "strict": "Strict"}
    triggers = {name: f"faulty_trigger:{value}" for name, value in names.items()}
    install(tmp_path, triggers | {"gone": "no_such_module:X"})
    faulty = trigger("faulty")
    with caplog.at_level(logging.ERROR):
        assert [faulty.should_probe(n, 0, None) for n in (4, 3, 5)] == [True, False, False]
    assert "the trigger 'faulty' failed" in caplog.text
    assert trigger("faulty").should_probe(5, 0, None), "another answer's"
    for name in ("strict", "gone"):  # what only the worker finds out does not end the worker
        assert not trigger(name, 2.0).should_probe(5, 0, None)
        assert f"the trigger {name!r} failed" in caplog.text
    with pytest.raises(InvalidRequest, match="'strict' refuses every_tokens = 4 with probe_threshold = 2: ValueError"):
        retrieval_of(ProbesSection(), every_tokens=4, probe_trigger="strict", probe_threshold=2.0)
    with pytest.raises(InvalidRequest, match="needs_logits is 'yes', not a bool"):
        trigger_type("odd")
    with pytest.raises(InvalidRequest, match="no_such_module"):
        trigger_type("gone")
    with pytest.raises(
        InvalidRequest, match="'else' is not known; there are every, drift, unsure, faulty, gone, odd, strict"
    ):
        trigger_type("else")
