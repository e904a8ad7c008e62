"""Written as for metaflow-torchrun 0.2."""

from around import Around
from metaflow import current, step, torchrun

from metaflow_extensions.torchrun.plugins.torchrun_libs.exceptions import TorchrunException

# Options and values in turns; a flag has an empty word in the place of its value.
WORDS = ["max_restarts", "0", "nproc_per_node", "2", "module", "", "tee", "3"]
OPTIONS = {"max_restarts": 0, "nproc_per_node": "2", "rdzv_id": "mine", "tee": "3"}
ARGS = {"epochs": 3, "flag": None, "name": "a b"}


class LegacyFlow(Around):
    @torchrun(all_nodes_started_timeout=60, nproc_per_node=2)
    @step
    def train(self):
        try:
            current.torch.run(
                torchrun_args=WORDS,
                entrypoint="worker",
                entrypoint_args=ARGS,
                push_results_dir_to_cloud=True,
                local_output_dir="out",
            )
            current.torch.run(OPTIONS, "missing.py", ARGS, 2, True, "out")
        except TorchrunException as error:
            print("caught:", error)
        self.next(self.join)


if __name__ == "__main__":
    LegacyFlow()
