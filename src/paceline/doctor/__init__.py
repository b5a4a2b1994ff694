"""What would stop or slow a training on these hosts. Probes find facts, checks make findings."""
