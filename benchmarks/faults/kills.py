"""`python -m benchmarks.faults --kills N`: SIGKILL of N workers of all roles under load with known answers.

The benchmark's own node (tiny model, 400 passages, replicas of every role but the frontend) first answers every
question undisturbed; these greedy answers are the reference. Then clients send chats and completions with retrieval and
probes, streamed and not, and searches without pause, while workers are killed, sometimes two or three at once. Every
answer is compared token by token and passage by passage:

- *right*;
- *right, without a probe's passages*: a probe timed out after two seconds, and the row continued without its passages;
- *cut*: its connection ended while a frontend was killed, which may only end its own streams;
- *lost*: no answer for any other reason;
- *wrong*: another token, passage or text, or tokens twice.

The order is a seeded sequence of shuffles of all workers. A worker is killed once it has been ready for `REST_S`, so
that the supervisor's back-off is reset: the benchmark measures single deaths, not repeated ones.
"""

import os
import random
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common.report import table
from launchers.http_client import post, stream
from runtime.errors import TrinityError
from runtime.node.supervisor.admin import NodeStatus
from runtime.retrieval.collections import bulk_load
from runtime.retrieval.ingestion.python_docs import python_documents
from runtime.testing.background import Background
from runtime.testing.node import Node
from runtime.testing.tiny_model import make_tiny_llama

REST_S = 31.0  # a little over `Backoff`'s healthy_s
GAP_S = 2.0  # mean time between two kills
CLIENTS = 5
_LOOK_S = 0.1
_PASSAGES = 400
_SUBJECTS = (
    "a with statement", "a generator", "an import", "a class body", "a lambda", "slicing", "an assignment",
    "a comprehension",
)  # fmt: skip
_CONFIG = """
[node]
name = "kills"
run_dir = "{home}/run"

[http]
port = 0
drain_notice_s = 0

[model]
name = "{home}/tiny"
context_tokens = 2048

[prefill]
workers = 4
slots = 3
chunk_tokens = 128

[decode]
workers = 4
slots = 6

[prompts]
passage_tokens = 600

[pool]
workers = 4

[[collections]]
name = "docs"
path = "{home}/docs"
"""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Question:
    """A request: its path, its body, and whether the answer is streamed."""

    path: str
    body: Json
    streamed: bool = False

    @property
    def kind(self) -> str:
        if self.path == "/v1/retrieval":
            return "search"
        name = "chat" if "chat" in self.path else "completion"
        return f"{name}, streamed" if self.streamed else name


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer: token ids (none for a search), passages as (at_token, id, text or ""), and whether it is complete."""

    tokens: tuple[int, ...]
    passages: tuple[tuple[int, str, str], ...]
    whole: bool = True


@dataclass(slots=True)
class Outcome:
    """Outcome of one request; times are monotonic seconds. `error`: its code, or "connection" if the connection
    ended."""

    question: int
    begin_s: float
    end_s: float = 0.0
    found: Answer | None = None
    error: str = ""
    message: str = ""


def questions() -> list[Question]:
    """Return sixteen generations with probes and eight searches, all different."""
    made = []
    for number, subject in enumerate(_SUBJECTS):
        retrieval = {"collection": "docs", "k": 2, "every_tokens": 8}
        common: Json = {"model": "tiny", "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        common |= {"max_tokens": 16 + 4 * (number % 3), "retrieval": retrieval}
        made += [
            Question("/v1/completions", common | {"prompt": f"how does {subject} work?"}, number % 2 == 0),
            Question(
                "/v1/chat/completions",
                common | {"messages": [{"role": "user", "content": f"what is {subject} for?"}]},
                number % 2 == 1,
            ),
            Question("/v1/retrieval", {"query": f"the syntax of {subject}", "collection": "docs", "k": 3}),
        ]
    return made


def ask(url: str, question: Question) -> Answer:
    """Send a request. Raises the `TrinityError` of an error response, `Unavailable` from an `OSError` for a broken
    connection."""
    if not question.streamed:
        whole = post(url, question.path, question.body, timeout_s=300)
        choice = whole.get("choices", [{}])[0]
        passages = whole["passages"] if "passages" in whole else whole["retrieval"]["passages"]
        return Answer(tuple(choice.get("token_ids", ())), _passages(passages))
    tokens: list[int] = []
    passages, finished = [], False
    for event in stream(url, question.path, question.body, timeout_s=300):
        passages += event.get("retrieval", {}).get("passages", [])
        for choice in event["choices"]:
            tokens += choice.get("token_ids") or ()
            finished = finished or choice.get("finish_reason") is not None
    return Answer(tuple(tokens), _passages(passages), finished)


def _passages(passages: list[Json]) -> tuple[tuple[int, str, str], ...]:
    return tuple((passage.get("at_token", 0), passage["id"], passage.get("text", "")) for passage in passages)


def classify(known: Answer, outcome: Outcome, frontend_deaths: list[float]) -> str:
    """Classify an outcome: "right", "right, without a probe's passages", "cut", "lost", "wrong" or "twice"."""
    answer = outcome.found
    cut = any(outcome.begin_s <= death <= outcome.end_s for death in frontend_deaths)
    if answer is None:
        return "cut" if outcome.error == "connection" and cut else "lost"
    if len(answer.tokens) > len(known.tokens):
        return "twice"
    lacking = [passage[0] for passage in known.passages if passage not in answer.passages]
    sure = min(lacking, default=len(known.tokens))
    if answer.tokens[:sure] != known.tokens[: min(sure, len(answer.tokens))]:
        return "wrong"
    if not answer.whole:
        return "cut" if cut else "lost"
    if len(answer.tokens) != len(known.tokens) or 0 in lacking:
        return "wrong"
    if lacking:
        return "right, without a probe's passages"
    return "right" if answer == known else "wrong"


class Load(Background):
    """Clients that send questions continuously and record every outcome; use as a context."""

    def __init__(self, url: str, requests: list[Question], seed: int) -> None:
        super().__init__(partial(self._run, number) for number in range(CLIENTS))
        self._url, self._requests, self._seed = url, requests, seed
        self.outcomes: list[Outcome] = []

    def _run(self, number: int) -> None:
        source = random.Random(self._seed * 1000 + number)
        while not self.ended.wait(source.random() * 0.1):
            self.outcomes.append(self._one(source.randrange(len(self._requests))))

    def _one(self, question: int) -> Outcome:
        outcome = Outcome(question, time.monotonic())
        try:
            outcome.found = ask(self._url, self._requests[question])
        except TrinityError as error:
            outcome.error = "connection" if error.__cause__ is not None else error.code
            outcome.message = error.message
        outcome.end_s = time.monotonic()
        return outcome


@dataclass
class Killer:
    """Kills workers in order, and measures their recovery."""

    node: Node
    source: random.Random
    recovery_s: dict[str, list[float]] = field(default_factory=dict)
    frontend_deaths: list[float] = field(default_factory=list)
    done: int = 0
    _ready_since: dict[tuple[str, int], float] = field(default_factory=dict)
    _killed: dict[str, tuple[int, float]] = field(default_factory=dict)  # its epoch, and the time of the kill

    def look(self) -> NodeStatus:
        """Record which workers have become ready."""
        status, now = self.node.status(), time.monotonic()
        for worker in status.workers:
            if worker.phase == "ready":
                self._ready_since.setdefault((worker.name, worker.epoch), now)
                killed = self._killed.get(worker.name)
                if killed is not None and worker.epoch > killed[0]:
                    del self._killed[worker.name]
                    self.recovery_s.setdefault(worker.name.rpartition("-")[0], []).append(now - killed[1])
        return status

    def kill(self, names: list[str]) -> None:
        """Kill these workers at once, as soon as all have been ready for `REST_S`."""
        while True:
            status, now = self.look(), time.monotonic()
            victims = [worker for worker in status.workers if worker.name in names]
            since = [self._ready_since.get((worker.name, worker.epoch), now) for worker in victims]
            if all(now - begin >= REST_S for begin in since):
                break
            self.wait(_LOOK_S)
        for worker in victims:
            self._killed[worker.name] = (worker.epoch, time.monotonic())
            if worker.name.startswith("frontend"):
                self.frontend_deaths.append(time.monotonic())
            os.kill(worker.pid, signal.SIGKILL)
            self.done += 1

    def wait(self, seconds: float) -> None:
        """Wait, while recording recoveries."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            threading.Event().wait(min(left, _LOOK_S))
            self.look()

    def settle(self) -> None:
        """Wait until every worker has recovered."""
        self.node.wait(lambda: self.look() and not self._killed and self.node.ready(), within_s=300)


def order(workers: list[str], count: int, source: random.Random) -> Iterator[list[str]]:
    """Yield groups of workers, `count` in all: shuffles of all workers, split into groups of one, sometimes two or
    three."""
    left = count
    while left > 0:
        shuffled = source.sample(workers, len(workers))
        while shuffled and left > 0:
            size = min(source.choice((1, 1, 1, 1, 2, 3)), left, len(shuffled))
            yield shuffled[:size]
            del shuffled[:size]
            left -= size


def make_node(home: Path) -> Path:
    """Create model, collection and configuration; returns the path of the configuration."""
    make_tiny_llama(home / "tiny")
    bulk_load.build(python_documents()[:_PASSAGES], home / "docs", embedder="hashing-128")
    config = home / "node.toml"
    config.write_text(_CONFIG.format(home=home))
    return config


def kills(home: Path, count: int, seed: int) -> Json:
    """Run the experiment in an empty directory."""
    source = random.Random(seed)
    node = Node(make_node(home), "--quiet", look_s=0.1)
    try:
        requests = questions()
        known = [ask(node.info.url, question) for question in requests]
        again = [ask(node.info.url, question) for question in requests]
        if known != again:
            raise RuntimeError("the undisturbed node is not deterministic")
        killer, begin = Killer(node, source), time.monotonic()
        workers = sorted(worker.name for worker in node.status().workers)
        with Load(node.info.url, requests, seed) as load:
            killer.look()
            for names in order(workers, count, source):
                killer.kill(names)
                killer.wait(source.uniform(0.5, 1.5) * GAP_S * len(names))
                if killer.done // 20 > (killer.done - len(names)) // 20:
                    print(f"{killer.done} of {count}: {_counted(known, load.outcomes, killer)}", flush=True)
                    for example in _examples(known, load.outcomes, killer)[:3]:
                        print(f"    {example}", flush=True)
            killer.settle()
        seconds = time.monotonic() - begin
        after = [ask(node.info.url, question) for question in requests]
        restarts = {worker.name: worker.epoch for worker in node.status().workers}
    finally:
        code = node.stop()
    return {
        "kills": count, "seed": seed, "seconds": seconds, "exit_code": code, "lives": restarts,
        "right_afterwards": after == known,
        "recovery_s": killer.recovery_s,
        "answers": _by_kind(requests, known, load.outcomes, killer),
        "examples": _examples(known, load.outcomes, killer),
    }  # fmt: skip


def _counted(known: list[Answer], outcomes: list[Outcome], killer: Killer) -> dict[str, int]:
    return dict(Counter(classify(known[one.question], one, killer.frontend_deaths) for one in list(outcomes)))


def _by_kind(requests: list[Question], known: list[Answer], outcomes: list[Outcome], killer: Killer) -> Json:
    kinds = sorted({question.kind for question in requests})
    return {
        kind: _counted(known, [one for one in outcomes if requests[one.question].kind == kind], killer)
        for kind in kinds
    }


def _examples(known: list[Answer], outcomes: list[Outcome], killer: Killer) -> list[Json]:
    """Return the first outcomes that are not right."""
    examples = []
    for one in outcomes:
        verdict = classify(known[one.question], one, killer.frontend_deaths)
        if verdict in ("lost", "wrong", "twice"):
            tokens = None if one.found is None else one.found.tokens
            examples.append(
                {"verdict": verdict, "question": one.question, "seconds": one.end_s - one.begin_s, "error": one.error,
                 "says": one.message, "tokens": tokens, "known": known[one.question].tokens}
            )  # fmt: skip
    return examples[:20]


def failures(results: Json) -> int:
    """Return the number of lost, wrong and duplicated answers."""
    return sum(kind.get(verdict, 0) for kind in results["answers"].values() for verdict in ("lost", "wrong", "twice"))


def report(results: Json) -> str:
    """Return the report as Markdown."""
    one = results["kills"]
    lines = [
        "# Kills", "", f"`{results['command']}`",
        f"Machine: {results['load_before']} before, {results['load_after']} after: shared with other processes.", "",
        f"{one['kills']} kill -9 in {one['seconds'] / 60:.1f} minutes, seed {one['seed']}. "
        "Seconds from a kill until the same worker is ready again:", "",
        *table(
            ("role", "kills", "median", "slowest"),
            [
                (role, len(times), f"{statistics.median(times):.1f}", f"{max(times):.1f}")
                for role, times in sorted(one["recovery_s"].items())
            ],
        ),
    ]  # fmt: skip
    verdicts = ("right", "right, without a probe's passages", "cut", "lost", "wrong", "twice")
    lines += [
        "",
        *table(
            ("requests", *verdicts),
            [(kind, *(counts.get(verdict, 0) for verdict in verdicts)) for kind, counts in one["answers"].items()],
        ),
        "", "*cut*: a connection of a frontend that was killed. "
        "Every other answer was compared token by token with that of the undisturbed node.", "",
        f"Afterwards the node gave the same answers as before: {'yes' if one['right_afterwards'] else 'NO'}; "
        f"it ended with exit code {one['exit_code']}.", "",
    ]  # fmt: skip
    return "\n".join(lines)
