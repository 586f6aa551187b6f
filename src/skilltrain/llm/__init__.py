"""Chat models: an OpenAI-compatible server, live or in batches, or a small local model; answers kept, budgets held."""

from skilltrain.llm.answers import AnswerError, Answers, Completion, Request, Usage
from skilltrain.llm.ask import Asked, Questions, ask_until, cost_of, read_numbers, read_object
from skilltrain.llm.batch import BatchLLM
from skilltrain.llm.budget import Budget, prices_of
from skilltrain.llm.client import LLM, LiveLLM, SmolLM2
from skilltrain.llm.settings import BudgetConfig, LLMConfig, OpenAIConfig, Prices, SmolLM2Config

__all__ = [
    "LLM",
    "AnswerError",
    "Answers",
    "Asked",
    "BudgetConfig",
    "Completion",
    "LLMConfig",
    "OpenAIConfig",
    "Questions",
    "Request",
    "SmolLM2Config",
    "Usage",
    "ask_until",
    "cost_of",
    "open_llm",
    "read_numbers",
    "read_object",
]


def open_llm(config: OpenAIConfig | SmolLM2Config) -> LLM:
    """The model of a recipe's `llm:` section. SkilltrainError: a package or a setting is missing."""
    # What decides an answer; neither the mode, nor the budget, nor the pace does.
    parameters = {"kind", "model", "base_url", "temperature", "max_tokens"}
    answers = Answers(config.cache, config.model_dump(mode="json", include=parameters))
    if isinstance(config, SmolLM2Config):
        return SmolLM2(config, answers, Budget(BudgetConfig(), Prices(prompt=0, completion=0)))
    client = LiveLLM if config.mode == "live" else BatchLLM
    return client(config, answers, Budget(config.budget, prices_of(config)))
