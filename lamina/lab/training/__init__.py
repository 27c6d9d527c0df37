"""The training loop, one run, its updates and batches."""
