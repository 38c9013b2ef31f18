"""Models that span several GPUs: what their communication adds to the service times of a node.

Both terms argue about where a vector pool is placed (arXiv 2512.02281).

**Tensor parallelism.** A model worker is t GPUs: each computes and reads 1/t, and after attention and after the MLP of
every layer they add up the activations (Megatron-LM, arXiv 1909.08053, section 3). A ring moves 2 (t - 1) / t of the
bytes of such an all-reduce over each GPU's link, so a token takes `layers` · 2 · 2 (t - 1) / t · `hidden` · 2 bytes /
`link_bytes_s` longer. A pool worker beside one of the t GPUs delays all of them.

**Expert parallelism.** The experts of a model are spread over the g GPUs of a node, and each token's activations go to
k experts and back in every layer (GShard, arXiv 2006.16668). GPUs of an independent pool hold none: the experts of d of
g GPUs are displaced to another node, and d / g of the bytes cross the network instead of the links. A token then takes
`layers` · 2 k · `hidden` · 2 bytes · d / g · (1 / `network_bytes_s` - 1 / `link_bytes_s`) longer.
"""

from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from runtime.simulator.times.service import ServiceTimes

_ACTIVATION_BYTES = 2  # bfloat16


class Collectives(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`tensor`: GPUs of a model worker. `experts`: experts of each token, of a model spread over the node; 0: none."""

    tensor: Annotated[int, Meta(ge=1, le=8)] = 1
    experts: Annotated[int, Meta(ge=0, le=64)] = 0

    def all_reduce_s(self, times: ServiceTimes) -> float:
        """Return a token's time in all-reduces."""
        moved = 2 * (self.tensor - 1) / self.tensor * times.hidden * _ACTIVATION_BYTES
        return times.layers * 2 * moved / times.link_bytes_s

    def displaced_s(self, times: ServiceTimes, displaced: int, gpus: int) -> float:
        """Return the time that a token takes longer if the experts of `displaced` of `gpus` GPUs are elsewhere."""
        moved = times.layers * 2 * self.experts * times.hidden * _ACTIVATION_BYTES * displaced / gpus
        return moved * (1 / times.network_bytes_s - 1 / times.link_bytes_s)

    def applied(self, times: ServiceTimes, displaced: int, gpus: int) -> ServiceTimes:
        """Return the times of workers of `tensor` GPUs each. `displaced`: GPUs of an independent pool."""
        t, token_s = self.tensor, self.all_reduce_s(times) + self.displaced_s(times, displaced, gpus)
        return replace(
            times,
            prefill_token_s=times.prefill_token_s / t + token_s,
            prefill_behind_s=times.prefill_behind_s / t,
            prefill_pair_s=times.prefill_pair_s / t,
            decode_step_s=times.decode_step_s / t,
            decode_row_s=times.decode_row_s / t + token_s,
            decode_context_s=times.decode_context_s / t,
        )
