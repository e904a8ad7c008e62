"""Leaves what a program has seen in a file, in words that do not change from launch to launch."""

import json
import os
import re

OUT = os.environ.get("GANG_OUT", "")
LAUNCH = "-".join(os.environ.get("TORCHELASTIC_RUN_ID", "").split("-")[:2])  # without the gang's name


def words() -> dict[str, str]:
    """What differs from launch to launch and means nothing, and what stands for it."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    worker = os.path.dirname(error_file)
    names = {
        worker: "<worker's folder>",
        os.path.dirname(os.path.dirname(os.path.dirname(worker))): "<folder>",
        os.environ.get("TORCHELASTIC_RUN_ID", ""): "<run id>",
    }
    return {name: word for name, word in names.items() if len(name) > 1}


def stable(value: object) -> object:
    """Return a value as JSON has it, with those words."""
    text = re.sub(r"torchrun-call-\w+", "<call>", json.dumps(value, default=repr))
    for name, word in words().items():
        text = text.replace(json.dumps(name)[1:-1], word)
    return json.loads(text)


def note(what: str, **seen: object) -> None:
    """Leave a file of this rank."""
    path = os.path.join(OUT, f"{what}-{LAUNCH}-{os.environ.get('RANK', '0')}.json")
    with open(path + ".part", "w") as file:
        json.dump({name: stable(value) for name, value in seen.items()}, file)
    os.replace(path + ".part", path)
