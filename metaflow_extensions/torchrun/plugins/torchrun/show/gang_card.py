"""``@card(type="torchrun")``: the gang's page, as Metaflow asks for it.

It runs in a process of its own, ``flow.py card create``, which Metaflow starts. Metaflow imports this module whenever it
is imported itself, so what takes time is imported where it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..compat import cards

if TYPE_CHECKING:
    from ..records.snapshot import Snapshot
    from .page import Place


class GangCard(cards.MetaflowCard):  # type: ignore[misc]  # Metaflow is not typed
    """Shows the gang on the control node's task, live and afterwards; on another node's task where that is.

    What it shows comes from `show.live_card`, or, where that has said nothing, from the datastore: so the card of a
    past run can be made again, by ``flow.py card create --type torchrun``.
    """

    type = "torchrun"
    RUNTIME_UPDATABLE = True
    RELOAD_POLICY = cards.RELOAD_POLICY

    def __init__(self, options: Any = None, components: Any = None, graph: Any = None, flow: Any = None) -> None:
        super().__init__()
        self._graph: dict[str, Any] = graph or {}  # by step, as `FlowGraph.output_steps` has it (Metaflow 2.19)

    def render(self, task: Any) -> str:
        """Return the final page."""
        return _page(task, (self.runtime_data or {}).get("user"), True, _gangs_of(self._graph))

    def render_runtime(self, task: Any, data: Any) -> str:
        """Return the page of a gang that still runs; `refresh` keeps it up to date."""
        return _page(task, data["user"], False)

    def refresh(self, task: Any, data: Any) -> dict[str, Any]:
        """Return what is new on the page: all its sections, by their ids."""
        return {section["id"]: section for section in _layout(task, data["user"])["contents"]}

    def reload_content_token(self, task: Any, data: Any) -> str:
        """Return what stays the same while the page need not be loaded again: until the final one is there."""
        return "runtime"


def _layout(task: Any, given: dict[str, Any] | None, gangs: Sequence[str] = ()) -> dict[str, Any]:
    """Return the page of a task; `given` is what `show.live_card` has said, `gangs` the steps that are gangs."""
    from ..features.listed import FEATURES
    from ..records.snapshot import Snapshot
    from .as_card import layout, said
    from .page import Place, page_of

    flow, run, step, task_id = task.pathspec.split("/")
    place = Place(flow, run, step, task_id, ui_url=cards.ui_url())
    snapshot = Snapshot.read(given) if given else _stored(task)
    if snapshot is not None:
        return layout(page_of(snapshot, place, FEATURES, is_short=True))
    none = "There are no records of a gang with this task."
    why = (
        f"{none} Its step has no @torchrun, or another task is the control node, or the run is older than such records."
    )
    is_elsewhere = gangs and place.step not in gangs
    return {"type": "page", "title": "Gang", "contents": [said(_elsewhere(place, gangs) if is_elsewhere else why)]}


def _elsewhere(place: Place, gangs: Sequence[str]) -> str:
    """Say where the gangs are, on the page of another step."""
    places = ", ".join(f"{place.flow}/{place.run}/{each}" for each in gangs)
    where = f"The gang of this run is that of {places}." if len(gangs) == 1 else f"The gangs of this run are: {places}."
    return f"Step {place.step} is no gang: it has no @torchrun, or is not entered with num_parallel. {where}"


def _stored(task: Any) -> Snapshot | None:
    """Return what is stored with the task; None where nothing is, as with another node's task or an old run."""
    from ..channel.registry import Registry
    from ..compat.stored import datastore_of_card, last_attempt

    flow_name, run_id, step_name, task_id = task.pathspec.split("/")
    datastore = datastore_of_card(flow_name, task.metadata_dict)
    attempt = datastore and last_attempt(datastore, (run_id, step_name, task_id))
    return None if attempt is None else Registry(datastore, run_id, step_name, task_id, attempt).load_snapshot()


def _gangs_of(graph: dict[str, Any]) -> list[str]:
    """Return the steps of a flow that are gangs."""
    after = {step for each in graph.values() if each.get("type") == "split-parallel" for step in each.get("next", ())}
    decorators = {step: [each["name"] for each in graph.get(step, {}).get("decorators", ())] for step in sorted(after)}
    return [step for step, names in decorators.items() if "torchrun" in names]


def _page(task: Any, given: dict[str, Any] | None, is_final: bool, gangs: Sequence[str] = ()) -> str:
    from .style import STYLE

    return cards.page(task.pathspec, _layout(task, given, gangs), STYLE, is_final)
