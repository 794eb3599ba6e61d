"""Complete, exact and durable checkpoints for Hugging Face Accelerate under FSDP."""
