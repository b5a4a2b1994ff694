"""Training in Kubernetes: a TrainJob or a Job, followed by kubectl."""
