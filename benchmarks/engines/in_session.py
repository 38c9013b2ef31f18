"""Passages inside a running generation of vLLM (its streaming input), against asking again behind them.

`.venv-vllm-cpu/bin/python benchmarks/engines/in_session.py MODEL` runs in vLLM's own environment, without a node. MODEL
is a directory of transformers. A session gets random tokens, writes `k`, gets more tokens, writes on, and gets tokens
once more. Every stretch is compared with a fresh run over the same sequence. Then a session's pause for 192 tokens of
passages is compared with that of a second request, which has the first one's blocks cached.

vLLM drops the last token of a turn, of which it has no KV yet, so it is the first token of what follows it.
"""

import asyncio
import random
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Sequence

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import StreamingInput
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

_PASSAGES = 192
_PROMPTS = (20, 100, 127, 128, 129, 200, 380)  # a block of KV has 128 tokens on a CPU
_TURNS = (1, 2, 16)


class Engine:
    """vLLM, and the requests that it was asked."""

    def __init__(self, model: str) -> None:
        arguments = AsyncEngineArgs(
            model=model, dtype="float32", enforce_eager=True, max_model_len=2048, disable_log_stats=True
        )
        self.llm = AsyncLLM.from_engine_args(arguments)
        self.times: list[float] = []  # seconds, when the last session's tokens came
        self._count = 0
        self._random = random.Random(5)

    def tokens(self, count: int) -> list[int]:
        """Random ones."""
        return [self._random.randrange(300, 20_000) for _ in range(count)]

    async def fresh(self, prompt: Sequence[int], k: int, salt: str = "") -> list[int]:
        """What is written behind a prompt, of which nothing is cached but under the same salt."""
        self._count += 1
        asked = TokensPrompt(prompt_token_ids=list(prompt), cache_salt=salt or f"fresh {self._count}")
        told: list[int] = []
        async for output in self.llm.generate(asked, _greedy(k), f"request {self._count}"):
            told += output.outputs[0].token_ids
        return told

    async def session(self, prompt: Sequence[int], inserts: Sequence[Sequence[int]], k: int) -> list[list[int]]:
        """What is written behind the prompt and behind each insertion."""
        self._count += 1
        name, turns, over = f"session {self._count}", [list[int]()], asyncio.Event()

        async def chunks() -> AsyncGenerator[StreamingInput, None]:
            for number, chunk in enumerate([prompt, *inserts]):
                before = [turns[number - 1][-1]] if number else []
                asked = TokensPrompt(prompt_token_ids=[*before, *chunk], cache_salt=name)
                yield StreamingInput(prompt=asked, sampling_params=_greedy(k))
                await over.wait()
                over.clear()

        self.times = []
        async for output in self.llm.generate(chunks(), _greedy(k), name):
            self.times += [time.perf_counter()] * len(output.outputs[0].token_ids)
            for token in output.outputs[0].token_ids:
                if len(turns[-1]) == k:
                    turns.append([])
                turns[-1].append(token)
            if len(turns[-1]) == k:
                over.set()
        return turns


def _greedy(k: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=k, ignore_eos=True, output_kind=RequestOutputKind.DELTA)


async def same(engine: Engine, size: int, k: int) -> bool:
    """Whether each of three stretches of a session is that of a fresh run."""
    sequence, inserts = engine.tokens(size), [engine.tokens(60), engine.tokens(130)]
    turns = await engine.session(sequence, inserts, k)
    for turn, insert in zip(turns, [*inserts, []], strict=True):
        if await engine.fresh(sequence, k) != turn:
            return False
        sequence = [*sequence, *turn, *insert]
    return True


async def pauses(engine: Engine, size: int) -> tuple[float, float]:
    """Milliseconds from one turn's last token to the next one's first: in a session, and by a second request."""
    prompt, passages = engine.tokens(size), engine.tokens(_PASSAGES)
    await engine.session(prompt, [passages], 16)
    session_ms = (engine.times[16] - engine.times[15]) * 1e3
    salt = f"pause {prompt[:4]}"
    told = await engine.fresh(prompt, 16, salt)
    begin = time.perf_counter()
    await engine.fresh([*prompt, *told, *passages], 1, salt)
    return session_ms, (time.perf_counter() - begin) * 1e3


async def main() -> None:
    engine = Engine(sys.argv[1])
    found = [await same(engine, size, k) for size in _PROMPTS for k in _TURNS]
    together = await asyncio.gather(*(same(engine, 60 + 37 * number, 16) for number in range(6)))
    print(f"sessions whose every stretch is a fresh run's: {sum(found)} of {len(found)}; 6 at once: {sum(together)}")
    for size in (150, 240, 300):
        times = [await pauses(engine, size) for _ in range(5)]
        session, again = (statistics.median(one) for one in zip(*times, strict=True))
        print(f"pause for {_PASSAGES} tokens behind {size}: {session:.0f} ms in session, {again:.0f} ms by a request")
    engine.llm.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
