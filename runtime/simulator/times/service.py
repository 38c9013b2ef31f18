"""Service times of the stages: documented defaults, or measured values from `trinity calibrate`.

The defaults are an H200's (141 GB), measured with Trinity's own model in the shape of Llama 3.2 1B (16 layers, 8 KV
heads of 64) in bfloat16: benchmarks/results/gpu-h200.md. `H100_8B` is another set, from data sheets: an H100 (SXM, 989
dense bfloat16 TFLOP/s, 3.35 TB/s) that serves an 8-billion-parameter Llama (32 layers, 8 KV heads of 128) in bfloat16.
The fits of prompts are within 4%, those of steps within 23%. Times of the model and of the hand-over were measured
before layers were compiled and hand-overs had one kernel, which have not been measured on a GPU: docs/gpu.md.
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
    """Service times in seconds, and sizes in bytes."""

    source: str = "defaults: measured on an H200, Trinity's own model in the shape of Llama 3.2 1B"
    prefill_pass_s: _Cost = 10.2e-3  # fit: 10.6, 10.1, 14.3 ms for 128, 512, 2,048 tokens, 13.7 for 512 after 2,048
    prefill_token_s: _Cost = 0.0  # the same fit: a pass below 2,048 tokens is bound by its launches
    prefill_behind_s: _Cost = 2.3e-6  # the same fit: extra time of a token in a chunk after others
    prefill_pair_s: _Cost = 1.95e-9  # the same fit: for each earlier token
    decode_step_s: _Cost = 2.2e-3  # fit: 2.0 to 6.6 ms for 1 to 64 rows of 256 and 2,048 tokens
    decode_row_s: _Cost = 13.5e-6  # the same fit
    decode_context_s: _Cost = 34e-9  # the same fit
    kv_token_bytes: _Size = 32_768  # 16 layers · 2 · 8 heads · 64 · 2 bytes
    # 128 MiB of blocks in order in 3.4 ms; scattered 10.0 ms, 1.34e10, which is not used
    link_bytes_s: Annotated[float, Meta(gt=0)] = 3.96e10
    link_s: _Cost = 50e-6  # latency from prefill's offer to decode; an assumption
    embed_s: _Cost = 4e-3  # one text, all-MiniLM-L6-v2 in int8 on a CPU core; no embedder was measured on a GPU
    ring_s: _Cost = 10e-6  # latency through the ring; measured on two CPU cores (4–8 µs busy)
    extend_s: _Cost = 29e-6  # fixed part of an extend: 51 and 117 µs for 1,024 and 4,096 slots of 96 float16
    extend_slot_s: _Cost = 0.064e-6  # a slot's rows of 768 float16: 95 µs for 1,024 slots
    query_s: _Cost = 0.9e-6  # host time of a query in the pool besides its extends: admission, poll, result
    round_s: _Cost = 0.0  # time of the pool's loop per extend; .3 µs from `calibrate`
    wake_s: _Cost = 0.0  # wake-up time of a sleeping pool; .1 ms from `calibrate`
    extend_shared: _Factor = 3.0  # slowdown of an extend beside a busy model: a search of 41 waits 2.4 ms for its turn
    layers: Annotated[int, Meta(ge=1, le=10_000)] = 16  # the model's shape, for `collectives.py`, as `hidden`
    hidden: Annotated[int, Meta(ge=1, le=1_000_000)] = 2048
    # between nodes: 400 Gbit/s a GPU (ConnectX-7's data sheet), 80%; for `collectives.py`
    network_bytes_s: Annotated[float, Meta(gt=0)] = 4e10
    gpu_bytes: _Size = 1.41e11
    weight_bytes: _Size = 1.95e9
    index_bytes: _Size = 1.664e10  # 10 million vectors of 768 float16 and 32 edges of 4 bytes

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
        """Read a file written by `save`, whose missing fields have their defaults; "h100-8b" is `H100_8B`. Raises
        `ConfigError`."""
        if str(path) == "h100-8b":
            return H100_8B
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


H100_8B = ServiceTimes(
    source="H100 data sheet, an 8-billion-parameter Llama, not measured; extends of an H200",
    prefill_pass_s=2e-3,  # launches and synchronisation of one pass; an assumption
    prefill_token_s=30e-6,  # 2 · 8e9 FLOP a token at 55% of 989 TFLOP/s
    prefill_behind_s=0.0,
    prefill_pair_s=1e-9,  # attention: 4 · 32 layers · 4096 FLOP for each earlier token, at the same rate
    decode_step_s=6e-3,  # 16 GB of weights read at 80% of 3.35 TB/s
    decode_row_s=40e-6,  # 2 · 8e9 FLOP a row at 40% of 989 TFLOP/s
    decode_context_s=49e-9,  # 128 KiB of KV a token at 80% of 3.35 TB/s
    kv_token_bytes=131_072,  # 32 layers · 2 · 8 heads · 128 · 2 bytes
    link_bytes_s=3.6e11,  # NVLink 4: 450 GB/s a direction, 80% of it
    embed_s=2e-3,  # one query through a small embedder; an assumption
    query_s=0.0,
    layers=32,
    hidden=4096,
    gpu_bytes=8e10,
    weight_bytes=1.6e10,  # 8e9 parameters in bfloat16
)
