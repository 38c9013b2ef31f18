"""The first screen: is the node up and does it answer in time; then where time goes, and what is close to full."""

from typing import Any

from dashboards.grafana import Json, Panel, Query, Row, dashboard, label_variable

UID = "trinity-overview"
_RATE = "$__rate_interval"


def overview() -> Json:
    """The overview dashboard, from the metrics that a node exports."""
    worker = label_variable("worker", "Worker", "trinity_worker_up", "worker")
    return dashboard(UID, "Trinity: overview", [_answers(), _stages(), _pool(), _saturation(), _workers()], [worker])


def _rate(counter: str) -> str:
    return f"sum(rate({counter}[{_RATE}]))"


def _quantile(q: float, histogram: str) -> str:
    return f"histogram_quantile({q}, sum by (le) (rate({histogram}_bucket[{_RATE}])))"


def _percentiles(title: str, description: str, histogram: str, width: int = 8) -> Panel:
    queries = [Query(_quantile(q, histogram), f"p{round(100 * q)}") for q in (0.5, 0.95, 0.99)]
    return Panel("timeseries", title, description, queries, "s", width)


def _tile(title: str, description: str, expr: str, unit: str, **look: Any) -> Panel:
    return Panel("stat", title, description, [Query(expr)], unit, width=4, height=4, **look)


def _answers() -> Row:
    # A request ends in exactly one of these.
    ended = " + ".join(_rate(f"trinity_requests_{how}_total") for how in ("finished", "cancelled", "failed"))
    failed = f"{_rate('trinity_requests_failed_total')} / ({ended})"
    tpot = "trinity_request_time_per_output_token_seconds"
    alarm = ((0, "green"), (0.001, "orange"), (0.01, "red"))
    return Row(
        "Answers",
        [
            _tile("Requests", "Requests that ended, a second", ended, "reqps"),
            _tile("Failed", "Share that ended with an error", failed, "percentunit", thresholds=alarm),
            _tile("TTFT p95", "Time to first token", _quantile(0.95, "trinity_time_to_first_token_seconds"), "s"),
            _tile("TPOT p95", "Mean time per output token of a request", _quantile(0.95, tpot), "s"),
            _tile("Tokens", "Generated tokens a second", _rate("trinity_generation_tokens_total"), "short"),
            _tile(
                "Workers not ready",
                "Workers of the plan that do not serve",
                "sum(1 - trinity_worker_up)",
                "short",
                thresholds=((0, "green"), (1, "red")),
            ),
        ],
    )


def _stages() -> Row:
    parts = ("queue_time", "embed_time", "retrieval_time", "prefill_time", "handover_time")
    means = [
        Query(
            f"{_rate(f'trinity_request_{part}_seconds_sum')} / {_rate(f'trinity_request_{part}_seconds_count')}",
            part.removesuffix("_time"),
        )
        for part in parts
    ]
    return Row(
        "Where the time goes",
        [
            Panel("timeseries", "TTFT by stage (mean)", "Stages before the first token", means, "s", 8, stacked=True),
            _percentiles("Time to first token", "Frontend to first token", "trinity_time_to_first_token_seconds"),
            _percentiles("Time per output token", "Mean of a request", "trinity_request_time_per_output_token_seconds"),
        ],
    )


def _pool() -> Row:
    queues = [Query(f"sum(trinity_pool_queue_{stage})", stage) for stage in ("prefill", "decode")]
    queries = [Query(_rate(f"trinity_pool_queries_{stage}_total"), stage) for stage in ("prefill", "decode")]
    return Row(
        "Vector pool",
        [
            Panel("timeseries", "Queries", "Queries received, a second", queries, "reqps", 6),
            Panel("timeseries", "Queue depth", "Queries that wait for a slot", queues, "short", 6),
            _percentiles("Prefill wait", "From enqueue to slot", "trinity_pool_wait_prefill_seconds", 6),
            _percentiles("Decode wait", "From enqueue to slot", "trinity_pool_wait_decode_seconds", 6),
        ],
    )


def _saturation() -> Row:
    return Row(
        "Saturation",
        [
            Panel(
                "timeseries",
                "Pool slots in use",
                "Slots of the running batch",
                [Query("sum(trinity_pool_active_slots) / sum(trinity_pool_slots)", "pool")],
                "percentunit",
                8,
            ),
            Panel(
                "timeseries",
                "KV slots in use",
                "Share of decode slots",
                [Query('trinity_kv_cache_usage_perc{worker=~"$worker"}', "{{worker}}")],
                "percentunit",
                8,
            ),
            Panel(
                "timeseries",
                "Waiting and running",
                "Requests in prefill and decode",
                [
                    Query("sum(trinity_prefill_waiting)", "waiting for prefill"),
                    Query("sum(trinity_prefill_running)", "in prefill"),
                    Query("sum(trinity_num_requests_waiting)", "waiting for decode"),
                    Query("sum(trinity_num_requests_running)", "decoding"),
                ],
                "short",
                8,
            ),
        ],
    )


def _workers() -> Row:
    def of(metric: str) -> list[Query]:
        return [Query(f'{metric}{{worker=~"$worker"}}', "{{worker}}")]

    return Row(
        "Workers",
        [
            Panel("timeseries", "Up", "1 while the worker is ready", of("trinity_worker_up"), "short", 6),
            Panel(
                "timeseries",
                "Heartbeat age",
                "Since the loop last ran",
                of("trinity_worker_heartbeat_age_seconds"),
                "s",
                6,
            ),
            Panel(
                "timeseries",
                "Restarts",
                "In the last five minutes",
                [Query('increase(trinity_worker_restarts_total{worker=~"$worker"}[5m])', "{{worker}}")],
                "short",
                6,
            ),
            Panel("timeseries", "Memory", "Resident memory", of("trinity_worker_resident_memory_bytes"), "bytes", 6),
        ],
    )
