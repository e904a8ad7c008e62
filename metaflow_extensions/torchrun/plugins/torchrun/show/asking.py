"""Asks a gang that runs, for a command: by a request beside its view, which the control node's task finds."""

from __future__ import annotations

import time
import uuid
from typing import Any

from ..gang.messages import What
from ..gang.questions import LIMITS
from ..registry import Registry, Replies, Reply, Request, Requests
from .finding import CommandFailed
from .stored_gangs import StoredGang, StoredGangs

_MARGIN_S = 60.0  # the control node looks for requests every 2 s (`task/gang_store`), if nothing holds it up
_LOOK_S, _LOOK_ON_DISK_S = 2.0, 0.2
_SEE_END_S = 10.0  # between checks whether the gang has ended; each costs several requests


def last_reply(registry: Registry, what: What) -> Reply | None:
    """Return the last reply of this kind, to whomever."""
    return (registry.load(Replies) or Replies()).last.get(what)


def ask(stored: StoredGangs, gang: StoredGang, what: What, of: dict[str, Any]) -> Reply | None:
    """Store a request, and return the first reply to it or to a later one that asks the same; None: the gang is over."""
    registry, request = stored.registry(gang), Request(uuid.uuid4().hex, of)
    before = last_reply(registry, what)
    registry.save(Requests({**_requests(registry), what: request}))
    try:
        look_s = _LOOK_S if stored.storage.kind != "local" else _LOOK_ON_DISK_S
        began = sees_end_at = time.monotonic()
        patience_s = LIMITS[what] + _MARGIN_S
        while (now := time.monotonic()) - began < patience_s:
            if now >= sees_end_at:
                gang, sees_end_at = stored.again(gang), now + _SEE_END_S
                if gang.is_over or ((view := stored.view(gang)) is not None and view.is_over):
                    return None
            time.sleep(look_s)
            reply = last_reply(registry, what)
            is_new = reply is not None and (before is None or reply.request.id != before.request.id)
            if reply is not None and is_new and reply.request.of == of:
                return reply
    finally:  # nobody waits for it any more
        registry.save(Requests({kind: each for kind, each in _requests(registry).items() if each != request}))
    raise CommandFailed(
        f"{gang.where} has not answered within {patience_s:g} s. Its control node answers while current.torch.run "
        "waits: it may be in code of its own, wait for a machine, or have been killed. To see what is known of it: "
        f"{stored.program} show {gang.where}."
    )


def _requests(registry: Registry) -> dict[str, Request]:
    return (registry.load(Requests) or Requests()).last


def answer_of(stored: StoredGangs, gang: StoredGang, what: What, of: dict[str, Any]) -> Reply:
    """Return the reply to a request; raise an error if the gang has ended."""
    if (reply := ask(stored, gang, what, of)) is None:
        show = f"{stored.program} show {gang.where}"
        raise CommandFailed(f"{gang.where} has ended, so none of its workers runs. To see how it ended: {show}.")
    return reply
