"""Vectors of texts from a server that speaks OpenAI's embeddings: every text gets its vector, or the run ends."""

import asyncio
import base64
import binascii
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
from jaxtyping import Float32

from skilltrain.errors import SkilltrainError
from skilltrain.llm.beside import run_beside
from skilltrain.llm.budget import Budget, estimate_tokens, plausible
from skilltrain.llm.pace import Pacer
from skilltrain.llm.protocol import CompletionError, Usage
from skilltrain.llm.server import Asking, Key, explain, open_client
from skilltrain.llm.settings import EmbeddingsConfig, Prices

Vectors = Float32[np.ndarray, "text dim"]
Emit = Callable[[tuple[range, Vectors]], None]

# OpenAI's list prices in dollars for a million tokens, as published in 2025.
LIST_PRICES = {"text-embedding-3-small": 0.02, "text-embedding-3-large": 0.13, "text-embedding-ada-002": 0.10}
_MOST_PER_TEXT = 32  # tokens that a server may put around a text
_TOO_MUCH = (400, 413, 422)  # how servers refuse a text that is too long, or too many at once
_KEPT = "vectors so far are kept; run again later"


class Embeddings:
    """An OpenAI-compatible server that gives vectors; `dim` is the length expected of them, as soon as it is known."""

    def __init__(self, config: EmbeddingsConfig) -> None:
        self.config, self.dim = config, config.dimensions
        price = config.price if config.price is not None or not config.is_openai else LIST_PRICES.get(config.model)
        if config.budget.max_dollars is not None and price is None:
            what = f"{config.section}.budget.max_dollars needs to know what tokens cost"
            raise SkilltrainError(what, fix=f"set {config.section}.price, dollars for a million tokens")
        self.budget = Budget(config.budget, None if price is None else Prices(prompt=price, completion=0))
        self.key = Key(config)
        self.pacer = Pacer(config.requests_per_minute, config.tokens_per_minute)
        self.was_answered = False

    def embed(
        self, texts: Iterable[str], name_of: Callable[[int], str], keep: Callable[[range, Vectors], None]
    ) -> Generator[tuple[range, Vectors], None, None]:
        """Yield (positions in `texts`, their unit vectors), as they come; requests start in the order of `texts`.

        They are given to `keep` first, in the moment in which they come: who stops, with Ctrl-C too, loses none.
        Raises SkilltrainError where a text gets no vector; `name_of` says which text stands at a position. Requests
        under way at that moment come to their end, and their vectors are kept and yielded before.
        """

        async def work(emit: Emit) -> None:
            def take(found: tuple[range, Vectors]) -> None:
                keep(*found)
                emit(found)

            await _Session(self, texts, name_of, take).run()

        return run_beside(work)


class _Session:
    """One `embed`, in one event loop."""

    def __init__(self, server: Embeddings, texts: Iterable[str], name_of: Callable[[int], str], emit: Emit) -> None:
        self._server, self._config, self._name_of, self._emit = server, server.config, name_of, emit
        self._asking = Asking(server.config, server.pacer, server.budget)
        self._todo = _batches(texts, server.config.batch_size)
        self._fault: Exception | None = None
        self._client: Any = None

    async def run(self) -> None:
        """Embed all texts. Raises the first fault."""
        async with open_client(self._config, self._server.key) as self._client:
            await asyncio.gather(*(self._work() for _ in range(self._config.concurrency)))
        if self._fault is not None:
            raise self._fault

    async def _work(self) -> None:
        try:
            for start, texts in self._todo:
                if self._fault is not None:
                    return
                await self._embed(start, texts)
        except Exception as error:  # whatever it is, what is under way has been paid for and comes to its end
            self._fault = self._fault or error

    async def _embed(self, start: int, texts: Sequence[str]) -> None:
        """Hand on the vectors of `texts`, the first of which stands at `start`; what is refused is asked in halves."""
        import openai

        most = _most_of(texts)
        try:
            if not await self._asking.reserve(most):
                raise self._asking.over_budget()
            vectors = await self._asking.ask(lambda: self._send(texts), most, _estimate(texts))
        except CompletionError as fault:
            raise self._explained(fault) from None
        except (openai.OpenAIError, TimeoutError) as error:
            if not (isinstance(error, openai.APIStatusError) and error.status_code in _TOO_MUCH):
                raise self._explained(
                    explain(error, self._config, self._server.key, self._server.was_answered)
                ) from None
            if len(texts) == 1:
                raise self._refused(start, texts[0], error) from None
        else:
            self._server.was_answered = True
            self._emit((range(start, start + len(texts)), self._unit(start, vectors)))
            return
        half = len(texts) // 2
        await self._embed(start, texts[:half])
        await self._embed(start + half, texts[half:])

    async def _send(self, texts: Sequence[str]) -> tuple[Vectors, Usage]:
        """The vectors of `texts` from one try, and what it took."""
        dimensions = self._config.dimensions
        reply = await self._client.embeddings.with_raw_response.create(
            model=self._config.model, input=list(texts), encoding_format="base64",  # a third of the bytes of numbers
            extra_body=None if dimensions is None else {"dimensions": dimensions},
        )  # fmt: skip
        vectors, reported = read_vectors(reply.text, len(texts))
        return vectors, Usage(max(plausible(reported), _estimate(texts)), 0)

    def _unit(self, start: int, vectors: Vectors) -> Vectors:
        """`vectors` of length 1. Raises SkilltrainError for what is none, or not as long as those before."""
        dim = vectors.shape[1]
        self._server.dim = expected = self._server.dim or dim
        if dim != expected:
            what = f"model '{self._config.model}' gives vectors of {dim} numbers, not {expected}"
            fix = "the model behind this name has changed: name another cache folder"
            if self._config.dimensions is not None:
                fix = f"it cannot shorten them: leave out {self._config.section}.dimensions"
            raise SkilltrainError(what, where=self._config.base_url, fix=fix)
        lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
        good = np.isfinite(lengths) & (lengths > 0)
        if not good.all():
            where = self._name_of(start + int(np.argmin(good)))
            raise SkilltrainError(
                f"{self._config.base_url} gave it a vector that is zero or holds no number", where=where
            )
        return (vectors / lengths).astype(np.float32)

    def _explained(self, fault: SkilltrainError | CompletionError) -> SkilltrainError:
        """A fault as the end of the run."""
        if isinstance(fault, SkilltrainError):
            return fault
        if fault.kind == "budget":
            fix = f"raise {self._config.section}.budget; vectors so far are kept"
            return SkilltrainError(fault.reason, where=self._config.base_url, fix=fix)
        what = fault.reason if fault.kind == "malformed" else f"gave no vectors: {fault.reason}"
        return SkilltrainError(what, where=self._config.base_url, fix=_KEPT)

    def _refused(self, place: int, text: str, error: Exception) -> SkilltrainError:
        reason = " ".join(self._server.key.blot(str(error)).split())[:300]
        what = f"{self._config.base_url} refused its text of {len(text):,} characters: {reason}"
        section = self._config.section
        fix = f"where it is too long, lower {section}.skill.body_chars or {section}.query_chars"
        return SkilltrainError(what, where=self._name_of(place), fix=fix)


def _batches(texts: Iterable[str], size: int) -> Iterator[tuple[int, list[str]]]:
    """(position of the first, texts) of each request."""
    rest, start = iter(texts), 0
    while batch := [text.encode(errors="replace").decode() for text in islice(rest, size)]:  # JSON takes no half pairs
        yield start, batch
        start += len(batch)


def _most_of(texts: Sequence[str]) -> Usage:
    """The most that one try can take: a token a byte."""
    return Usage(sum(len(text.encode(errors="replace")) + _MOST_PER_TEXT for text in texts), 0)


def _estimate(texts: Sequence[str]) -> int:
    """About how many tokens a server reads."""
    return sum(map(estimate_tokens, texts))


def read_vectors(text: str, num_texts: int) -> tuple[Vectors, Any]:
    """(the vectors of an answer in the order of the texts, tokens read by the server's account).

    They may come in any order, as base64 of little-endian float32 or as numbers. Raises CompletionError where there is
    not exactly one for each text, or they are not of one length.
    """
    try:
        body = json.loads(text)
        by_index = [(item["index"], item["embedding"]) for item in body["data"]]
        usage = body.get("usage")
    except ValueError as error:
        raise CompletionError("malformed", f"the server's reply is not JSON: {error}") from None
    except (KeyError, TypeError, AttributeError):
        raise CompletionError("malformed", "the server's reply holds no data[].index and data[].embedding") from None
    indices = [index for index, _ in by_index]
    if any(type(index) is not int for index in indices) or sorted(indices) != list(range(num_texts)):
        what = f"the server's reply holds {len(indices)} vectors for {num_texts} texts"
        raise CompletionError("malformed", f"{what}, or their indices are not those of the texts")
    vectors = [_vector(value) for _, value in sorted(by_index, key=lambda pair: pair[0])]
    if len({len(vector) for vector in vectors}) != 1 or not len(vectors[0]):
        raise CompletionError("malformed", "the vectors of the server's reply are empty, or differ in length")
    return np.stack(vectors), usage.get("prompt_tokens") if isinstance(usage, dict) else None


def _vector(value: Any) -> Float32[np.ndarray, " dim"]:
    """One vector; numbers that no float32 holds become infinite. Raises CompletionError where it is none."""
    try:
        if isinstance(value, str):
            return np.frombuffer(base64.b64decode(value, validate=True), dtype="<f4").astype(np.float32)
        with np.errstate(over="ignore"):
            vector = np.array(value, dtype=np.float32)
    except (ValueError, TypeError, OverflowError, binascii.Error):
        raise CompletionError("malformed", "an embedding in the server's reply is no list of numbers") from None
    if vector.ndim != 1:
        raise CompletionError("malformed", f"an embedding in the server's reply has {vector.ndim} dimensions, not 1")
    return vector
