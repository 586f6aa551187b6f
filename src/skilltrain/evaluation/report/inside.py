"""What lies inside models and skills: attention by field over layers, and structure of gold skills against others."""

from collections.abc import Sequence

from skilltrain.evaluation.analysis.attention import FieldAttention, FieldShares
from skilltrain.evaluation.analysis.structure import FeatureComparison
from skilltrain.evaluation.report.contents import Report
from skilltrain.evaluation.report.marks import SHARES, axes, share, stretched, table, text
from skilltrain.evaluation.report.numbers import ALPHA, counted, number, p_value
from skilltrain.evaluation.statistics.bootstrap import compact

FIELDS = ("name", "description", "body")


def attention(report: Report) -> str:
    """Shares of attention over the layers, one figure a model; nothing where it was not measured."""
    if not report.analysis.attention:
        return ""
    figures = "\n".join(_layers(model) for model in report.analysis.attention)
    return (
        '<section id="attention">\n<h2>Where the model looks</h2>\n<p>Attention of the position that scores, to the '
        "fields of the skill: averaged over heads, shared out over the three fields, averaged over pairs. A dashed "
        "line is the field’s share of the tokens, which attention without a preference would give it.</p>\n"
        f'<div class="wide">{figures}</div>\n</section>'
    )


def _layers(model: FieldAttention) -> str:
    count = len(model.layers)
    xs = [100 * n / (count - 1) for n in range(count)] if count > 1 else [0.0, 100.0]
    layers = model.layers if count > 1 else model.layers * 2
    areas, lines = "", ""
    for place, field in enumerate(FIELDS):
        attended, held = [shares(layer)[place] for layer in layers], shares(model.tokens)[place]
        areas += f'<polygon class="{field}" points="{_path(xs, attended)} {_path([100, 0], [held, held])}"/>'
        lines += f'<polyline class="{field} expected" points="{_path([0, 100], [held, held])}"/>'
        lines += f'<polyline class="{field}" points="{_path(xs, attended)}"/>'
    legend = "".join(
        f'<li><i class="key {field}"></i><span>{field} <b>{compact(attended, 3)}</b> '
        f"<small>{compact(held, 3)} of the tokens{_ratio(attended, held)}</small></span></li>"
        for field, attended, held in zip(FIELDS, shares(model.overall), shares(model.tokens), strict=True)
    )
    said = ", ".join(f"{f} {compact(v, 3)}" for f, v in zip(FIELDS, shares(model.overall), strict=True))
    across = [(xs[n], str(n + 1)) for n in _numbered(count)]
    return (
        f'<figure class="curve fields"><figcaption>{text(model.model)} <small>share of attention by layer, '
        f'{counted(model.num_pairs, "pair")}</small></figcaption><ul class="legend">{legend}</ul>'
        f'<svg class="axes" role="img" aria-label="{text(model.model)}, {counted(count, "layer")}: {said}">'
        f"{axes(across, [(100 * y, share(y)) for y in SHARES.ticks])}{stretched(areas + lines)}</svg></figure>"
    )


def _numbered(count: int) -> list[int]:
    """The layers named below a plot: the first, the last, and about eight in all."""
    step = max(1, -(-count // 8))
    return [*range(0, count - step // 2 - 1, step), count - 1] if count > 1 else [0]


def _path(xs: Sequence[float], values: Sequence[float]) -> str:
    return " ".join(f"{x:.2f},{100 * (1 - value):.2f}" for x, value in zip(xs, values, strict=True))


def shares(fields: FieldShares) -> tuple[float, float, float]:
    """The shares in the order of `FIELDS`."""
    return fields.name, fields.description, fields.body


def _ratio(attended: float, held: float) -> str:
    return f", × {attended / held:.1f}" if held else ""


def structure(report: Report) -> str:
    """The features of gold skills beside those of the others, with a bar of the effect; nothing where not computed."""
    if not (features := report.analysis.structure):
        return ""
    limit = max(abs(feature.effect - 0.5) for feature in features)
    limit = next(step for step in (0.1, 0.2, 0.3, 0.5) if limit <= step)
    ends = (
        f'<span class="ends"><span>{compact(0.5 - limit, 1) if limit < 0.5 else 0}</span><span>.5</span>'
        f"<span>{compact(0.5 + limit, 1) if limit < 0.5 else 1}</span></span>"
        '<span class="unseen">effect as a plot</span>'
    )
    head = ("Feature", "Gold", "Others", "Effect", ends, "p, Holm", "Gold skills have")
    rows = [_feature(feature, limit) for feature in features]
    sizes = f"{features[0].num_gold:,} gold skills against {features[0].num_others:,} others"
    return (
        f'<section id="structure">\n<h2>Structure of gold skills</h2>\n<p>{sizes}: medians, or shares of skills that '
        "have the feature. The effect is the probability that a random gold skill has more of it than a random other "
        "one (.5: no difference); Mann-Whitney tests, corrected by Holm over the features.</p>\n"
        f"{table('Structure of gold skills and others', 'structure', '', head, rows)}\n</section>"
    )


def feature_reading(feature: FeatureComparison) -> str:
    """What the test allows to say of gold skills: more, less or not told apart."""
    if feature.p >= ALPHA or feature.effect == 0.5:
        return "not told apart"
    return "more" if feature.effect > 0.5 else "less"


def _feature(feature: FeatureComparison, limit: float) -> str:
    word = feature_reading(feature)
    place = 50 + 50 * (feature.effect - 0.5) / limit
    bar = (
        f'<svg aria-hidden="true" class="{word.replace(" ", "-")}"><rect x="{min(place, 50):.2f}%" y="30%" '
        f'width="{abs(place - 50):.2f}%" height="40%" rx="2"/>'
        '<line class="zero" x1="50%" x2="50%" y1="0" y2="100%"/></svg>'
    )
    return (
        f'<tr><th scope="row">{text(feature.feature)}</th><td>{number(feature.gold)}</td><td>{number(feature.others)}'
        f'</td><td><b>{compact(feature.effect, 2)}</b></td><td class="plot">{bar}</td><td>{p_value(feature.p)}</td>'
        f'<td class="word {word.replace(" ", "-")}">{word}</td></tr>\n'
    )
