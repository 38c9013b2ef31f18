"""Ray Serve in front of nodes (the extra `ray`): each replica starts a node, forwards requests to it, and stops it.

serve run launchers.fleet.ray_serve:nodes config=/etc/trinity/node.toml most=4
"""

import asyncio
import math
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

import aiohttp
from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from runtime.errors import TrinityError, Unavailable
from runtime.node.config_file import load_config
from runtime.node.metrics.worker_metrics import DecodeMetrics, FrontendMetrics, PrefillMetrics
from runtime.node.placement.plan import default_run_dir
from runtime.node.run_dir import find_node
from runtime.serving.http.middleware import BodyMemory, bounded_body, error_response

_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]
_NOT_FORWARDED = ("/drain", "/metrics")  # they concern one node
_HOP_BY_HOP = {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "proxy-connection"}
_SET_BY_RAY = _HOP_BY_HOP | {"date", "server", "x-request-id"}  # Ray sets them; the id is the same
_POLL_S = 0.2
_HEALTH_S = 5.0
_STOP_S = 120.0
_MAX_ONGOING = 4096  # above the node's own limits, which produce proper errors
_GAUGES = {
    "waiting": (str(PrefillMetrics.WAITING), str(DecodeMetrics.WAITING)),
    "in_flight": (str(FrontendMetrics.IN_FLIGHT),),
}


class Fleet(BaseModel):
    """Arguments of the application.

    config: the nodes' TOML file, at this path on each machine; each replica's node gets its own name and port.
    least, most: number of nodes. target: requests in flight per node. unavailable_s: how long /health may fail before
    Ray replaces the node, whose supervisor restarts workers itself. gpus: GPUs that Ray reserves per node.
    look_back_s: window of the autoscaling metrics.
    """

    model_config = ConfigDict(extra="forbid")

    config: str
    least: Annotated[int, Field(ge=1, le=1024)] = 1
    most: Annotated[int, Field(ge=1, le=1024)] = 1
    target: Annotated[float, Field(gt=0, le=1e6)] = 16.0
    gpus: Annotated[float, Field(ge=0, le=64)] = 0.0
    unavailable_s: Annotated[float, Field(ge=0, le=86_400)] = 120.0
    look_back_s: Annotated[float, Field(ge=1, le=3600)] = 30.0


def nodes(fleet: Fleet) -> serve.Application:
    """Return the Ray Serve application. Raises `ConfigError` for an invalid configuration file."""
    path = Path(fleet.config).resolve()
    load_config(path)
    scaling = AutoscalingConfig(
        min_replicas=fleet.least,
        initial_replicas=fleet.least,
        max_replicas=max(fleet.least, fleet.most),
        target_ongoing_requests=fleet.target,
        look_back_period_s=fleet.look_back_s,
        metrics_interval_s=min(10.0, fleet.look_back_s / 2),
        upscale_delay_s=fleet.look_back_s,
        policy=AutoscalingPolicy(policy_function=by_load),
    )
    deployed = serve.deployment(
        serve.ingress()(_Node),
        name="trinity",
        autoscaling_config=scaling,
        ray_actor_options={"num_gpus": fleet.gpus},
        max_ongoing_requests=_MAX_ONGOING,
        health_check_period_s=_HEALTH_S,
        graceful_shutdown_timeout_s=_STOP_S,
    )
    return deployed.bind(str(path), fleet.unavailable_s)


def by_load(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Autoscaling policy: enough nodes for the target in flight each, and one more while requests wait on all nodes."""
    metrics = context.aggregated_metrics or {}
    waiting = metrics.get("waiting", {}).values()
    in_flight = sum(metrics.get("in_flight", {}).values()) + (context.total_queued_requests or 0.0)
    desired = math.ceil(in_flight / context.config.target_ongoing_requests)
    if len(waiting) >= context.current_num_replicas and min(waiting, default=0.0) >= 1:
        desired = max(desired, context.current_num_replicas + 1)
    return max(desired, 1), {}


class _Node:
    """A replica: starts a node and forwards requests to it."""

    async def __init__(self, config: str, unavailable_s: float) -> None:  # type: ignore[misc]  # Ray awaits it
        self._unavailable_s = unavailable_s
        name = f"ray-{serve.get_replica_context().replica_id.unique_id}"
        options = ["--config", config, "--name", name, "--port", "0", "--quiet", "--with-parent", str(os.getpid())]
        self._process = subprocess.Popen([sys.executable, "-m", "launchers.main", "serve", *options])
        self._client = aiohttp.ClientSession(
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=2.0),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),  # below the node's 75 s
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._bodies = BodyMemory()
        self._url = await self._wait_ready(load_config(Path(config), name).node.run_dir or default_run_dir(name))
        self._healthy_at = time.monotonic()
        self._watch = asyncio.create_task(self._exit_with_node())

    def __serve_build_asgi_app__(self) -> Starlette:
        return Starlette(routes=[Route("/{path:path}", self._forward, methods=_METHODS)])

    # ---- interface of Ray Serve

    async def check_health(self) -> None:
        """Raise `Unavailable` for a node that has been unavailable too long: Ray replaces it after three failures."""
        if await self._healthy(self._url):
            self._healthy_at = time.monotonic()
        elif (failing_s := time.monotonic() - self._healthy_at) > self._unavailable_s:
            raise Unavailable(f"/health has failed for {failing_s:.0f} s, the limit is {self._unavailable_s:g} s")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the node's waiting requests and all in flight; {} if it does not answer."""
        try:
            async with self._client.get(f"{self._url}/metrics") as answer:
                answer.raise_for_status()
                series = [line.rsplit(" ", 1) for line in (await answer.text()).splitlines() if line[:1] != "#"]
        except aiohttp.ClientError:
            return {}
        return {key: sum(float(value) for of, value in series if of.split("{")[0] in _GAUGES[key]) for key in _GAUGES}

    async def __del__(self) -> None:
        """Stop the node: Ray calls this once all its requests have ended."""
        self._watch.cancel()
        self._process.terminate()
        await asyncio.to_thread(self._process.wait)  # takes drain_s at most
        await self._client.close()

    # ---- the node

    async def _wait_ready(self, run_dir: str | Path) -> str:
        """Wait until the node is ready; return its URL. Raises `Unavailable` if it exits first."""
        while self._process.poll() is None:
            await asyncio.sleep(_POLL_S)
            try:
                node = find_node(Path(run_dir))
            except Unavailable:
                continue
            if node.pid == self._process.pid and await self._healthy(node.url):
                return node.url
        raise Unavailable(f"the node exited with {self._process.returncode} before it was ready")

    async def _exit_with_node(self) -> None:
        """Exit with the node, so that Ray routes requests to other replicas."""
        while self._process.poll() is None:
            await asyncio.sleep(_POLL_S)
        os._exit(1)

    async def _healthy(self, url: str) -> bool:
        try:
            async with self._client.get(f"{url}/health", timeout=aiohttp.ClientTimeout(2.0)) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def _forward(self, request: Request) -> Response:
        """Forward a request unchanged and stream the response."""
        if request.url.path in _NOT_FORWARDED:
            return Response(status_code=404)
        headers = [(name, value) for name, value in request.headers.items() if name not in _HOP_BY_HOP]
        headers.append(("x-forwarded-for", request.client.host if request.client else "unknown"))
        url = f"{self._url}{request.scope['path']}" + (f"?{request.url.query}" if request.url.query else "")
        try:
            body = await bounded_body(request, self._bodies)
        except TrinityError as error:
            return error_response(error)
        try:
            answer = await self._client.request(
                request.method, url, headers=headers, data=body or None, allow_redirects=False
            )
        except aiohttp.ClientError as error:
            unavailable = Unavailable(f"the node does not answer: {type(error).__name__}")
            return error_response(unavailable)
        response = StreamingResponse(_body(answer), answer.status)
        received = [(name.decode("latin-1").lower(), value) for name, value in answer.raw_headers]
        response.raw_headers = [(name.encode(), value) for name, value in received if name not in _SET_BY_RAY]
        return response


async def _body(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Iterate over the body. Closing the connection cancels the request at the node if the client has gone."""
    try:
        async for part in answer.content.iter_any():
            yield part
    finally:
        answer.close()
