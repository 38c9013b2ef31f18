"""A KV connector for instances on one machine: prefill writes a prompt's KV blocks to a file, decode reads them.

It serves machines on which NIXL does not run, such as those without a GPU. vLLM's own connector of this kind,
`ExampleConnector`, finds KV by a digest of the prompt alone: reading a file that is being written, or was left
incomplete, crashes the engine; prompts that take more than one step are stored wrongly; and files are never removed.
Here the prefill response names the file (`kv_transfer_params`, as with NIXL); a complete file is renamed to its final
name; the reader removes it, or a sweep does `lease_s` after it was written; and KV that cannot be read is recomputed.

The scheduler's state belongs to the scheduler's thread, a worker's to the worker's; `Transfers` passes between them.
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

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}\Z")  # file names in requests
_SWEEP_S = 5.0


@dataclass
class Save:
    """A prompt's complete blocks, to be written after the step that computes the last of them."""

    name: str
    blocks: list[int]


@dataclass
class Load:
    """Blocks to be filled from a file, starting at its block `first`."""

    name: str
    first: int
    blocks: list[int]


@dataclass
class Transfers(KVConnectorMetadata):  # type: ignore[misc]
    """The workers' file operations in one step; `done`: files to remove unread."""

    saves: list[Save] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    done: list[str] = field(default_factory=list)


@dataclass
class _Prompt:
    """A request whose KV is to be saved: `blocks` allocated so far."""

    name: str
    tokens: int
    blocks: list[int] = field(default_factory=list)


class TrinityKvFiles(KVConnectorBase_V1):  # type: ignore[misc]
    """The connector. Options (`kv_connector_extra_config`): `directory`, shared by prefill and decode; `owner`, the
    prefix of this instance's file names; `lease_s`, after which an unread file is removed.
    """

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise ValueError("TrinityKvFiles supports models with a single KV cache group only: use NixlConnector")
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
        self._found: dict[str, tuple[str, int]] = {}  # request → its file and first block to load
        self._caches: dict[str, torch.Tensor] = {}
        self._failed: set[int] = set()
        self._swept = 0.0

    # ---- scheduler side

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int, bool]:
        """Return the tokens available in a file beyond those computed here."""
        params = request.kv_transfer_params or {}
        name = params.get("kv_file")
        if not params.get("do_remote_prefill") or not isinstance(name, str) or not _NAME.match(name):
            return 0, False
        last = self._full_block_tokens(request.num_prompt_tokens)
        more = min(int(params.get("kv_tokens", 0)), last) - num_computed_tokens
        if more <= 0:
            return 0, False
        if not all(self._file(name, rank).exists() for rank in range(self._parallel.world_size)):
            logger.warning("KV %s is missing: the prompt is recomputed", name)
            return 0, False
        self._found[request.request_id] = name, num_computed_tokens // self._block_tokens
        return more, False

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """Schedule the load or save of a request that runs in this step, with these blocks."""
        params = request.kv_transfer_params or {}
        source = self._found.pop(request.request_id, None)
        if params.get("do_remote_prefill"):
            params["do_remote_prefill"] = False  # once: after a preemption the prompt is recomputed
            if source is not None and num_external_tokens > 0:
                name, first = source
                count = num_external_tokens // self._block_tokens
                self._step.loads.append(Load(name, first, blocks.get_block_ids()[0][first : first + count]))
            elif isinstance(unread := params.get("kv_file"), str) and _NAME.match(unread):
                self._step.done.append(unread)
        if params.get("do_remote_decode") and (tokens := self._full_block_tokens(request.num_prompt_tokens)):
            name = f"{self._owner}-{uuid.uuid4().hex}"
            self._saving[request.request_id] = _Prompt(name, tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        """Return the workers' file operations in this step."""
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
        """Return the `kv_transfer_params` for decode. The blocks are free, because the file has their content."""
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

    def _full_block_tokens(self, tokens: int) -> int:
        """Tokens in full blocks, excluding the last token, whose logits decode must compute."""
        return (tokens - 1) // self._block_tokens * self._block_tokens

    # ---- worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Raise `ValueError` for a cache whose first dimension is not blocks."""
        for layer, cache in kv_caches.items():
            if cache.shape[0] != self._blocks:
                raise ValueError(f"TrinityKvFiles: the KV of {layer} is {tuple(cache.shape)}: use NixlConnector")
        self._caches = kv_caches

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Read this step's blocks; those that cannot be read are reported to the scheduler and recomputed."""
        for load in self._transfers().loads:
            file = self._file(load.name, self._parallel.rank)
            try:
                read = safetensors.torch.load_file(file)
                for layer, cache in self._caches.items():
                    part = read[layer][load.first : load.first + len(load.blocks)]
                    cache[load.blocks] = part.to(cache.device)
            except Exception as error:  # any error: the prompt can be recomputed, and the engine must not crash
                logger.warning("KV %s cannot be read, the prompt is recomputed: %s", file.name, error)
                self._failed.update(load.blocks)
            file.unlink(missing_ok=True)
        for name in self._transfers().done:
            self._file(name, self._parallel.rank).unlink(missing_ok=True)

    def wait_for_save(self) -> None:
        """Write the blocks that this step has completed."""
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
            except Exception as error:  # such as a full disk: decode misses the file and recomputes
                logger.warning("KV %s cannot be written: %s", file.name, error)
                new.unlink(missing_ok=True)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks of this step's loads that could not be read."""
        failed, self._failed = self._failed, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No-op: all layers are loaded before the step."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """No-op: all layers are saved at the end of the step."""

    def _transfers(self) -> Transfers:
        transfers = self._get_connector_metadata()
        assert isinstance(transfers, Transfers)
        return transfers

    def _file(self, name: str, rank: int) -> Path:
        return self._directory / f"{name}.{rank}"

    def _sweep(self) -> None:
        """Remove files whose lease has expired."""
        now = time.monotonic()
        if now - self._swept < _SWEEP_S:
            return
        self._swept = now
        before = time.time() - self._lease_s
        with contextlib.suppress(OSError), os.scandir(self._directory) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):  # removed by another instance
                    if entry.stat().st_mtime < before:
                        os.unlink(entry)


def _scheduled(output: "SchedulerOutput") -> Iterator[tuple[str, list[int], int, bool]]:
    """Iterate over a step's requests: its blocks, the tokens computed before, and whether the blocks are all it has."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, list(new.block_ids[0]), new.num_computed_tokens, True
    known = output.scheduled_cached_reqs
    for request, blocks, computed in zip(known.req_ids, known.new_block_ids, known.num_computed_tokens, strict=True):
        yield request, list(blocks[0]) if blocks else [], computed, request in known.resumed_req_ids
