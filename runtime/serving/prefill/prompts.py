"""Prompts of a prefill worker's requests: without passages, with them, and the query for the passages."""

from collections.abc import Sequence

from runtime.errors import InvalidRequest
from runtime.retrieval.passages import Passage, within
from runtime.retrieval.search.query import Query
from runtime.serving.messages import Generation, Retrieval
from runtime.serving.model.text import Prompt, build_prompt, prompt_budget, query_text
from runtime.serving.model.tokenizer import Tokenizer


class Prompts:
    """Builds prompts for a model of so many tokens of context, with at most `passage_tokens` tokens of passages."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, context_tokens: int, passage_tokens: int) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._context_tokens, self._passage_tokens = context_tokens, passage_tokens

    def bare(self, generation: Generation) -> list[int]:
        """Return the tokens without passages. Raises `InvalidRequest`, `ContextLengthExceeded`."""
        tokens = build_prompt(
            self._tokenizer, generation.messages, generation.prompt, budget_tokens=self._budget(generation)
        ).tokens
        if max(tokens, default=0) >= self._vocabulary:
            raise InvalidRequest(
                f"token id {max(tokens)} in the prompt; the vocabulary has {self._vocabulary}", "prompt"
            )
        return tokens

    def query(self, generation: Generation, retrieval: Retrieval) -> Query:
        """Return the query for its passages."""
        text = query_text(self._tokenizer, generation.messages, generation.prompt)
        return retrieval.query(text, "prefill", generation.deadline_ns)

    def with_passages(self, generation: Generation, bare: Sequence[int], passages: Sequence[Passage]) -> Prompt:
        """Return the prompt with those of the passages that are near enough and fit."""
        assert generation.retrieval is not None, "it has passages"
        return build_prompt(
            self._tokenizer,
            generation.messages,
            generation.prompt,
            within(passages, generation.retrieval.max_distance),
            budget_tokens=self._budget(generation),
            passage_tokens=self._passage_tokens,
            bare=bare,
        )

    def _budget(self, generation: Generation) -> int:
        return prompt_budget(self._context_tokens, generation.sampling.max_tokens)


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many leading tokens two prompts have in common."""
    shorter = min(len(one), len(other))
    return next((at for at in range(shorter) if one[at] != other[at]), shorter)
