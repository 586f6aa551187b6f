"""Qwen3-Reranker's chat form as a Jinja template, so that any library renders a pair as our reranker does."""

import json
from collections.abc import Sequence

from skilltrain.templates import QWEN3_RERANKER_PREFIX, QWEN3_RERANKER_SUFFIX, RerankerTemplate

_TEMPLATE = """
{%- macro plain(text) -%}
  {%- set kept = namespace(text=text) -%}
  {%- for token in CONTROL_TOKENS -%}
    {%- set kept.text = kept.text | replace(token, token[:1] ~ ' ' ~ token[1:]) -%}
  {%- endfor -%}
  {{- kept.text -}}
{%- endmacro -%}
{%- set pair = namespace(instruction=INSTRUCTION, query='', document='') -%}
{%- for message in messages -%}
  {%- if message['role'] == 'system' -%}
    {%- set pair.instruction = message['content'] -%}
  {%- elif message['role'] == 'query' -%}
    {%- set pair.query = message['content'] -%}
  {%- elif message['role'] == 'document' -%}
    {%- set pair.document = message['content'] -%}
  {%- endif -%}
{%- endfor -%}
{{- PREFIX ~ '<Instruct>: ' ~ pair.instruction -}}
{{- SEPARATOR ~ '<Query>: ' ~ plain(pair.query[:QUERY_CHARS]) -}}
{{- SEPARATOR ~ '<Document>: ' ~ plain(pair.document) ~ SUFFIX -}}
"""


def yes_no_chat_template(template: RerankerTemplate, control_tokens: Sequence[str]) -> str:
    """A template for the roles system (another instruction), query and document, with the checkpoint's separator.

    The query is cut to the template's characters. The name of a control token inside query or document is broken up
    by a space: untrusted text must not end its own message (skilltrain reads such names as plain text, without it).
    """
    values = {
        "CONTROL_TOKENS": [*control_tokens],
        "INSTRUCTION": template.instruction,
        "PREFIX": QWEN3_RERANKER_PREFIX,
        "SUFFIX": QWEN3_RERANKER_SUFFIX,
        "SEPARATOR": template.separator,
        "QUERY_CHARS": template.query_chars,
    }
    settings = "".join(
        f"{{%- set {name} = {json.dumps(value, ensure_ascii=False)} -%}}\n" for name, value in values.items()
    )
    return (settings + _TEMPLATE).strip() + "\n"
