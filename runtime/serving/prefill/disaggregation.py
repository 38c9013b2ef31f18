"""Conditional disaggregation: which prompts are prefilled by the decode worker that writes their answers.

A prefill worker keeps prompts away from running batches. But a short one may go into a decode worker's step as well:
nothing is handed over, and a queue in front of prefill is not waited for. A prompt is computed by decode if

- a row is free there;
- that is done no later than here: the prompts that were sent there before it, and the steps of the batch beside which
  its chunks are run, take no longer than the prompts that wait here;
- a step that carries a chunk of it still keeps the goal of a token.

So a long prompt, of many chunks, is prefill's unless that has a long queue. NVIDIA Dynamo decides alike, by configured
lengths of a prompt and of the queue; here they are measured times. Pure: the simulated prefill worker runs this too.
"""

from runtime.node.config import Disaggregate
from runtime.serving.messages import DecodeLoad

_REMEMBERED = 0.9  # of the passes before, with each pass


def computed_by_decode(
    chunk_s: float, beside_s: float, ahead_s: float, sent_s: float, load: DecodeLoad, tpot_s: float
) -> bool:
    """Whether decode is to compute a prompt in chunks of `chunk_s`, beside steps that take `beside_s` together; it
    waits for others' prompts for `ahead_s` here, for `sent_s` there."""
    step_s = load.step_ns / 1e9 if load.rows else 0.0
    return load.rows < load.slots and sent_s + beside_s <= ahead_s and step_s + chunk_s <= tpot_s


class Disaggregation:
    """Decides for the prompts of one prefill worker. `tpot_s` is the goal of a token; decode runs `chunk_tokens` of
    prompts in one step."""

    def __init__(self, mode: Disaggregate, tpot_s: float, chunk_tokens: int) -> None:
        self._mode, self._tpot_s, self._chunk_tokens = mode, tpot_s, chunk_tokens
        self._seconds = self._tokens = 0.0  # of the last passes, the latest weigh most
        self._sent: dict[str, int] = {}  # decode worker → when it will have computed what was sent to it, in ns

    def passed(self, tokens: int, seconds: float) -> None:
        """A pass of so many tokens has taken so long."""
        self._tokens = _REMEMBERED * self._tokens + tokens
        self._seconds = _REMEMBERED * self._seconds + seconds

    def by_decode(self, now_ns: int, worker: str, tokens: int, ahead: int, load: DecodeLoad) -> bool:
        """Whether a decode worker is to compute a prompt of `tokens` that are not cached, while `ahead` wait here.

        True counts as sent. Before the first pass nothing is known of times: prefill makes it.
        """
        if self._mode != "auto" or not self._tokens:
            return self._mode == "never"
        token_s = self._seconds / self._tokens
        passes = -(-tokens // self._chunk_tokens) - (not load.rows)  # beside others; more rows may come meanwhile
        beside_s = passes * load.step_ns / 1e9
        chunk_s = min(tokens, self._chunk_tokens) * token_s
        begin_ns = max(now_ns, self._sent.get(worker, 0))
        found = computed_by_decode(chunk_s, beside_s, ahead * token_s, (begin_ns - now_ns) / 1e9, load, self._tpot_s)
        if found:
            self._sent[worker] = begin_ns + round((tokens * token_s + beside_s) * 1e9)
        return found
