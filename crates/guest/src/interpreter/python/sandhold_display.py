"""What a result carries besides the usual representations, and how large it may be."""

import datetime
import math
import sys

# Longer text is cut, with a marker.
TEXT_CHARACTERS_MAX = 4 << 20
# A frame with more cells sends its text and HTML only.
FRAME_CELLS_MAX = 500_000
CHART = "e2b/chart"
DATA = "e2b/data"


def install(shell):
    """Adds the formatters to the shell."""
    from IPython.core.formatters import BaseFormatter
    from traitlets import ObjectName, Unicode

    class ChartFormatter(BaseFormatter):
        format_type = Unicode(CHART)
        print_method = ObjectName("_repr_e2b_chart_")
        _return_type = dict

        def __call__(self, shown):
            # Not registered: matplotlib's inline backend clears every formatter of figures.
            if is_figure(shown):
                return figure_chart(shown)
            return super().__call__(shown)

    class DataFormatter(BaseFormatter):
        format_type = Unicode(DATA)
        print_method = ObjectName("_repr_e2b_data_")
        _return_type = dict

    display = shell.display_formatter
    data = DataFormatter(parent=display)
    data.for_type_by_name("pandas.core.frame", "DataFrame", frame_data)
    display.formatters[CHART] = ChartFormatter(parent=display)
    display.formatters[DATA] = data
    # pandas 3 moved the class's public name, not its home; both names lead here.
    data.for_type_by_name("pandas", "DataFrame", frame_data)
    display.active_types = list(display.formatters)
    bound_results(display)
    show_any_error(shell)

    import sandhold_charts

    sandhold_charts.record_boxes()


def bound_results(display):
    unbounded = display.format

    def bounded(*arguments, **keywords):
        formats, metadata = unbounded(*arguments, **keywords)
        return {kind: bound(kind, value) for kind, value in formats.items()}, metadata

    display.format = bounded


def bound(kind, value):
    # Pictures and documents cannot be cut; the agent leaves them out if they are too large.
    if not kind.startswith("text/") or not isinstance(value, str):
        return value
    if len(value) <= TEXT_CHARACTERS_MAX:
        return value
    left_out = len(value) - TEXT_CHARACTERS_MAX
    return f"{value[:TEXT_CHARACTERS_MAX]}\n[cut: {left_out} more characters]"


def show_any_error(shell):
    """An error whose own text cannot be made is still shown under its name."""
    show = shell._showtraceback

    def shown(kind, error, lines):
        try:
            str(error)
        except Exception as failure:
            error = f"<its text cannot be made: {type(failure).__name__}>"
        show(kind, error, lines)

    shell._showtraceback = shown


def is_figure(shown):
    figure = sys.modules.get("matplotlib.figure")
    return figure is not None and isinstance(shown, figure.Figure)


def figure_chart(figure):
    import sandhold_charts

    try:
        return sandhold_charts.figure_chart(figure)
    except Exception as error:  # The picture is worth having even where its data is not.
        print(f"chart data: {error!r}", file=sys.__stderr__)
        return None


def frame_data(frame):
    if frame.size > FRAME_CELLS_MAX:
        return None
    return {
        str(name): [plain(value) for value in frame.iloc[:, at].tolist()]
        for at, name in enumerate(frame.columns)
    }


def plain(value):
    """The value as JSON can say it."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value != value:  # NaT and the like.
        return None
    if isinstance(value, (datetime.date, datetime.datetime, datetime.time)):
        return value.isoformat()
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return plain(value.item())
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    if isinstance(value, dict):
        return {str(name): plain(part) for name, part in value.items()}
    return str(value)
