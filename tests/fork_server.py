"""Fork server for Python programs: they start in 10 ms in a process with their imports preloaded."""

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]


class ForkServer:
    """A process that forks a process per program; a context manager. Preloaded modules must not start threads."""

    def __init__(self, *modules: str, **environment: str) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", __name__, *modules],
            cwd=ROOT, env={**os.environ, **environment}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, *words: str, cwd: str | Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run `python *words`: a script, or -c and source text, with arguments."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            paths = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (out, err)]
            self._server.stdin.write(json.dumps([words, str(cwd), environment, paths]) + "\n")
            self._server.stdin.flush()
            code = int(self._server.stdout.readline())
            return subprocess.CompletedProcess(words, code, _text(out), _text(err))

    def __enter__(self) -> "ForkServer":
        return self

    def __exit__(self, *error: object) -> None:
        self._server.communicate(timeout=60)


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def serve(*modules: str) -> None:
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        if child := os.fork():
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        else:
            os._exit(become(*json.loads(line)))


def become(words: list[str], cwd: str, environment: dict[str, str], files: list[str]) -> int:
    """Run the program and return its exit code. Objects are collected and exit handlers run, as at a normal exit."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in enumerate(files, start=1):
        os.dup2(os.open(path, os.O_WRONLY), number)
    os.chdir(cwd)
    os.environ.update(environment)
    sys.argv = ["-c", *words[2:]] if words[0] == "-c" else words
    code = 0
    try:
        if words[0] == "-c":
            exec(words[1], {"__name__": "__main__"})
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if code and ended.code != code:
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    gc.collect()
    atexit._run_exitfuncs()  # noqa: SLF001  (the interpreter's own end takes .2 s)
    sys.stdout.flush()
    ctypes.CDLL(None).fflush(None)
    return code


if __name__ == "__main__":
    serve(*sys.argv[1:])
