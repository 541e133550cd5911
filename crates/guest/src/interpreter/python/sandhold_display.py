"""What a result carries besides the usual representations, and how large it may be."""

import datetime
import math
import sys

# Longer text is cut; a longer image or document is left out. Both leave a marker.
TEXT_CHARACTERS_MAX = 4 << 20
BINARY_CHARACTERS_MAX = 48 << 20
# A frame with more cells sends its text and HTML only.
FRAME_CELLS_MAX = 500_000
CHART = "e2b/chart"
DATA = "e2b/data"
BINARY = ("image/png", "image/jpeg", "application/pdf")


def install(shell):
    """Adds the formatters to the shell."""
    from IPython.core.formatters import BaseFormatter
    from traitlets import ObjectName, Unicode

    class ChartFormatter(BaseFormatter):
        format_type = Unicode(CHART)
        print_method = ObjectName("_repr_e2b_chart_")
        _return_type = dict

    class DataFormatter(BaseFormatter):
        format_type = Unicode(DATA)
        print_method = ObjectName("_repr_e2b_data_")
        _return_type = dict

    display = shell.display_formatter
    chart = ChartFormatter(parent=display)
    chart.for_type_by_name("matplotlib.figure", "Figure", figure_chart)
    data = DataFormatter(parent=display)
    data.for_type_by_name("pandas.core.frame", "DataFrame", frame_data)
    display.formatters[CHART] = chart
    display.formatters[DATA] = data
    # pandas 3 moved the class's public name, not its home; both names lead here.
    data.for_type_by_name("pandas", "DataFrame", frame_data)
    display.active_types = list(display.formatters)
    bound_results(display)

    import sandhold_charts

    sandhold_charts.record_boxes()


def bound_results(display):
    unbounded = display.format

    def bounded(*arguments, **keywords):
        formats, metadata = unbounded(*arguments, **keywords)
        return {kind: bound(kind, value) for kind, value in formats.items()}, metadata

    display.format = bounded


def bound(kind, value):
    if isinstance(value, (bytes, bytearray)):
        if len(value) > BINARY_CHARACTERS_MAX * 3 // 4:
            return ""
        return value
    if not isinstance(value, str):
        return value
    if kind in BINARY:
        return value if len(value) <= BINARY_CHARACTERS_MAX else ""
    if len(value) <= TEXT_CHARACTERS_MAX:
        return value
    left_out = len(value) - TEXT_CHARACTERS_MAX
    return f"{value[:TEXT_CHARACTERS_MAX]}\n[cut: {left_out} more characters]"


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
