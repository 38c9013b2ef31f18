"""Decoder layers of a Llama as programs between attentions, for devices other than CPUs: eager, or compiled by torch.

```
begin:    tokens ─▶ embedding ─▶ norm, queries, keys, values, rotation ─▶ KV blocks
                                                      attention of layer 0
proceed:  output of layer 0, norm, MLP ─▶ norm, queries, keys, values of layer 1 ─▶ KV blocks
                                                      attention of layer 1
finish:   output of the last layer, norm, MLP, of chunks' last tokens ─▶ norm ─▶ logits
```
torch compiles what is between two matrix products into one to three kernels, where eager operations are some forty a
layer. A program is compiled once, for all layers and any number of tokens from 2 on. The residual stream and everything
inside a kernel are float32; what passes through memory to a product or to attention is of the weights' or KV's type.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.nn.functional import embedding, silu

from runtime.serving.network.compiler import prepare_compiler
from runtime.serving.network.cpu_kernels import compiled_kernel
from runtime.serving.network.linear import Linear
from runtime.serving.network.paged_cache import Angles, apply_rope, store


@compiled_kernel("float32[:,::1]", "float32[::1]", "float32", "float32[:,::1]")
def rms_norm(x: Any, weight: Any, epsilon: Any, output: Any) -> None:
    """output[t] = x[t] · weight / RMS of x[t]."""
    tokens, hidden = x.shape
    for token in range(tokens):
        total = np.float32(0.0)
        for d in range(hidden):
            total += x[token, d] * x[token, d]
        scale = np.float32(1.0) / np.sqrt(total / np.float32(hidden) + epsilon)
        for d in range(hidden):
            output[token, d] = x[token, d] * scale * weight[d]


@dataclass(frozen=True)
class Norm:
    """RMSNorm over the last dimension: x · weight / RMS of x (arXiv 1910.07467)."""

    weight: torch.Tensor
    epsilon: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon))

    def on_cpu(self, x: torch.Tensor) -> torch.Tensor:
        """The same by a loop, for tensors of a CPU."""
        y = torch.empty_like(x)
        rms_norm(x.numpy(), self.weight.numpy(), self.epsilon, y.numpy())
        return y


@dataclass(frozen=True)
class Layer:
    """A decoder layer. `attention_in` projects queries, keys and values, `mlp_in` gate and up, in one product each."""

    attention_norm: Norm
    attention_in: Linear
    attention_out: Linear
    mlp_norm: Norm
    mlp_in: Linear
    mlp_out: Linear

    def mlp(self, normed: torch.Tensor) -> torch.Tensor:
        gate, up = self.mlp_in(normed).chunk(2, dim=-1)
        return self.mlp_out(silu(gate) * up)


class Rotation(Protocol):
    """Rotation angles by position: `runtime.serving.network.llama.Rope`."""

    def angles(self, positions: torch.Tensor) -> Angles: ...


# ---- the programs


class State(NamedTuple):
    """A batch between two programs: the residual stream float32 [tokens, hidden], the current layer's rotated queries
    [tokens, heads, head_dim], its rotated keys and its values [tokens, 2 · kv_heads, head_dim], the angles, and the
    batch's numbers (see `PagedBatch`)."""

    x: torch.Tensor
    query: torch.Tensor
    fresh: torch.Tensor
    angles: Angles
    numbers: torch.Tensor


def begin(table: torch.Tensor, rotation: Rotation, layer: Layer, stored: torch.Tensor, numbers: torch.Tensor) -> State:
    """Return the state before the attention of the first layer, whose blocks `stored` [2, blocks, kv_heads,
    block_tokens, head_dim] take the tokens' K and V. `table`: the embeddings [vocabulary, hidden]."""
    angles, x = rotation.angles(numbers[1]), embedding(numbers[0], table)
    return State(x, *_heads(layer, stored, x, angles, numbers), angles, numbers)


def proceed(layer: Layer, following: Layer, stored: torch.Tensor, state: State, attended: torch.Tensor) -> None:
    """Advance the state, in place, from the attention of `layer` [tokens, heads, head_dim] to that of the following
    layer, whose blocks are `stored`."""
    x = _after_attention(layer, state.x, attended)
    query, fresh = _heads(following, stored, x, state.angles, state.numbers)
    for kept, new in ((state.x, x), (state.query, query), (state.fresh, fresh)):
        kept.copy_(new)


def finish(
    layer: Layer, norm: Norm, head: Linear, x: torch.Tensor, attended: torch.Tensor, last: torch.Tensor
) -> torch.Tensor:
    """Return the logits of the tokens `last` after the last layer: float32 [len(last), vocabulary]."""
    return head(norm(_after_attention(layer, x[last], attended[last]))).float()


def _after_attention(layer: Layer, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    x = x + layer.attention_out(attended.flatten(1))
    return x + layer.mlp(layer.mlp_norm(x))


def _heads(
    layer: Layer, stored: torch.Tensor, x: torch.Tensor, angles: Angles, numbers: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    kv_heads, head_dim = stored.shape[2], stored.shape[4]
    _, _, blocks, offsets, order = numbers
    product = layer.attention_in(layer.attention_norm(x))
    heads = product.shape[1] // head_dim - 2 * kv_heads
    # A token that pads the batch takes the heads of the token that it repeats: both write the same K and V.
    projected = product[order].float().view(-1, heads + 2 * kv_heads, head_dim)
    query = apply_rope(projected[:, :heads], angles).to(stored.dtype)
    key = apply_rope(projected[:, heads:-kv_heads], angles)
    # A sequence's NaN must not affect later owners of its blocks: masked values are still multiplied.
    fresh = torch.cat((key, projected[:, -kv_heads:]), dim=1).to(stored.dtype).nan_to_num()
    store(stored, blocks, offsets, fresh)
    return query, fresh


class Programs(NamedTuple):
    """The three programs, as functions of their arguments above."""

    begin: Callable[[torch.Tensor, Rotation, Layer, torch.Tensor, torch.Tensor], State] = begin
    proceed: Callable[[Layer, Layer, torch.Tensor, State, torch.Tensor], None] = proceed
    finish: Callable[[Layer, Norm, Linear, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = finish


def compiled_programs() -> Programs:
    """Return the programs, for torch to compile at their first calls, for any number of tokens and chunks from 2 on.
    Raises `ModelError` without a private cache."""
    prepare_compiler()
    from torch._dynamo import maybe_mark_dynamic

    programs: list[Any] = [torch.compile(program, fullgraph=True) for program in Programs()]
    started, proceeded, finished = programs

    def run_begin(*arguments: Any) -> State:
        maybe_mark_dynamic(arguments[-1], 1)
        state: State = started(*arguments)
        maybe_mark_dynamic(state.numbers, 1)
        for tensor in (state.x, state.query, state.fresh, *state.angles):
            maybe_mark_dynamic(tensor, 0)
        return state

    def run_proceed(*arguments: Any) -> None:
        maybe_mark_dynamic(arguments[-1], 0)
        proceeded(*arguments)

    def run_finish(*arguments: Any) -> torch.Tensor:
        for tensor in arguments[3:]:
            maybe_mark_dynamic(tensor, 0)
        logits: torch.Tensor = finished(*arguments)
        return logits

    return Programs(run_begin, run_proceed, run_finish)
