"""Vectors of texts from a server that speaks OpenAI's embeddings: every text gets its vector, or the run ends."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
from jaxtyping import Float32

from skilltrain.errors import SkilltrainError
from skilltrain.llm.budget import Budget, estimate_tokens, reported_tokens
from skilltrain.llm.client import Server, in_threads, over_budget
from skilltrain.llm.protocol import CompletionError, Usage
from skilltrain.llm.settings import EmbeddingsConfig, Prices

Vectors = Float32[np.ndarray, "text dim"]

# OpenAI's list prices in dollars per million tokens, as published in 2025.
LIST_PRICES = {"text-embedding-3-small": 0.02, "text-embedding-3-large": 0.13, "text-embedding-ada-002": 0.10}
_MOST_PER_TEXT = 32  # tokens that a server may put around a text
_TOO_MUCH = (400, 413, 422)  # how servers refuse a text that is too long, or too many at once


class Embeddings:
    """An OpenAI-compatible server that gives vectors; `dim` is their length, as soon as it is known."""

    def __init__(self, config: EmbeddingsConfig) -> None:
        self.config, self.dim = config, config.dimensions
        price = config.price if config.price is not None or not config.is_openai else LIST_PRICES.get(config.model)
        prices = None if price is None else Prices(prompt=price, completion=0)
        self.budget = Budget(config.budget, prices, config.section)
        self._server = Server(config, self.budget)

    def embed(self, texts: Iterable[str], name_of: Callable[[int], str]) -> Iterator[tuple[range, Vectors]]:
        """Yield (positions in `texts`, their unit vectors) as they come; requests start in the order of `texts`.

        Raises SkilltrainError where a text gets no vector; `name_of` says which text is at a position. Requests under
        way at that moment come to their end, and their vectors are yielded before.
        """

        def work(batch: tuple[int, list[str]]) -> list[tuple[range, Vectors]]:
            return list(self._embed(*batch, name_of))

        for parts in in_threads(work, self._reserved(texts), self.config.concurrency):
            yield from parts

    def _reserved(self, texts: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
        """(position of the first, texts) of each request, as soon as the budget holds it."""
        rest, start = iter(texts), 0
        # A request holds no half of a surrogate pair.
        while batch := [text.encode(errors="replace").decode() for text in islice(rest, self.config.batch_size)]:
            self._reserve(batch)
            yield start, batch
            start += len(batch)

    def _reserve(self, texts: Sequence[str]) -> None:
        if not self.budget.wait_to_reserve(_most_of(texts)):
            raise self._fault(over_budget(self.budget))

    def _embed(
        self, start: int, texts: Sequence[str], name_of: Callable[[int], str]
    ) -> Iterator[tuple[range, Vectors]]:
        """The vectors of `texts`, the first of which is at `start`; a batch that is refused is sent in halves."""
        import openai

        try:
            vectors = self._server.ask(lambda: self._send(texts), _most_of(texts))
        except CompletionError as fault:
            raise self._fault(fault) from None
        except openai.OpenAIError as error:
            if not (isinstance(error, openai.APIStatusError) and error.status_code in _TOO_MUCH):
                raise self._fault(self._server.explain(error)) from None
            if len(texts) == 1:
                raise self._refused(texts[0], error, name_of(start)) from None
        else:
            yield range(start, start + len(texts)), self._unit(vectors, lambda place: name_of(start + place))
            return
        half = len(texts) // 2
        for first, part in ((start, texts[:half]), (start + half, texts[half:])):
            self._reserve(part)
            yield from self._embed(first, part, name_of)

    def _send(self, texts: Sequence[str]) -> tuple[Vectors, Usage]:
        """The vectors of `texts` from one try, and what it took. Raises CompletionError where there are none."""
        dimensions = {} if self.config.dimensions is None else {"dimensions": self.config.dimensions}
        embeddings = self._server.client.embeddings
        try:
            reply = embeddings.create(model=self.config.model, input=list(texts), extra_body=dimensions)
            data = sorted(reply.data, key=lambda item: item.index)
            vectors = np.array([item.embedding for item in data], dtype=np.float32)
        except (ValueError, TypeError, AttributeError) as error:
            raise CompletionError("malformed", f"the server's reply holds no vectors: {error}") from None
        if [item.index for item in data] != list(range(len(texts))) or vectors.ndim != 2 or not vectors.size:
            what = f"the server's reply does not hold one vector for each of {len(texts)} texts"
            raise CompletionError("malformed", what)
        reported = getattr(reply.usage, "prompt_tokens", None)
        return vectors, Usage(reported_tokens(reported, sum(map(estimate_tokens, texts))), 0)

    def _unit(self, vectors: Vectors, name_of: Callable[[int], str]) -> Vectors:
        """`vectors` of length 1. Raises SkilltrainError for one that has no direction, or not the length expected."""
        dim = vectors.shape[1]
        self.dim = expected = self.dim or dim
        if dim != expected:
            what = f"model '{self.config.model}' gives vectors of {dim} numbers, not {expected}"
            fix = "the model behind this name has changed: name another cache folder"
            if self.config.dimensions is not None:
                fix = f"it cannot shorten them: leave out {self.config.section}.dimensions"
            raise SkilltrainError(what, where=self.config.base_url, fix=fix)
        lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
        good = np.isfinite(lengths) & (lengths > 0)
        if not good.all():
            what = f"{self.config.base_url} gave it a vector that is zero or holds no number"
            raise SkilltrainError(what, where=name_of(int(np.argmin(good))))
        return (vectors / lengths).astype(np.float32)

    def _fault(self, fault: SkilltrainError | CompletionError) -> SkilltrainError:
        """A fault as the end of the run."""
        if isinstance(fault, SkilltrainError):
            return fault
        fix = "vectors so far are kept; run again later"
        if fault.kind == "budget":
            fix = f"raise {self.config.section}.budget; vectors so far are kept"
        what = f"gave no vectors: {fault.reason}" if fault.kind == "failed" else fault.reason
        return SkilltrainError(what, where=self.config.base_url, fix=fix)

    def _refused(self, text: str, error: Exception, where: str) -> SkilltrainError:
        reason, section = " ".join(self._server.blot(str(error)).split())[:300], self.config.section
        what = f"{self.config.base_url} refused its text of {len(text):,} characters: {reason}"
        fix = f"where it is too long, lower {section}.skill.body_chars or {section}.query_chars"
        return SkilltrainError(what, where=where, fix=fix)


def _most_of(texts: Sequence[str]) -> Usage:
    """The most that one try can take: one token per byte."""
    return Usage(sum(len(text.encode(errors="replace")) + _MOST_PER_TEXT for text in texts), 0)
