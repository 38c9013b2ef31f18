"""Count the source files that a chat request with retrieval executes: `python -m benchmarks.request_files [--list]`.

Starts a node with a tiny model and a profiler in each process, and sends a streamed request after two warm-up requests.
A file of `runtime/`, `ipc/` or `gpu/` counts if one of its functions is called during the request, in any process and
thread, that is not called in an idle node too (heartbeats, reports). Files with compiled functions that the pool's loop
can call count as well.
"""

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

ROOT = Path(__file__).parent.parent
FOLDERS = ("runtime", "ipc", "gpu")
_DIRECTORY = "TRINITY_REQUEST_FILES"  # environment variable of the node's processes: output directory of the profiles

CONFIG = """
[node]
name = "request-files"
run_dir = "{home}/run"

[http]
port = 0

[model]
name = "{home}/tiny"
context_tokens = 2048

[prefill]
spares = 0

[decode]
spares = 0

[[collections]]
name = "docs"
path = "{home}/docs"
"""


def watch() -> None:
    """Profile a process of the node: a first SIGUSR1 starts recording idle functions, a second one those of the
    request; SIGUSR2 writes the files of the latter."""
    seen: set[CodeType] = set()
    idle: set[CodeType] = set()
    watching = False

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if watching and event == "call":
            seen.add(frame.f_code)

    def begin(signum: int, frame: FrameType | None) -> None:
        nonlocal watching
        idle.update(seen)
        seen.clear()
        watching = True

    def end(signum: int, frame: FrameType | None) -> None:
        nonlocal watching
        watching = False
        Path(os.environ[_DIRECTORY], str(os.getpid())).write_text("\n".join(sorted(_files(seen - idle))))

    signal.signal(signal.SIGUSR1, begin)
    signal.signal(signal.SIGUSR2, end)
    threading.setprofile(profile)
    sys.setprofile(profile)


def _files(seen: set[CodeType]) -> set[str]:
    paths = {Path(code.co_filename) for code in list(seen) if code.co_name != "<module>"}
    ours = {str(path.relative_to(ROOT)) for path in paths if path.is_relative_to(ROOT)}
    return {path for path in ours if path.startswith(FOLDERS)}


def compiled_files() -> set[str]:
    """Return the files of the compiled functions that the pool's loop can call."""
    from runtime.pool.loop import run_loop

    found: dict[int, CodeType] = {}

    def modules(function: Any) -> list[ModuleType]:
        return [
            used for used in map(function.__globals__.get, function.__code__.co_names) if isinstance(used, ModuleType)
        ]

    def visit(function: Any) -> None:
        function = getattr(function, "py_func", function)
        code = getattr(function, "__code__", None)
        if code is None or id(code) in found:
            return
        found[id(code)] = code
        for name in code.co_names:
            for used in (function.__globals__.get(name), *(getattr(m, name, None) for m in modules(function))):
                if hasattr(used, "py_func"):
                    visit(used)

    visit(run_loop)
    return _files(set(found.values()))


def executed_files() -> dict[str, set[str]]:
    """Run the node and a request; return the files by process."""
    from launchers.http_client import stream
    from runtime.retrieval.collections.collection import Collection
    from runtime.retrieval.collections.python_docs import python_documents
    from runtime.testing.node import running
    from runtime.testing.tiny_model import make_tiny_llama

    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "How does a with statement call __exit__?"}],
        "max_tokens": 12,
        "ignore_eos": True,
        "retrieval": {"collection": "docs", "k": 2},
    }
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        make_tiny_llama(home / "tiny")
        Collection.build(python_documents()[:200], home / "docs", embedder="hashing-128")
        config, hook, out = home / "node.toml", home / "hook", home / "out"
        config.write_text(CONFIG.format(home=home))
        for made in (hook, out):
            made.mkdir()
        (hook / "sitecustomize.py").write_text("from benchmarks.request_files import watch\n\nwatch()\n")
        os.environ[_DIRECTORY] = str(out)
        os.environ["PYTHONPATH"] = f"{hook}:{ROOT}"
        with running(config) as node:
            pids = {name: pid for name, pid in node.pids().items() if name != "supervisor"}
            for _ in range(2):
                list(stream(node.info.url, "/v1/chat/completions", body))
            node.wait_idle()
            for signal_number, pause_s in ((signal.SIGUSR1, 3.0), (signal.SIGUSR1, 0.3), (signal.SIGUSR2, 0.0)):
                for pid in pids.values():
                    os.kill(pid, signal_number)
                time.sleep(pause_s)  # of idle time; then until a sleeping loop has iterated once
                if pause_s == 0.3:
                    list(stream(node.info.url, "/v1/chat/completions", body))
            node.wait(lambda: len(list(out.iterdir())) == len(pids))
            found = {name: set((out / str(pid)).read_text().split()) for name, pid in pids.items()}
    return found | {"pool-0, compiled": compiled_files()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="list the files")
    options = parser.parse_args()
    found = executed_files()
    for name, files in found.items():
        print(f"{name}: {len(files)} files")
        if options.list:
            print("\n".join(f"  {path}" for path in sorted(files)))
    print(f"together: {len(set().union(*found.values()))} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
