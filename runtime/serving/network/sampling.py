"""Next tokens drawn where the logits are: a number for each row comes back to the host instead of a vocabulary.

The rules are `Sampler`'s, and so are its uniform numbers; sums of a vocabulary's weights round in another order, so
what falls between two tokens to sixteen digits may fall the other way.
"""

from collections.abc import Sequence

import torch

from runtime.serving.model.language_model import SampleSpec

_GUESS = 256  # so many of the most likely tokens are sorted first; all of them only if that is not enough
_LOW = (1 << 31) - 1
NO_TOKEN = -1


def sample(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    """A token for each row of logits float32 [rows, vocabulary]: int64 [rows], on their device; NO_TOKEN where no logit
    is finite, or one is +inf or NaN.

    Waits for the device only where a nucleus has more than 256 tokens.
    """
    best = logits.amax(dim=1)  # NaN where one is
    numbers = torch.arange(logits.shape[1], device=logits.device)
    tokens = torch.where(logits == best[:, None], numbers, logits.shape[1]).amin(dim=1)
    drawn = [row for row, spec in enumerate(specs) if spec.temperature > 0]
    if drawn:
        rows = _sent(drawn, logits.device)
        asked = _sent([specs[row] for row in drawn], logits.device)
        all_of_them = [i for i, row in enumerate(drawn) if specs[row].top_p >= 1.0]
        nuclei = [i for i, row in enumerate(drawn) if specs[row].top_p < 1.0]
        temperature, top_p, point = asked.unbind(1)
        weights = ((logits[rows].double() - best[rows, None].double()) / temperature[:, None]).exp()
        found = torch.empty_like(rows)
        for some, pick in ((all_of_them, _of_all), (nuclei, _of_nucleus)):
            if some:
                at = _sent(some, logits.device)
                found[at] = pick(logits[rows[at]], weights[at], top_p[at], point[at])
        tokens = tokens.index_copy(0, rows, found)
    return torch.where(best.isfinite(), tokens, NO_TOKEN)


def _sent(values: Sequence[int] | Sequence[SampleSpec], device: torch.device) -> torch.Tensor:
    made = torch.tensor(values, dtype=torch.int64 if isinstance(values[0], int) else torch.float64)
    return made if device.type == "cpu" else made.pin_memory().to(device, non_blocking=True)


def _of_all(_: torch.Tensor, weights: torch.Tensor, top_p: torch.Tensor, point: torch.Tensor) -> torch.Tensor:
    sums = weights.cumsum(dim=1)
    return _located(sums, point * sums[:, -1], torch.full_like(point, sums.shape[1] - 1, dtype=torch.int64))


def _of_nucleus(logits: torch.Tensor, weights: torch.Tensor, top_p: torch.Tensor, point: torch.Tensor) -> torch.Tensor:
    """Among the fewest most likely tokens whose weights make up `top_p` of the sum; of equals the first come first."""
    wanted = top_p * weights.sum(dim=1)
    keys = _keys(logits)
    for count in (min(_GUESS, keys.shape[1]), keys.shape[1]):
        ids = _LOW - (keys.topk(count, dim=1).values & _LOW)
        sums = weights.gather(1, ids).cumsum(dim=1)
        if count == keys.shape[1] or bool((sums[:, -1] >= wanted).all()):
            break
    last = torch.searchsorted(sums, wanted[:, None]).squeeze(1).clamp(max=sums.shape[1] - 1)
    most = sums.gather(1, last[:, None]).squeeze(1)
    return ids.gather(1, _located(sums, point * most, last)[:, None]).squeeze(1)


def _keys(logits: torch.Tensor) -> torch.Tensor:
    """Integers that order as logits do, and of equal ones the first above the others: all of a row differ."""
    bits = (logits + 0.0).view(torch.int32).long()  # -0 becomes +0: they tie
    ordered = torch.where(bits < 0, bits ^ _LOW, bits)
    numbers = torch.arange(logits.shape[1], device=logits.device)
    return (ordered << 31) + (_LOW - numbers)


def _located(sums: torch.Tensor, points: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """The index that each point falls on, at most `last`."""
    return torch.minimum(torch.searchsorted(sums, points[:, None], right=True).squeeze(1), last)
