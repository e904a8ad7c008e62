"""What the tests of datastores `ask` Metaflow, which reads its settings once, at the import."""

# argv: flow/run/step.
TELL = """
import json, sys
from metaflow import Step, Task, namespace
from metaflow.datastore import FlowDataStore
from metaflow.plugins import DATASTORES
from metaflow_extensions.torchrun.plugins.torchrun.channel.registry import Registry
from metaflow_extensions.torchrun.plugins.torchrun.gang.wire import to_plain
from metaflow_extensions.torchrun.plugins.torchrun.errors import GangStartTimeout

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
flow, run, step = pathspec.split("/")
control = min(tasks, key=len)  # the other nodes' ids are the control task's and "_node_" with a number
control_task = Task(pathspec + "/" + control)
storage = next(d for d in DATASTORES if d.TYPE == tasks[control]["store"])
store = FlowDataStore(flow, storage_impl=storage, ds_root=control_task.metadata_dict["ds-root"])
records = []
for attempt in range(3):
    try:
        records.append(to_plain(Registry(store, run, step, control, attempt).look_up(0)))
    except GangStartTimeout:
        records.append(None)
print("TOLD " + json.dumps({"tasks": tasks, "records": records}))
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
