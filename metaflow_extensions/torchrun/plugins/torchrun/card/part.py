"""Parts of the gang's page as a component for a card of a user's own: ``current.card.append(current.torch.card())``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..compat.cards import as_component, component_class
from ..errors import TorchrunConfigError
from .page import SECTIONS, part


class GangPart(component_class()):  # type: ignore[misc]  # Metaflow is not typed
    """Shows what is known of the gang whenever Metaflow asks, while the step runs and at its end."""

    REALTIME_UPDATABLE = True

    def __init__(self, names: tuple[str, ...], content: Callable[[], dict[str, Any]]) -> None:
        unknown = [name for name in names if name not in SECTIONS]
        if unknown:
            raise TorchrunConfigError(
                f"current.torch.card knows no part {unknown[0]!r}. The parts are {', '.join(map(repr, SECTIONS))}."
            )
        self._names = names
        self._content = content  # what to show now, from any thread

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: it always shows what is so now."""

    @as_component
    def render(self) -> dict[str, Any]:
        """Return it as plain data, as Metaflow's own components do."""
        return part(self.component_id, self._content(), self._names)
