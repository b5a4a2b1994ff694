"""Watches workers from outside their interpreters: hangs are reported and ended, stragglers named.

`driver.Watchdog` polls the workers' states, `detect_hang` decides whether they hang, and `report`
writes down where each of them waits. Its callers pass in the states, and act on a hang.
"""
