"""Distributed setup: environment, rendezvous, process group, device, network interface."""
