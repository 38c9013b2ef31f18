"""`[prefill]`, `[decode]` and `[pool]`: the node's own workers."""

from typing import Annotated, Literal

from msgspec import Meta

from runtime.node.engine_config import BLOCK_TOKENS, ModelSection, Section

MAX_WORKERS = 8
MAX_TOP_M = 512
"""Of a query: its candidate list. k is at most 128."""
SEARCH_WIDTH = 4
"""Parents that an extend of a query expands, if it does not set it."""
Workers = Annotated[int, Meta(ge=0, le=MAX_WORKERS)]


class WorkerSection(Section, frozen=True):
    """Keys of every worker role:

    - `workers`: number of workers.
    - `devices`: "cpu", "cuda:N" or a GPU's UUID; one entry per worker, or one for all.
    - `cores`: lists of core numbers, one per worker or one for all; without, the kernel places the worker, or, on a
      GPU, the layout does by NUMA node. Models compute and embed with a thread on each of these cores; without, with
      one.
    """

    workers: Workers = 1
    devices: tuple[str, ...] = ("cpu",)
    cores: tuple[tuple[Annotated[int, Meta(ge=0, le=4096)], ...], ...] = ()


class KvWorkerSection(WorkerSection, frozen=True):
    """Keys of the roles that hold KV:

    - `kv_blocks`: KV blocks per worker; 0 allocates what `slots` sequences of full context need.
    - `spares`: number of standby workers: processes that have loaded the model and replace a worker that dies. Each
      needs as much memory as a worker.
    """

    slots: Annotated[int, Meta(ge=1, le=512)] = 8
    kv_blocks: Annotated[int, Meta(ge=0, le=10_000_000)] = 0
    spares: Annotated[int, Meta(ge=0, le=8)] = 0

    @property
    def threads(self) -> int:
        """Threads of a worker with the most cores."""
        return max((1, *map(len, self.cores)))

    def blocks(self, model: ModelSection, block_tokens: int = BLOCK_TOKENS) -> int:
        """Return the number of KV blocks of one worker."""
        return self.kv_blocks or self.slots * model.row_blocks(block_tokens)


class PrefillSection(KvWorkerSection, frozen=True):
    """Prefill workers.

    - `slots`: prompts that a worker holds at once, from their first chunk until decode has pulled their KV.
    - `chunk_tokens`: tokens of one forward pass, of one prompt or of several. "auto" is 256 on CPUs and 1,024 on GPUs,
      from where on a longer pass is hardly faster per token, and other prompts wait for it longer.
    """

    slots: Annotated[int, Meta(ge=1, le=256)] = 4
    chunk_tokens: Literal["auto"] | Annotated[int, Meta(ge=16, le=65_536)] = "auto"

    @property
    def pass_tokens(self) -> int:
        """`chunk_tokens`, where "auto" is the number for the workers' devices."""
        if self.chunk_tokens != "auto":
            return self.chunk_tokens
        return 256 if self.devices[0] == "cpu" else 1024


class DecodeSection(KvWorkerSection, frozen=True):
    """Decode workers.

    - `slots`: rows of the running batch, one per request.
    - `chunk_tokens`: tokens per step of what a row must compute besides its next token, such as a prompt or passages.

    When KV blocks run out, the youngest row is preempted. Its KV is written to the host tier of `[kv]` whole and loaded
    later, or recomputed if that is faster by the times that the worker has measured.
    """

    slots: Annotated[int, Meta(ge=1, le=512)] = 8
    chunk_tokens: Annotated[int, Meta(ge=16, le=65_536)] = 256


PoolPlacement = Literal["own", "with-prefill", "with-decode", "coupled", "with-prefill+own", "with-decode+own"]


class PoolSection(WorkerSection, frozen=True):
    """Vector-pool workers: replicas of each other, or of each shard of a sharded collection.

    Placement:

    - `placement`: "own" places them on `devices`. "with-prefill", "with-decode" and "coupled" (both) place one beside
      each worker of these roles, on its GPU or its cores; `workers` and `devices` are then left out. "with-prefill+own"
      and "with-decode+own" place these for the queries of the one stage, and `workers` on `devices` for the other's.

    A query goes to the pool worker beside its model worker, else to those for its stage, or for both, in turn, and to
    another one while these are down, slow or overloaded.

    Scheduling (docs/scheduler.md):

    - `slots`: maximum number of active queries. "auto" measures at start, for at most a second: the fewest with
      which an extend wastes at most a tenth of its time, or whose rate is 95% of the best (few on a CPU, up to hundreds
      on a GPU). The engine has as many slots again for paused queries.
    - `reserve`: share r of the slots that is reserved for prefill queries. On a GPU decode leaves them free while
      prefill is present, used or not; elsewhere it uses those that prefill does not.

    Search:

    - `top_m`: length of the candidate list of queries that do not set it. Others may set at most 512.

    Engine and client sessions:

    - `form`: "auto" uses a resident kernel on a GPU that no other worker of the node uses: one launch that fetches
      queries by itself (docs/gpu.md). "launches", as on other GPUs: launches that end when a query finishes or
      arrives; use it for a GPU on which other programs compute.
    """

    placement: PoolPlacement = "own"
    slots: Literal["auto"] | Annotated[int, Meta(ge=1, le=4096)] = "auto"
    form: Literal["auto", "launches"] = "auto"
    reserve: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.3
    top_m: Annotated[int, Meta(ge=1, le=MAX_TOP_M)] = 160
