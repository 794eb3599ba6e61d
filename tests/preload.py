"""What the fork server imports, so that a fresh rank need not. Imports only: nothing here may run an operation."""

import accelerate  # noqa: F401
import safetensors.torch  # noqa: F401
import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp  # noqa: F401
import transformers  # noqa: F401
