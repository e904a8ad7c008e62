"""What the tests of datastores `ask` Metaflow, which reads its settings once, at the import."""

# argv: flow/run/step.
TELL = """
import json, sys
from metaflow import Step, Task, namespace

pathspec = sys.argv[1]
namespace(None)
tasks = {}
for task in Step(pathspec):
    data = task.data if task.finished else None
    tasks[task.id] = {
        "successful": task.successful,
        "out": task.stdout,
        "store": task.metadata_dict["ds-type"],
        "first_err": Task(task.pathspec, attempt=0).stderr,
        "node": getattr(data, "node", None),
        "attempt": getattr(data, "attempt", None),
        "results": [vars(result) for result in getattr(data, "results", [])],
    }
print("TOLD " + json.dumps(tasks))
"""


# argv: flow/run, and a folder for the files.
READ_OUTPUTS = """
import json, sys
from pathlib import Path
from metaflow import Run, namespace
namespace(None)
data = Run(sys.argv[1]).data
outputs = data.results[0].outputs
folder = outputs.download(sys.argv[2])
print("TOLD " + json.dumps({
    "alone": [file.name for file in data.alone.outputs],
    "part": outputs.open("good \\u6a21\\u578b/shards/1.bin").read(3).decode(),
    "sizes": {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()},
}))
"""
