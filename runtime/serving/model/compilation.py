"""Compilation of a model's programs for a GPU, beside the worker that serves with eager ones until then.

    worker    load ─▶ ready ─▶ step, eager … ─▶ step ─▶ piece ─▶ step ─▶ piece … ─▶ step, compiled and captured
    process   └─▶ two layers of the model: compile, into torch's cache ──▶ mark, end

One program serves all layers, so a model of two leaves all that torch compiles for the whole one: a piece
(`LanguageModel.compile`) traces it and finds the code. A mark in torch's cache names the setups for which that has been
done: where it is, no process is started. `python -m runtime.serving.model.compilation PARENT` is the process.
"""

import fcntl
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from ipc.native.compiled import stamp_of
from runtime.errors import ModelError, ResourceBusy, TrinityError
from runtime.node.config import NodeConfig
from runtime.node.engine_config import BLOCK_TOKENS
from runtime.node.worker import die_with_parent
from runtime.node.worker_config import KvWorkerSection
from runtime.serving.kv.blocks import BlockManager
from runtime.serving.kv.transport import Transport
from runtime.serving.model.language_model import LanguageModel, check_device
from runtime.serving.model.model_info import Kernels, WeightsType, weights_type

if TYPE_CHECKING:
    from ipc.memory.device import CudaArray
    from runtime.cuda_graphs import Capture

log = logging.getLogger("model")

_LAYERS = 2  # the fewest that run all programs
_SCRATCH = 4  # blocks that pieces write to
_REASON_BYTES = 2000

NO_ROOM = 3
"""Exit code of the process if the GPU has no memory for two more layers: the worker compiles alone, between steps."""


class ModelSetup(msgspec.Struct, frozen=True):
    """How a worker loads a model (`LanguageModel.load`), and the largest batches that it runs."""

    name: str
    blocks: int
    block_tokens: int
    context_tokens: int
    device: str
    weights: WeightsType
    kernels: Kernels
    threads: int = 1
    prompts_only: bool = False
    rows: int = 0
    tokens: int = 0

    @classmethod
    def of(
        cls,
        config: NodeConfig,
        role: Literal["prefill", "decode"],
        transport: Transport,
        block_tokens: int = BLOCK_TOKENS,
        threads: int = 1,
    ) -> "ModelSetup":
        """Return the setup of a role's workers on a node with a model of its own."""
        model, decode = config.own_model, role == "decode"
        assert model is not None
        section: KvWorkerSection = config.decode if decode else config.prefill
        rows = config.decode.slots if decode else 0
        return cls(
            name=model.name,
            blocks=section.blocks(model, block_tokens),
            block_tokens=block_tokens,
            context_tokens=model.context_tokens,
            threads=threads,
            device=transport.device,
            weights=weights_type(model.weights, transport.device),
            kernels=transport.kernels,
            prompts_only=not decode,
            rows=rows,
            tokens=rows + config.decode.chunk_tokens if decode else config.prefill.pass_tokens,
        )

    def load(
        self,
        *,
        buffer: "memoryview | CudaArray | None" = None,
        layers: int | None = None,
        stamp: Callable[[str], None] = lambda phase: None,
    ) -> LanguageModel:
        """Load the model, and run it once. The arguments are those of `LanguageModel.load`."""
        arguments = msgspec.structs.asdict(self)
        name, rows, tokens = (arguments.pop(key) for key in ("name", "rows", "tokens"))
        model = LanguageModel.load(name, buffer=buffer, layers=layers, stamp=stamp, **arguments)
        model.warm_up(rows=rows, tokens=tokens)
        stamp("first pass")
        return model

    @property
    def mark(self) -> Path:
        """The file that says that torch's cache has all that this setup compiles, with this torch, code and GPU."""
        import torch

        from runtime.serving.network import compiler

        gpu = torch.cuda.get_device_name(self.device) if self.device != "cpu" else ""
        code = stamp_of(Path(compiler.__file__).parent)
        key = repr((msgspec.json.encode(self), version("torch"), gpu, code))
        return compiler.cache_directory() / "compiled" / sha256(key.encode()).hexdigest()


class Compilation:
    """The way of a worker's model from eager to compiled programs: `advance` between two steps."""

    def __init__(
        self,
        model: LanguageModel,
        setup: ModelSetup,
        blocks: BlockManager,
        start: "Callable[[ModelSetup], CompilerProcess] | None" = None,
        capture: "Capture | None" = None,
    ) -> None:
        """`start`: starts the process, by default one that runs `compile_programs`. `capture`: see
        `LanguageModel.compile`. Tests pass both; without, a model on a CPU is left as it is."""
        self._model, self._setup, self._blocks, self._capture = model, setup, blocks, capture
        self._process: CompilerProcess | None = None
        self._pieces: Iterator[None] | None = None
        self._wanted = setup.device != "cpu" or start is not None
        if not self._wanted:
            return
        self._scratch = blocks.open([])
        blocks.grow(self._scratch, min(_SCRATCH, blocks.total) * blocks.block_tokens)
        self._pieces = self._compile()
        if not is_compiled(setup):
            self._process = (start or CompilerProcess)(setup)

    @property
    def uncompiled(self) -> bool:
        """Whether a model on a GPU runs uncompiled."""
        return self._wanted and (self._pieces is not None or not self._model.compiled)

    def _compile(self, *, eager: bool = False) -> Iterator[None]:
        setup = self._setup
        return self._model.compile(
            self._scratch.blocks, rows=setup.rows, tokens=setup.tokens, eager=eager, capture=self._capture
        )

    def advance(self) -> None:
        """Do a piece of the work, once the process has ended: up to a second or two, at a start."""
        if self._process is not None:
            code = self._process.poll()
            if code is None:
                return
            if code:
                log.warning("compiling the model for %s failed: %s", self._setup.device, self._process.reason)
                self._pieces = self._compile(eager=code != NO_ROOM)
            self._process.close()
            self._process = None
        if self._pieces is None:
            return
        try:
            ended = next(self._pieces, self) is self
        except Exception as error:  # no memory for a graph, another version of torch: anything
            reason = str(error)[:300]
            log.warning("steps on %s run without graphs, several times slower: %s", self._setup.device, reason)
            ended = True
        if ended:
            self._pieces = None
            self._blocks.close(self._scratch)

    def finish(self) -> None:
        """Wait for the process, and do all pieces: for a standby worker, which serves nobody yet."""
        if self._process is not None:
            self._process.wait()
        while self._pieces is not None:
            self.advance()

    def close(self) -> None:
        if self._process is not None:
            self._process.close()


class CompilerProcess:
    """A process that runs `compile_programs`."""

    def __init__(self, setup: ModelSetup) -> None:
        command = [sys.executable, "-m", "runtime.serving.model.compilation", str(os.getpid())]
        self._errors = os.memfd_create("compiler")
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self._errors)
        assert self._process.stdin is not None
        with self._process.stdin as sent:
            sent.write(msgspec.json.encode(setup))

    def poll(self) -> int | None:
        """Return its exit code (see `main`), None while it runs."""
        return self._process.poll()

    def wait(self) -> None:
        self._process.wait()

    @property
    def reason(self) -> str:
        """The last line that it has written to its standard error."""
        begin = max(0, os.fstat(self._errors).st_size - _REASON_BYTES)
        lines = os.pread(self._errors, _REASON_BYTES, begin).decode(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), f"exit code {self._process.poll()}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._errors)


def compile_programs(setup: ModelSetup) -> bool:
    """Compile what a worker with this setup compiles, into torch's cache, and mark it; of several processes that are
    to do the same one does, and the others wait for it. Return whether torch can; if not, the log says why. Raises as
    `LanguageModel.load`."""
    check_device(setup.device)
    mark = setup.mark
    try:
        mark.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = mark.with_suffix(".lock").open("w")
    except OSError as error:
        log.warning("cannot write %s: %s; the next start compiles again", mark, error.strerror)
        return _compile(setup)
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if mark.exists():
            return True
        compiled = _compile(setup)
        if compiled:
            with suppress(OSError):  # a full disk: the next start compiles again
                mark.touch()
        return compiled


def _compile(setup: ModelSetup) -> bool:
    model = setup.load(layers=_LAYERS)
    for _ in model.compile(range(min(_SCRATCH, setup.blocks)), rows=setup.rows, tokens=setup.tokens):
        pass
    return model.compiled


def is_compiled(setup: ModelSetup) -> bool:
    """Return whether torch's cache has all that a worker with this setup compiles."""
    try:
        return setup.mark.exists()
    except (ModelError, OSError):  # there is no cache, or it cannot be read
        return False


def main() -> int:
    """Run the process. Return its exit code: 0, 1 if torch cannot compile, `NO_ROOM`, or another of a typed error. The
    last line of its standard error says what failed."""
    die_with_parent(int(sys.argv[1]))
    try:
        return 0 if compile_programs(msgspec.json.decode(sys.stdin.buffer.read(), type=ModelSetup)) else 1
    except TrinityError as error:
        print(error.message, file=sys.stderr)
        return NO_ROOM if isinstance(error, ResourceBusy) else error.exit_code


if __name__ == "__main__":
    sys.exit(main())
