"""A matplotlib figure that a notebook shows as a picture, also where pyplot was never imported."""

from __future__ import annotations

import io

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


class ShownFigure(Figure):
    """An ordinary figure, known to no pyplot state; notebooks find `_repr_png_`."""

    def _repr_png_(self) -> bytes:
        stream = io.BytesIO()
        self.savefig(stream, format="png")
        return stream.getvalue()


def figure(width: float, height: float) -> Figure:
    """An empty figure of that many inches."""
    made = ShownFigure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(made)
    return made
