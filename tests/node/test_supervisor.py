"""The supervisor restarts dead workers, kills hung ones, ends on permanent errors, and takes its workers with it."""

import os
import select
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from runtime.errors import EXIT_CONFIG, InvalidRequest, Unavailable
from runtime.node.supervisor.admin import admin_request, node_status, restart_node, stop_node
from runtime.testing.waiting import eventually
from tests.node.conftest import StartTiny
from tests.node.tiny_node import (
    TINY_WORKER,
    gone,
    serve_in_a_terminal,
    serve_where_ends_of_children_are_ignored,
    serve_where_sigint_is_ignored,
    worker,
)


def test_a_node_is_announced_once_when_ready_and_stops_in_order_without_leaks(start_tiny: StartTiny) -> None:
    node = start_tiny()
    status = node.ready()
    assert [found.name for found in status.workers] == ["pool-0", "frontend-0"]
    assert all(found.pid and found.restarts == 0 and found.resident_bytes > 0 for found in status.workers)
    stop_node(node.info, timeout_s=60)
    assert node.ended() == 0
    assert node.stopped() == ["frontend-0", "pool-0"]  # clients stop before their servers
    assert not (node.home / "run").exists()
    assert node.log.read_text().count("announced") == 1
    assert all(gone(found.pid) for found in status.workers)


def test_a_killed_worker_is_restarted_with_the_next_epoch(start_tiny: StartTiny) -> None:
    node = start_tiny()
    first = worker(node.ready())
    os.kill(first.pid, signal.SIGKILL)
    status = node.eventually(lambda status: status.ready and worker(status).pid != first.pid, "a new pool worker")
    second, other = worker(status), worker(status, "frontend-0")
    assert (second.epoch, second.restarts) == (first.epoch + 1, 1)
    assert (other.epoch, other.restarts) == (1, 0)
    assert "pool-0 ended (signal SIGKILL); it restarts in 0." in node.log.read_text()
    text = admin_request(node.info.control, "metrics").decode()
    assert 'trinity_worker_restarts_total{model_name="",node="tiny",worker="pool-0"} 1.0' in text


def test_the_end_of_a_worker_wakes_the_supervisor(start_tiny: StartTiny) -> None:
    node = start_tiny(poll_s=3600.0)
    for found in node.ready().workers:
        os.kill(found.pid, signal.SIGKILL)
        eventually(lambda pid=found.pid: not psutil.pid_exists(pid), 60, "the supervisor to see its end")  # type: ignore[misc]


def test_the_supervisor_goes_on_while_the_process_from_which_workers_are_forked_is_stopped(
    start_tiny: StartTiny,
) -> None:
    node = start_tiny()
    first = worker(status := node.ready())
    template = psutil.Process(node.template(status))
    template.suspend()
    os.kill(first.pid, signal.SIGKILL)
    eventually(lambda: not psutil.pid_exists(first.pid), 60, "the supervisor to see its end")
    assert worker(node_status(node.info)).pid == 0  # it answers
    with suppress(psutil.NoSuchProcess):
        template.resume()
    node.eventually(lambda status: status.ready and worker(status).epoch == 2, "a new pool worker")


@pytest.mark.parametrize("life", ["serve", "real serve"])
def test_signals_that_nothing_uses_end_neither_the_node_nor_a_worker(start_tiny: StartTiny, life: str) -> None:
    node = start_tiny({"pool-0": [life]})
    before = worker(node.ready())
    others = [signal.SIGPROF, signal.SIGIO, signal.SIGPWR, signal.SIGRTMAX]
    for kind in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGVTALRM, *others):
        os.kill(before.pid, kind)
        node.signal(kind)
    for kind in (signal.SIGHUP, signal.SIGINT):  # from a terminal: the supervisor's alone
        os.kill(before.pid, kind)
    os.kill(worker(node.ready(), "frontend-0").pid, signal.SIGKILL)  # noticed after anything that ended before
    node.eventually(lambda status: status.ready and worker(status, "frontend-0").epoch == 2, "a new frontend")
    after = worker(node.ready())
    assert (after.pid, after.restarts) == (before.pid, 0)


@pytest.mark.parametrize(
    ("command", "how"),
    [(TINY_WORKER, "exit code 3): the node stops"), (("/nowhere/python",), "could not be started: ")],
)
def test_a_worker_that_was_never_ready_ends_the_node_after_three_tries(
    command: tuple[str, ...], how: str, start_tiny: StartTiny
) -> None:
    node = start_tiny({"pool-0": ["crash"]}, command=command)
    assert node.ended() == 1
    log = node.log.read_text()
    assert log.count(f"pool-0 ended ({how.partition(')')[0]}") == 2
    assert f"pool-0 cannot run ({how}" in log
    assert not (node.home / "run").exists()


def test_imports_that_do_not_end_are_failed_starts(start_tiny: StartTiny) -> None:
    node = start_tiny(command=("sleep", "600"), start_s=1.0)
    assert node.ended() == 1
    reason = "the process from which workers are forked has not imported what they use within node.start_s = 1 s"
    assert f"cannot run (could not be started: {reason}): the node stops" in node.log.read_text()


def test_a_node_whose_parent_ignores_the_ends_of_its_children_restarts_a_killed_worker(start_tiny: StartTiny) -> None:
    node = start_tiny(process=serve_where_ends_of_children_are_ignored)
    os.kill(worker(node.ready()).pid, signal.SIGKILL)
    node.eventually(lambda status: status.ready and worker(status).epoch == 2, "a new pool worker")
    assert "pool-0 ended (signal SIGKILL)" in node.log.read_text()


def test_a_worker_with_a_permanent_error_ends_the_node_at_once(start_tiny: StartTiny) -> None:
    node = start_tiny({"frontend-0": ["real refuse"]})
    assert node.ended() == EXIT_CONFIG
    log = node.log.read_text()
    assert "frontend-0 cannot be" in log
    assert "it restarts in" not in log


@pytest.mark.parametrize("life", ["real refuse", "crash"])
def test_a_worker_that_can_no_longer_run_is_retried_and_the_node_stays_up(start_tiny: StartTiny, life: str) -> None:
    node = start_tiny({"pool-0": ["serve", life]})
    before = node.ready()
    os.kill(worker(before).pid, signal.SIGKILL)
    status = node.eventually(lambda status: worker(status).failed_starts >= 4, "a pool worker that cannot run")
    assert not status.ready
    after, other = worker(status, "frontend-0"), worker(before, "frontend-0")
    assert (after.phase, after.pid, after.epoch, after.note) == ("ready", other.pid, other.epoch, "")
    why = {"real refuse": "exit code 78: pool-0 cannot be", "crash": "exit code 3"}[life]
    assert worker(status).note.startswith(f"cannot run ({why})")
    text = admin_request(node.info.control, "metrics").decode()
    assert 'trinity_worker_failed_starts{model_name="",node="tiny",worker="frontend-0"} 0.0' in text
    node.order({})
    status = node.eventually(lambda status: status.ready, "a life that serves")
    assert (worker(status).failed_starts, worker(status).note) == (0, "")
    assert f"pool-0 cannot run ({why}): the others keep serving, it restarts in 0." in node.log.read_text()


def test_a_worker_whose_mapped_file_is_truncated_repeatedly_affects_no_other(start_tiny: StartTiny) -> None:
    node = start_tiny({"pool-0": ["serve", *["bus error when ready"] * 4, "serve"]})
    before = node.ready()
    os.kill(worker(before).pid, signal.SIGBUS)
    status = node.eventually(lambda status: status.ready and worker(status).epoch == 6, "the sixth life")
    assert worker(status, "frontend-0").pid == worker(before, "frontend-0").pid
    assert node.log.read_text().count("pool-0 ended (signal SIGBUS)") == 5


def test_a_worker_whose_loop_hangs_logs_its_stacks_and_is_killed_and_restarted(start_tiny: StartTiny) -> None:
    node = start_tiny({"pool-0": ["real hang", "serve"]}, heartbeat_s=1.0)
    node.eventually(lambda status: status.ready and worker(status).epoch >= 2, "the second life")
    log = node.log.read_text()
    (line,) = [line for line in log.splitlines() if "pool-0 ended by a fatal signal; its stacks:" in line]
    assert "Fatal Python error: Aborted" in line
    assert "in live" in line
    assert "pool-0 has no heartbeat for 1 s: killed" in log
    assert "pool-0 ended (signal SIGABRT)" in log


def test_a_workers_child_processes_end_with_it(start_tiny: StartTiny) -> None:
    node = start_tiny({"pool-0": ["with child", "serve"]})
    pid = worker(node.ready()).pid
    child = int(Path(f"{node.orders}.child").read_text())
    os.kill(pid, signal.SIGKILL)
    node.eventually(lambda status: status.ready and worker(status).epoch == 2 and gone(child), "a life of its own")


def test_a_supervisor_that_was_stopped_itself_kills_no_worker(start_tiny: StartTiny) -> None:
    node = start_tiny(heartbeat_s=3.0)
    before = node.ready()
    node.signal(signal.SIGSTOP)
    select.select([], [], [], 3.5)
    node.signal(signal.SIGCONT)
    after = node.eventually(lambda status: status.ready, "every worker to be ready")
    assert [found.pid for found in after.workers] == [found.pid for found in before.workers]


def test_a_rolling_restart_does_not_count_as_failures(start_tiny: StartTiny) -> None:
    node = start_tiny()
    before = node.ready()
    old = node.template(before)
    restart_node(node.info, "", timeout_s=60)
    after = node.ready()
    assert node.template(after) != old  # the new workers use what is installed now
    assert [(found.epoch, found.restarts) for found in after.workers] == [(2, 0), (2, 0)]
    assert {found.pid for found in after.workers}.isdisjoint(found.pid for found in before.workers)
    assert node.stopped() == ["pool-0", "frontend-0"]
    lines = [line for line in node.log.read_text().splitlines() if "restarts: it drains first" in line]
    assert len(lines) == 2


def test_a_single_worker_can_be_restarted_and_an_unknown_one_is_named(start_tiny: StartTiny) -> None:
    node = start_tiny()
    node.ready()
    restart_node(node.info, "frontend-0", timeout_s=60)
    status = node.ready()
    assert (worker(status).epoch, worker(status, "frontend-0").epoch) == (1, 2)
    with pytest.raises(InvalidRequest, match="no worker 'decode-7'; there are pool-0, frontend-0"):
        restart_node(node.info, "decode-7", timeout_s=60)


def test_a_worker_that_does_not_drain_for_its_restart_is_killed_and_restarted(start_tiny: StartTiny) -> None:
    node = start_tiny({"pool-0": ["busy", "serve"]}, drain_s=1)
    node.ready()
    restart_node(node.info, "pool-0", timeout_s=60)
    assert worker(node.ready()).epoch == 2
    assert "pool-0 has not drained within 1 s: killed" in node.log.read_text()


def test_a_worker_that_does_not_become_ready_in_time_is_killed_and_retried(start_tiny: StartTiny) -> None:
    node = start_tiny({"pool-0": ["never ready", "serve"]}, start_s=4.0)
    node.eventually(lambda status: status.ready and worker(status).epoch >= 2, "the second life")
    assert "pool-0 is not ready after node.start_s = 4 s: killed" in node.log.read_text()


def test_a_second_signal_ends_a_node_that_drains(start_tiny: StartTiny) -> None:
    node = start_tiny({"frontend-0": ["busy"]})
    workers = node.ready().workers
    node.signal(signal.SIGINT)
    drains = node.eventually(
        lambda status: [found.phase for found in status.workers] == ["ready", "draining"], "the drain"
    )
    assert node.template(drains) is None  # no worker starts any more
    node.signal(signal.SIGINT)
    assert node.ended() == 0
    assert all(gone(found.pid) for found in workers)
    assert not (node.home / "run").exists()


def test_a_node_started_where_sigint_is_ignored_drains_on_sigterm(start_tiny: StartTiny) -> None:
    node = start_tiny(process=serve_where_sigint_is_ignored)
    node.ready()
    node.signal(signal.SIGTERM)
    assert node.ended() == 0
    assert node.stopped() == ["frontend-0", "pool-0"]
    assert not (node.home / "run").exists()


def test_closing_the_terminal_drains_the_node_completely(start_tiny: StartTiny) -> None:
    node = start_tiny({"pool-0": ["ignore stop"]}, process=serve_in_a_terminal)
    pool = worker(node.ready())
    node.signal(signal.SIGHUP)
    node.eventually(lambda status: worker(status).phase == "draining", "the drain")
    node.signal(signal.SIGHUP)  # a terminal's end comes from its kernel and from its shell
    for _ in range(2):
        node.eventually(lambda status: worker(status).phase == "draining", "an answer after the signal")
    os.kill(pool.pid, signal.SIGKILL)
    assert node.ended() == 0
    assert node.stopped() == ["frontend-0"]
    assert "killing" not in node.log.read_text()


def test_a_worker_that_does_not_drain_in_time_is_killed(start_tiny: StartTiny) -> None:
    node = start_tiny({"pool-0": ["ignore stop"]}, drain_s=1)
    workers = node.ready().workers
    node.signal(signal.SIGTERM)
    assert node.ended() == 0
    assert "not drained within 1 s" in node.log.read_text()
    assert all(gone(found.pid) for found in workers)


def test_stopping_a_starting_node_does_not_wait_for_the_start(start_tiny: StartTiny) -> None:
    node = start_tiny({"pool-0": ["never ready"]})
    node.eventually(lambda status: worker(status, "frontend-0").phase == "ready", "the frontend")
    node.signal(signal.SIGTERM)
    assert node.ended() == 0
    assert node.stopped() == ["frontend-0"]


def test_a_worker_in_back_off_does_not_delay_the_nodes_stop(start_tiny: StartTiny) -> None:
    node = start_tiny({"pool-0": ["crash when ready", *["crash"] * 50]})
    node.eventually(lambda status: worker(status).restarts >= 4, "long back-offs")
    stop_node(node.info, timeout_s=60)
    assert node.ended() == 0


def test_workers_die_with_a_killed_supervisor_and_the_next_node_starts(start_tiny: StartTiny) -> None:
    node = start_tiny({"pool-0": ["real ignore stop"], "frontend-0": ["real serve"]})
    pids = [found.pid for found in node.ready().workers]
    waits = [os.pidfd_open(pid) for pid in pids]
    node.process.kill()
    assert node.ended() == -signal.SIGKILL
    for fd in waits:
        assert select.select([fd], [], [], 60)[0], "a worker outlived its supervisor"
        os.close(fd)
    with pytest.raises(Unavailable):
        node.info  # noqa: B018
    assert start_tiny().ready().ready
