"""The figure of `benchmarks.start` for a machine with a core for each process."""

from benchmarks.start import chain_s

_LOG = """\
2026-11-28T17:00:00.900 I 1 supervisor: starts 3 workers after 0.90 s (0.10 waiting for a core): imports and checks 0.90
2026-11-28T17:00:03.000 I 2 pool-0: ready after 2.00 s: imports 1.50, loop 0.50
2026-11-28T17:00:06.000 I 3 decode-0: ready after 5.00 s (2.50 waiting for a core): imports 1.00, torch 2.00, rest 2.00
2026-11-28T17:00:06.100 I 4 prefill-0: ready after 5.10 s (3.00 waiting for a core): imports 1.00, torch 4.10
2026-11-28T17:00:07.000 W 1 supervisor: decode-0 ended (signal SIGKILL); it restarts in 0.10 s
2026-11-28T17:00:17.000 I 5 decode-0: ready after 9.00 s: imports 1.00, torch 8.00
"""


def test_the_chain_is_the_supervisors_start_and_the_longest_first_start_of_a_worker_without_waits_for_a_core() -> None:
    assert round(chain_s(_LOG), 3) == 0.8 + 2.5
