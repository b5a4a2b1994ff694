"""Where the time of a step goes: measured on each worker, brought together in profile.json."""
