"""The names by which launchers of every version start what runs on a host."""
