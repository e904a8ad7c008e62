"""The text: Python's reference manual, which ships inside Python itself as the topics of `help()`."""

from pydoc_data.topics import topics

import torch


def is_table(paragraph: str) -> bool:
    # A grammar rule may start a line with "|" too, but does not end it with one.
    lines = [line.strip() for line in paragraph.splitlines()]
    return any(line.startswith(("|", "+-")) and line.endswith(("|", "-+")) for line in lines)


def load_text() -> str:
    """All topics in one text, without the tables, which are mostly blanks.

    Topics quote each other: a paragraph is kept the first time only, so that none of the held-out text was seen
    in training.
    """
    paragraphs = "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")
    text = "\n\n".join(paragraph for paragraph in dict.fromkeys(paragraphs) if not is_table(paragraph))
    # A handful of typographic characters, too rare to learn.
    return "".join(character for character in text if character.isascii())


def encode(text: str, vocabulary: str) -> torch.Tensor:
    index = {character: number for number, character in enumerate(vocabulary)}
    return torch.tensor([index[character] for character in text], dtype=torch.int64)


def decode(tokens: torch.Tensor, vocabulary: str) -> str:
    return "".join(vocabulary[number] for number in tokens.tolist())


def split(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Training text and held-out text: the last tenth."""
    border = len(tokens) * 9 // 10
    return tokens[:border], tokens[border:]
