"""The trainer: batches from the ledger, advantages, losses, FSDP2, checkpoints, weights published."""
