"""Chat models behind OpenAI-compatible servers, with a cache, a budget and safe prompts."""

from skilltrain.llm.answers import AnswerError
from skilltrain.llm.ask import Outcome, Questions, ask_all, estimate_cost, read_numbers, read_object
from skilltrain.llm.client import LLM
from skilltrain.llm.settings import LLMConfig

__all__ = [
    "LLM",
    "AnswerError",
    "LLMConfig",
    "Outcome",
    "Questions",
    "ask_all",
    "estimate_cost",
    "read_numbers",
    "read_object",
]
