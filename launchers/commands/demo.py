"""`trinity demo`: runs a complete node on this machine and asks it about Python's language reference."""

import json
import os
import platform
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from gpu.build.params import Progress
from launchers.http_client import stream
from launchers.progress import BuildProgress
from runtime.errors import CollectionError, Unavailable
from runtime.node.run_dir import NodeInfo
from runtime.retrieval.collections import bulk_load
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.ingestion.python_docs import python_documents
from runtime.serving import stages
from runtime.serving.model import smollm
from runtime.testing.node import Node

NAME = "demo"
_QUESTIONS = (
    "How does a with statement call __exit__?",
    "What is the difference between is and == in Python?",
    "When does a finally clause run?",
    "What does the yield expression do in a generator?",
)

_CONFIG = """\
# The node of `trinity demo`: one worker of each role, on the CPU.
[node]
name = "{name}"

[http]
port = {port}

[model]
name = "{model}"
context_tokens = 2048

[prefill]
slots = 4

[decode]
slots = 8

[pool]
slots = 32

[[collections]]
name = "docs"
path = "{collection}"
"""


def node_file(name: str, port: int, collection: Path) -> str:
    """Return the TOML of the demo's node."""
    return _CONFIG.format(name=name, port=port, model=smollm.NAME, collection=collection)


def demo(
    questions: Annotated[int, typer.Option(help="Built-in questions to ask.", min=0, max=len(_QUESTIONS))] = 3,
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens per answer.", min=1, max=1024)] = 96,
    every_tokens: Annotated[
        int, typer.Option(help="Tokens between probes of the pool; 0 disables them.", min=0, max=1024)
    ] = 0,
    port: Annotated[int, typer.Option(help="HTTP port; 0 selects a free one.", min=0, max=65_535)] = 0,
    ask: Annotated[list[str] | None, typer.Option(help="Ask this question (repeatable).")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the node running and print example requests.")] = False,
) -> None:
    """Build an index of Python's reference, start a node, ask it questions, and show the stage times."""
    for kind in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(kind) is signal.SIG_DFL:  # else it was started with nohup, say
            signal.signal(kind, signal.default_int_handler)  # a closed terminal stops the node, as Ctrl-C does
    console = Console()
    console.print("[bold]Trinity demo[/bold]: frontend, prefill, decode and vector pool as processes on this machine\n")
    home = smollm.models_directory().parent / "demo"  # the user's private cache
    with BuildProgress(sys.stderr) as progress:
        smollm.ensure_converted(lambda what, share: progress("converting the model", share))
        collection = prepare_collection(home, progress)
    with CollectionReader(collection) as docs:
        said = f"{docs.state.count} passages of Python's reference, {docs.description.dim} dimensions"
    console.print(f"index: {said}; model: {smollm.NAME}\n")
    config = home / "node.toml"
    config.write_text(node_file(NAME, port, collection))
    node = start_node(config, console, outlive=keep)
    try:
        timings = [
            _ask(node.info, question, max_tokens, every_tokens, console)
            for question in [*(ask or ()), *_QUESTIONS[:questions]]
        ]
        if timings:
            console.print(_timing_table(timings))
    except BaseException:
        keep = False
        raise
    finally:
        if not keep:
            node.stop()
            console.print("the node has stopped")
    if keep:
        _print_examples(node.info, config)


def prepare_collection(home: Path, progress: Progress) -> Path:
    """Return the directory of the reference's index; build it once per version of Python, or if it is damaged."""
    home.mkdir(mode=0o700, exist_ok=True)
    path = home / f"python-{platform.python_version()}"
    try:
        CollectionReader(path).close()
    except CollectionError:
        cores = len(os.sched_getaffinity(0))
        bulk_load.build(python_documents(), path, threads=cores, force=path.exists(), progress=progress)
    return path


def start_node(config: Path, console: Console, *, outlive: bool) -> Node:
    """Start a node and wait until all workers are ready; unless `outlive`, it ends with this process."""
    begin = time.monotonic()
    with console.status("starting the node"):
        try:
            node = Node(config, *(() if outlive else ("--with-parent", str(os.getpid()))))
        except (RuntimeError, TimeoutError) as error:  # with the end of its log
            raise Unavailable(str(error)) from error
    waited = time.monotonic() - begin
    console.print(f"the node is up after {waited:.1f} s at {node.info.url} (log: {node.log})\n")
    return node


def _ask(
    info: NodeInfo, question: str, max_tokens: int, every_tokens: int, console: Console
) -> tuple[str, dict[str, Any]]:
    """Stream one answer to the console; return the question and its stage times."""
    console.rule(f"[bold]{question}", align="left")
    body = {
        "model": smollm.NAME,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "retrieval": {"collection": "docs", "k": 4, "every_tokens": every_tokens},
    }
    timings: dict[str, Any] = {}
    for event in stream(info.url, "/v1/chat/completions", body):
        for passage in event.get("retrieval", {}).get("passages", ()):
            console.print(
                f"  [dim]passage[/dim] {passage['id']:24} [dim]{passage['distance']:.3f}[/dim]  {passage['title']}",
                highlight=False,
            )
        for choice in event["choices"]:
            console.print(choice["delta"].get("content") or "", end="", markup=False, highlight=False, soft_wrap=True)
        timings |= event.get("timings", {})
    console.print("\n")
    return question, timings


def _timing_table(timings: list[tuple[str, dict[str, Any]]]) -> Table:
    """One column per question, one row per stage."""
    table = Table(title="stage times in milliseconds")
    table.add_column("stage", no_wrap=True)
    table.add_column("from … to")
    for number in range(1, len(timings) + 1):
        table.add_column(f"question {number}" if len(timings) < 4 else f"q{number}", justify="right", no_wrap=True)
    for stage in stages.ALL:
        times = (f"{spans[stage.name] * 1e3:.1f}" if stage.name in spans else "–" for _, spans in timings)
        table.add_row(stage.name, stage.meaning, *times)
    return table


def _print_examples(info: NodeInfo, config: Path) -> None:
    body = {
        "model": smollm.NAME,
        "messages": [{"role": "user", "content": _QUESTIONS[0]}],
        "max_tokens": 64,
        "temperature": 0,
        "stream": True,
        "retrieval": {"collection": "docs", "k": 4},
    }
    print(f"""The node is running at {info.url}. Its configuration is {config}.

  curl -N {info.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'

  trinity status {NAME}     shows its workers
  trinity stop {NAME}       stops it""")
