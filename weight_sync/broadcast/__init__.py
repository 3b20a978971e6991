"""Weights from the trainer's ranks to the engines' workers, bucket by bucket, without a file."""
