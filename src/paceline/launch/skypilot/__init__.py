"""Training on machines that SkyPilot rents."""
