"""Crossover of filtered search from a scan of the passing rows to a graph walk: `SCAN_ROWS_PER_ENTRY`.

As in a pool: queries run through the engine's compiled functions, one extend a step, each with a bitmap of its own,
alone and with others in the running batch.
"""

import time
from typing import Any

import numpy as np

from benchmarks.common.data import Array
from gpu import CpuEngine, GraphIndex
from gpu.compiled import compiled
from gpu.cpu.extend.filtered import SCAN_ROWS_PER_ENTRY
from gpu.engine import RELEASE
from gpu.index.data import bitmap
from ipc.native.intrinsics import call

K = 10
TOP_M = 64
PARTS = (0.4, 0.2, 0.1, 0.05, 0.02)
ACTIVE = (1, 8)
_ROUNDS = 3
_FILTERS = 16  # bitmaps, so that no query has the rows of the previous one in a cache


@compiled
def answer(
    engine: Any, queries: Any, masks: Any, passing: int, top_m: int, width: int, active: int, report: Any, ids: Any,
    distances: Any,
) -> Any:  # fmt: skip
    """Run all queries, `active` at a time; return how many rows were found, or a negative number on failure."""
    admit, extend, read_result, change, set_filter, handle = (
        engine[0],
        engine[1],
        engine[2],
        engine[3],
        engine[4],
        engine[5],
    )
    sent = running = found = 0
    while sent < len(queries) or running:
        while running < active and sent < len(queries):
            vector = queries.ctypes.data + sent * queries.strides[0]
            slot = call(admit, (handle, vector, 0, K, top_m, width, 0))
            if slot < 0:
                return -1
            call(set_filter, (handle, slot, masks.ctypes.data + (sent % len(masks)) * masks.strides[0], passing))
            running += 1
            sent += 1
        done = call(extend, (handle, report.ctypes.data))
        if done < 0:
            return -1
        for i in range(done):
            slot = report[2 + 2 * i]
            found += call(read_result, (handle, slot, ids.ctypes.data, distances.ctypes.data))
            call(change, (handle, slot, RELEASE))
        running -= done
    return found


def switched(base: Array, queries: Array, metric: str, seed: int) -> list[dict[str, float]]:
    """Measure, for each share that passes and number of active queries, the microseconds a query of a scan and of a
    walk, and the rows scanned in the time of one entry of the walk's list: the crossover is `SCAN_ROWS_PER_ENTRY`."""
    index = GraphIndex.build(base, metric=metric, neighbor_codes=True, seed=seed)  # type: ignore[arg-type]
    random, found = np.random.default_rng(seed), []
    queries = np.ascontiguousarray(queries, np.float32)
    engine = CpuEngine({"all": index}, slots=max(ACTIVE), max_top_m=4096, max_k=K, max_search_width=1)
    backend = engine.backend()
    words = np.array([*backend[:4], backend.set_filter, backend.handle], np.int64)
    report, ids, distances = np.zeros(2 + 2 * max(ACTIVE), np.int64), np.zeros(K, np.int64), np.zeros(K, np.float32)
    for part in PARTS:
        longer = round(TOP_M / part)
        if len(base) <= SCAN_ROWS_PER_ENTRY * longer:
            continue  # the engine would not walk
        passing = [random.random(len(base)) < part for _ in range(_FILTERS)]
        masks = np.stack([bitmap(one, len(base)) for one in passing])
        rows = float(np.mean([one.sum() for one in passing]))
        for active in ACTIVE:
            times_us: dict[str, list[float]] = {"compare": [], "walk": []}
            for _ in range(_ROUNDS):  # alternating, so that other load affects both
                # A count of one passing row makes the engine compare; a count of all makes it walk with the list as is.
                for name, top_m, count in (("compare", TOP_M, 1), ("walk", longer, len(base))):
                    begin = time.process_time()
                    if answer(words, queries, masks, count, top_m, 1, active, report, ids, distances) < 0:
                        raise RuntimeError("the engine has failed")
                    times_us[name].append((time.process_time() - begin) / len(queries) * 1e6)
            # The first round compiles and warms up.
            compare, walk = (min(times_us[name][1:]) for name in ("compare", "walk"))
            found.append({
                "part": part, "active": active, "top_m": longer, "compare_us": compare, "walk_us": walk,
                "rows_a_step": (walk / longer) / (compare / rows),
            })  # fmt: skip
            print("  switch", found[-1], flush=True)
    engine.close()
    return found


def report_of(found: list[dict[str, float]]) -> str:
    """Format the results as a sentence of Markdown."""
    lines = []
    for active in ACTIVE:
        own = [one for one in found if one["active"] == active]
        parts = ", ".join(f"{one['rows_a_step']:.1f} at {one['part']:.0%}" for one in own)
        lines.append(f"{active} at a time: {parts}")
    return (
        f"Rows compared in the time of one list entry of the walk (`SCAN_ROWS_PER_ENTRY` is {SCAN_ROWS_PER_ENTRY}), "
        f"{'; '.join(lines)}"
    )
