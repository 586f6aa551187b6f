"""Rules for English and Chinese that split a task into steps and order them, without a model.

- A task is split into sentences and list items, then into clauses: at words of order (then,
  finally, 然后), and where "and" or a comma precedes a verb of action.
- A clause without such a verb and without a question describes the setting, and is no step.
- A list of kinds of data tells what a step takes and gives.

The rules are rough, and only as good as their word lists.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from skilltrain.texts import one_line


def _any_of(words: str) -> str:
    """Return a regex for any of these words."""
    return "|".join(words.split())


_VERBS = _any_of(
    """
    add alert analyse analyze annotate append archive arrange ask assess audit backup benchmark
    book build buy calculate call capture categorize chart check clean collect combine compare
    compile compose compress compute configure convert copy count crawl create crop cut debug
    delete deliver deploy describe design detect determine diagnose discover display download
    draft draw edit email embed encode encrypt estimate evaluate examine execute explain explore
    export extract fetch figure fill filter find fix forecast format gather generate geocode get
    give grab group identify import index inform insert inspect install integrate introduce
    investigate keep label launch learn let list load locate look make manage map mark measure
    merge migrate modify monitor move normalize notify obtain open optimize organize outline
    parse pick ping plan play plot post predict prepare present print process produce provide
    publish pull push put query rank read recommend record refactor remind remove rename render
    replace reply report request research reserve resize retrieve review rewrite run save scan
    schedule scrape search see select send set share show simulate solve sort split start stop
    store stream suggest summarise summarize sync tag tell test tidy track train transcribe
    transfer transform translate trim turn update upload use validate verify view visit
    visualize watch work write
    """
)
_ZH_VERBS = _any_of(
    """
    查找 查询 查看 搜索 检索 获取 下载 抓取 爬取 读取 阅读 提取 收集 生成 创建 制作 绘制 撰写 编写
    编辑 翻译 总结 汇总 归纳 分析 比较 对比 计算 统计 转换 转成 转为 保存 导出 导入 上传 发送 发给
    发到 发布 通知 提醒 部署 运行 执行 测试 检查 验证 监控 推荐 规划 安排 预订 整理 合并 拆分 压缩
    打开 列出 给出 告诉 显示 展示 训练 标注 识别 更新 删除 添加 设置 配置 备份 查 画 写 存 找 做 用
    """
)
# A verb of action. _START looks ahead for one, after words such as "also" or "then".
_VERB = rf"(?:re-?)?(?:{_VERBS})\b"
_ZH_VERB = f"(?:{_ZH_VERBS}|[把将用给])"
_START = rf"(?=(?:(?:also|please|finally|lastly|then|next|automatically)\s+)*{_VERB})"
# End of a sentence, with the mark of a list item after it.
_SENTENCE = re.compile(
    r"(?:(?<=[.!?;:])\s+|[。！？；]|\n)+(?:(?:[-*•]|\d+[.)、])\s*)?"
    r"|^\s*(?:[-*•]|\d+[.)、])\s+",
    re.M,
)
# Between clauses: words of order, or "and" or a comma before a verb.
_ORDER = re.compile(
    r"[,;]?\s*\b(?:and\s+then|and\s+finally|after\s+(?:that|which)|afterwards|followed\s+by"
    r"|once\s+done|then|finally|lastly|next(?=\s*,))\b\s*,?\s*"
    rf"|\s*[,;&]?\s*\band\s+{_START}"
    rf"|\s*[,;&]\s*{_START}"
    rf"|[，,、]?\s*(?:然后|接着|随后|之后|并且|最后|同时"
    rf"|再(?={_ZH_VERB})|并(?={_ZH_VERB}))\s*[，,]?"
    rf"|[，,]\s*(?={_ZH_VERB})",
    re.I,
)
# "after TIME, MAIN" and "before TIME, MAIN". The group `before` is set for "before".
_LEADING_TIME = re.compile(
    r"^(?:after|once|when|(?P<before>before))\s+(?P<time>.{8,}?),\s+(?P<main>.{8,})$", re.I
)
# "MAIN after TIME" and "MAIN before TIME", in which TIME begins with a gerund.
_TRAILING_TIME = re.compile(
    r"^(?P<main>.{8,}?)\s+(?:after|(?P<before>before))\s+(?P<time>\w+ing\b.{4,})$", re.I
)
# Words at the beginning of a clause that say nothing about the step.
_OPENING = re.compile(
    r"^(?:(?:first(?:ly)?|second(?:ly)?|third(?:ly)?|then|next|finally|lastly|also|and|now"
    r"|please|so|start\s+by|(?:can|could|would)\s+you(?:\s+please)?"
    r"|i\s+(?:want|need|would\s+like|'d\s+like)\s+(?:you\s+)?to"
    r"|help\s+me(?:\s+to)?|let's|we\s+need\s+to)\b[,:]?\s*"
    r"|(?:请|帮我|首先|先|我想要?|我要|需要|然后|并|再|最后)[，,]?\s*)+",
    re.I,
)
# A question, a wish, or a gerund.
_REQUEST = r"^(?:what|how|which|who|where|why|\w{3,}ing)\b|\bI\s+(?:need|want)\b|[什怎如哪]\w"
_ACTION = re.compile(rf"\b{_VERB}|{_ZH_VERB}|{_REQUEST}", re.I)
_KINDS = _any_of(
    """
    address article audio calendar chart code coordinate csv dashboard data database dataset
    diagram document email event excel file graph html image invoice issue json list map
    markdown message note page paper pdf photo picture plan post presentation report result
    route schedule score script slide spreadsheet summary table text ticket transcript
    translation url video website
    """
)
_ZH_KINDS = "图表|图片|报告|文档|文件|数据|视频|音频|邮件|网页|代码|论文|列表|表格|摘要"
# Kinds of data. Groups: the English kind, or the Chinese kind.
_KIND = re.compile(rf"\b({_KINDS})s?\b|({_ZH_KINDS})", re.I)
# Verbs of making, with up to 6 words after them (or 12 Chinese characters).
GIVES = re.compile(
    r"\b(?:build|compil|compos|creat|draft|draw|download|export|extract|fetch|find|gather|generat"
    r"|get|into|mak|output|plot|produc|render|return|retriev|sav|scrap|to|transcrib|writ)\w*\b"
    r"(?:\W+\w+){0,6}"
    r"|[生创写绘制下导提保获]\w{1,12}",
    re.I,
)
# Verbs of working on something, with up to 6 words after them, as far as the next "to" or "and".
TAKES = re.compile(
    r"\b(?:analy[sz]|attach|clean|convert|edit|email|from|import|load|of|pars|plot|process|publish"
    r"|read|send|shar|summari[sz]|transform|translat|upload|using|visuali[sz])\w*\b"
    r"(?:\W+(?!(?:in)?to\b|and\b)\w+){0,6}"
    r"|[读分转总翻发上]\w{1,12}",
    re.I,
)
# Words that refer back to an earlier step.
_REFERENCE = re.compile(
    r"\b(?:it|its|them|this|these|those|the\s+(?:result|output|finding|file|data)s?|resulting"
    r"|above|previous|then|after|afterwards|followed|finally|lastly|next|before|once|based\s+on)\b"
    r"|[它其该这]|结果|然后|接着|随后|之后|最后|根据|基于|再",
    re.I,
)
# Words for a step that runs at the same time as the previous step.
_SIMULTANEOUS = re.compile(
    r"\b(?:meanwhile|in\s+parallel|at\s+the\s+same\s+time|separately|independently|also)\b"
    r"|同时|另外|并行",
    re.I,
)
# A step that begins with a verb of finding.
_FETCHES = re.compile(
    r"(?:find|search|get|fetch|download|read|look|list|check|pull|query|retriev|collect|gather"
    r"|scrap|load|open|monitor|recommend|track|watch|book|locat|discover|identif|extract|view"
    r"|browse|research)|[查搜找读]|获取|下载|检索|推荐|抓取|收集|提取",
    re.I,
)

MAX_STEPS = 20
Waits = tuple[tuple[int, ...], ...]
"""Positions of the earlier steps that each step waits for."""


@dataclass(frozen=True, slots=True)
class Round:
    """One decomposition of a task.

    Attributes:
        texts: The steps in words.
        chosen: Id of the skill of each step, if a model chose the skills.
        hints: Ids of the skills retrieved for the steps.
        jaccard: Similarity of the hints to those of the previous round.
    """

    texts: tuple[str, ...]
    chosen: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    jaccard: float | None = None


def steps_by_rules(task: str) -> tuple[str, ...]:
    """Split a task into steps, at most MAX_STEPS. A task that no rule splits is one step.

    For example, "Find papers on X, then write a report." gives "Find papers on X" and "write a
    report".
    """
    clauses = []
    for sentence in _SENTENCE.split(task):
        if sentence:
            clauses += _clauses(one_line(sentence))
    # A clause without a verb of action, a question or a wish only describes the setting.
    steps = [clause for clause in clauses if _ACTION.search(clause)]
    if not steps:
        return (one_line(task),)
    return tuple(dict.fromkeys(steps))[:MAX_STEPS]


def _clauses(sentence: str) -> list[str]:
    """Split a sentence into clauses, in the order in which they are done.

    For example, "after reading the page, save it" and "save it after reading the page" give
    "reading the page" and "save it". With "before", the order is the other way round.
    """
    sentence = _OPENING.sub("", sentence)  # without words such as "please"
    # Match "after TIME, MAIN" or "MAIN after TIME". The group `before` is set for "before".
    match = _LEADING_TIME.match(sentence) or _TRAILING_TIME.match(sentence)
    if match:
        time_clauses = _clauses(match["time"])  # after the word "after" or "before"
        main_clauses = _clauses(match["main"])
        if match["before"]:
            return main_clauses + time_clauses
        return time_clauses + main_clauses

    # Split at words of order such as "then", and at "and" or a comma before a verb.
    clauses = []
    for text in _ORDER.split(sentence):
        clause = _OPENING.sub("", text).strip(" ,;:.!?，。")
        if len(clause) > 1:
            clauses.append(clause)
    return clauses


def kinds_in(text: str, near: re.Pattern[str] | None = None) -> frozenset[str]:
    """Return the kinds of data (chart, csv …) that a text names.

    For example, "convert the csv to a chart" names csv and chart. It gives a chart and takes a csv.

    Args:
        text: The text.
        near: `GIVES` for kinds that are made according to the text, `TAKES` for kinds that are
            worked on. None for all kinds.
    """
    if near is not None:
        text = " ".join(near.findall(text))
    # One of the two groups is empty.
    return frozenset((english + chinese).lower() for english, chinese in _KIND.findall(text))


def dependencies(task: str, texts: Sequence[str]) -> Waits:
    """Return the positions of the earlier steps that each step waits for.

    - A step that runs at the same time as the previous step (also, 同时) waits for the same steps.
    - A step that finds something new (find, download, 查找) waits for no step, unless the step or
      the words before it refer back (it, the result, then, 然后).
    - Any other step waits for all earlier steps whose result is still unused.
    - A step that names a kind of data also waits for the last earlier step that makes it.

    Args:
        task: The whole task, for the words between its steps.
        texts: The steps in words.
    """
    task = one_line(task)
    # The kinds of data that each step makes: those next to a verb of making.
    kinds_made = [kinds_in(text, near=GIVES) for text in texts]
    waits_by_step = []
    unused = set()  # earlier steps that no step waits for yet, so their result is unused
    for position, text in enumerate(texts):
        waits = set()
        if position > 0:
            # The step, and the words of the task before it, such as "and then".
            words = f"{_between(task, texts[position - 1], text)} {text}"
            finds_something_new = _FETCHES.match(text) and not _REFERENCE.search(words)
            if _SIMULTANEOUS.search(words):
                waits.update(waits_by_step[-1])
            elif not finds_something_new:
                waits.update(unused)

        # Wait for the last step that makes a kind of data that this step names.
        for kind in kinds_in(text):
            makers = [earlier for earlier in range(position) if kind in kinds_made[earlier]]
            if makers:
                waits.add(makers[-1])
        unused -= waits
        unused.add(position)
        waits_by_step.append(tuple(sorted(waits)))
    return tuple(waits_by_step)


def _between(task: str, first: str, second: str) -> str:
    """Return the words of a task between two of its steps.

    For example, the task "find a page, then save it" with the steps "find a page" and "save it"
    gives ", then ". Such words tell how the second step depends on the first step.

    Returns "before" if the task names the second step first, and "" if a step is not in the task.
    """
    if first not in task or second not in task:
        return ""
    end = task.find(first) + len(first)
    start = task.find(second)
    return task[end:start] if start >= end else "before"
