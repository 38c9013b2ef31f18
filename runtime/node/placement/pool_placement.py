"""Resolution of `pool.placement`: pool workers beside model workers, on their devices and cores, and independent ones.

A query goes first to the pool worker beside its model worker (`NodePlan.local_pools`), then to those of its stage.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace

from gpu import is_device_name
from runtime.errors import ConfigError
from runtime.node.config import NodeConfig, Role
from runtime.node.engine_config import Stage, VllmSection
from runtime.node.worker_config import MAX_WORKERS, PoolPlacement, PoolSection, WorkerSection

Paired = Literal["prefill", "decode"]
PAIRED_ROLES: dict[PoolPlacement, tuple[Paired, ...]] = {
    "own": (),
    "with-prefill": ("prefill",),
    "with-decode": ("decode",),
    "coupled": ("prefill", "decode"),
    "with-prefill+own": ("prefill",),
    "with-decode+own": ("decode",),
}
_OWN_STAGE: dict[PoolPlacement, Stage] = {"own": "", "with-prefill+own": "decode", "with-decode+own": "prefill"}
"""Stage that independent pool workers serve first, in the placements that have them; "": both."""
_Place = tuple[str, str, tuple[int, ...]]  # a worker, its device and its cores


def pool_stages(pool: PoolSection, paired: Mapping[Paired, int]) -> tuple[Stage, ...]:
    """Return the stage that each pool worker serves first, "" for both: those beside the `paired` numbers of model
    workers of a stage, then the others."""
    beside = [stage for stage in PAIRED_ROLES[pool.placement] for _ in range(paired[stage])]
    own = _OWN_STAGE.get(pool.placement)
    return (*beside, *(() if own is None else (own,) * pool.workers))


def first_pools(stages: Sequence[Stage], stage: Stage) -> tuple[int, ...]:
    """Return the numbers of the pool workers that a stage's queries go to first: the stage's, else those of both,
    else all. `stages`: as from `pool_stages`."""
    for first in (stage, ""):
        if numbers := tuple(number for number, served in enumerate(stages) if served == first):
            return numbers
    return tuple(range(len(stages)))


def pool_partners(config: NodeConfig) -> list[tuple[str, Stage]]:
    """Return, for each pool worker of a resolved placement, the worker that it is beside, "" for an independent one,
    and the stage that it serves first."""
    beside = [(name, stage) for stage, places in _places(config).items() for name, *_ in places]
    independent = config.pool.workers - len(beside)
    return [*beside, *[("", _OWN_STAGE.get(config.pool.placement, ""))] * independent]


def resolve_pool_placement(config: NodeConfig) -> NodeConfig:
    """Set the pool's `workers`, `devices` and, on CPUs, `cores` from its placement.

    Raises `ConfigError` if the placement is impossible, or if one of these keys is set to a different value.
    """
    pool, setting = config.pool, f'pool.placement = "{config.pool.placement}"'
    roles, own = PAIRED_ROLES[pool.placement], _OWN_STAGE.get(pool.placement) is not None
    if not config.needs_pool or not roles:
        return config
    places = [place for of_stage in _places(config).values() for place in of_stage]
    if not places:
        raise ConfigError(
            f"{setting}: this node runs no {' or '.join(roles)} workers for pool workers to be beside: remove it, and "
            "place the pool with pool.devices"
        )
    if own and not pool.workers:
        instead = pool.placement.removesuffix("+own")
        raise ConfigError(f'pool.workers = 0 with {setting}, which needs at least 1 besides: use "{instead}"')
    beside = f"one beside each {' and '.join(roles)} worker"
    places += [("", *place) for place in worker_devices("pool", pool)] if own else []
    if len(places) > MAX_WORKERS:
        raise ConfigError(f"{setting}: {len(places)} pool workers, {beside}; the limit is {MAX_WORKERS}")
    devices = tuple(device for _, device, _ in places)
    # beside a model on a GPU, the pool's loop gets a core of its own
    cores = tuple(cores if device == "cpu" or not name else () for name, device, cores in places)
    resolved: dict[str, object] = {"workers": len(places), "devices": devices, "cores": cores if any(cores) else ()}
    if not own:
        _check_unset(pool, resolved, f"{setting}, which sets it to {{}} ({beside})")
    return replace(config, pool=replace(pool, **resolved))


def _check_unset(pool: PoolSection, resolved: Mapping[str, object], setting: str) -> None:
    defaults = PoolSection()
    for key, value in resolved.items():
        if (given := getattr(pool, key)) not in (value, getattr(defaults, key)):
            raise ConfigError(f"pool.{key} = {_shown(given)} with {setting.format(_shown(value))}: remove it")


def _places(config: NodeConfig) -> dict[Paired, list[_Place]]:
    """Return the model workers that get a pool worker beside them, by stage."""
    places: dict[Paired, list[_Place]] = {}
    for stage in PAIRED_ROLES[config.pool.placement]:
        if isinstance(config.model, VllmSection):
            places[stage] = _instances(config.model, stage)
        elif config.own_model is not None:
            section = config.prefill if stage == "prefill" else config.decode
            places[stage] = [(f"{stage}-{n}", *place) for n, place in enumerate(worker_devices(stage, section))]
    return places


def _instances(section: VllmSection, stage: Paired) -> list[_Place]:
    """Return vLLM's instances of a stage, each with its first GPU."""
    names = [name for name, each in section.stages.items() for _ in range(each.instances)]
    return [
        (f"engine-{name}-{number}", next(iter(section.gpus[number]), "cpu"), ())
        for number, name in enumerate(names)
        if name == stage
    ]


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
