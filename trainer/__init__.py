"""The trainer: batches from the queue, advantages, losses, FSDP2, checkpoints, weights published."""
