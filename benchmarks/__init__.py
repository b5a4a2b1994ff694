"""Measurements that repeat the figures of docs/benchmarks.md; run each as a module."""
