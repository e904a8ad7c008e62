"""Registers our card with Metaflow; nothing else happens here."""

from ..torchrun.card.gang_card import GangCard

CARDS = [GangCard]
