"""The supervisor: starts the workers of a plan, monitors and restarts them, serves the admin protocol, stops the node.

Its loop: reap ended processes → advance restarts, scaling, reloads → reconcile workers → control loop → serve requests.
Workers are its child processes and die with it; no process of a node outlives its supervisor.
"""

import contextlib
import itertools
import logging
import os
import random
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import get_args

import msgspec
from msgspec.structs import replace

from runtime.errors import EXIT_BUSY, EXIT_CONFIG, EXIT_FAILED, InvalidRequest
from runtime.node.control.loop import ControlLoop
from runtime.node.forking import LISTEN, PRIVATE, STACK
from runtime.node.logs.log import log_directory, log_to_file
from runtime.node.metrics.table import WorkerTable
from runtime.node.placement.gpus import Gpus
from runtime.node.placement.machine import check_host_memory
from runtime.node.placement.plan import NodePlan, WorkerPlan
from runtime.node.run_dir import NodeInfo, RunDir
from runtime.node.startup import StartupTimer, process_age_s
from runtime.node.supervisor.admin import AdminServer, NodeStatus, ScaleReply
from runtime.node.supervisor.backoff import Backoff
from runtime.node.supervisor.forks import COMMAND, Template
from runtime.node.supervisor.lifecycle import HEARTBEAT_S, Lifecycle
from runtime.node.supervisor.listen import listen, listen_private
from runtime.node.supervisor.node_metrics import node_families, worker_status
from runtime.node.supervisor.reload import RollingReload
from runtime.node.supervisor.rolling_restart import RollingRestart
from runtime.node.supervisor.scaling import FIXED_ROLES, ScaleAction, Scaler
from runtime.node.supervisor.signals import Signals
from runtime.node.supervisor.standby import StandbyWorkers
from runtime.node.supervisor.stopping import of_role, set_draining, stop_steps
from runtime.node.supervisor.supervised_worker import (
    Desired,
    Phase,
    SupervisedWorker,
    spawn,
)
from runtime.node.worker import WorkerSpec

_POLL_S = 0.1
log = logging.getLogger("supervisor")


class Supervisor:
    """Supervisor of one node. `run` returns the exit code once the node has stopped.

    `command` starts the template, from which workers are forked; each reads its `WorkerSpec` from standard input as one
    line of JSON.
    """

    def __init__(
        self,
        plan: NodePlan,
        clock: Callable[[], float] = time.monotonic,
        seed: int | None = None,
        command: Sequence[str] = COMMAND,
        device_bytes: Mapping[str, int] | None = None,
        heartbeat_s: float = HEARTBEAT_S,
        poll_s: float = _POLL_S,
    ) -> None:
        """device_bytes: memory that each worker of the plan needs free, where its model or index lies, by name. poll_s:
        how long the loop sleeps while nothing happens that wakes it."""
        self._poll_s = poll_s
        self.plan = plan
        self._device_bytes = {worker.role: (device_bytes or {}).get(worker.name, 0) for worker in plan.workers}
        self._startup = StartupTimer(age_s=process_age_s())
        self._template = Template(command, plan.config.node.start_s, clock)
        self._waiting: dict[str, float] = {}  # since when workers wait for the template's imports
        self._clock = clock
        self._random = random.Random(seed)
        self._epochs: dict[str, int] = {}  # last epoch of each removed worker
        self.workers = [self._make_worker(placement) for placement in plan.workers]
        spares = [self._make_worker(placement, needed=False) for placement in plan.spares]
        self._standbys = StandbyWorkers(spares, self.workers)
        self._lifecycle = Lifecycle(plan.config, self._spawn, clock, self._can_spawn, heartbeat_s)
        tables = {worker.name: worker.table for worker in self.workers}
        self._control_loop = ControlLoop(plan.config, tables)
        self._gpus = Gpus()
        self._restarts = RollingRestart(self.workers)
        self._scaler = Scaler(
            self.workers, plan, add=self._add_worker, remove=self.remove_worker, check_memory=self.check_memory
        )
        self._reload = RollingReload(self.workers, [collection.name for collection in plan.config.collections])
        self._private: socket.socket | None = None  # on which the frontend answers HTTP workers
        self._stop_requests = 0
        self._was_ready = False

    def run(self, on_ready: Callable[[NodeInfo], None] = lambda info: None) -> int:
        """Run the node until it is stopped. `on_ready` is called once, when all workers are ready.

        Returns 0 after an orderly stop, else `EXIT_CONFIG` if a worker cannot run with this configuration, `EXIT_BUSY`
        if a worker lacked a resource that may be free later, else 1.
        """
        # Before the run directory exists: a stop during the start removes it too.
        self._signals = Signals(self.request_stop, self._request_drain)
        run_dir = RunDir.acquire(Path(self.plan.run_dir))
        try:
            with (
                log_to_file(self.plan, "supervisor"),
                listen(self.plan.config.http) as listener,
                contextlib.closing(AdminServer(self.plan.endpoint("control"))) as control,
                contextlib.ExitStack() as stack,
            ):
                self._info, self._listener = self._describe(listener), listener
                if self.plan.of_role("http"):
                    self._private = stack.enter_context(listen_private(self.plan.http_socket("frontend-0")))
                run_dir.write(self._info)
                return self._serve(control, on_ready)
        finally:
            self._kill_all()
            run_dir.release()
            for worker in self._all:
                worker.table.close()
                worker.read_stacks()

    @property
    def _all(self) -> tuple[SupervisedWorker, ...]:
        """Workers and standby workers."""
        return (*self.workers, *self._standbys.spares)

    def _serve(self, control: AdminServer, on_ready: Callable[[NodeInfo], None]) -> int:
        self._startup.mark("imports and checks")
        log.info("starts %d workers after %s", len(self.workers), self._startup)
        while True:
            self._lifecycle.reap(self._all)
            if fatal := [worker.exit_code for worker in self.workers if worker.phase is Phase.FATAL]:
                self._stop_all(control)
                return next((code for code in (EXIT_CONFIG, EXIT_BUSY) if code in fatal), EXIT_FAILED)
            if self._stop_requests:
                self._stop_all(control)
                return 0
            self._restarts.step(self._clock())
            if self._scaler.step():
                self._control_loop.pause_planner(self._clock())
            self._reload.step()
            self._template.receive()
            spares = self._standbys.step(may_start=self._was_ready)
            self._lifecycle.reconcile((*self.workers, *spares))
            self._template.import_wanted()
            self._control_loop.step(self._clock())
            self._flip_by_plan()
            if not self._was_ready and all(worker.phase is Phase.READY for worker in self.workers):
                self._was_ready = True
                on_ready(self._info)
                # their next processes start sooner
                self._template.load(worker.placement.role for worker in self.workers)
            self._wait(control)
            self._serve_admin(control)

    # ---- steps of the loop

    def _flip_by_plan(self) -> None:
        """Carry out the planner's move, if it has one. It is consulted only while every worker is ready."""
        now_s = self._clock()
        if self._scaler.in_progress or (move := self._control_loop.plan(now_s)) is None:
            return
        try:
            self._scaler.request("flip", move.role)
        except InvalidRequest as error:
            log.warning("the planner's flip of a %s worker is refused: %s", move.role, error)
            self._control_loop.pause_planner(now_s)

    def check_memory(self, added: WorkerPlan) -> None:
        """Raise `InvalidRequest` unless an added worker's GPU, or the host, has the memory, or a standby worker takes
        its place."""
        if self._standbys.is_loaded_for(added):
            return
        needed = self._device_bytes.get(added.role, 0)
        if added.device == "cpu":
            check_host_memory(needed, added.name)
        else:
            self._gpus.check_free(added.gpu, needed, added.name)

    def _wait(self, control: AdminServer) -> None:
        """Sleep until an admin request, a process exit or a signal arrives, or `poll_s` has passed."""
        with selectors.DefaultSelector() as selector:
            for source in (control, self._signals, *([self._template] if self._template.fileno() >= 0 else ())):
                selector.register(source, selectors.EVENT_READ)
            selector.select(0.0 if control.pending() else self._poll_s)
        self._signals.clear()

    def _serve_admin(self, control: AdminServer) -> None:
        encode = msgspec.json.encode
        control.serve(
            {
                "status": lambda _: encode(self.status()),
                "metrics": lambda _: self.metrics_text().encode(),
                "stop": self._answer_stop,
                "draining on": lambda _: self._set_draining(True),
                "draining off": lambda _: self._set_draining(False),
                "restart": lambda name: self._restart(name).encode(),
                "reload": lambda collection: encode(self._reload.request(collection)),
                "reloaded": lambda _: encode(self._reload.status()),
                **{action: partial(self._scale, action) for action in get_args(ScaleAction)},
            }
        )

    def _answer_stop(self, _: str) -> bytes:
        self._request_drain()
        return b"{}"

    def _set_draining(self, draining: bool) -> bytes:
        """Set whether the node reports that it drains. The knob survives a restart of the processes."""
        log.info("draining, as requested by an operator" if draining else "no longer draining")
        set_draining(self.workers, draining)
        return b"{}"

    def _scale(self, action: ScaleAction, target: str) -> bytes:
        try:
            return msgspec.json.encode(ScaleReply(self._scaler.request(action, target)))
        except InvalidRequest as error:
            return msgspec.json.encode(ScaleReply((), error.message))

    @property
    def _frontend(self) -> WorkerTable:
        """The table of the node's only frontend."""
        return of_role(self.workers, "frontend")[0].table

    def _restart(self, name: str) -> str:
        error = self._restarts.request(name)
        if not name:
            self._standbys.restart_all()
            self._template.renew()
        return error

    def _can_spawn(self, worker: SupervisedWorker) -> bool:
        """Whether `_spawn` would not wait for the template's imports."""
        if worker.may_use_standby and self._standbys.is_loaded_for(worker.placement):
            return True
        if self._template.can_fork(worker.placement.role):
            return True
        self._waiting.setdefault(worker.name, self._clock())
        return False

    def _spawn(self, worker: SupervisedWorker, use_standby: bool) -> None:
        """Give a worker a process: a standby worker's if there is one and it is permitted, else a new one. Raises
        `OSError`."""
        worker.read_stacks()  # close the file of a start that failed
        if use_standby and self._standbys.assign(worker):
            assert worker.process is not None
            worker.process.write(msgspec.json.encode(self._spec(worker)) + b"\n", last=True)
            return
        worker.stack_fd = os.memfd_create(f"trinity-stacks-{worker.name}")
        descriptors = {STACK: worker.stack_fd}
        if worker.placement.role in ("frontend", "http"):
            descriptors[LISTEN] = self._listener.fileno()
        if self._private is not None and worker.placement.role == "frontend":
            descriptors[PRIVATE] = self._private.fileno()
        worker.process = spawn(self._template, self._spec(worker), worker.placement, descriptors)

    def _spec(self, worker: SupervisedWorker) -> WorkerSpec:
        now = self._clock()
        return WorkerSpec(
            plan=self.plan,
            worker=worker.name,
            epoch=worker.epoch,
            table=worker.table.reference,
            supervisor_pid=os.getpid(),
            node_ready=self._was_ready,
            last_exit=worker.last_exit,
            waited_s=now - self._waiting.pop(worker.name, now),
        )

    def _make_worker(self, placement: WorkerPlan, needed: bool = True) -> SupervisedWorker:
        table = WorkerTable.create(placement.role, placement.name, self.plan.config.slo)
        epoch = self._epochs.get(placement.name, 0)
        return SupervisedWorker(placement, table, Backoff(self._random), needed, epoch=epoch)

    def _add_worker(self, placement: WorkerPlan) -> None:
        """Add a worker; `reconcile` starts it in this iteration of the loop."""
        worker = self._make_worker(placement, needed=False)
        self.workers.append(worker)
        self._control_loop.add_worker(worker.table)
        self._update_plan()

    def remove_worker(self, worker: SupervisedWorker) -> None:
        """Remove a worker whose process has ended."""
        self.workers.remove(worker)
        self._waiting.pop(worker.name, None)
        self._epochs[worker.name] = worker.epoch
        self._control_loop.remove_worker(worker.table)
        worker.table.close()
        self._update_plan()

    def _update_plan(self) -> None:
        workers = [worker.placement for worker in self.workers]
        # Drained ones of fixed roles may be added back: workers that start meanwhile need their endpoints.
        absent = [placement for placement in self._scaler.vacant if placement.role in FIXED_ROLES]
        self.plan = replace(self.plan, workers=(*workers, *absent))

    # ---- stopping

    def request_stop(self) -> None:
        """Drain and stop; a second request stops at once."""
        self._stop_requests += 1

    def _request_drain(self) -> None:
        """Drain and stop, on `trinity stop` or SIGHUP (kernel and shell send it): more do not shorten the drain."""
        self._stop_requests = max(1, self._stop_requests)

    def _stop_all(self, control: AdminServer) -> None:
        """Drain role by role within `drain_s` in all; a second signal, or the deadline, kills the rest."""
        log.info("draining (a second signal stops at once)")
        self._listener.close()  # once their copies are closed too, new connections are refused instead of queued
        if self._private is not None:
            self._private.close()
        self._template.close()  # no worker starts any more
        deadline = self._clock() + self.plan.config.node.drain_s
        requests = max(1, self._stop_requests)
        for spare in self._standbys.spares:
            spare.desired = Desired.STOP
        self._lifecycle.reconcile(self._standbys.spares)
        for group, waits in stop_steps(self.workers, self._lifecycle, by=deadline):
            while waits():
                self._wait(control)
                self._serve_admin(control)
                self._lifecycle.reap(self._all)
                late, forced = self._clock() > deadline, self._stop_requests > requests
                if late or forced:
                    within = f"within {self.plan.config.node.drain_s:g} s"
                    log.warning("not drained %s: killing", within if late else "yet, and a second signal arrived")
                    self._kill_all()
                    return
                self._lifecycle.reconcile(group)

    def _kill_all(self) -> None:
        self._template.close()
        for worker in self._all:
            worker.kill_group()
        for worker in self._all:
            if worker.process is not None:
                worker.process.wait(timeout=30)
                worker.process.close_input()
                worker.process = None

    # ---- status and metrics

    def _describe(self, listener: socket.socket) -> NodeInfo:
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        return NodeInfo(
            name=self.plan.config.node.name,
            pid=os.getpid(),
            url=f"http://{shown}:{port}",
            control=self.plan.endpoint("control"),
            pools=tuple(self.plan.endpoint(pool.name) for pool in self.plan.of_role("pool")),
            collections=tuple(collection.name for collection in self.plan.config.collections),
            logs=str(log_directory(self.plan)),
        )

    def status(self) -> NodeStatus:
        """Return the node's status, as `trinity status` shows it."""
        now_s = self._clock()
        return NodeStatus(
            info=self._info,
            stopping=bool(self._stop_requests),
            workers=tuple(worker_status(worker, now_s) for worker in self.workers),
            spares=tuple(worker_status(spare, now_s) for spare in self._standbys.spares),
            draining=self._frontend.knob("draining") >= 1,
        )

    def metrics_text(self) -> str:
        """Return all metrics of the node in Prometheus's text format."""
        # Imported here: Prometheus's client is not needed until someone reads metrics, and workers start sooner.
        from runtime.node.metrics.exporter import engine_families, render, table_families, vllm_families

        config = self.plan.config
        tables = {worker.name: worker.table for worker in self.workers}
        engines = {engine.name: self.plan.engine_metrics(engine.name) for engine in self.plan.of_role("engine")}
        families = itertools.chain(
            table_families(tables),
            node_families(config, [worker.placement for worker in self.workers], self.status()),
            self._control_loop.families(),
            self._gpus.families(),
            engine_families(engines),
            () if engines else vllm_families(tables.values()),  # an engine exports its own
        )
        model_name = Path(config.model.name).name if config.model else ""
        return render(families, {"node": config.node.name, "model_name": model_name})
