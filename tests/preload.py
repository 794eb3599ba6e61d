"""What the fork server imports, so that a fresh rank need not. Imports only: nothing here may run an operation.

Everything that a rank of a test would import on its way is listed: those imports are nine tenths of its time.
"""

from importlib import import_module

for name in (
    "accelerate.utils.fsdp_utils",
    "datasets",
    "safetensors.torch",
    "torch._dynamo",
    "torch.distributed.checkpoint.optimizer",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "accel_fsdp_tools.checkpointer",
    "accel_fsdp_tools.cpu_fsdp",
    "accel_fsdp_tools.tracking",
):
    import_module(name)
