"""The check by running: steps of the plain model and of the planned one, from equal state, compared bit for bit."""

from __future__ import annotations

from .record import NOT_RUN, Checked
from .run import check_step

__all__ = ["NOT_RUN", "Checked", "check_step"]
