"""A worker that needs its peers: adds up the ranks over gloo and notes the sum and who was asked."""

import torch
import torch.distributed as dist
import worker

dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
worker.note_self(sum=total.item())
dist.barrier()
dist.destroy_process_group()
