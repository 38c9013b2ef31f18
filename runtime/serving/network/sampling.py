"""Batched sampling on the device of the logits: one token id per row is copied to the host, not the logits.

Greedy, or by temperature and nucleus. A device may round sums over the vocabulary in another order than a CPU, so a
point within the rounding error of the boundary between two tokens may select the other one there.
"""

from collections.abc import Sequence

import torch

from runtime.serving.model.sampler import SampleSpec

_NUCLEUS_GUESS = 256  # most likely tokens that are sorted first; all are sorted only if these are not enough
_LOW_BITS = (1 << 31) - 1
NO_TOKEN = -1


def sample(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    """Return a token for each row of logits float32 [rows, vocabulary]: int64 [rows], on their device.

    A row without a finite logit, or with +inf or NaN, gets NO_TOKEN.

    Synchronizes with the device only if a nucleus has more than 256 tokens.
    """
    best = logits.amax(dim=1)  # NaN for rows with a NaN
    tokens = _first_of_largest(logits, best)
    random_rows = [row for row, spec in enumerate(specs) if spec.temperature > 0]
    if random_rows:
        rows = _upload(random_rows, logits.device)
        parameters = _upload([specs[row] for row in random_rows], logits.device)
        full = [i for i, row in enumerate(random_rows) if specs[row].top_p >= 1.0]
        nucleus = [i for i, row in enumerate(random_rows) if specs[row].top_p < 1.0]
        temperature, top_p, point = parameters.unbind(1)
        weights = logits[rows].double()
        weights -= best[rows, None].double()  # in place: new memory takes a CPU longer than the arithmetic
        weights /= temperature[:, None]
        weights.exp_()
        sampled = torch.empty_like(rows)
        for selected, pick in ((full, _sample_full), (nucleus, _sample_nucleus)):
            if selected:
                at = _upload(selected, logits.device)
                sampled[at] = pick(logits[rows[at]], weights[at], top_p[at], point[at])
        tokens = tokens.index_copy(0, rows, sampled)
    return torch.where(best.isfinite(), tokens, NO_TOKEN)


def _first_of_largest(logits: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(axis=1))  # a tenth of torch's time
    numbers = torch.arange(logits.shape[1], device=logits.device)
    return torch.where(logits == best[:, None], numbers, logits.shape[1]).amin(dim=1)


def _upload(values: Sequence[int] | Sequence[SampleSpec], device: torch.device) -> torch.Tensor:
    host = torch.tensor(values, dtype=torch.int64 if isinstance(values[0], int) else torch.float64)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def _sample_full(_: torch.Tensor, weights: torch.Tensor, top_p: torch.Tensor, point: torch.Tensor) -> torch.Tensor:
    sums = weights.cumsum(dim=1)
    return _search(sums, point * sums[:, -1], torch.full_like(point, sums.shape[1] - 1, dtype=torch.int64))


def _sample_nucleus(
    logits: torch.Tensor, weights: torch.Tensor, top_p: torch.Tensor, point: torch.Tensor
) -> torch.Tensor:
    """Sample from the smallest set of most likely tokens with `top_p` of the weight; ties go to the lower token id."""
    wanted = top_p * weights.sum(dim=1)
    keys = _sort_keys(logits)
    for count in (min(_NUCLEUS_GUESS, keys.shape[1]), keys.shape[1]):
        ids = _LOW_BITS - (keys.topk(count, dim=1).values & _LOW_BITS)
        sums = weights.gather(1, ids).cumsum(dim=1)
        if count == keys.shape[1] or bool((sums[:, -1] >= wanted).all()):
            break
    last = torch.searchsorted(sums, wanted[:, None]).squeeze(1).clamp(max=sums.shape[1] - 1)
    most = sums.gather(1, last[:, None]).squeeze(1)
    return ids.gather(1, _search(sums, point * most, last)[:, None]).squeeze(1)


def _sort_keys(logits: torch.Tensor) -> torch.Tensor:
    """Return distinct integers in the order of the logits; of equal logits the lower token id sorts higher."""
    bits = (logits + 0.0).view(torch.int32).long()  # -0 becomes +0, so that they tie
    ordered = torch.where(bits < 0, bits ^ _LOW_BITS, bits)
    numbers = torch.arange(logits.shape[1], device=logits.device)
    return (ordered << 31) + (_LOW_BITS - numbers)


def _search(sums: torch.Tensor, points: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Return the index whose interval of the cumulative sums contains each point, at most `last`."""
    return torch.minimum(torch.searchsorted(sums, points[:, None], right=True).squeeze(1), last)
