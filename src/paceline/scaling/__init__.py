"""How a training scales: measured on several numbers of workers, tabulated, predicted."""
