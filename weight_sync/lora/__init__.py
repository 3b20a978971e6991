"""LoRA adapters as versions: what an adapter adds to which tensor, and the merged file that engines load."""
