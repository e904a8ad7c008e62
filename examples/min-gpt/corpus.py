"""The text: Python's reference manual, which ships inside Python itself as the topics of `help()`."""

from pydoc_data.topics import topics

import torch


def is_table(paragraph: str) -> bool:
    # A line of a grammar rule may also start with "|", but does not end with it.
    lines = [line.strip() for line in paragraph.splitlines()]
    return any(line.startswith(("|", "+-")) and line.endswith(("|", "-+")) for line in lines)


def load_text() -> str:
    """All topics in one text, without the tables, which are mostly blanks.

    Topics quote each other. Each paragraph is kept only once, so that the training text contains nothing of the
    held-out text.
    """
    paragraphs = "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")
    text = "\n\n".join(paragraph for paragraph in dict.fromkeys(paragraphs) if not is_table(paragraph))
    # The few typographic characters are too rare to learn.
    return "".join(character for character in text if character.isascii())


def encode(text: str, vocabulary: str) -> torch.Tensor:
    index = {character: number for number, character in enumerate(vocabulary)}
    return torch.tensor([index[character] for character in text], dtype=torch.int64)


def decode(tokens: torch.Tensor, vocabulary: str) -> str:
    return "".join(vocabulary[number] for number in tokens.tolist())


def split(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the training text and the held-out text, which is the last tenth."""
    border = len(tokens) * 9 // 10
    return tokens[:border], tokens[border:]
