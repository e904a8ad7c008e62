"""A small GPT over characters."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPTConfig:
    vocab_size: int
    block_size: int = 64
    n_layer: int = 3
    n_head: int = 4
    n_embd: int = 96


class SelfAttention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.query_key_value = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.out = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.query_key_value(x).view(batch, length, 3, self.n_head, width // self.n_head)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.n_embd)
        self.attention = SelfAttention(config)
        self.norm_2 = nn.LayerNorm(config.n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(config.n_embd, 4 * config.n_embd),
            nn.GELU(),
            nn.Linear(4 * config.n_embd, config.n_embd),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.characters = nn.Embedding(config.vocab_size, config.n_embd)
        self.positions = nn.Embedding(config.block_size, config.n_embd)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.n_layer)))
        self.norm = nn.LayerNorm(config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size)
        self.apply(self._initialize)

    @staticmethod
    def _initialize(module: nn.Module) -> None:
        # With small weights, all characters are nearly equally likely at first.
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return scores of the next character, for every position of (batch, length) tokens."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.characters(tokens) + self.positions(positions)
        return self.head(self.norm(self.blocks(x)))

    @torch.no_grad()
    def generate(self, tokens: torch.Tensor, count: int, temperature: float, seed: int = 0) -> torch.Tensor:
        """Append `count` sampled characters to a (1, length) prompt."""
        # Sampled on the CPU, so that a seed gives the same text on every device.
        generator = torch.Generator().manual_seed(seed)
        for _ in range(count):
            scores = self(tokens[:, -self.config.block_size :])[:, -1].cpu() / temperature
            drawn = torch.multinomial(F.softmax(scores, dim=-1), num_samples=1, generator=generator)
            tokens = torch.cat([tokens, drawn.to(tokens.device)], dim=1)
        return tokens
