"""Draws charts as SVG: axes at round numbers, a colour, dash and marker for each series, names beside the lines.

Colours come from the page's style sheet (classes s0 to s5), so that they suit light and dark.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from localllm.bench.reports.charts import Chart, Ecdf, Lines, Series, Spread, Spreads
from localllm.bench.reports.safe import html_text, one_line
from localllm.bench.reports.scales import Scale, load_scale, tick_text, value_scale
from localllm.bench.reports.words import cut, number

N_STYLES = 6
DASHES = ("", "7 3", "2 3", "9 3 2 3", "12 4", "5 2 1 2")
WIDTH, HEIGHT = 460.0, 270.0
_CHAR, _BOLD_CHAR = 6.4, 7.3  # about the width of a character of the labels
_NAME_CHARS = 18
_LEAST_SHARE, _MOST_SHARE, _MANY = 0.02, 0.995, 200
_LIMIT_WITHIN = 2.5
"""A limit above so many times the largest value is not drawn: it would press all else together."""


@dataclass(frozen=True, slots=True)
class _Frame:
    left: float
    right: float
    top: float
    bottom: float


def svg(chart: Chart) -> str:
    """Return a chart as an SVG element; "" where it has no point."""
    match chart:
        case Lines():
            return _lines(chart) if any(series.points for series in chart.series) else ""
        case Ecdf():
            return _ecdf(chart) if any(series.points for series in chart.series) else ""
        case Spreads():
            return _spreads(chart) if chart.rows else ""


def swatch(slot: int) -> str:
    """Return the small sample of a style that stands in a legend."""
    return (
        f'<svg class="swatch s{slot % N_STYLES}" viewBox="0 0 34 12" width="34" height="12" aria-hidden="true">'
        f'<path class="line" d="M1 6H33"{_dash(slot)}/>{_marker(slot, 17, 6)}</svg>'
    )


def _lines(chart: Lines) -> str:
    series = [each for each in chart.series if each.points]
    names = max(len(_name(each)) for each in series)
    frame = _Frame(52, WIDTH - 12 - names * _BOLD_CHAR, 18, HEIGHT - 44)
    loads = [x for each in series for x, _ in each.points]
    heights = [y for each in series for _, y in each.points]
    x = load_scale(loads, frame.left + 10, frame.right - 8, 5 * _CHAR)
    chart = replace(chart, limit=_shown(chart.limit, heights))
    y = value_scale([*heights, *_given(chart.limit)], frame.bottom, frame.top)
    parts = [*_y_axis(frame, y, chart.y_title), *_x_axis(frame, x, chart.x_title), *_limit_across(frame, y, chart)]
    knees: list[tuple[Series, tuple[float, float]]] = []
    for each in series:
        places = [(x.at(px), y.at(py)) for px, py in each.points]
        parts.append(_line(each.slot, places))
        parts += [_in_group(each.slot, _marker(each.slot, px, py)) for px, py in places]
        knees += [(each, at) for (px, _), at in zip(each.points, places, strict=True) if px == each.marked]
    parts += _knees(knees)
    ends = [(each, y.at(each.points[-1][1])) for each in series]
    parts += _end_names(ends, [x.at(each.points[-1][0]) for each in series], frame)
    return _svg(chart.title, _said(chart), HEIGHT, parts)


def _ecdf(chart: Ecdf) -> str:
    series = [each for each in chart.series if each.points]
    frame = _Frame(52, WIDTH - 16, 18, HEIGHT - 44)
    values = [x for each in series for x, _ in _shown_points(each)]
    chart = replace(chart, limit=_shown(chart.limit, values))
    x = value_scale([*values, *_given(chart.limit)], frame.left, frame.right)
    y = Scale(0.0, 1.0, frame.bottom, frame.top, False, (0.0, 0.25, 0.5, 0.75, 1.0))
    parts = [*_y_axis(frame, y, "share of samples", percent=True), *_x_axis(frame, x, chart.x_title)]
    parts += _limit_up(frame, x, chart)
    for each in series:
        parts.append(f'<path class="line s{each.slot % N_STYLES}" d="{_stairs(each, x, y)}"{_dash(each.slot)}/>')
        middle = next((x.at(px), y.at(share)) for px, share in each.points if share >= 0.5)
        parts.append(_in_group(each.slot, _marker(each.slot, *middle)))
    parts += _curve_names(series, x, y, frame)
    return _svg(chart.title, _said(chart), HEIGHT, parts)


def _spreads(chart: Spreads) -> str:
    names = [cut(one_line(row.name), 26) for row in chart.rows]
    height = 66 + 36.0 * len(chart.rows)
    frame = _Frame(20 + max(map(len, names)) * _BOLD_CHAR, WIDTH - 24, 18, height - 44)
    chart = replace(chart, limit=_shown(chart.limit, [row.p99 for row in chart.rows]))
    x = value_scale([*(row.p99 for row in chart.rows), *_given(chart.limit), 0.0], frame.left, frame.right, 4)
    parts = [*_x_axis(frame, x, chart.x_title), *_limit_up(frame, x, chart)]
    for i, (row, name) in enumerate(zip(chart.rows, names, strict=True)):
        middle = frame.top + 22 + 36 * i
        parts.append(_text(frame.left - 8, middle + 4, name, "name end"))
        parts.append(_in_group(row.slot, _spread(row, x, middle)))
        parts.append(_text(x.at(row.p50), middle - 8, number(row.p50), "mark middle"))
    return _svg(chart.title, _said(chart), height, parts)


def _spread(row: Spread, x: Scale, y: float) -> str:
    p50, p95, p99 = x.at(row.p50), x.at(row.p95), x.at(row.p99)
    return (
        f'<path class="thin" d="M{p95:.1f} {y:.1f}H{p99:.1f}M{p99:.1f} {y - 4:.1f}V{y + 4:.1f}"/>'
        f'<path class="thick" d="M{p50:.1f} {y:.1f}H{p95:.1f}"/>'
        f'<path class="line" d="M{p95:.1f} {y - 7:.1f}V{y + 7:.1f}"/>{_marker(row.slot, p50, y, 5.0)}'
    )


def _svg(title: str, said: str, height: float, parts: Iterable[str]) -> str:
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-label="{html_text(title)}. '
        f'{html_text(said)}">{"".join(parts)}</svg>'
    )


def _y_axis(frame: _Frame, scale: Scale, title: str, *, percent: bool = False) -> Iterator[str]:
    for tick in scale.ticks:
        y = scale.at(tick)
        yield f'<path class="grid" d="M{frame.left:.1f} {y:.1f}H{frame.right:.1f}"/>'
        yield _text(frame.left - 6, y + 4, f"{100 * tick:g}%" if percent else tick_text(tick), "tick end")
    middle = (frame.top + frame.bottom) / 2
    yield f'<text class="axis middle" transform="translate(12 {middle:.1f}) rotate(-90)">{html_text(title)}</text>'


def _x_axis(frame: _Frame, scale: Scale, title: str) -> Iterator[str]:
    yield f'<path class="base" d="M{frame.left:.1f} {frame.bottom:.1f}H{frame.right:.1f}"/>'
    last = -1e9
    for tick in scale.ticks:
        x, words = scale.at(tick), tick_text(tick)
        yield f'<path class="base" d="M{x:.1f} {frame.bottom:.1f}v4"/>'
        if x - last >= (len(words) + 1) * _CHAR:
            yield _text(x, frame.bottom + 17, words, "tick middle")
            last = x
    yield _text((frame.left + frame.right) / 2, frame.bottom + 36, title, "axis middle")


def _limit_across(frame: _Frame, y: Scale, chart: Lines) -> Iterator[str]:
    if chart.limit is not None:
        at = y.at(chart.limit)
        yield f'<path class="limit" d="M{frame.left:.1f} {at:.1f}H{frame.right:.1f}"/>'
        yield _text(frame.right, at - 4, f"{chart.limit_name} {chart.limit:g} {chart.y_title}", "mark end")


def _limit_up(frame: _Frame, x: Scale, chart: Ecdf | Spreads) -> Iterator[str]:
    if chart.limit is not None:
        at = x.at(chart.limit)
        yield f'<path class="limit" d="M{at:.1f} {frame.bottom:.1f}V{frame.top:.1f}"/>'
        side = "end" if at > (frame.left + frame.right) / 2 else "start"
        yield _text(at, frame.top - 6, f"{chart.limit_name} {chart.limit:g} {chart.x_title}", f"mark {side}")


def _line(slot: int, places: Sequence[tuple[float, float]]) -> str:
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    return f'<path class="line s{slot % N_STYLES}" d="M{path}"{_dash(slot)}/>'


def _shown_points(series: Series) -> list[tuple[float, float]]:
    """Return a distribution's points without the outermost few: one sample far out would press all else together."""
    most = _MOST_SHARE if len(series.points) >= _MANY else 1.0
    return [point for point in series.points if _LEAST_SHARE <= point[1] <= most]


def _stairs(series: Series, x: Scale, y: Scale) -> str:
    first = series.points[0]
    steps = [f"M{x.at(first[0]):.1f} {y.at(0):.1f}V{y.at(first[1]):.1f}"]
    steps += [f"H{x.at(value):.1f}V{y.at(share):.1f}" for value, share in series.points[1:]]
    return "".join(steps)


def _knees(knees: Sequence[tuple[Series, tuple[float, float]]]) -> Iterator[str]:
    """Yield a ring around each knee, and the word once where several lie together."""
    named: list[tuple[float, float]] = []
    for series, (x, y) in knees:
        yield _in_group(series.slot, f'<circle class="ring" cx="{x:.1f}" cy="{y:.1f}" r="9"/>')
        if all(abs(x - px) > 30 or abs(y - py) > 26 for px, py in named):
            yield _text(x, y - 13 if y > 40 else y + 22, series.mark, "mark middle")
            named.append((x, y))


def _end_names(ends: Sequence[tuple[Series, float]], right: Sequence[float], frame: _Frame) -> Iterator[str]:
    """Yield the names to the right of the lines, moved apart where they would lie on each other."""
    edge = max(right)
    placed = _apart([y for _, y in ends], 13.0, frame.top, frame.bottom)
    for (series, _), y in zip(ends, placed, strict=True):
        yield _text(edge + 9, y + 4, _name(series), f"name start s{series.slot % N_STYLES}")


def _curve_names(series: Sequence[Series], x: Scale, y: Scale, frame: _Frame) -> Iterator[str]:
    """Yield each name beside its curve, each at another height."""
    for i, each in enumerate(series):
        wanted = 0.86 - 0.72 * (i + 0.5) / len(series)
        value = next(px for px, share in each.points if share >= wanted)
        at, name = x.at(value), _name(each)
        is_left = at + 8 + len(name) * _BOLD_CHAR > frame.right
        place, side = (at - 8, "end") if is_left else (at + 8, "start")
        yield _text(place, y.at(wanted) + 4, name, f"name {side} s{each.slot % N_STYLES}")


def _apart(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return the places moved as little as it takes to lie `gap` apart, in their order, from `low` on."""
    order = sorted(range(len(places)), key=places.__getitem__)
    found = list(places)
    for before, here in pairwise(order):
        found[here] = max(found[here], found[before] + gap)
    over = max(found) - high
    if over > 0:
        for i, here in enumerate(reversed(order)):
            found[here] = max(min(found[here], high - i * gap), low)
    return found


def _marker(slot: int, x: float, y: float, r: float = 3.6) -> str:
    match slot % N_STYLES:
        case 0:
            return f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="{r:g}"/>'
        case 1:
            return f'<rect class="dot" x="{x - r:.1f}" y="{y - r:.1f}" width="{2 * r:g}" height="{2 * r:g}"/>'
        case 2:
            return f'<path class="dot" d="M{x:.1f} {y - 1.3 * r:.1f}l{1.2 * r:.1f} {2.1 * r:.1f}h{-2.4 * r:.1f}z"/>'
        case 3:
            d = 1.35 * r
            return f'<path class="dot" d="M{x:.1f} {y - d:.1f}l{d:.1f} {d:.1f}l{-d:.1f} {d:.1f}l{-d:.1f} {-d:.1f}z"/>'
        case 4:
            return f'<circle class="hollow" cx="{x:.1f}" cy="{y:.1f}" r="{r:g}"/>'
        case _:
            d, across = 2 * r, f"l{-2 * r:g} {2 * r:g}"
            return f'<path class="cross" d="M{x - r:.1f} {y - r:.1f}l{d:g} {d:g}m0 {-d:g}{across}"/>'


def _in_group(slot: int, inner: str) -> str:
    return f'<g class="s{slot % N_STYLES}">{inner}</g>'


def _dash(slot: int) -> str:
    dash = DASHES[slot % N_STYLES]
    return f' stroke-dasharray="{dash}"' if dash else ""


def _text(x: float, y: float, words: str, classes: str) -> str:
    return f'<text class="{classes}" x="{x:.1f}" y="{y:.1f}">{html_text(words)}</text>'


def _name(series: Series) -> str:
    return cut(one_line(series.name), _NAME_CHARS)


def _given(limit: float | None) -> tuple[float, ...]:
    return () if limit is None else (limit,)


def _shown(limit: float | None, values: Sequence[float]) -> float | None:
    return limit if limit is not None and limit <= _LIMIT_WITHIN * max(values) else None


def _said(chart: Chart) -> str:
    """Return the series' names, for those who do not see the plot; the numbers stand in the table below it."""
    rows = chart.rows if isinstance(chart, Spreads) else chart.series
    return "Of " + ", ".join(one_line(row.name) or "the run" for row in rows)
