"""Vega-Lite specifications of the report's charts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from modelnew.measure.child import Json

if TYPE_CHECKING:
    from modelnew.measure.report import Summary, Task

# Fixed order: a kind has the same colour and shape in every chart and every report.
KINDS = (
    "pointwise", "product", "product + pointwise", "convolution", "convolution + pointwise",
    "library", "library + pointwise", "unknown kind",
)  # fmt: skip
# One hue a base kind, from the set of Okabe and Ito that colour-blind readers can tell apart;
# the shape repeats the hue and tells the fused kind from the bare one.
LIGHT = (
    "#0072b2", "#d55e00", "#d55e00", "#00865f", "#00865f", "#b0508f", "#b0508f", "#767676",
)  # fmt: skip
DARK = (
    "#56b4e9", "#f0a030", "#f0a030", "#2cc5a0", "#2cc5a0", "#e596c8", "#e596c8", "#a0a0a0",
)  # fmt: skip
SHAPES = (
    "circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "triangle-right",
    "circle",
)  # fmt: skip
BASELINES = {"eager": "eager PyTorch", "compile": "torch.compile"}
GREY = "#888888"
FAST_LIMIT = 4.0  # the largest p of the fast_p curves
SHARE_LIMIT = 1.1  # of the roofline; above it lies what the caches do, or an error

_KIND_SCALE = {"domain": list(KINDS)}


def specs(results: Summary) -> Json:
    """The page's charts by element id; those that would show nothing are left out."""
    found: Json = {}
    if results.baselines:
        found["chart-fast"] = fast(results)
    for baseline in BASELINES:
        if points := _speedup_points(results, baseline):
            found[f"chart-{baseline}"] = speedups(points, BASELINES[baseline])
    if points := _named_points(results):
        found["chart-named"] = named(points)
    if points := _roofline_points(results):
        found["chart-roofline"] = roofline(points)
    return found


def headline(results: Summary) -> Json:
    """The fast_p curves and the sorted speed-ups side by side, about 900 px wide, on white."""
    left = fast(results)
    right = speedups(_speedup_points(results, "eager"), BASELINES["eager"])
    titles = ("Right and faster by more than p", "Speed-up of each task")
    panels = []
    for layers, title, width, rise in zip(
        (left["layer"], right["layer"]), titles, (320, 395), (12, 17), strict=True
    ):
        layers[0]["name"] = f"limit {width}"  # of two layers of one name one is drawn
        layers[1]["encoding"]["x"]["axis"]["tickCount"] = 5  # panels have no signal "width"
        # The left axis has a label at its very top, which raises the title.
        heading = {"text": title, "offset": rise}
        panels.append({"title": heading, "layer": layers, "width": width, "height": 300})
    config = {**right["config"], "background": "#ffffff"}
    config["legend"] = {**config["legend"], "columns": 2}
    return {
        "hconcat": panels,
        "spacing": 30,
        "padding": 12,
        "config": config,
        # Lines and kinds have nothing to do with each other.
        "resolve": {
            "scale": {"color": "independent", "shape": "independent", "strokeDash": "independent"}
        },
    }


# --- points --------------------------------------------------------------------------------------


def _point(task: Task) -> Json:
    return {
        "task": task.name, "kind": task.kind, "anchor": task.anchor, "ours": task.ms["solution"]
    }  # fmt: skip


def _speedup_points(results: Summary, baseline: str) -> list[Json]:
    return [
        {**_point(task), "rank": rank, "speedup": speedup, "theirs": task.ms[baseline]}
        for rank, (speedup, task) in enumerate(results.speedups(baseline), start=1)
    ]


def _named_points(results: Summary) -> list[Json]:
    points = [
        {**_point(task), "eager": speedup, "compile": task.speedup("compile")}
        for speedup, task in reversed(results.speedups("eager"))
    ]
    return [{key: value for key, value in p.items() if value is not None} for p in points]


def _roofline_points(results: Summary) -> list[Json]:
    shares = [(task.roofline, task) for task in results.right if task.ms]
    return [
        # Multiples of the golden ratio lie apart, however many there are.
        {**_point(task), "share": share, "spot": round(index * 0.618034 % 1, 3)}
        for index, (share, task) in enumerate(shares)
        if share is not None
    ]


# --- charts --------------------------------------------------------------------------------------


def fast(results: Summary) -> Json:
    """The fast_p curves, one a baseline."""
    lines = [name for key, name in BASELINES.items() if key in results.baselines]
    points = [
        {"p": p, "share": share, "line": name}
        for key, name in BASELINES.items()
        if key in results.baselines
        for p, share in results.curve(key)
    ]
    color = {
        "field": "line", "type": "nominal", "scale": {"domain": list(BASELINES.values())},
        "legend": {"title": None, "values": lines, "symbolType": "stroke",
                   "symbolSize": 300, "symbolStrokeWidth": 2},
    }  # fmt: skip
    return _page(
        "Share of tasks that are right and faster than the baseline by more than p",
        {
            "height": 300,
            "layer": [
                _rule("x", 1),
                {
                    "data": {"values": points},
                    "mark": {"type": "line", "interpolate": "step-after", "strokeWidth": 2},
                    "encoding": {
                        "x": _axis("p", "p, times as fast as the baseline", [0, FAST_LIMIT],
                                   format=_times()),
                        "y": _axis("share", "share of tasks", [0, 1],
                                   format={"format": ".0%", "tickCount": 5}),
                        "color": color,
                        "strokeDash": {**color, "scale": {
                            "domain": list(BASELINES.values()), "range": [[1, 0], [6, 3]]}},
                        "tooltip": _tooltip(line="baseline", p="p", share="share"),
                    },
                },
            ],
        },
    )  # fmt: skip


def speedups(points: list[Json], baseline: str) -> Json:
    """A dot a task, sorted; a point has rank, speedup, kind, task, anchor, ours and theirs."""
    return _page(
        f"Speed-up of each task against {baseline}, sorted, on a logarithmic axis",
        {
            "height": 320,
            "layer": [
                _rule("y", 1),
                {
                    "data": {"values": points},
                    "mark": {"type": "point", "filled": True, "size": 45, "opacity": 0.85},
                    "encoding": {
                        "x": _axis("rank", f"tasks, sorted by speed-up against {baseline}",
                                   [0, len(points) + 1], format={"grid": False}),
                        "y": _log(points, ("speedup",), f"{baseline} / ours"),
                        **_by_kind(points),
                        "tooltip": _tooltip(
                            task="task", kind="kind", speedup="speed-up", ours="ours, ms",
                            theirs=f"{baseline}, ms",
                        ),
                    },
                },
            ],
        },
    )  # fmt: skip


def named(points: list[Json]) -> Json:
    """A line a task with its name; a point has task, kind, eager and perhaps compile."""
    y = {
        "field": "task", "type": "nominal", "sort": None, "title": None,
        "axis": {"ticks": False, "domain": False},
    }  # fmt: skip
    tips = _tooltip(
        task="task", kind="kind", eager="against eager", compile="against torch.compile",
        ours="ours, ms",
    )  # fmt: skip
    x = _log(points, ("eager", "compile"), "baseline / ours")
    x["axis"]["orient"] = "top"
    layers: list[Json] = [_rule("x", 1)]
    if any("compile" in point for point in points):
        ring = {"type": "point", "filled": False, "size": 35, "color": GREY}
        layers.append(
            {"mark": ring, "encoding": {"x": {**x, "field": "compile"}, "y": y, "tooltip": tips}}
        )
    dot = {"type": "point", "filled": True, "size": 45}
    layers.append({"mark": dot, "encoding": {"x": x, "y": y, **_by_kind(points), "tooltip": tips}})
    return _page(
        "Speed-up of each task by name",
        {"height": 15 * len(points), "data": {"values": points}, "layer": layers},
    )


def roofline(points: list[Json]) -> Json:
    """Strips of the share of the roofline, one a kind; a point has share, kind and spot.

    `spot` (0 to 1) sets dots of one strip apart and means nothing else.
    """
    present = _present(points)
    y = {
        "field": "kind", "type": "nominal", "sort": present, "title": None,
        "axis": {"ticks": False, "domain": False},
    }  # fmt: skip
    x = _axis("share", "roofline time / ours (1: at the limit)", [0, SHARE_LIMIT], format={})
    dots = {
        "mark": {"type": "point", "filled": True, "size": 40, "opacity": 0.75},
        "encoding": {
            "x": x, "y": y,
            "yOffset": {"field": "spot", "type": "quantitative", "scale": {"domain": [-0.4, 1.4]}},
            **_by_kind(points, legend=False),
            "tooltip": _tooltip(
                task="task", kind="kind", share="share of the roofline", ours="ours, ms"
            ),
        },
    }  # fmt: skip
    return _page(
        "Share of the roofline that each task reaches, by kind of region, with medians",
        {
            "height": 46 * len(present),
            "data": {"values": points},
            "layer": [_rule("x", 1), dots, _medians(x, y)],
        },
    )


def _medians(x: Json, y: Json) -> Json:
    return {
        "name": "medians",
        "transform": [
            {"aggregate": [{"op": "median", "field": "share", "as": "median"},
                           {"op": "count", "as": "tasks"}], "groupby": ["kind"]},
        ],
        "mark": {"type": "tick", "thickness": 3, "size": 34, "color": "#222222"},
        "encoding": {
            "x": {**x, "field": "median"}, "y": y,
            "tooltip": _tooltip(kind="kind", median="median share", tasks="tasks"),
        },
    }  # fmt: skip


def _page(description: str, body: Json) -> Json:
    """A chart as wide as its place in the page; the page's CSS gives text and axes colours."""
    return {
        "description": description,
        "width": "container",
        "autosize": {"type": "fit-x", "contains": "padding"},
        **body,
        "config": {
            "background": None,
            "font": "system-ui, sans-serif",
            "view": {"stroke": None},
            "axis": {"labelFontSize": 11, "titleFontSize": 12, "titleFontWeight": "normal",
                     "gridColor": "#e4e4e4", "domainColor": GREY, "tickColor": GREY},
            "axisY": {"labelLimit": 330},  # of names; the page lowers it where it is narrow
            "legend": {"orient": "bottom", "labelFontSize": 12, "labelLimit": 0, "title": None,
                       "columns": {"expr": "width < 520 ? 2 : 4"}},
            "title": {"fontSize": 14, "anchor": "start", "fontWeight": 600, "offset": 12},
            "range": {"category": list(LIGHT), "symbol": list(SHAPES)},
        },
    }  # fmt: skip


def _rule(channel: str, at: float) -> Json:
    """The line that says "as fast as the other"; its name is a class in the SVG."""
    return {
        "name": "limit",
        "data": {"values": [{"at": at}]},
        "mark": {"type": "rule", "strokeDash": [3, 3], "color": GREY},
        "encoding": {channel: {"field": "at", "type": "quantitative"}},
    }


def _axis(field: str, title: str, domain: Sequence[float], *, format: Mapping[str, Any]) -> Json:
    return {
        "field": field, "type": "quantitative", "title": title,
        "scale": {"domain": list(domain), "nice": False, "clamp": True},
        "axis": {"tickCount": {"expr": "ceil(width / 90)"}, **format},
    }  # fmt: skip


def _times() -> Json:
    return {"labelExpr": "datum.label + '\u00d7'"}


def _log(points: list[Json], fields: Sequence[str], title: str) -> Json:
    """A logarithmic axis over all positive values, 0.8 to 2 at least, its ticks powers of two."""
    values = [point[field] for point in points for field in fields if point.get(field)]
    low, high = min([0.85, *values]) / 1.1, max([1.9, *values]) * 1.1
    exponents = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
    ticks = [2.0**exponent for exponent in exponents]
    axis = {"values": ticks, "format": "~g", **_times()}
    return {
        "field": fields[0], "type": "quantitative", "title": title, "axis": axis,
        "scale": {"type": "log", "domain": [low, high], "nice": False},
    }  # fmt: skip


def _present(points: list[Json]) -> list[str]:
    return [kind for kind in KINDS if any(point["kind"] == kind for point in points)]


def _by_kind(points: list[Json], legend: bool = True) -> Json:
    """Colour and shape by kind, in one legend of the kinds that occur."""
    shown = {"values": _present(points), "symbolSize": 70} if legend else None
    channel = {"field": "kind", "type": "nominal", "scale": _KIND_SCALE, "legend": shown}
    return {"color": channel, "shape": channel}


def _tooltip(**titles: str) -> list[Json]:
    texts = ("task", "kind", "line")
    return [
        {"field": field, "title": title, "type": "nominal"}
        if field in texts
        else {"field": field, "title": title, "type": "quantitative", "format": ".4~g"}
        for field, title in titles.items()
    ]
