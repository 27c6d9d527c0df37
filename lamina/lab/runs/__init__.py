"""Run folders and checkpoints that survive kills, progress, worker processes, and the environment of a run."""
