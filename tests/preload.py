"""What the fork server imports, so that a fresh rank need not. No operation of torch may run here, nor a thread start.

Everything that a rank of a test would import on its way is listed: those imports are nine tenths of its time.
"""

import contextlib
import gc
from importlib import import_module

for name in (
    "accelerate.utils.fsdp_utils",
    "datasets",
    "numpy.ctypeslib",
    "safetensors.torch",
    "torch._dynamo",
    "torch.distributed.checkpoint.optimizer",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization.config",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "accel_fsdp_tools.checkpointer",
    "accel_fsdp_tools.cpu_fsdp",
    "accel_fsdp_tools.describing.adapters",
    "accel_fsdp_tools.describing.models",
    "accel_fsdp_tools.describing.skeleton",
    "accel_fsdp_tools.describing.tracing",
    "accel_fsdp_tools.tracking",
    "accel_fsdp_tools.trainer.callback",
    "accel_fsdp_tools.upstream",
):
    import_module(name)

with contextlib.suppress(ImportError):  # an extra
    import_module("torchdata.stateful_dataloader")

# Transformers compiles a thousand patterns when the first model's names are looked up, and keeps them.
import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")

gc.collect()
gc.freeze()  # a rank's collections need not walk through a million objects that stay, nor copy their pages
