"""The supervisor: starts every worker of a plan, watches it, restarts what dies, answers status, and stops all of it.

Its loop: serve the control socket → reap the dead → roll, change → bring each worker nearer to what is desired → tune.
Workers are its children and die with it; nothing of a node outlives its supervisor.
"""

import logging
import os
import random
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from msgspec.structs import replace

from runtime.errors import EXIT_BUSY, EXIT_CONFIG, EXIT_FAILED, InvalidRequest
from runtime.node.control.loop import ControlLoop
from runtime.node.logs.log import log_directory, log_to_file
from runtime.node.metrics.exporter import NodeCollector, engine_families, render, vllm_families
from runtime.node.metrics.table import WorkerTable
from runtime.node.placement.gpus import Gpus
from runtime.node.placement.plan import NodePlan, WorkerPlan
from runtime.node.run_dir import NodeInfo, RunDir
from runtime.node.supervisor.admin import ControlServer, NodeStatus, WorkerStatus, Written
from runtime.node.supervisor.backoff import Backoff
from runtime.node.supervisor.lifecycle import Lifecycle
from runtime.node.supervisor.listen import listen
from runtime.node.supervisor.node_metrics import NodeFigures, node_version, usage_of, usage_of_all
from runtime.node.supervisor.reload import Reloading
from runtime.node.supervisor.rolling_restart import Rolling
from runtime.node.supervisor.scaling import Changes
from runtime.node.supervisor.standby import Standbys
from runtime.node.supervisor.supervised_worker import COMMAND, Child, Desired, Phase, close_input, spawn, tell
from runtime.node.worker import WorkerSpec

_STOP_ORDER = ("frontend", "engine", "prefill", "decode", "pool")  # whoever asks stops before whoever answers
_POLL_S = 0.1

log = logging.getLogger("supervisor")


class Supervisor:
    """Runs one node in this process. `run` returns the exit code once the node has stopped.

    `command` is what runs a worker: it finds its `WorkerSpec` on its standard input, one line of JSON.
    """

    def __init__(
        self,
        plan: NodePlan,
        clock: Callable[[], float] = time.monotonic,
        seed: int | None = None,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self.plan = plan
        self._command = list(command)
        self._clock = clock
        self._random = random.Random(seed)
        self._epochs: dict[str, int] = {}  # the last of each worker that has left
        self.children = [self._child(place) for place in plan.workers]
        self._standbys = Standbys([self._child(place, needed=False) for place in plan.spares], self.children)
        self._lifecycle = Lifecycle(plan.config, self._spawn, clock)
        tables = {child.place.name: child.table for child in self.children}
        self._control_loop = ControlLoop(plan.config, tables)
        self.figures = NodeFigures(plan.config, plan.workers, version=node_version())
        self._gpus = Gpus()
        self._rolling = Rolling(self.children)
        self._changes = Changes(self.children, plan, begin=self._begin, end=self.end)
        self._reloading = Reloading(self.children, [collection.name for collection in plan.config.collections])
        self._stop_signals = 0
        self._announced = False

    def run(self, on_ready: Callable[[NodeInfo], None] = lambda info: None) -> int:
        """Start the node and serve until it is stopped; the exit code. `on_ready` is called once, when all are ready.

        The code is 0 after an orderly stop, `EXIT_CONFIG` if a worker says that it can never run, else
        `EXIT_BUSY` if one lacked what may be free later, else 1.
        """
        self._catch_signals()  # before there is a directory: who stops a node that starts leaves none behind either
        run_dir = RunDir.acquire(Path(self.plan.run_dir))
        try:
            with (
                log_to_file(self.plan, "supervisor"),
                listen(self.plan.config.http) as listener,
                ControlServer(self.plan.endpoint("control")) as control,
            ):
                self._info, self._listener = self._describe(listener), listener
                run_dir.write(self._info)
                return self._serve(control, on_ready)
        finally:
            self._kill_all()
            run_dir.release()
            for child in self._all:
                child.table.close()
                child.take_stacks()

    @property
    def _all(self) -> tuple[Child, ...]:
        """The workers and the standby workers."""
        return (*self.children, *self._standbys.children)

    def _serve(self, control: ControlServer, on_ready: Callable[[NodeInfo], None]) -> int:
        while True:
            self._lifecycle.reap(self._all)
            if fatal := [child.exit_code for child in self.children if child.phase is Phase.FATAL]:
                self._stop_all(control)
                return next((code for code in (EXIT_CONFIG, EXIT_BUSY) if code in fatal), EXIT_FAILED)
            if self._stop_signals:
                self._stop_all(control)
                return 0
            self._rolling.step(self._clock())
            self._changes.step()
            self._reloading.step()
            spares = self._standbys.step(may_start=self._announced)
            self._lifecycle.reconcile((*self.children, *spares))
            self._control_loop.step(self._clock())
            self._plan()
            if not self._announced and all(child.phase is Phase.READY for child in self.children):
                self._announced = True
                on_ready(self._info)
            self._wait(control)
            self._answer(control)

    # ---- the steps of the loop

    def _plan(self) -> None:
        """Flip the worker that the planner wants to move, one at a time: it looks while every worker is ready."""
        if not self._changes.under_way and (move := self._control_loop.plan(self._clock())) is not None:
            try:
                self._changes.ask("flip", move.role)
            except InvalidRequest as error:
                log.warning("the %s worker stays what it is: %s", move.role, error)

    def _wait(self, control: ControlServer) -> None:
        """Until something may have happened: a control message, a child's end, a signal, or a tenth of a second."""
        with selectors.DefaultSelector() as selector:
            selector.register(control.fileno(), selectors.EVENT_READ)
            selector.register(self._wakeup, selectors.EVENT_READ)
            pidfds = [os.pidfd_open(c.process.pid) for c in self._all if c.process and c.process.poll() is None]
            try:
                for fd in pidfds:
                    selector.register(fd, selectors.EVENT_READ)
                selector.select(0.0 if control.pending() else _POLL_S)
            finally:
                for fd in pidfds:
                    os.close(fd)
        while True:
            try:
                if not self._wakeup.recv(64):
                    return
            except BlockingIOError:
                return

    def _answer(self, control: ControlServer) -> None:
        control.serve(
            status=self.status,
            metrics=self.metrics_text,
            stop=self._request_drain,
            drain=self._drain,
            restart=self._restart,
            change=self._changes.ask,
            reload=self._reloading.ask,
            reloaded=self._reloading.state,
        )

    def _drain(self, wanted: bool) -> None:
        """Have the frontend say that the node drains, or no longer; it reads it in its table, the next one too."""
        log.info("an operator has the node drain" if wanted else "the node no longer drains")
        self._frontend.set_knob("draining", float(wanted))

    @property
    def _frontend(self) -> WorkerTable:
        """The table of the only one that a node has."""
        return next(child.table for child in self.children if child.place.role == "frontend")

    def _restart(self, name: str) -> str:
        trouble = self._rolling.ask(name)
        if not name:
            self._standbys.renew()
        return trouble

    def _spawn(self, child: Child, by_standby: bool) -> None:
        """Give a worker a process, that of a standby worker where that is possible and wanted. Raises `OSError`."""
        child.take_stacks()  # of a life that could not begin
        if by_standby and self._standbys.stand_in(child):
            assert child.process is not None
            tell(child.process, self._spec(child))
            return
        child.stack_fd = os.memfd_create(f"trinity-stacks-{child.name}")
        child.process = spawn(self._command, self._spec(child), child.place)

    def _spec(self, child: Child) -> WorkerSpec:
        return WorkerSpec(
            plan=self.plan,
            worker=child.place.name,
            epoch=child.epoch,
            table=child.table.reference,
            supervisor_pid=os.getpid(),
            listen_fd=self._listener.fileno() if child.place.role == "frontend" else -1,
            stack_fd=child.stack_fd,
            node_ready=self._announced,
            last_exit=child.last_exit,
        )

    def _child(self, place: WorkerPlan, needed: bool = True) -> Child:
        table = WorkerTable.create(place.role, place.name, self.plan.config.slo)
        return Child(place, table, Backoff(self._random), needed, epoch=self._epochs.get(place.name, 0))

    def _begin(self, place: WorkerPlan) -> None:
        """One more worker, started in this round of the loop."""
        child = self._child(place, needed=False)
        self.children.append(child)
        self._control_loop.joined(child.table)
        self._replan()

    def end(self, child: Child) -> None:
        """One worker less: its process is gone."""
        self.children.remove(child)
        self._epochs[child.name] = child.epoch
        self._control_loop.left(child.table)
        child.table.close()
        self._replan()

    def _replan(self) -> None:
        workers = tuple(child.place for child in self.children)
        # A pool that has left may come back: whoever starts meanwhile shall know where to look for it.
        away = tuple(place for place in self._changes.vacant if place.role == "pool")
        self.plan = replace(self.plan, workers=(*workers, *away))
        self.figures.workers = workers

    # ---- stopping

    def request_stop(self) -> None:
        """Drain and stop; asked a second time, stop at once."""
        self._stop_signals += 1

    def _request_drain(self) -> None:
        """`trinity stop`, or a terminal that closes (its kernel and its shell both send SIGHUP).

        Whoever asks a second time waits for the same drain, and cuts nothing short.
        """
        self._stop_signals = max(1, self._stop_signals)

    def _catch_signals(self) -> None:
        def stop(signum: int, frame: FrameType | None) -> None:
            self.request_stop()

        def hang_up(signum: int, frame: FrameType | None) -> None:
            self._request_drain()

        self._wakeup, wake = socket.socketpair()
        for end in (self._wakeup, wake):
            end.setblocking(False)
        self._wake = wake
        signal.set_wakeup_fd(wake.fileno())
        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup: the node outlives its terminal
            signal.signal(signal.SIGHUP, hang_up)

    def _stop_all(self, control: ControlServer) -> None:
        """Role by role, each given what is left of `drain_s`; a second signal, or the bound, kills the rest."""
        log.info("draining (again to stop at once)")
        self._listener.close()  # with the frontend's own gone, new connections are refused, not left in a queue
        bound = self._clock() + self.plan.config.node.drain_s
        patience = self._stop_signals
        for spare in self._standbys.children:
            spare.desired = Desired.GONE
        self._lifecycle.reconcile(self._standbys.children)
        for role in _STOP_ORDER:
            group = [child for child in self.children if child.place.role == role]
            self._lifecycle.stop(group, by=bound)
            while any(child.process for child in group):
                self._wait(control)
                self._answer(control)
                self._lifecycle.reap(self._all)
                late, asked_again = self._clock() > bound, self._stop_signals > max(1, patience)
                if late or asked_again:
                    within = f"within {self.plan.config.node.drain_s:g} s"
                    log.warning("not drained %s: killing", within if late else "yet, and asked again to stop")
                    self._kill_all()
                    return
                self._lifecycle.reconcile(group)

    def _kill_all(self) -> None:
        for child in self._all:
            child.kill_group()
        for child in self._all:
            if child.process is not None:
                child.process.wait(timeout=30)
                close_input(child.process)
                child.process = None

    # ---- what is said to others

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
            paths=tuple(collection.path for collection in self.plan.config.collections),
            logs=str(log_directory(self.plan)),
            doorbell=self.plan.config.pool.doorbell,
            remote=self.plan.config.remote,
        )

    def status(self) -> NodeStatus:
        """The node as `trinity status` shows it."""
        now_s = self._clock()
        return NodeStatus(
            info=self._info,
            stopping=bool(self._stop_signals),
            workers=tuple(_worker_status(child, now_s) for child in self.children),
            spares=tuple(_worker_status(child, now_s) for child in self._standbys.children),
            draining=self._frontend.knob("draining") == 1,
            written=Written.of(self._frontend),
        )

    def metrics_text(self) -> str:
        """All metrics of the node in Prometheus's text format."""
        status = self.status()
        model = self.plan.config.model
        tables = {child.place.name: child.table for child in self.children}
        vllm_names = self.plan.config.http.vllm_metrics and not self.plan.of_role("engine")
        collector = NodeCollector(
            tables,
            (
                lambda: self.figures.families(
                    status.workers, os.getpid(), status.spares, draining=status.draining or status.stopping
                ),
                self._control_loop.families,
                self._gpus.families,
                lambda: engine_families(
                    {e.name: self.plan.engine_metrics(e.name) for e in self.plan.of_role("engine")}
                ),
                lambda: vllm_families(tables.values()) if vllm_names else (),
            ),
            {"node": self.plan.config.node.name, "model_name": Path(model.name).name if model else ""},
        )
        return render(collector)


def _worker_status(child: Child, now_s: float) -> WorkerStatus:
    usage = usage_of_all if child.place.role == "engine" else usage_of
    return WorkerStatus(
        name=child.place.name,
        phase=child.phase.value,
        pid=child.process.pid if child.process else 0,
        epoch=child.epoch,
        restarts=child.restarts,
        heartbeat_age_s=child.silent_s,
        resident_bytes=usage(child.process.pid if child.process else 0).resident_bytes,
        device=child.place.shown_device,
        cores=child.place.cores,
        note=child.note(now_s),
        failed_starts=child.failed_starts,
    )
