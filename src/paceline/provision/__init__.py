"""Machines made and deleted."""
