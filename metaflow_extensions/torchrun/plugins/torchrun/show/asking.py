"""Commands of features: each reads the stored data of a gang, or sends it a request, which the control node answers."""

# mypy: disable-error-code="untyped-decorator"
# Metaflow's copy of click has no types.

from __future__ import annotations

import getpass
import time
import uuid
from collections.abc import Mapping
from typing import Any

from ..channel.registry import Registry
from ..compat.cli import CommandException, click
from ..compat.datastore import DatastoreValues
from ..elements.terminal import printable
from ..errors import TorchrunError
from ..records.requests import Answer, GangCommand, GangHasEnded, Request
from .finding import WHICH, attempt_option, find_one, gang_argument
from .stored_gangs import StoredGang, StoredGangs

# The control node looks for requests twice a minute if the datastore is an object store (`task/gang_store`). A feature then
# needs some seconds for its answer.
_PATIENCE_S = 75.0
_LOOK_S = 2.0
_LOOK_ON_DISK_S = 0.2
_SEE_END_S = 10.0  # between checks whether the gang has ended; each costs several requests


class NoAnswer(CommandException):  # type: ignore[misc]  # Metaflow is not typed
    """No answer has come, though the command is correct."""

    headline = "No answer"


class CommandFailed(CommandException):  # type: ignore[misc]  # Metaflow is not typed
    """A feature's command has failed."""

    headline = "Command failed"


class AskedGang:
    """One attempt of a gang, for a feature's command: `records.requests.Asked`."""

    def __init__(self, stored: StoredGangs, gang: StoredGang, attempt: int, feature: str) -> None:
        self.where = f"{gang.run}/{gang.step}/{gang.control_task}"
        self.datastore = DatastoreValues(stored.datastore).address
        self._stored, self._gang, self._attempt, self._feature = stored, gang, attempt, feature
        self._registry = Registry(stored.datastore, gang.run, gang.step, gang.control_task, attempt)

    def kept(self) -> Any:
        """Return what the feature has recorded of the gang, or None."""
        snapshot = self._stored.snapshot(self._gang, self._attempt)
        return None if snapshot is None else snapshot.features.get(self._feature)

    def last(self) -> Answer | None:
        """Return the last answer, perhaps to another command."""
        return self._registry.load_answer()

    def _is_over(self) -> bool:
        """Return whether the attempt has ended, as far as the datastore shows."""
        gangs = self._stored.gangs(self._gang.run, self._gang.step)
        found = [each for each in gangs if each.control_task == self._gang.control_task]
        if not found or found[0].place(self._attempt).is_over:
            return True
        snapshot = self._stored.snapshot(found[0], self._attempt)
        return snapshot is not None and snapshot.summary.is_over

    def ask(self, data: Mapping[str, Any]) -> Answer:
        """Store a request, and return the first answer to it or to an equal later request of somebody else."""
        self._refuse_if_over()
        before = self.last()
        self._store_request(data)
        look_s = _LOOK_S if self._stored.storage.kind != "local" else _LOOK_ON_DISK_S
        began = looked = time.monotonic()
        while time.monotonic() - began < _PATIENCE_S:
            time.sleep(look_s)
            answer = self.last()
            if answer is not None and (before is None or answer.request.id != before.request.id):
                if (answer.request.feature, answer.request.data) == (self._feature, dict(data)):
                    return answer
                self._store_request(data)  # somebody else has overwritten our request: only one is stored at a time
                before = answer
            if time.monotonic() - looked > _SEE_END_S:
                self._refuse_if_over()
                looked = time.monotonic()
        raise NoAnswer(
            f"{self.where} has not answered within {_PATIENCE_S:g} s. Its control node answers while its step runs: it may "
            "wait for a machine, or have been killed, or have a clock that is 10 minutes from this one's, or run a version "
            f"of metaflow-torchrun that can't answer. To see what is known of it: {self._show}."
        )

    def _store_request(self, data: Mapping[str, Any]) -> None:
        self._registry.save_request(Request(_id(), time.time(), self._feature, dict(data)))

    @property
    def _show(self) -> str:
        return f"{self._stored.program} show {self.where}"

    def _refuse_if_over(self) -> None:
        if self._is_over():
            raise GangHasEnded(
                f"{self.where} has ended, so none of its workers runs. To see how it ended: {self._show}."
            )


def click_command(feature: str, command: GangCommand) -> Any:
    """Return a feature's command for Metaflow's command line (``click.Command``)."""

    def run(obj: Any, gang: str, attempt: int | None, **options: Any) -> None:
        stored, found, which = find_one(obj, gang, attempt)
        asked = AskedGang(stored, found, which, feature)
        try:
            for line in command.run(asked, options):
                click.echo(printable(line))
        except GangHasEnded as error:
            raise NoAnswer(str(error)) from error
        except TorchrunError as error:
            raise CommandFailed(str(error)) from error

    made = click.pass_obj(run)
    for name, (kind, text) in command.options.items():
        option = click.option(
            f"--{name}", name, type=kind, is_flag=kind is None, default=None if kind else False, help=text
        )
        made = option(made)
    return click.command(command.name, help=command.help, epilog=WHICH)(gang_argument(attempt_option(made)))


def _id() -> str:
    try:
        who = getpass.getuser()
    except (KeyError, OSError):  # the user has no name, as in many containers
        who = "somebody"
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{who}-{uuid.uuid4().hex[:8]}"
