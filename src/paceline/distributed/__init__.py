"""Who am I, who are the others: environment, process group, device, network interface."""
