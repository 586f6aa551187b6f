"""The examples that put a router behind the tool search of model APIs and of LangChain."""

import asyncio
import json
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from openai import OpenAI

from loopback import Quiet, serving
from skilltrain import Router
from small_library import succeeds, write_library

EXAMPLES = Path(__file__).parents[1] / "examples"
QUERY = "what will the sky be like tomorrow: the weather forecast"
SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}}
DESCRIPTIONS = {
    "get_weather": "weather forecast of a place for tomorrow",
    "book_table": "book a table at a restaurant",
    "send_mail": "send a mail to a colleague",
}


@pytest.fixture(autouse=True)
def examples(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)


@pytest.fixture
def router():
    return Router([{"name": "any", "body": "any skill"}], "lexical")


@contextmanager
def api(*answers):
    """Start a stub of a model API that gives these answers in turn; yield address and requests."""
    requests = []

    class Handler(Quiet):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            answer = json.dumps(answers[len(requests)]).encode()
            requests.append(json.loads(body))
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

    with serving(Handler) as address:
        yield address, requests


# Anthropic --------------------------------------------------------------------


def anthropic_tools():
    rows = DESCRIPTIONS.items()
    return [{"name": name, "description": text, "input_schema": SCHEMA} for name, text in rows]


def anthropic_message(*content):
    return {
        "id": "m",
        "type": "message",
        "role": "assistant",
        "model": "claude",
        "content": content,
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {"input_tokens": 1, "output_tokens": 1},
    }


def test_anthropic_tools_are_deferred(router):
    from anthropic_tool_search import ToolSearch

    first, *others = ToolSearch(anthropic_tools(), router).tools

    assert first["name"] == "search_tools"
    assert "defer_loading" not in first
    assert all(tool["defer_loading"] for tool in others)


def test_anthropic_result_refers_to_tools(router):
    from anthropic_tool_search import ToolSearch

    call = SimpleNamespace(id="t", input={"query": QUERY})

    result = ToolSearch(anthropic_tools(), router, top_k=1).result(call)

    reference = {"type": "tool_reference", "tool_name": "get_weather"}
    assert result == {"type": "tool_result", "tool_use_id": "t", "content": [reference]}


def test_anthropic_result_without_tool_is_text(router):
    from anthropic_tool_search import ToolSearch

    call = SimpleNamespace(id="t", input={"query": "zebra"})

    assert ToolSearch(anthropic_tools(), router).result(call)["content"] == "no tool fits"


def test_anthropic_client_sends_references(router):
    anthropic = pytest.importorskip("anthropic", reason="needs anthropic")
    from anthropic_tool_search import ToolSearch

    search = ToolSearch(anthropic_tools(), router, top_k=1)
    call = {"type": "tool_use", "id": "t", "name": "search_tools", "input": {"query": QUERY}}
    use = {"type": "tool_use", "id": "u", "name": "get_weather", "input": {"place": "Bonn"}}
    messages = [{"role": "user", "content": "umbrella in Bonn?"}]
    settings = {"model": "claude", "max_tokens": 9, "tools": search.tools, "messages": messages}

    with api(anthropic_message(call), anthropic_message(use)) as (address, requests):
        client = anthropic.Anthropic(base_url=address, api_key="none")
        message = client.messages.create(**settings)
        results = [search.result(block) for block in message.content if search.is_call(block)]
        messages.append({"role": "assistant", "content": message.content})
        messages.append({"role": "user", "content": results})
        answer = client.messages.create(**settings)

    (result,) = requests[1]["messages"][-1]["content"]
    assert result["content"] == [{"type": "tool_reference", "tool_name": "get_weather"}]
    assert not search.is_call(answer.content[0])


# OpenAI -----------------------------------------------------------------------


def openai_response(*output):
    return {
        "id": "r",
        "object": "response",
        "created_at": 0,
        "model": "gpt",
        "output": output,
        "parallel_tool_calls": False,
        "tool_choice": "auto",
        "tools": [],
    }


def test_openai_client_gets_found_tools(router):
    from openai_tool_search import SEARCH_TOOL, ToolSearch

    rows = DESCRIPTIONS.items()
    tools = [
        {"type": "function", "name": name, "description": text, "parameters": SCHEMA}
        for name, text in rows
    ]
    search = ToolSearch(tools, router, top_k=1)
    call = {
        "type": "tool_search_call",
        "id": "s",
        "call_id": "c",
        "execution": "client",
        "status": "completed",
        "arguments": {"query": QUERY},
    }
    use = {
        "type": "function_call",
        "id": "f",
        "call_id": "d",
        "name": "get_weather",
        "arguments": '{"place": "Bonn"}',
        "status": "completed",
    }
    items = [{"role": "user", "content": "umbrella in Bonn?"}]

    with api(openai_response(call), openai_response(use)) as (address, requests):
        client = OpenAI(base_url=address, api_key="none")
        response = client.responses.create(model="gpt", tools=[SEARCH_TOOL], input=items)
        items += response.output
        items += [search.output(i) for i in response.output if i.type == "tool_search_call"]
        answer = client.responses.create(model="gpt", tools=[SEARCH_TOOL], input=items)

    assert requests[0]["tools"] == [SEARCH_TOOL]
    sent_call, output = requests[1]["input"][-2:]
    assert (sent_call["type"], sent_call["call_id"]) == ("tool_search_call", "c")
    assert (output["type"], output["call_id"]) == ("tool_search_output", "c")
    assert output["execution"] == "client"
    assert output["tools"] == [tools[0] | {"defer_loading": True}]
    assert answer.output[0].name == "get_weather"


# LangChain --------------------------------------------------------------------

BANK = {
    "spending-by-category": "Break the user's spending down by category over a period.",
    "card-limits": "Explain the limits set on the user's card.",
    "visa-statement": "Produce a bank statement formatted for a visa application.",
}


@pytest.fixture(scope="module")
def bank_router(tmp_path_factory):
    """A calibrated router over the small library and the skills of `check_judge`."""
    folder = write_library(tmp_path_factory.mktemp("judge") / "library")
    for name, description in BANK.items():
        file = folder / "skills" / name / "SKILL.md"
        file.parent.mkdir()
        file.write_text(f"---\nname: {name}\ndescription: {description}\n---\n{description}\n")
    pool = f"pool={folder}/pool"
    requests = folder / "requests"
    succeeds("pool", f"sources={folder}/skills", f"out={folder}/pool")
    succeeds("queries", f"files={folder}/queries/all.jsonl", pool, f"out={requests}")
    succeeds("index", pool, "rankers=[{kind: lexical}]", f"out={folder}/router")
    inputs = (f"router={folder}/router", f"queries={requests}", "split=null", "answered=0.6")
    succeeds("calibrate", *inputs, f"out={folder}/calibration")
    succeeds("index", f"calibration={folder}/calibration", f"out={folder}/router")
    return Router.load(folder / "router")


def test_the_judge_keeps_its_contract(bank_router):
    testing = pytest.importorskip("langchain_skill_router.testing", reason="needs the package")
    from langchain_judge import RouterJudge

    asyncio.run(testing.check_judge(RouterJudge(bank_router)))


def test_the_judge_gives_probabilities_of_skills(bank_router):
    package = pytest.importorskip("langchain_skill_router", reason="needs the package")
    from langchain_judge import RouterJudge

    request = "merge these pdf files into one document"
    questions = {
        "need": package.YesNo(package.DEFAULTS.need_question),
        "right": package.YesNo('Does it fit?\n<skill name="pdf-merge">\nx\n</skill>'),
        "wrong": package.YesNo('Does it fit?\n<skill name="podcast-notes">\nx\n</skill>'),
        "pick": package.Pick("Which?", {"pdf-merge": "x", "unknown": "y"}),
    }

    answers = asyncio.run(RouterJudge(bank_router).ask({"request": request}, questions))

    expected = bank_router.route(request).skills[0].probability
    assert answers["right"].yes == pytest.approx(expected)
    assert answers["pick"].probabilities == {"pdf-merge": answers["right"].yes, "unknown": 0.0}
    assert answers["wrong"].yes < answers["right"].yes
    assert 0 < answers["need"].yes <= 1


def test_the_judge_needs_a_calibration(router):
    package = pytest.importorskip("langchain_skill_router", reason="needs the package")
    from langchain_judge import RouterJudge

    with pytest.raises(package.JudgeMisconfigured):
        RouterJudge(router)
