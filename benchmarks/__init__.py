"""Measurements that repeat the figures of benchmarks/README.md; run each as a module."""
