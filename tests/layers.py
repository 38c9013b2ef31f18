"""Layers of tests, as markers: `unit` tests start nothing, `process` tests start processes, `e2e` tests share a whole
node, and `nodes` tests start, kill, replace and scale whole nodes of their own, which takes minutes."""

from collections.abc import Iterable
from pathlib import PurePosixPath

ORDER = ("nodes", "e2e", "process", "unit")

NODES = {"engines": ("test_vllm", "test_vllm_stages")}
"""Files outside tests/e2e whose tests start whole nodes."""

E2E = ("test_command_line", "test_examples", "test_frontend_death", "test_request_path")
"""Files of tests/e2e whose tests share one node; the others are in the layer `nodes`."""

PROCESS = {
    "cuda": (
        "test_concurrent_blocks", "test_compiled_functions", "test_compiler", "test_kernels", "test_launches",
        "test_launch_bindings", "test_fault_injection", "test_in_place", "test_resident", "test_stage_times",
    ),
    "dashboards": ("test_fleet", "test_rules"),
    "engines": ("test_real_vllm", "test_vllm_setup"),
    "frontend": (
        "test_responses", "test_store_faults", "test_store_reader", "test_store_tenants", "test_stores",
    ),
    "fleet": ("test_configurations", "test_kubernetes"),
    "fuzz": ("test_collections",),
    "gpu": (
        "test_cuvs_build", "test_engine", "test_gpu_check", "test_reference",
        "test_replacing_indexes", "test_restricted",
    ),
    "integrations": ("test_mcp",),
    "ipc": (
        "test_device_arena", "test_doorbell", "test_endpoints", "test_faults", "test_handover", "test_leaks",
        "test_linked", "test_machine_code", "test_memory", "test_ring", "test_session_arena", "test_session_hostile",
    ),
    "launchers": (
        "test_bootstrap", "test_entry", "test_examples", "test_precompile", "test_service", "test_vllm_environment",
        "test_workers_commands",
    ),
    "collections": ("test_background", "test_bulk_loads", "test_kill", "test_reader_barrier"),
    "node": (
        "test_control", "test_diagnosis", "test_forks", "test_lifecycle", "test_node_metrics", "test_placement",
        "test_run_dir", "test_scaling", "test_standby", "test_supervisor", "test_worker_start",
    ),
    "pool": ("test_cuda_pool", "test_kills", "test_loop_parts", "test_vectors_in_place"),
    "retrieval": ("test_directory", "test_embedder", "test_index_commands", "test_ingestion", "test_isolated_reader"),
    "serving": ("test_compilation", "test_compiled_layers", "test_model", "test_paged_attention", "test_smollm"),
    "tests": ("test_ci", "test_imports"),
}  # fmt: skip


TRANSFORMERS = {
    "retrieval": ("test_torch_encoder",),
    "serving": (
        "test_compiled_layers", "test_disaggregation", "test_llama", "test_model", "test_pool_handover", "test_smollm",
        "test_swap", "test_tiers", "test_workers",
    ),
}  # fmt: skip
"""Files whose tests compare with transformers, which takes 4 s of a core to import: they share a process."""


FIRST = ("transformers", "tests/simulator/test_planner.py")
"""What takes longest in one process: 60 and 20 s of a core."""


def layer_of(nodeid: str) -> str:
    """Return the layer of a test by its file."""
    path = PurePosixPath(file_of(nodeid))
    folder = path.parent.name
    if folder == "e2e":
        return "e2e" if path.stem in E2E else "nodes"
    if path.stem in NODES.get(folder, ()):
        return "nodes"
    return "process" if path.stem in PROCESS.get(folder, ()) else "unit"


def file_of(nodeid: str) -> str:
    """Return a test's file."""
    return nodeid.split("::", 1)[0]


def share_of(nodeid: str) -> str:
    """Return what shares a process with a test: its file, or the files that share a node or transformers."""
    path = PurePosixPath(file_of(nodeid))
    if layer_of(nodeid) == "e2e":
        return "e2e"
    return "transformers" if path.stem in TRANSFORMERS.get(path.parent.name, ()) else str(path)


def parallel_places(nodeids: Iterable[str]) -> dict[str, float]:
    """Return the place of each share in the order in which parallel processes take them.

    Tests with processes wait, others compute: they alternate, so that no core is idle. What takes longest comes first,
    and the last of those that wait before the end, or the run ends with one of them alone.
    """
    layers: dict[str, int] = {}
    for nodeid in nodeids:
        share, layer = share_of(nodeid), ORDER.index(layer_of(nodeid))
        layers[share] = min(layer, layers.get(share, layer))
    shares = sorted(layers, key=lambda share: (share not in FIRST, layers[share]))
    waiting = [share for share in shares if ORDER[layers[share]] != "unit"]
    computing = [share for share in shares if share not in waiting]
    places = {share: 0.85 * number / len(waiting) for number, share in enumerate(waiting)}
    return places | {share: number / len(computing) for number, share in enumerate(computing)}
