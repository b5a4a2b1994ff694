"""Watches workers from outside their interpreters: hangs are reported and ended, stragglers named.

`driver.Watchdog` is the one way: it polls the workers' states, `detect_hang` decides over them, and
`report` writes down who hangs where. Who watches gives it the states, and acts on a hang.
"""
