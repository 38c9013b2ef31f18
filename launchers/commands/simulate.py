"""`trinity simulate`: replay of a trace on a simulated node, or search of the best split of GPUs (--plan).
`trinity calibrate`: measurement of the service times that it needs.
"""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from runtime.errors import ConfigError, UsageError
from runtime.node.worker_config import PoolPlacement
from runtime.simulator.traces import MAX_REQUESTS

if TYPE_CHECKING:
    from runtime.simulator.plan import Plan
    from runtime.simulator.result import Result


def simulate_node(
    config: Annotated[Path, typer.Option(readable=False, help="Configuration file of the node (TOML).")],
    trace: Annotated[
        Path, typer.Option(readable=False, help="Trace file: Azure .csv, Mooncake or RAGPulse .jsonl[.gz].")
    ],
    policy: Annotated[str, typer.Option(help="Pool policy: configured, fixed:r, trinity or paper")] = "configured",
    placement: Annotated[
        PoolPlacement | None, typer.Option(help="Placement of the pool.", show_default="pool.placement")
    ] = None,
    rate: Annotated[float, typer.Option(help="Scale the trace to this rate in requests/s; 0: as is.", min=0)] = 0.0,
    limit: Annotated[int, typer.Option(help="Maximum number of requests to replay.", min=2)] = MAX_REQUESTS,
    times: Annotated[
        Path | None,
        typer.Option(
            help='Service times: a file (.json), or "h100-8b": data sheets, a larger model.', show_default="an H200's"
        ),
    ] = None,
    tensor_parallel: Annotated[
        int, typer.Option(help="GPUs of a model worker, which add up activations twice a layer.", min=1, max=8)
    ] = 1,
    experts: Annotated[
        int,
        typer.Option(
            help="Experts of a token, of a model spread over the node's GPUs: an independent pool displaces some to "
            "another node; 0: a dense model.",
            min=0,
            max=64,
        ),
    ] = 0,
    ttft: Annotated[
        float | None, typer.Option(help="SLO: time to first token, in seconds.", show_default="slo.ttft_s")
    ] = None,
    tpot: Annotated[
        float | None,
        typer.Option(help="SLO: mean time per output token, in seconds.", show_default="slo.tpot_s"),
    ] = None,
    probe_every: Annotated[int, typer.Option(help="Tokens between probes; 0 disables them.", min=0)] = 32,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Output directory for result.json, with samples over time, or plan.json.")
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Search for the best split of GPUs and placement.")] = False,
    gpus: Annotated[int, typer.Option(help="Number of GPUs, for --plan and --experts.", min=2, max=8)] = 8,
) -> None:
    """Replay a trace on a simulated node that runs the production scheduler, router and control law."""
    # Imported here, because --help does not need compiled code.
    from runtime.node.config_file import load_config
    from runtime.simulator.capacity import capacity, demands
    from runtime.simulator.node import simulate
    from runtime.simulator.plan import plans
    from runtime.simulator.policies import PolicyChoice
    from runtime.simulator.setup import Setup
    from runtime.simulator.times.collectives import Collectives
    from runtime.simulator.times.service import ServiceTimes
    from runtime.simulator.traces import at_rate, load_trace, mean_rate
    from runtime.simulator.workload import Slos, Workload

    for option, value in (("--ttft", ttft), ("--tpot", tpot)):
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"{option} is {value:g}; it must be a number above 0")
    settings = load_config(config)
    if placement is not None:
        settings = replace(settings, pool=replace(settings.pool, placement=placement))
    setup = Setup(
        config=settings,
        times=ServiceTimes() if times is None else ServiceTimes.load(times),
        collectives=Collectives(tensor=tensor_parallel, experts=experts),
        workload=Workload(probe_every_tokens=probe_every),
        slos=Slos(
            ttft_s=settings.slo.ttft_s if ttft is None else ttft, tpot_s=settings.slo.tpot_s if tpot is None else tpot
        ),
        policy=PolicyChoice.parse(policy),
        seed=seed,
    )
    arrivals = load_trace(trace, limit)
    if out is not None:
        _make(out)
    console = Console()
    console.print(f"{len(arrivals)} requests, {mean_rate(arrivals):.2f}/s; service times: {setup.times.source}")
    console.print(f"SLO: first token within {setup.slos.ttft_s:g} s, {setup.slos.tpot_s * 1e3:g} ms per later token")
    if settings.handover.mode == "pool":
        console.print('handover.mode is "pool"; every hand-over is simulated as "p2p"')
    if plan:
        candidates = plans(setup, arrivals, gpus, progress=lambda text: console.print(f"  {text}"))
        console.print(_plans_table(candidates))
        if out is not None:
            _write(out / "plan.json", candidates)
        return
    setup = setup.with_collectives(gpus)
    if rate:
        arrivals = at_rate(arrivals, rate)
    needs = demands(setup, arrivals)
    most = capacity(setup, arrivals)
    console.print(
        f"{max(needs, key=lambda name: needs[name])} is the bottleneck: its capacity with full batches is {most:.2f} "
        f"requests/s; the load of this trace is {mean_rate(arrivals) / most:.0%} of it"
    )
    result = simulate(setup, arrivals)
    console.print(_result_table(result))
    if out is not None:
        _write(out / "result.json", result)
        console.print(f"wrote {out}/result.json")


def calibrate_machine(
    config: Annotated[Path, typer.Option(readable=False, help="Configuration file of the node to measure (TOML).")],
    out: Annotated[
        Path,
        typer.Option(help="Output file (.json), for simulate --times.", dir_okay=False, writable=True),
    ],
) -> None:
    """Measure the service times of this machine. Run nothing else on it meanwhile."""
    from runtime.node.config_file import load_config
    from runtime.simulator.times.calibrate import calibrate
    from runtime.simulator.times.service import ServiceTimes

    _make(out.parent)
    console = Console()
    measured = calibrate(load_config(config), ServiceTimes(), lambda text: console.print(f"measuring {text}"))
    measured.save(out)
    console.print(f"wrote {out}: {measured.source}")


def _make(folder: Path) -> None:
    """Create the folder of the output: before minutes of work, which would be lost."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: {folder} cannot be created: {error.strerror}") from error


def _write(path: Path, found: object) -> None:
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2))
    except OSError as error:
        raise ConfigError(f"--out: {path} cannot be written: {error.strerror}") from error


def _result_table(result: "Result") -> Table:
    table = Table(title=f"{result.policy}, pool {result.placement}, {result.sent_per_s:.2f} requests/s sent")
    for name in ("", "met SLO", "p50", "p90", "p99"):
        table.add_column(name, justify="right" if name else "left")
    for name, share, spread in (
        ("TTFT (s)", result.ttft_attainment, result.ttft_s),
        ("TPOT (ms)", result.tpot_attainment, result.tpot_s),
    ):
        unit = 1e3 if "ms" in name else 1.0
        table.add_row(name, f"{share:.1%}", *(f"{value * unit:.2f}" for value in (spread.p50, spread.p90, spread.p99)))
    table.add_row("both", f"{result.attainment:.1%}", f"goodput {result.goodput:.2f}/s", "", "")
    used = {name: f"{value:.0%}" for name, value in result.use.items()}
    reused = f"{result.use['prefix_hits']:.1%}"
    ends = ", ".join(f"{count} {name}" for name, count in sorted(result.outcomes.items()))
    table.caption = (
        f"busy, with the actual batches: prefill {used['prefill']}, decode {used['decode']} of the time "
        f"with {used['decode_slots']} of its slots, pool {used['pool']}, link {used['link']}; "
        f"rows stalled by probes {used['stall']}; prompt tokens reused {reused}; outcomes: {ends}"
    )
    return table


def _plans_table(candidates: "list[Plan]") -> Table:
    table = Table(title="Greatest rate at which 90% of the sent requests meet both SLOs")
    for name in ("placement", "prefill", "decode", "pool", "slots", "busiest", "capacity/s", "rate/s"):
        table.add_column(name, justify="left" if name in ("placement", "busiest") else "right")
    for plan in candidates:
        table.add_row(
            plan.placement, str(plan.prefill), str(plan.decode), str(plan.pool), str(plan.decode_slots),
            plan.busiest, f"{plan.capacity:.2f}", f"{plan.rate:.2f}",
        )  # fmt: skip
    return table
