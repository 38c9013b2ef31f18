"""For every alert, metric series on which it must fire and series on which it must not.

Courses are promtool's: "0+6x400" begins at 0 and grows by 6 a minute, 400 times.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

Series = Mapping[str, str]
MINUTES = 100
"""When most alerts are evaluated: their windows are full by then."""
SIX_HOURS = 400
"""The longest window, and the length of every series that does not end earlier."""
GROWS = f"0+100x{SIX_HOURS}"
NODE = 'node="n"'
WORKER = 'node="n",worker="decode-0"'


def constant(value: float) -> str:
    return f"{value}x{SIX_HOURS}"


def grows(by: float) -> str:
    return f"0+{by}x{SIX_HOURS}"


@dataclass(frozen=True)
class Case:
    fires: Series
    quiet: Series
    labels: Mapping[str, str] = field(default_factory=lambda: {"node": "n"})
    common: Series = field(default_factory=dict)  # series of both
    at_minute: int = MINUTES


_SLO = {f'trinity_slo_objective_ratio{{{NODE},instance="i"}}': constant(0.99)}
_REQUESTS = {f'trinity_slo_requests_total{{{NODE},slo="all",worker="frontend-0"}}': GROWS}


def _violations(course: str) -> Series:
    return {f'trinity_slo_violations_total{{{NODE},slo="all",worker="frontend-0"}}': course}


def _wait(fast: float, slow: float) -> Series:
    """Queries a minute that wait less than 10 ms, and up to 100 ms."""
    name = f'trinity_pool_wait_seconds_bucket{{{NODE},stage="prefill",worker="pool-0"'
    return {
        f'{name},le="0.01"}}': grows(fast),
        f'{name},le="0.1"}}': grows(fast + slow),
        f'{name},le="+Inf"}}': grows(fast + slow),
    }


def _of_worker(metric: str, fires: str, quiet: str) -> Case:
    """Courses of a worker's metric; the alert names the worker."""
    series = f"{metric}{{{WORKER}}}"
    return Case({series: fires}, {series: quiet}, {"node": "n", "worker": "decode-0"})


CASES: dict[str, Case] = {
    "TrinitySLOBurnsFast": Case(
        fires=_violations(grows(20)),
        # An hour ago it burned at this rate; the last ten minutes were good: the short window clears the alert.
        quiet=_violations(f"0+20x{MINUTES - 10} {(MINUTES - 10) * 20}+0x10"),
        labels={"node": "n", "slo": "all"},
        common=_SLO | _REQUESTS,
    ),
    "TrinitySLOBurnsSlowly": Case(
        fires=_violations(grows(7)),
        quiet=_violations(grows(5)),
        labels={"node": "n", "slo": "all"},
        common=_SLO | _REQUESTS,
        at_minute=SIX_HOURS,
    ),
    "TrinityNodeDown": Case(
        fires={'up{job="trinity",instance="i"}': constant(0)},
        quiet={'up{job="trinity",instance="i"}': constant(1), 'up{job="other",instance="i"}': constant(0)},
        labels={"job": "trinity", "instance": "i"},
    ),
    "TrinityWorkerDown": _of_worker("trinity_worker_up", constant(0), f"1x{MINUTES - 1} 0"),
    "TrinityWorkerCannotRun": _of_worker("trinity_worker_failed_starts", constant(3), constant(2)),
    "TrinityCollectionUnavailable": _of_worker("trinity_pool_collections_unavailable", constant(1), constant(0)),
    "TrinityWorkerRestarts": _of_worker("trinity_worker_restarts_total", grows(1), grows(0.1)),
    # It ended before the next scrape; and it ended long ago.
    "TrinityHeartbeatOld": _of_worker(
        "trinity_worker_heartbeat_age_seconds", f"0x{MINUTES - 2} 16 0", f"16x{MINUTES - 4} 14 0 0 0"
    ),
    "TrinityRequestsFail": Case(
        fires={f'trinity_requests_total{{{NODE},outcome="refused"}}': grows(2)},
        quiet={
            f'trinity_requests_total{{{NODE},outcome="cancelled"}}': grows(50),
            f'trinity_requests_total{{{NODE},outcome="invalid"}}': grows(50),  # client errors do not alert
        },
        common={
            f'trinity_requests_total{{{NODE},outcome="finished"}}': GROWS,
            f'trinity_requests_total{{{NODE},outcome="failed"}}': grows(0.5),
        },
    ),
    "TrinityPrefillWaits": Case(
        fires=_wait(fast=50, slow=50),
        quiet=_wait(fast=99, slow=1),
        common={f"trinity_control_wait_target_seconds{{{NODE}}}": constant(0.01)},
    ),
    "TrinityDeadlinesMissed": Case(
        fires={f'trinity_pool_deadline_misses_total{{{NODE},stage="decode"}}': grows(2)},
        quiet={f'trinity_pool_deadline_misses_total{{{NODE},stage="decode"}}': grows(0.5)},
        common={f'trinity_pool_queries_total{{{NODE},stage="decode"}}': GROWS},
    ),
    "TrinityPoolRefuses": Case(
        fires={f'trinity_pool_refused_total{{{NODE},reason="overloaded"}}': grows(1)},
        quiet={
            f'trinity_pool_refused_total{{{NODE},reason="overloaded"}}': constant(9),
            f'trinity_pool_refused_total{{{NODE},reason="invalid_request"}}': grows(9),
        },
    ),
    "TrinityDecodeStalls": Case(
        fires={f"trinity_decode_stall_seconds_total{{{WORKER}}}": grows(40)},
        quiet={f"trinity_decode_stall_seconds_total{{{WORKER}}}": grows(30)},
        common={
            f"trinity_decode_row_seconds_total{{{WORKER}}}": GROWS,
            f"trinity_control_stall_target_ratio{{{NODE}}}": constant(0.25),
        },
    ),
    "TrinityKVFull": Case(
        fires={f"trinity_num_requests_waiting{{{WORKER}}}": constant(3)},
        quiet={f"trinity_num_requests_waiting{{{WORKER}}}": constant(0)},
        labels={"node": "n", "worker": "decode-0"},
        common={f"trinity_kv_cache_usage_perc{{{WORKER}}}": constant(1)},
    ),
    "TrinityNodeDrains": Case(
        fires={f"trinity_node_draining{{{NODE}}}": constant(1)},
        quiet={f"trinity_node_draining{{{NODE}}}": constant(0)},
    ),
    "TrinityModelUncompiled": _of_worker("trinity_model_uncompiled", constant(1), constant(0)),
    "TrinityMemoryLow": Case(
        fires={f"trinity_node_memory_available_bytes{{{NODE}}}": constant(4)},
        quiet={f"trinity_node_memory_available_bytes{{{NODE}}}": constant(6)},
        common={f"trinity_node_memory_bytes{{{NODE}}}": constant(100)},
    ),
}
