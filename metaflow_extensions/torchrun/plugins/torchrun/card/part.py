"""Parts of the gang's page as a component for a card of a user's own: ``current.card.append(current.torch.card())``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..compat.renamed import known
from ..errors import TorchrunConfigError
from .page import SECTIONS, part


def _as_it_is(render: Any) -> Any:
    return render


# By both names at this place in Metaflow 2.13 to 2.19; in 2.13 only here. Without the class, Metaflow itself warns that
# a card can't show a part.
_COMPONENTS = "metaflow.plugins.cards.card_modules.components"
_UserComponent: Any = known(_COMPONENTS, "UserComponent", object)
_with_default_component_id = known(_COMPONENTS, "with_default_component_id", _as_it_is)
_render_safely = known("metaflow.plugins.cards.card_modules.renderer_tools", "render_safely", _as_it_is)


class GangPart(_UserComponent):  # type: ignore[misc]  # Metaflow is not typed
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

    @_with_default_component_id  # type: ignore[untyped-decorator]
    @_render_safely  # type: ignore[untyped-decorator]
    def render(self) -> dict[str, Any]:
        """Return it as plain data, as Metaflow's own components do."""
        return part(self.component_id, self._content(), self._names)
