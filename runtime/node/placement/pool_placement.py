"""Resolution of `pool.placement`: pool workers beside each prefill or decode worker, on its device and cores.

The placement determines their number and devices. A model worker queries the pool worker beside it first
(`NodePlan.local_pools`).
"""

import msgspec
from msgspec.structs import replace

from gpu import is_device_name
from runtime.errors import ConfigError
from runtime.node.config import NodeConfig, Role
from runtime.node.worker_config import MAX_WORKERS, PoolSection, WorkerSection

_ROLES: dict[str, tuple[Role, ...]] = {
    "own": (),
    "with-prefill": ("prefill",),
    "with-decode": ("decode",),
    "coupled": ("prefill", "decode"),
}


def paired_workers(config: NodeConfig) -> tuple[str, ...]:
    """Return the workers that have a pool worker beside them, pool-0's first; empty with placement "own"."""
    roles = _ROLES[config.pool.placement] if config.needs_pool else ()
    return tuple(f"{role}-{index}" for role in roles for index in range(getattr(config, role).workers))


def resolve_pool_placement(config: NodeConfig) -> NodeConfig:
    """Set the pool's `workers`, `devices` and, on CPUs, `cores` from its placement.

    Raises `ConfigError` if the placement is impossible, or if one of these keys is set to a different value.
    """
    roles = _ROLES[config.pool.placement]
    if not roles or not config.needs_pool:
        return config
    setting, pool = f'pool.placement = "{config.pool.placement}"', config.pool
    if config.own_model is None:
        raise ConfigError(
            f"{setting}: only prefill and decode workers of the node's own engine can have pool workers beside them: "
            "remove it, and place the pool with pool.devices"
        )
    for collection in config.collections:
        if collection.shards > 1:
            raise ConfigError(
                f"{setting}: pool workers serve whole collections, but {collection.name!r} has {collection.shards} "
                'shards: build it without shards, or set pool.placement = "own"'
            )
    count = len(paired_workers(config))
    beside = f"one beside each {' and '.join(roles)} worker"
    if count > MAX_WORKERS:
        raise ConfigError(f"{setting}: {count} pool workers, {beside}; the limit is {MAX_WORKERS}")
    places = [place for role in roles for place in worker_devices(role, getattr(config, role))]
    devices = tuple(device for device, _ in places)
    # beside a model on a GPU, the pool's loop gets a core of its own
    cores = tuple(cores for _, cores in places) if "cpu" in devices else pool.cores
    defaults = PoolSection()
    resolved: dict[str, object] = {"workers": count, "devices": devices, "cores": cores}
    for key, value in resolved.items():
        if (given := getattr(pool, key)) not in (value, getattr(defaults, key)):
            raise ConfigError(
                f"pool.{key} = {_shown(given)} with {setting}, which sets it to {_shown(value)} ({beside}): remove it"
            )
    return replace(config, pool=replace(pool, **resolved))


def worker_devices(role: Role, section: WorkerSection) -> list[tuple[str, tuple[int, ...]]]:
    """Return device and cores of each of a role's workers; () cores: any. Raises `ConfigError`."""
    for key, entries in (("devices", section.devices), ("cores", section.cores)):
        if len(entries) > 1 and len(entries) != section.workers:
            raise ConfigError(
                f"{role}.{key} has {len(entries)} entries for {role}.workers = {section.workers}: "
                "give one entry, or one per worker"
            )
    if not section.devices:
        raise ConfigError(f'{role}.devices is empty: give at least one device, such as "cpu"')
    devices, cores = section.devices, section.cores or ((),)
    return [(devices[n % len(devices)], cores[n % len(cores)]) for n in range(section.workers)]


def check_device(key: str, device: str) -> None:
    """Raise `ConfigError` unless `device` is a device name."""
    if not is_device_name(device):
        raise ConfigError(f'{key}: {device!r} is not a device: use "cpu", "cuda:N" or a GPU\'s UUID ("GPU-…")')


def _shown(value: object) -> str:
    """Format a value as TOML."""
    return msgspec.json.encode(value).decode()
