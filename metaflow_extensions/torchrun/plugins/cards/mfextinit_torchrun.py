"""Registers our card with Metaflow; nothing else happens here."""

from ..torchrun.show.gang_card import GangCard

CARDS = [GangCard]
