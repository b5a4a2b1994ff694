"""Shared by commands and scripts: decides where a training runs, starts it, reports its end."""
