"""Cards as Metaflow's `CardComponentManager` (2.19) has them, for tests of when they are made."""

from contextlib import contextmanager
from types import SimpleNamespace

from metaflow import current


class FakeCard:
    """A card of the gang's own type: the data that it was refreshed with, and how it was made for the last time."""

    def __init__(self):
        self.shown, self.made = [], []
        self.fails = False
        self._latest_user_data = None
        self._card_creator_args = {"card_uuid": "of-a-test"}
        self._card_creator = SimpleNamespace(create=self.create, _run_command=None)

    def refresh(self, data):
        self.shown.append(data)
        if self.fails:
            raise OSError("no process")

    def create(self, card_uuid, mode, final):
        assert final
        self.made.append((mode, self._latest_user_data))


class FakeUsersCard(FakeCard):
    """A card of the user's own, with components; `made` has how it was made each time."""

    def __init__(self, *components):
        super().__init__()
        self._card_creator_args = {"card_uuid": "of-a-user", "runtime_card": True}
        self.components = Components(enumerate(components))
        self._latest_user_data = {"mine": 1}
        self._last_layout_change, self._last_render, self._render_seq, self._last_refresh = None, 0, 0, 3.0

    def _card_proc(self, mode):
        self.made.append((mode, [each.render() for each in self.components.values()]))

    def create(self, card_uuid, runtime_card, mode, final):
        self.made.append((mode, final))


class Components(dict):
    layout_last_changed_on = 1.0


def offer(*cards, of_users=()):
    """Have a task find these cards, until the next call of this."""
    collector = {"torchrun": list(cards)}
    found = SimpleNamespace(get=lambda name: collector[name], _card_component_store=dict(enumerate(of_users)))
    current._update_env({"card": found})


@contextmanager
def offered(*cards):
    """Have a task find these cards."""
    offer(*cards)
    try:
        yield
    finally:
        current._update_env({"card": None})
