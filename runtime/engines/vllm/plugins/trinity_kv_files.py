"""A KV connector for instances on one machine: prefill writes a prompt's KV blocks into a file, decode reads them.

It is there for machines on which NIXL does not run, such as those without a GPU. vLLM's own connector of this kind,
`ExampleConnector`, finds KV by a digest of the prompt alone, so a file that is written just now or was left half
written ends the engine that reads it, prompts that take more than one step are stored wrongly, and nothing is ever
removed. Here the answer of prefill names the file (`kv_transfer_params`, as with NIXL); a file has its name once it is
whole; it is removed by whoever has read it, or `lease_s` after it was written; and KV that cannot be read is computed.

The state of the scheduler's side belongs to its thread, that of a worker to its own: `Transfers` goes between them.
"""

import contextlib
import os
import re
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = init_logger(__name__)

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}\Z")  # of a file, as it comes with a request
_SWEEP_S = 5.0


@dataclass
class Save:
    """A prompt's whole blocks, to be written once this step has computed the last of them."""

    name: str
    blocks: list[int]


@dataclass
class Load:
    """Blocks to be filled from a file, from its block number `first` on."""

    name: str
    first: int
    blocks: list[int]


@dataclass
class Transfers(KVConnectorMetadata):  # type: ignore[misc]
    """What the workers are to do in one step; `done` are files that nobody needs."""

    saves: list[Save] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    done: list[str] = field(default_factory=list)


@dataclass
class _Prompt:
    """A request whose KV is to be handed over: `blocks` as far as they are allocated."""

    name: str
    tokens: int
    blocks: list[int] = field(default_factory=list)


class TrinityKvFiles(KVConnectorBase_V1):  # type: ignore[misc]
    """Options (`kv_connector_extra_config`): `directory`, which prefill and decode share; `owner`, with which the names
    of this instance's files begin; `lease_s`, for which a file is kept that nobody reads.
    """

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise ValueError("TrinityKvFiles hands over models with one kind of attention alone: use NixlConnector")
        options = self._kv_transfer_config.kv_connector_extra_config
        self._directory = Path(options["directory"])
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._owner = str(options["owner"])
        self._lease_s = float(options["lease_s"])
        self._block_tokens: int = vllm_config.cache_config.block_size
        self._blocks: int = kv_cache_config.num_blocks
        self._parallel = vllm_config.parallel_config
        self._step = Transfers()
        self._saving: dict[str, _Prompt] = {}
        self._saved: dict[str, _Prompt] = {}
        self._found: dict[str, tuple[str, int]] = {}  # a request's file, and where in it its load begins
        self._caches: dict[str, torch.Tensor] = {}
        self._failed: set[int] = set()
        self._swept = 0.0

    # ---- the scheduler

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens that are in a file beyond those that are here."""
        params = request.kv_transfer_params or {}
        name = params.get("kv_file")
        if not params.get("do_remote_prefill") or not isinstance(name, str) or not _NAME.match(name):
            return 0, False
        last = self._whole(request.num_prompt_tokens)
        more = min(int(params.get("kv_tokens", 0)), last) - num_computed_tokens
        if more <= 0:
            return 0, False
        if not all(self._file(name, rank).exists() for rank in range(self._parallel.world_size)):
            logger.warning("KV %s is not there: the prompt is computed", name)
            return 0, False
        self._found[request.request_id] = name, num_computed_tokens // self._block_tokens
        return more, False

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """The request runs in this step, with these blocks."""
        params = request.kv_transfer_params or {}
        found = self._found.pop(request.request_id, None)
        if params.get("do_remote_prefill"):
            params["do_remote_prefill"] = False  # once: what is computed again after a preemption is computed
            if found is not None and num_external_tokens > 0:
                name, first = found
                count = num_external_tokens // self._block_tokens
                self._step.loads.append(Load(name, first, blocks.get_block_ids()[0][first : first + count]))
            elif isinstance(unread := params.get("kv_file"), str) and _NAME.match(unread):
                self._step.done.append(unread)
        if params.get("do_remote_decode") and (tokens := self._whole(request.num_prompt_tokens)):
            name = f"{self._owner}-{uuid.uuid4().hex}"
            self._saving[request.request_id] = _Prompt(name, tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        """What the workers do in this step."""
        step, self._step = self._step, Transfers()
        for request, blocks, computed, fresh in _scheduled(scheduler_output):
            prompt = self._saving.get(request)
            if prompt is None:
                continue
            prompt.blocks = blocks if fresh else prompt.blocks + blocks
            if computed + scheduler_output.num_scheduled_tokens[request] >= prompt.tokens:
                step.saves.append(Save(prompt.name, prompt.blocks[: prompt.tokens // self._block_tokens]))
                self._saved[request] = self._saving.pop(request)
        return step

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """What decode is to be told. The blocks are free: the file has what was in them."""
        self._saving.pop(request.request_id, None)
        self._found.pop(request.request_id, None)
        saved = self._saved.pop(request.request_id, None)
        if saved is None:
            return False, None
        return False, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "kv_file": saved.name,
            "kv_tokens": saved.tokens,
        }

    def _whole(self, tokens: int) -> int:
        """Tokens in whole blocks, without the last token: what follows it is computed from it."""
        return (tokens - 1) // self._block_tokens * self._block_tokens

    # ---- a worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Raises `ValueError` for a cache that is not one of blocks."""
        for layer, cache in kv_caches.items():
            if cache.shape[0] != self._blocks:
                raise ValueError(f"TrinityKvFiles: the KV of {layer} is {tuple(cache.shape)}: use NixlConnector")
        self._caches = kv_caches

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Read what this step needs; what cannot be read is told to the scheduler, which has it computed."""
        for load in self._transfers().loads:
            file = self._file(load.name, self._parallel.rank)
            try:
                read = safetensors.torch.load_file(file)
                for layer, cache in self._caches.items():
                    part = read[layer][load.first : load.first + len(load.blocks)]
                    cache[load.blocks] = part.to(cache.device)
            except Exception as error:  # whatever it is, the prompt can be computed, and this engine must go on
                logger.warning("KV %s cannot be read, the prompt is computed: %s", file.name, error)
                self._failed.update(load.blocks)
            file.unlink(missing_ok=True)
        for name in self._transfers().done:
            self._file(name, self._parallel.rank).unlink(missing_ok=True)

    def wait_for_save(self) -> None:
        """Write what this step has completed."""
        saves = self._transfers().saves
        if saves:
            self._sweep()
        for save in saves:
            file = self._file(save.name, self._parallel.rank)
            new = file.with_name(f"{file.name}.new")
            try:
                kv = {layer: cache[save.blocks].contiguous().cpu() for layer, cache in self._caches.items()}
                safetensors.torch.save_file(kv, new)
                new.rename(file)
            except Exception as error:  # a full disk, say: decode does not find it, and computes
                logger.warning("KV %s cannot be written: %s", file.name, error)
                new.unlink(missing_ok=True)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of this step's loads that have nothing in them."""
        failed, self._failed = self._failed, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """They are there before the step begins."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """All layers are saved at the step's end."""

    def _transfers(self) -> Transfers:
        transfers = self._get_connector_metadata()
        assert isinstance(transfers, Transfers)
        return transfers

    def _file(self, name: str, rank: int) -> Path:
        return self._directory / f"{name}.{rank}"

    def _sweep(self) -> None:
        """Remove files of which nobody has made use."""
        now = time.monotonic()
        if now - self._swept < _SWEEP_S:
            return
        self._swept = now
        before = time.time() - self._lease_s
        with contextlib.suppress(OSError), os.scandir(self._directory) as found:
            for entry in found:
                with contextlib.suppress(OSError):  # another instance was faster
                    if entry.stat().st_mtime < before:
                        os.unlink(entry)


def _scheduled(output: "SchedulerOutput") -> Iterator[tuple[str, list[int], int, bool]]:
    """Each request of a step: its blocks, the tokens computed before, and whether the blocks are all that it has."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, list(new.block_ids[0]), new.num_computed_tokens, True
    known = output.scheduled_cached_reqs
    for request, blocks, computed in zip(known.req_ids, known.new_block_ids, known.num_computed_tokens, strict=True):
        yield request, list(blocks[0]) if blocks else [], computed, request in known.resumed_req_ids
