"""Parts of the gang's page as a component for a card of a user's own: ``current.card.append(current.torch.card())``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# By both names at this place in Metaflow 2.13 to 2.19; in 2.13 only here.
from metaflow.plugins.cards.card_modules.components import UserComponent, with_default_component_id
from metaflow.plugins.cards.card_modules.renderer_tools import render_safely

from ..errors import TorchrunConfigError
from .page import SECTIONS, part


class GangPart(UserComponent):  # type: ignore[misc]  # Metaflow is not typed
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

    @with_default_component_id  # type: ignore[untyped-decorator]
    @render_safely  # type: ignore[untyped-decorator]
    def render(self) -> dict[str, Any]:
        """Return it as plain data, as Metaflow's own components do."""
        return part(self.component_id, self._content(), self._names)
