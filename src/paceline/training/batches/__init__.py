"""What each worker trains on at each step: loaders, shares, stand-ins."""
