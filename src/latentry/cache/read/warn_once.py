"""Warnings that would otherwise repeat for every batch."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


class WarnOnce:
    """Logs one warning for each subject. Several threads may use it."""

    def __init__(self) -> None:
        self._warned: dict[str, object] = {}

    def __call__(self, subject: str, message: str, *arguments: Any) -> None:
        """Log the message, unless there was one about the subject.

        Args:
            subject: What the message is about.
            message: As for ``logging``.
            arguments: As for ``logging``.
        """
        mark = object()
        if self._warned.setdefault(subject, mark) is mark:
            logger.warning(message, *arguments)
