"""Watches workers from outside their interpreters: hangs are named and ended, stragglers told of.

`overseer.LocalOverseer` watches one host's workers for their launcher, and `beside.watched` those
that something else has started. Under both: a `Lookout` sees the `WorkerState`s of a host, `judge`
decides over those of all hosts, `collect_stacks`, `write_report` and `failures_of` tell.
"""
