"""Service times of the stages: documented defaults, or measured values from `trinity calibrate`.

The defaults describe one H100 (SXM, 989 dense bfloat16 TFLOP/s, 3.35 TB/s) that serves an 8-billion-parameter Llama
(32 layers, 8 KV heads of 128) in bfloat16. They are computed from the data sheet, except those of searches beside and
in the pool, which were measured on an H200 (docs/gpu.md). Steps, prompts and the hand-over were measured there too, but
for a model of 1 billion parameters and with code that has been replaced since, so they are not used:

| field | default | from |
|---|---|---|
| `prefill_pass_s` | 2 ms | launches and synchronisation of one pass; an assumption |
| `prefill_token_s` | 30 µs | 2 · 8e9 FLOP a token at 55% of 989 TFLOP/s |
| `prefill_behind_s` | 0 | extra time of a token in a chunk after others; measured by `calibrate` |
| `prefill_pair_s` | 1 ns | attention: 4 · 32 layers · 4096 FLOP for each earlier token, at the same rate |
| `decode_step_s` | 6 ms | 16 GB of weights read at 80% of 3.35 TB/s |
| `decode_row_s` | 40 µs | 2 · 8e9 FLOP a row at 40% of 989 TFLOP/s |
| `decode_context_s` | 49 ns | 128 KiB of KV a token at 80% of 3.35 TB/s |
| `kv_token_bytes` | 131,072 | 32 layers · 2 · 8 heads · 128 · 2 bytes |
| `link_bytes_s` | 3.6e11 | NVLink 4: 450 GB/s a direction, 80% of it |
| `link_s` | 50 µs | latency from prefill's offer to decode; an assumption |
| `tier_block_s` | 50 µs | fixed cost of writing or loading a KV block: open, rename; measured by `calibrate` |
| `tier_write_bytes_s` | 2e9 | write bandwidth with checksum and copies; measured on two CPU cores, not next to a GPU |
| `tier_load_bytes_s` | 2e9 | the same for loading |
| `embed_s` | 2 ms | one query through a small embedder; an assumption |
| `ring_s` | 10 µs | latency through the ring; measured on two CPU cores (4–8 µs busy) |
| `extend_s` | 29 µs | fixed part of an extend, H200: 51 and 117 µs for 1,024 and 4,096 slots of 96 float16 |
| `extend_slot_s` | .064 µs | a slot's rows of 768 float16, H200: 95 µs for 1,024 slots |
| `extend_shared` | 3 | slowdown of an extend beside a busy model, H200: a search of 41 waits 2.4 ms for its turn |
| `query_s` | 0 | time of a query in the pool besides its extends: ring, admission, result; 2 µs from `calibrate` |
| `round_s` | 0 | time of the pool's loop per extend; .3 µs from `calibrate` |
| `wake_s` | 0 | wake-up time of a sleeping pool; .1 ms from `calibrate` |
| `gpu_bytes` | 8e10 | device memory |
| `weight_bytes` | 1.6e10 | 8e9 parameters in bfloat16 |
| `index_bytes` | 1.664e10 | 10 million vectors of 768 float16 and 32 edges of 4 bytes |
"""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from runtime.errors import ConfigError
from runtime.files import read_regular

_Cost = Annotated[float, Meta(ge=0, le=3600)]
_Factor = Annotated[float, Meta(ge=1, le=1000)]
_Size = Annotated[float, Meta(ge=0, le=1e15)]
_MAX_FILE_BYTES = 1 << 16


class ServiceTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Service times in seconds, and sizes in bytes; the module's table has units and sources."""

    source: str = "defaults: H100 data sheet, an 8-billion-parameter Llama, not measured; extends of an H200"
    prefill_pass_s: _Cost = 2e-3
    prefill_token_s: _Cost = 30e-6
    prefill_behind_s: _Cost = 0.0
    prefill_pair_s: _Cost = 1e-9
    decode_step_s: _Cost = 6e-3
    decode_row_s: _Cost = 40e-6
    decode_context_s: _Cost = 49e-9
    kv_token_bytes: _Size = 131_072
    link_bytes_s: Annotated[float, Meta(gt=0)] = 3.6e11
    link_s: _Cost = 50e-6
    tier_block_s: _Cost = 50e-6
    tier_write_bytes_s: Annotated[float, Meta(gt=0)] = 2e9
    tier_load_bytes_s: Annotated[float, Meta(gt=0)] = 2e9
    embed_s: _Cost = 2e-3
    ring_s: _Cost = 10e-6
    extend_s: _Cost = 29e-6
    extend_slot_s: _Cost = 0.064e-6
    query_s: _Cost = 0.0
    round_s: _Cost = 0.0
    wake_s: _Cost = 0.0
    extend_shared: _Factor = 3.0
    gpu_bytes: _Size = 8e10
    weight_bytes: _Size = 1.6e10
    index_bytes: _Size = 1.664e10

    def prefill_s(self, start: int, tokens: int) -> float:
        """Return the time of a chunk of `tokens` tokens after `start` cached ones, without the fixed cost of a pass."""
        each = self.prefill_token_s + self.prefill_pair_s * (start + tokens / 2)
        return tokens * (each + self.prefill_behind_s if start else each)

    def decode_s(self, rows: int, context_tokens: int) -> float:
        """Return the time of a step of `rows` rows with `context_tokens` tokens in total."""
        return self.decode_step_s + rows * self.decode_row_s + context_tokens * self.decode_context_s

    def extend_time_s(self, slots: float) -> float:
        """Return the time of an extend with `slots` active slots."""
        return self.extend_s + slots * self.extend_slot_s

    def copy_s(self, tokens: int) -> float:
        """Return the time to copy the KV of `tokens` tokens."""
        return tokens * self.kv_token_bytes / self.link_bytes_s

    def save(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")

    @classmethod
    def load(cls, path: Path) -> "ServiceTimes":
        """Read a file written by `save`; missing fields have their defaults. Raises `ConfigError`."""
        try:
            text = read_regular(path, _MAX_FILE_BYTES)
        except OSError as error:
            raise ConfigError(f"{path}: cannot read the service times: {error.strerror}") from error
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"{path}: invalid service times: {error}; `trinity calibrate` measures them again"
            ) from error
