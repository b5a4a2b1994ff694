"""Training on Slurm: submit a job, follow it, and queue it again until the training is done."""
