"""A model on a GPU serves with eager layers until its programs are compiled: over CPU tensors, with an injected
compiler."""

import fcntl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec import structs

from runtime.serving.kv.blocks import BlockManager
from runtime.serving.model.compilation import (
    NO_ROOM,
    Compilation,
    CompilerProcess,
    ModelSetup,
    compile_programs,
    is_compiled,
)

torch = pytest.importorskip("torch", reason="the model needs the extra [llm]")

from runtime.serving.model.language_model import Chunk, LanguageModel  # noqa: E402
from runtime.serving.network.decoder import Programs  # noqa: E402
from tests.serving.replays import EndsWhenTold, Replays  # noqa: E402

BLOCKS = 40


class Compiler:
    """torch's compiler: its programs are the eager ones, and are counted."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Programs:
        def counted(program: Callable[..., object]) -> Callable[..., object]:
            def run(*arguments: object) -> object:
                self.calls += 1
                return program(*arguments)

            return run

        return Programs(*map(counted, Programs()))  # type: ignore[arg-type]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compiler:
    compiler = Compiler()
    monkeypatch.setattr("runtime.serving.network.llama.compiled_programs", compiler)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    return compiler


@pytest.fixture
def setup(tiny_directory: Path) -> ModelSetup:
    return ModelSetup(
        name=str(tiny_directory), blocks=BLOCKS, block_tokens=16, context_tokens=512, device="cpu", weights="float32",
        kernels="gathered", rows=4, tokens=100,
    )  # fmt: skip


class Worker:
    """A model with its blocks, on its way to compiled programs, and a sequence that it generates."""

    def __init__(self, setup: ModelSetup) -> None:
        self.model, self.blocks = setup.load(), BlockManager(BLOCKS, 16, b"")
        self.process, self.capture = EndsWhenTold(), Replays()
        self.compilation = Compilation(self.model, setup, self.blocks, self.process, self.capture)
        self._table, self.tokens = self.blocks.open([]), [1, 2, 3]
        self.blocks.grow(self._table, 512)
        self._written = 0

    def step(self) -> None:
        tokens = self.tokens[self._written :]
        logits = self.model.forward([Chunk(self._table.blocks, self._written, tokens)])
        self._written = len(self.tokens)
        self.tokens.append(int(logits[0].argmax()))

    def finish(self) -> None:
        """Do all pieces, a step after each."""
        while self.compilation.uncompiled:
            self.compilation.advance()
            self.step()


def alone(model: LanguageModel, count: int) -> list[int]:
    """Return what an eager model generates."""
    tokens = [1, 2, 3]
    while len(tokens) < count:
        tokens.append(int(model.forward([Chunk(range(32), 0, tokens)])[0].argmax()))
    return tokens


def test_a_model_serves_eagerly_while_a_process_compiles_and_switches_between_two_steps(
    compiler: Compiler, setup: ModelSetup
) -> None:
    worker = Worker(setup)
    assert worker.process.started
    assert worker.blocks.held == 32 + 4, "blocks that pieces write to"
    for _ in range(3):
        worker.compilation.advance()
        worker.step()
    assert compiler.calls == worker.capture.captures == 0
    assert worker.compilation.uncompiled
    worker.process.code = 0
    worker.finish()
    assert worker.process.closed
    assert compiler.calls > 0
    assert worker.blocks.held == 32
    captures, replays, calls = worker.capture.captures, worker.capture.replays, compiler.calls
    worker.step()
    assert worker.capture.captures == captures, "the sizes that it runs have been captured"
    assert worker.capture.replays == replays + 1
    assert compiler.calls > calls, "compiled programs"
    assert worker.tokens == alone(setup.load(), len(worker.tokens)), "no piece writes to a sequence's blocks"


def test_a_model_that_cannot_be_compiled_stays_eager_with_one_warning(
    compiler: Compiler, setup: ModelSetup, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(setup)
    worker.process.code = 1
    for _ in range(20):
        worker.compilation.advance()
        worker.step()
    assert compiler.calls == 0
    assert worker.compilation.uncompiled
    assert worker.capture.replays > 0, "eager steps are captured"
    assert [record.message for record in caplog.records] == ["compiling the model for cpu failed: no compiler here"]
    assert worker.tokens == alone(setup.load(), len(worker.tokens))


def test_a_worker_that_has_no_memory_for_its_graphs_goes_on_without_them(
    compiler: Compiler, setup: ModelSetup, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(setup)
    worker.capture.room = 3
    worker.process.code = 0
    for _ in range(20):
        worker.compilation.advance()
        worker.step()
    assert worker.capture.captures == 3
    assert worker.compilation.uncompiled
    assert worker.blocks.held == 32, "the blocks that pieces write to are free again"
    assert [record.message for record in caplog.records] == [
        "steps on cpu run without graphs, several times slower: out of memory"
    ]
    assert worker.tokens == alone(setup.load(), len(worker.tokens))


def test_without_memory_for_two_more_layers_the_worker_compiles_between_its_steps(
    compiler: Compiler, setup: ModelSetup
) -> None:
    worker = Worker(setup)
    worker.process.code = NO_ROOM
    worker.finish()
    assert compiler.calls > 0


def test_a_setup_whose_programs_are_in_the_cache_starts_no_process(compiler: Compiler, setup: ModelSetup) -> None:
    setup.mark.parent.mkdir(parents=True)
    setup.mark.touch()
    worker = Worker(setup)
    assert not worker.process.started
    worker.finish()
    assert compiler.calls > 0


def test_what_is_compiled_is_marked_for_its_setup_alone(
    compiler: Compiler, setup: ModelSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.serving.network.decode_graphs.CudaCapture", Replays)
    monkeypatch.setattr("runtime.serving.network.prefill_graphs.CudaCapture", lambda warm_up: Replays())
    assert not is_compiled(setup)
    assert compile_programs(setup)
    assert is_compiled(setup)
    assert not is_compiled(structs.replace(setup, blocks=BLOCKS + 1)), "programs are compiled for a number of blocks"
    monkeypatch.setattr("runtime.serving.network.llama.compiled_programs", lambda: 1 / 0)
    assert not compile_programs(structs.replace(setup, rows=5))
    assert not is_compiled(structs.replace(setup, rows=5))


def test_of_two_processes_with_one_setup_one_compiles_and_the_other_waits_for_it(
    compiler: Compiler, setup: ModelSetup
) -> None:
    setup.mark.parent.mkdir(parents=True)
    with setup.mark.with_suffix(".lock").open("w") as first, ThreadPoolExecutor(1) as threads:
        fcntl.flock(first, fcntl.LOCK_EX)
        second = threads.submit(compile_programs, setup)
        setup.mark.touch()
        fcntl.flock(first, fcntl.LOCK_UN)
        assert second.result(60)
    assert compiler.calls == 0


def test_a_cache_that_can_be_neither_read_nor_written_costs_the_mark_alone(
    compiler: Compiler, setup: ModelSetup, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("runtime.serving.network.decode_graphs.CudaCapture", Replays)
    monkeypatch.setattr("runtime.serving.network.prefill_graphs.CudaCapture", lambda warm_up: Replays())
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / ("x" * 300)))
    assert not is_compiled(setup)
    assert compile_programs(setup)


def test_a_user_without_a_home_directory_has_no_cache(setup: ModelSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert not is_compiled(setup)


def test_a_standby_worker_is_compiled_before_it_replaces_another(compiler: Compiler, setup: ModelSetup) -> None:
    worker = Worker(setup)
    worker.compilation.finish()
    assert not worker.compilation.uncompiled


def test_the_process_says_in_one_line_why_it_failed(setup: ModelSetup, tmp_path: Path) -> None:
    process = CompilerProcess(structs.replace(setup, name=str(tmp_path)))
    process.wait()
    assert process.poll() not in (None, 0)
    assert str(tmp_path) in process.reason
    process.close()
