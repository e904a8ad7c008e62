"""The same training with FSDP: each rank has a part of the weights, and saves it in its own file.

torch.distributed.checkpoint can load the parts on any number of ranks. FSDP2 needs torch 2.6 or newer.
"""

import os
import shutil

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import train
from checkpoints import open_store, save_part
from resuming import last_checkpoint, node_folder
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class ShardedTrainer(train.Trainer):
    def __init__(self, args) -> None:
        self.store, self.step = open_store(args.checkpoints, args.training), 0
        self.model = self.ddp = train.build_model()
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.resume()

    def resume(self) -> None:
        with last_checkpoint(self.store) as last:
            if last is None:
                return
            self.step, folder = last
            model, optimizer = get_state_dict(self.model, self.optimizer)
            dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        if dist.get_rank() == 0:
            print(f"goes on after step {self.step}")

    def save(self) -> None:
        """Each node saves the files of its ranks as one part of the checkpoint."""
        folder = node_folder("saving")
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        if os.environ["LOCAL_RANK"] == "0":
            node, nodes = int(os.environ["GROUP_RANK"]), int(os.environ["GROUP_WORLD_SIZE"])
            save_part(self.store, folder, self.step, node, nodes)
            shutil.rmtree(folder)
            print(f"saved part {node} of {nodes} of step {self.step}")

    def weights(self) -> dict[str, torch.Tensor]:
        return get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True))


if __name__ == "__main__":
    train.main(ShardedTrainer)
