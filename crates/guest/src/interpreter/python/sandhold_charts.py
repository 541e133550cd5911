"""Reads the data of a matplotlib figure back out of it, in the form that clients parse.

Kinds: line, scatter, bar, pie, box_and_whisker; superchart for several axes; unknown for a mixture.
Every key of a kind is always there, null where the figure says nothing (wire contract 3).
"""

import importlib.util
import math
import re
import sys

from sandhold_display import plain

# A figure with more points sends its picture only.
POINTS_MAX = 100_000
UNIT = re.compile(r"\s\((.*?)\)|\[(.*?)\]")
BOXES = "_sandhold_boxes"
COLORBAR = "<colorbar>"


def figure_chart(figure):
    axes = [ax for ax in figure.get_axes() if ax.get_label() != COLORBAR]
    if not any(ax.has_data() for ax in axes):
        return None
    if len(axes) == 1:
        return axes_chart(axes[0])
    title = getattr(figure, "_suptitle", None)
    return {
        "type": "superchart",
        "title": title.get_text() or None if title else None,
        "elements": [axes_chart(ax) for ax in axes],
    }


def axes_chart(ax):
    kind = chart_kind(ax)
    chart = {"type": kind, "title": ax.get_title() or None, "elements": []}
    if kind not in ("pie", "unknown"):
        chart.update(labels(ax))
    READERS[kind](ax, chart)
    return chart


def chart_kind(ax):
    from matplotlib.collections import PathCollection
    from matplotlib.container import BarContainer
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle, Wedge

    if getattr(ax, BOXES, None):
        return "box_and_whisker"
    drawn = [part for part in ax._children if isinstance(part, data_artists())]
    if all(isinstance(part, Line2D) for part in drawn):
        return "line"
    drawn = [part for part in drawn if not is_guide_line(part)]
    for kind, artist in (("scatter", PathCollection), ("pie", Wedge)):
        if all(isinstance(part, artist) for part in drawn):
            return kind
    bars = any(isinstance(container, BarContainer) for container in ax.containers)
    if bars and all(isinstance(part, Rectangle) for part in drawn):
        return "bar"
    return "unknown"


def data_artists():
    from matplotlib.collections import Collection
    from matplotlib.image import AxesImage
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    return (Line2D, Patch, Collection, AxesImage)


def is_guide_line(part):
    """A straight horizontal or vertical line through two points, as axhline draws."""
    from matplotlib.lines import Line2D

    if not isinstance(part, Line2D):
        return False
    x, y = part.get_xdata(), part.get_ydata()
    return len(x) == 2 and len(y) == 2 and (x[0] == x[1] or y[0] == y[1])


def labels(ax):
    x, y = ax.get_xlabel() or None, ax.get_ylabel() or None
    return {"x_label": x, "y_label": y, "x_unit": unit(x), "y_unit": unit(y)}


def unit(label):
    found = UNIT.search(label or "")
    return (found.group(1) or found.group(2)) if found else None


def swap_axes(chart):
    for name in ("label", "unit"):
        x, y = f"x_{name}", f"y_{name}"
        chart[x], chart[y] = chart[y], chart[x]


# Point charts


def read_lines(ax, chart):
    read_scales(ax, chart)
    for line in ax.get_lines():
        if is_guide_line(line):
            continue
        label = str(line.get_label())
        if label.startswith(("_child", "_line")):
            label = f"Line {label.removeprefix('_child').removeprefix('_line')}"
        points = zip(line.get_xdata(orig=True), line.get_ydata(orig=True))
        chart["elements"].append({"label": label, "points": point_list(points, chart)})


def read_scatters(ax, chart):
    read_scales(ax, chart)
    dates = is_dated(ax.xaxis), is_dated(ax.yaxis)
    for collection in ax.collections:
        points = (
            [date(value) if dated else value for value, dated in zip(point, dates)]
            for point in collection.get_offsets().tolist()
        )
        label = str(collection.get_label())
        chart["elements"].append({"label": label, "points": point_list(points, chart)})


def point_list(points, chart):
    room = POINTS_MAX - sum(len(element["points"]) for element in chart["elements"])
    taken = []
    for x, y in points:
        if len(taken) >= room:
            raise ValueError(f"more than {POINTS_MAX} points")
        taken.append([point(x), point(y)])
    return taken


def point(value):
    if type(value).__name__ == "datetime64":
        return str(value.astype("datetime64[s]"))
    return plain(value)


def read_scales(ax, chart):
    for name, axis in (("x", ax.xaxis), ("y", ax.yaxis)):
        texts = [label.get_text() for label in axis.get_ticklabels()]
        ticks = axis.get_ticklocs()
        dated = is_dated(axis)
        chart[f"{name}_ticks"] = [date(t) if dated else point(t) for t in ticks]
        chart[f"{name}_tick_labels"] = texts
        chart[f"{name}_scale"] = scale(axis, dated, ticks, texts)


def scale(axis, dated, ticks, texts):
    if dated:
        return "datetime"
    if axis.get_scale() != "linear":
        return axis.get_scale()
    # Ticks 0, 1, 2 … that read otherwise are names.
    named = len(ticks) > 0 and all(
        tick == at and text != str(at) for at, (tick, text) in enumerate(zip(ticks, texts))
    )
    return "categorical" if named else "linear"


def is_dated(axis):
    get = getattr(axis, "get_converter", None)
    converter = get() if get else getattr(axis, "converter", None)
    return "Date" in type(converter).__name__ or "Datetime" in type(converter).__name__


def date(number):
    import matplotlib.dates

    return matplotlib.dates.num2date(number).isoformat()


# Charts of things with a name


def read_bars(ax, chart):
    from matplotlib.container import BarContainer

    containers = [c for c in ax.containers if isinstance(c, BarContainer)]
    flat = any(getattr(c, "orientation", None) == "horizontal" for c in containers)
    if flat:
        swap_axes(chart)
    names = tick_names(ax.yaxis if flat else ax.xaxis)
    for number, container in enumerate(containers):
        group = str(container.get_label())
        if group.startswith("_"):
            group = f"Group {number}"
        for bar in container:
            start, size = (bar.get_y(), bar.get_height()) if flat else (bar.get_x(), bar.get_width())
            value = bar.get_width() if flat else bar.get_height()
            label = name_at(names, start + size / 2)
            if label is None:
                label = name_at(names, start)
            if label is None:
                label = f"{start + size / 2:g}"
            chart["elements"].append({"label": label, "group": group, "value": plain(value)})


def read_wedges(ax, chart):
    from matplotlib.patches import Wedge

    for wedge in ax.patches:
        if isinstance(wedge, Wedge):
            angle = round(abs(float(wedge.theta2) - float(wedge.theta1)), 6)
            chart["elements"].append(
                {"label": str(wedge.get_label()), "angle": angle, "radius": plain(wedge.r)}
            )


def read_boxes(ax, chart):
    recorded = getattr(ax, BOXES)
    flat = any(box["flat"] for box in recorded)
    if flat:
        swap_axes(chart)
    names = tick_names(ax.yaxis if flat else ax.xaxis)
    for box in recorded:
        stats = box["stats"]
        label = name_at(names, box["position"])
        chart["elements"].append(
            {
                "label": str(stats.get("label", "")) if label is None else label,
                "min": plain(stats["whislo"]),
                "first_quartile": plain(stats["q1"]),
                "median": plain(stats["med"]),
                "third_quartile": plain(stats["q3"]),
                "max": plain(stats["whishi"]),
                "outliers": [plain(value) for value in stats.get("fliers", [])],
            }
        )


def tick_names(axis):
    texts = [label.get_text() for label in axis.get_ticklabels()]
    return list(zip(axis.get_ticklocs(), texts))


def name_at(names, position):
    for tick, text in names:
        if text and math.isclose(tick, position, rel_tol=1e-6, abs_tol=1e-6):
            return text
    return None


READERS = {
    "line": read_lines,
    "scatter": read_scatters,
    "bar": read_bars,
    "pie": read_wedges,
    "box_and_whisker": read_boxes,
    "unknown": lambda ax, chart: None,
}


# A box plot keeps nothing of its statistics, so they are noted while it is drawn.


def record_boxes():
    """Now, if matplotlib is loaded, else as soon as it is."""
    if "matplotlib.axes._axes" in sys.modules:
        wrap_bxp(sys.modules["matplotlib.axes._axes"])
    else:
        sys.meta_path.insert(0, WhenLoaded("matplotlib.axes._axes", wrap_bxp))


def wrap_bxp(module):
    drawn = module.Axes.bxp

    def bxp(self, bxpstats, positions=None, *arguments, **keywords):
        artists = drawn(self, bxpstats, positions, *arguments, **keywords)
        at = positions if positions is not None else range(1, len(bxpstats) + 1)
        flat = keywords.get("vert") is False or keywords.get("orientation") == "horizontal"
        held = self.__dict__.setdefault(BOXES, [])
        for stats, position in zip(bxpstats, at):
            held.append({"stats": stats, "position": float(position), "flat": flat})
        return artists

    bxp.__wrapped__, bxp.__doc__ = drawn, drawn.__doc__
    module.Axes.bxp = bxp


class WhenLoaded:
    """An import hook that acts once, after one module has been loaded."""

    def __init__(self, name, action):
        self.name, self.action = name, action

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute, action = spec.loader.exec_module, self.action

        def exec_module(module):
            execute(module)
            action(module)

        spec.loader.exec_module = exec_module
        return spec
