"""Pool workers that stand beside model workers: one beside each of a role, or of both, on its device and its cores.

`pool.placement` says beside which, and from that follows how many there are and where. Who stands beside a pool asks
it first (`NodePlan.local_pools`).
"""

import msgspec
from msgspec.structs import replace

from gpu import is_device_name
from runtime.errors import ConfigError
from runtime.node.config import MOST_WORKERS, NodeConfig, PoolSection, Role, WorkerSection

_ROLES: dict[str, tuple[Role, ...]] = {
    "own": (),
    "with-prefill": ("prefill",),
    "with-decode": ("decode",),
    "coupled": ("prefill", "decode"),
}


def paired_workers(config: NodeConfig) -> tuple[str, ...]:
    """The names of the workers that have a pool worker beside them, pool-0's first; none if pools have places of their
    own."""
    roles = _ROLES[config.pool.placement] if config.needs_pool else ()
    return tuple(f"{role}-{index}" for role in roles for index in range(getattr(config, role).workers))


def resolve_pool_placement(config: NodeConfig) -> NodeConfig:
    """With as many pool workers as have neighbours, on their devices; on a CPU on their cores too. Raises `ConfigError`
    for what cannot stand so, and for `workers`, `devices` and `cores` that say something else."""
    roles = _ROLES[config.pool.placement]
    if not roles or not config.needs_pool:
        return config
    said, pool = f'pool.placement = "{config.pool.placement}"', config.pool
    if config.own_model is None:
        raise ConfigError(
            f"{said}: only prefill and decode workers of the node's own engine have pools beside them: leave it out, "
            "and say in pool.devices where the pool is to be"
        )
    for collection in config.collections:
        if collection.shards > 1:
            raise ConfigError(
                f"{said}: each pool worker holds whole collections, and {collection.name!r} has {collection.shards} "
                'shards: index it in one piece, or set pool.placement = "own"'
            )
    count = len(paired_workers(config))
    beside = f"one beside each {' and '.join(roles)} worker"
    if count > MOST_WORKERS:
        raise ConfigError(f"{said}: {count} pool workers, {beside}, and a node has at most {MOST_WORKERS}")
    places = [place for role in roles for place in worker_devices(role, getattr(config, role))]
    devices = tuple(device for device, _ in places)
    # beside a model on a GPU a pool's loop has a core of its own
    cores = tuple(cores for _, cores in places) if "cpu" in devices else pool.cores
    shipped = PoolSection()
    found: dict[str, object] = {"workers": count, "devices": devices, "cores": cores}
    for key, value in found.items():
        if (given := getattr(pool, key)) not in (value, getattr(shipped, key)):
            raise ConfigError(
                f"pool.{key} = {_shown(given)} with {said}, which makes it {_shown(value)} ({beside}): leave it out"
            )
    return replace(config, pool=replace(pool, **found))


def worker_devices(role: Role, section: WorkerSection) -> list[tuple[str, tuple[int, ...]]]:
    """The device and the cores of each of a role's workers; () cores: any. Raises `ConfigError`."""
    for key, entries in (("devices", section.devices), ("cores", section.cores)):
        if len(entries) > 1 and len(entries) != section.workers:
            raise ConfigError(
                f"{role}.{key} has {len(entries)} entries for {role}.workers = {section.workers}: give 1 or as many"
            )
    if not section.devices:
        raise ConfigError(f'{role}.devices is empty: give at least one, such as "cpu"')
    devices, cores = section.devices, section.cores or ((),)
    return [(devices[n % len(devices)], cores[n % len(cores)]) for n in range(section.workers)]


def check_device(key: str, device: str) -> None:
    """Raises `ConfigError` for what is no device's name."""
    if not is_device_name(device):
        raise ConfigError(f'{key}: {device!r} is no device: "cpu", "cuda:N" or a GPU\'s UUID ("GPU-…") is')


def _shown(value: object) -> str:
    """As TOML has it."""
    return msgspec.json.encode(value).decode()
