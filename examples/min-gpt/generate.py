"""Let a trained model write. It loads model.pt from train.py, or from the outputs of a run of flow.py."""

import argparse
from pathlib import Path
from typing import BinaryIO

import torch
from corpus import decode, encode
from model import GPT, GPTConfig


def stored_model(run: str | None) -> BinaryIO:
    """Return the model of a run, such as `123`, or of the latest successful one."""
    # Imported here, because --model needs only torch.
    from metaflow import Flow, namespace
    from metaflow.exception import MetaflowNotFound

    # This finds the runs of every user, such as those of a container's user without a name.
    namespace(None)
    try:
        flow = Flow("MinGPTFlow")
        found = flow[run] if run else flow.latest_successful_run
    except (MetaflowNotFound, KeyError):
        found = None
    if found is None:
        raise SystemExit("no such run is here: run `python flow.py run` first, and this script from the same folder")
    model: BinaryIO = found.data.outputs.open("trained/model.pt")
    return model


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--run", help="number of the run (default: the latest that succeeded)")
    source.add_argument("--model", type=Path, help="a model.pt instead of a run")
    parser.add_argument("--prompt", default="The ")
    parser.add_argument("--length", type=int, default=500, help="characters to write")
    parser.add_argument("--temperature", type=float, default=0.7, help="lower is more cautious")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    with args.model.open("rb") if args.model else stored_model(args.run) as file:
        checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    unseen = sorted(set(args.prompt) - set(checkpoint["vocabulary"]))
    if unseen or not args.prompt:
        raise SystemExit(f"the prompt must have at least one character, and none that the model never saw: {unseen}")
    model = GPT(GPTConfig(**checkpoint["config"]))
    model.load_state_dict(checkpoint["weights"])
    prompt = encode(args.prompt, checkpoint["vocabulary"]).unsqueeze(0)
    written = model.generate(prompt, args.length, args.temperature, args.seed)
    print(decode(written[0], checkpoint["vocabulary"]))


if __name__ == "__main__":
    main()
