"""Hugging Face's Trainer: a tiny GPT-2, from a config, learns to count."""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

NUMBERS, LENGTH = 32, 16


def rows(count: int) -> list[dict[str, list[int]]]:
    """Sequences that count, each from another number."""
    texts = [[(row + place) % NUMBERS for place in range(LENGTH)] for row in range(count)]
    return [{"input_ids": text, "labels": text} for text in texts]


def arguments(forget_use_cpu: bool, folder: str) -> TrainingArguments:
    return TrainingArguments(
        output_dir=folder,
        # Without a GPU and without this, Trainer makes no process group, and each rank would train by itself.
        use_cpu=not torch.cuda.is_available() and not forget_use_cpu,
        max_steps=40,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        ddp_find_unused_parameters=False,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forget-use-cpu", action="store_true", help="see what becomes of that")
    args = parser.parse_args()
    torch.manual_seed(0)
    sizes = {"vocab_size": NUMBERS, "n_positions": LENGTH, "n_embd": 32, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM"))
    with tempfile.TemporaryDirectory() as folder:
        training = arguments(args.forget_use_cpu, folder)
        trained = Trainer(model=model, args=training, train_dataset=rows(256)).train()
        loss = trained.training_loss
    if os.environ["RANK"] == "0":
        ranks = training.world_size
        print(f"Trainer: {ranks} of {os.environ['WORLD_SIZE']} ranks train together, mean loss {loss:.3f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
