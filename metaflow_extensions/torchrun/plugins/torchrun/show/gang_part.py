"""Parts of the gang's page as a component for a card of a user's own: ``current.card.append(current.torch.card())``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..compat.cards import as_component, component_class
from ..errors import TorchrunConfigError
from ..records.snapshot import Snapshot
from .as_card import part, said
from .page import Place, page_of, section_names

if TYPE_CHECKING:
    from ..node.watchers import Feature


class GangPart(component_class()):  # type: ignore[misc]  # Metaflow is not typed
    """Shows what is known of the gang whenever Metaflow asks, while the step runs and at its end."""

    REALTIME_UPDATABLE = True

    def __init__(
        self,
        names: tuple[str, ...],
        snapshot: Callable[[], Snapshot | None],
        place: Callable[[], Place],
        features: Sequence[Feature] = (),
    ) -> None:
        known = section_names(features)
        unknown = [name for name in names if name not in known]
        if unknown:
            raise TorchrunConfigError(
                f"current.torch.card knows no part {unknown[0]!r}. The parts are {', '.join(map(repr, known))}."
            )
        self._names = names
        self._snapshot = snapshot  # what to show now, from any thread; None before the first launch
        self._place, self._features = place, features

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: it always shows what is so now."""

    @as_component
    def render(self) -> dict[str, Any]:
        """Return it as plain data, as Metaflow's own components do."""
        snapshot = self._snapshot()
        if snapshot is None:
            return {**said("No launch has begun yet."), "id": self.component_id}
        page = page_of(snapshot, self._place(), self._features, is_short=True)
        return part(self.component_id, page, self._names)
